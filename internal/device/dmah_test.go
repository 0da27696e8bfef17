package device

import (
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// ownCPU returns a processor on which the calling thread may run.
func ownCPU(t *testing.T) int {
	t.Helper()
	for cpu := range sys.PossibleCPUs() {
		if sys.MayRunOn(cpu) {
			return cpu
		}
	}
	t.Fatal("the thread may run nowhere")
	return 0
}

func TestDMAHRules(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cpu := ownCPU(t)
	for _, c := range []struct {
		what string
		cfg  ib.DMAHConfig
		want syscall.Errno
	}{
		{"hint 4", ib.DMAHConfig{PH: 4}, syscall.EINVAL},
		{"unknown memory", ib.DMAHConfig{Steering: &ib.Steering{CPU: cpu, MemType: 2}}, syscall.EINVAL},
		{"unknown memory comes first", ib.DMAHConfig{PH: 9, Steering: &ib.Steering{CPU: -1, MemType: 2}}, syscall.EINVAL},
		{"processor -1", ib.DMAHConfig{Steering: &ib.Steering{CPU: -1}}, syscall.EINVAL},
		{"a processor too many", ib.DMAHConfig{Steering: &ib.Steering{CPU: sys.PossibleCPUs()}}, syscall.EINVAL},
	} {
		_, err := d.AllocDMAH(c.cfg)
		wantErrno(t, c.what, err, c.want)
	}

	// A thread that is kept off a processor.
	var before, one unix.CPUSet
	must0(t, unix.SchedGetaffinity(0, &before))
	one.Set(cpu)
	must0(t, unix.SchedSetaffinity(0, &one))
	for other := range sys.PossibleCPUs() {
		if other != cpu {
			_, err := d.AllocDMAH(ib.DMAHConfig{PH: 9, Steering: &ib.Steering{CPU: other}})
			wantErrno(t, "another processor", err, syscall.EPERM)
		}
	}
	must0(t, unix.SchedSetaffinity(0, &before))
	closeAll(t, d)
}

func TestDMAHLife(t *testing.T) {
	d, other := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	pd, err := d.AllocPD()
	must0(t, err)
	otherPD, err := other.AllocPD()
	must0(t, err)
	steering := &ib.Steering{CPU: ownCPU(t), MemType: ib.TPHPersistent}
	cfg := ib.DMAHConfig{PH: 3, Steering: steering}
	h, err := d.AllocDMAH(cfg)
	must0(t, err)
	steering.CPU = -1 // the device has a copy
	if got := h.Config(); got.PH != 3 || got.Steering.CPU < 0 || got.Steering.MemType != ib.TPHPersistent {
		t.Errorf("the hint is %+v", got)
	}
	reg := func(p provider.PD, access ib.Access) (provider.MR, error) {
		return h.Register(p, access, func() (provider.MR, error) { return p.RegMR(make([]byte, 100), access) })
	}
	wantErrno(t, "another device's domain", second(reg(otherPD, ib.AccessLocalWrite)), syscall.EINVAL)
	wantErrno(t, "on demand", second(reg(pd, ib.AccessLocalWrite|ib.AccessOnDemand)), syscall.EOPNOTSUPP)
	wantErrno(t, "wrong rights", second(reg(pd, ib.AccessRemoteWrite)), syscall.EINVAL)
	a, err := reg(pd, ib.AccessLocalWrite)
	must0(t, err)
	b, err := reg(pd, ib.AccessLocalWrite)
	must0(t, err)
	if a.DMAH() != h {
		t.Error("the region has another handle")
	}
	must0(t, a.Rereg(provider.MRChange{Buf: make([]byte, 50)}))
	if a.DMAH() != h {
		t.Error("re-registration has lost the handle")
	}
	plain, err := pd.RegMR(make([]byte, 1), 0)
	must0(t, err)
	if plain.DMAH() != nil {
		t.Error("a plain region has a handle")
	}
	gone, err := d.AllocDMAH(ib.DMAHConfig{})
	must0(t, err)
	closeAll(t, gone)
	_, err = gone.Register(pd, 0, func() (provider.MR, error) { return pd.RegMR(nil, 0) })
	wantErrno(t, "a closed handle", err, syscall.EINVAL)
	wantErrno(t, "in use", h.Close(), syscall.EBUSY)
	closeAll(t, a, a)
	wantErrno(t, "in use by one", h.Close(), syscall.EBUSY)
	wantErrno(t, "the device", d.Close(), syscall.EBUSY)
	closeAll(t, b, plain, pd)
	wantErrno(t, "the device, for the handle", d.Close(), syscall.EBUSY)
	closeAll(t, h, h)
	closeAll(t, d, otherPD, other)
	wantErrno(t, "a closed device", second(d.AllocDMAH(ib.DMAHConfig{})), syscall.ENODEV)
}

// second returns the error of a call.
func second[T any](_ T, err error) error { return err }
