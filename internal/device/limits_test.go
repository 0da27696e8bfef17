package device

// Limits: what a device offers it can give, one more is refused with the errno
// of the verb's man page, and what is given back can be had again.

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// The numbers of objects.
func TestObjectLimits(t *testing.T) {
	const limit = 3
	d := openDevice(t, provider.Config{Link: linkLoop,
		Limits: provider.Limits{QPs: limit, CQs: limit, MRs: limit, PDs: limit, AHs: limit, SRQs: limit}})
	a := d.Attr()
	for name, n := range map[string]int{"MaxQP": a.MaxQP, "MaxCQ": a.MaxCQ, "MaxMR": a.MaxMR, "MaxPD": a.MaxPD, "MaxAH": a.MaxAH, "MaxSRQ": a.MaxSRQ} {
		if n != limit {
			t.Errorf("%s is %d, want %d", name, n, limit)
		}
	}
	pd := must[provider.PD](t)(d.AllocPD())
	cq := must[provider.CQ](t)(d.CreateCQ(1, nil))
	for _, kind := range []struct {
		name string
		made int // already
		make func() (closer, error)
	}{
		{"alloc_pd", 1, func() (closer, error) { return d.AllocPD() }},
		{"create_cq", 1, func() (closer, error) { return d.CreateCQ(1, nil) }},
		{"create_comp_channel", 0, func() (closer, error) { return d.CreateChannel() }},
		{"reg_mr", 0, func() (closer, error) { return pd.RegMR(make([]byte, 1), 0) }},
		{"create_ah", 0, func() (closer, error) { return pd.CreateAH(ib.AHAttr{DGID: d.GIDs()[0]}) }},
		{"create_srq", 0, func() (closer, error) { return pd.CreateSRQ(provider.SRQConfig{MaxWR: 1}) }},
		{"create_qp", 0, func() (closer, error) {
			return pd.CreateQP(provider.QPConfig{Type: ib.UD, SendCQ: cq, RecvCQ: cq})
		}},
	} {
		t.Run(kind.name, func(t *testing.T) {
			for range 3 { // what is closed can be made again
				var made []closer
				for len(made) < limit-kind.made {
					o, err := kind.make()
					if err != nil {
						t.Fatalf("number %d: %v", len(made), err)
					}
					made = append(made, o)
				}
				for range 2 {
					_, err := kind.make()
					wantErrno(t, "one more", err, syscall.ENOMEM)
				}
				closeAll(t, made...)
			}
		})
	}
	closeAll(t, pd, cq)
}

// The sizes of queues, lists and messages.
func TestSizeLimits(t *testing.T) {
	const deep = 8
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{QPWR: deep, CQE: 2 * deep, SRQWR: deep}})
	a := d.Attr()
	if a.MaxQPWR != deep || a.MaxCQE != 2*deep || a.MaxSRQWR != deep {
		t.Errorf("%+v", a)
	}
	pd := must[provider.PD](t)(d.AllocPD())
	cq := must[provider.CQ](t)(d.CreateCQ(a.MaxCQE, nil))
	ch := must[provider.Channel](t)(d.CreateChannel())
	other := openDevice(t, provider.Config{Link: linkLoop})
	otherCQ := must[provider.CQ](t)(other.CreateCQ(1, nil))
	otherCh := must[provider.Channel](t)(other.CreateChannel())
	defer closeAll(t, otherCQ, otherCh)

	newCQ := func(n int, ch provider.Channel) error {
		cq, err := d.CreateCQ(n, ch)
		if err == nil {
			closeAll(t, cq)
		}
		return err
	}
	newQP := func(change func(c *provider.QPConfig)) error {
		c := provider.QPConfig{Type: ib.RC, SendCQ: cq, RecvCQ: cq, Cap: ib.QPCap{MaxSendWR: a.MaxQPWR, MaxRecvWR: a.MaxQPWR,
			MaxSendSGE: a.MaxSGE, MaxRecvSGE: a.MaxSGE, MaxInlineData: a.MaxInlineData}}
		change(&c)
		qp, err := pd.CreateQP(c)
		if err == nil {
			closeAll(t, qp)
		}
		return err
	}
	newSRQ := func(c provider.SRQConfig) error {
		s, err := pd.CreateSRQ(c)
		if err == nil {
			closeAll(t, s)
		}
		return err
	}
	tests := []struct {
		name string
		want syscall.Errno // 0: it works
		err  error
	}{
		{"cq of the limit", 0, newCQ(a.MaxCQE, ch)},
		{"cq above the limit", syscall.EINVAL, newCQ(a.MaxCQE+1, nil)},
		{"cq of nothing", syscall.EINVAL, newCQ(0, nil)},
		{"cq negative", syscall.EINVAL, newCQ(-1, nil)},
		{"cq on another device's channel", syscall.EINVAL, newCQ(1, otherCh)},
		{"cq resized to the limit", 0, cq.Resize(a.MaxCQE)},
		{"cq resized above the limit", syscall.EINVAL, cq.Resize(a.MaxCQE + 1)},
		{"cq resized to nothing", syscall.EINVAL, cq.Resize(0)},
		{"qp of the limits", 0, newQP(func(*provider.QPConfig) {})},
		{"qp of nothing", 0, newQP(func(c *provider.QPConfig) { c.Cap = ib.QPCap{} })},
		{"send_wr", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendWR++ })},
		{"recv_wr", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvWR++ })},
		{"send_sge", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendSGE++ })},
		{"recv_sge", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvSGE++ })},
		{"inline", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxInlineData++ })},
		{"send_wr negative", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxSendWR = -1 })},
		{"recv_sge negative", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Cap.MaxRecvSGE = -1 })},
		{"qp of no type", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Type = 0 })},
		{"qp of an unknown type", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.Type = 99 })},
		{"qp without a send queue", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.SendCQ = nil })},
		{"qp on another device's queue", syscall.EINVAL, newQP(func(c *provider.QPConfig) { c.RecvCQ = otherCQ })},
		{"srq of the limit", 0, newSRQ(provider.SRQConfig{MaxWR: a.MaxSRQWR, MaxSGE: a.MaxSRQSGE, Limit: a.MaxSRQWR})},
		{"srq above the limit", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: a.MaxSRQWR + 1})},
		{"srq of nothing", syscall.EINVAL, newSRQ(provider.SRQConfig{})},
		{"srq sge", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, MaxSGE: a.MaxSRQSGE + 1})},
		{"srq limit", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, Limit: 2})},
		{"srq limit negative", syscall.EINVAL, newSRQ(provider.SRQConfig{MaxWR: 1, Limit: -1})},
	}
	for _, tt := range tests {
		if tt.want != 0 {
			wantErrno(t, tt.name, tt.err, tt.want)
		} else if tt.err != nil {
			t.Errorf("%s: %v", tt.name, tt.err)
		}
	}
	closeAll(t, cq, ch, pd)
}

// Posting beyond what a queue pair was made for: the requests before the bad one are posted,
// the bad one is named. (internal/qp, TestPostRefused, has every reason to refuse a send
// request.)
func TestPostLimits(t *testing.T) {
	b := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 64)
	t.Cleanup(b.close)
	small := newEnd(t, b.dev, ib.RC, 64)
	t.Cleanup(small.close)
	closeAll(t, small.qp)
	small.qp = must[provider.QP](t)(small.pd.CreateQP(provider.QPConfig{Type: ib.RC, SendCQ: small.cq, RecvCQ: small.cq,
		Cap: ib.QPCap{MaxSendWR: 3, MaxRecvWR: 2, MaxSendSGE: 1, MaxRecvSGE: 1}}))
	_, err := small.qp.PostSend([]ib.SendWR{{Op: ib.OpSend}})
	wantErrno(t, "PostSend in RESET", err, syscall.EINVAL)
	_, err = small.qp.PostRecv([]ib.RecvWR{{}})
	wantErrno(t, "PostRecv in RESET", err, syscall.EINVAL)
	small.connect(b) // not the other way round: its requests stay outstanding
	ok, two := ib.SendWR{Op: ib.OpSend}, []ib.SGE{{}, {}}
	for _, tt := range []struct {
		name string
		wrs  []ib.SendWR
		n    int
		want syscall.Errno
	}{
		{"second of two", []ib.SendWR{ok, {Op: ib.OpSend, SGL: two}}, 1, syscall.EINVAL},
		{"full", []ib.SendWR{ok, ok, ok}, 2, syscall.ENOMEM},
		{"still full", []ib.SendWR{ok}, 0, syscall.ENOMEM},
	} {
		n, err := small.qp.PostSend(tt.wrs)
		wantErrno(t, tt.name, err, tt.want)
		if n != tt.n {
			t.Errorf("%s: %d requests posted, want %d", tt.name, n, tt.n)
		}
	}
	for _, tt := range []struct {
		name string
		wrs  []ib.RecvWR
		n    int
		want syscall.Errno
	}{
		{"SGEs", []ib.RecvWR{{}, {SGL: two}}, 1, syscall.EINVAL},
		{"full before the bad one", []ib.RecvWR{{}, {}, {SGL: two}}, 1, syscall.ENOMEM},
		{"full", []ib.RecvWR{{}}, 0, syscall.ENOMEM},
	} {
		n, err := small.qp.PostRecv(tt.wrs)
		wantErrno(t, tt.name, err, tt.want)
		if n != tt.n {
			t.Errorf("%s: %d receives posted, want %d", tt.name, n, tt.n)
		}
	}
}

// Addresses that cannot be: of devices and of peers.
func TestAddressLimits(t *testing.T) {
	taken := nextAddr()
	d := openDevice(t, provider.Config{Addrs: []netip.Addr{taken}})
	try := func(cfg provider.Config) error {
		fds := descriptors(t)
		d, err := Open("", &cfg)
		if err == nil {
			closeAll(t, d)
		}
		// The device that is there closes its end of the connection a little later.
		eventually(t, "no descriptor is left open", func() bool { return descriptors(t) <= fds })
		return err
	}
	inUse := nextAddr() // where another program has the port
	conn, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(inUse, wire.RoCEPort)))
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(t, conn)
	addr := func(s string) provider.Config { return provider.Config{Addrs: []netip.Addr{netip.MustParseAddr(s)}} }
	for _, tt := range []struct {
		name string
		err  error
		want syscall.Errno
	}{
		{"address in use", try(provider.Config{Addrs: []netip.Addr{taken}}), syscall.EADDRINUSE},
		{"address in use, loop", try(provider.Config{Link: linkLoop, Addrs: []netip.Addr{taken}}), syscall.EADDRINUSE},
		{"port in use", try(provider.Config{Addrs: []netip.Addr{inUse}}), syscall.EADDRINUSE},
		{"not of this host", try(addr("192.0.2.1")), syscall.EADDRNOTAVAIL},
		{"unspecified", try(addr("0.0.0.0")), syscall.EINVAL},
		{"multicast", try(addr("224.0.0.1")), syscall.EINVAL},
		{"unknown link", try(provider.Config{Link: "carrier-pigeon"}), syscall.EINVAL},
	} {
		wantErrno(t, tt.name, tt.err, tt.want)
	}
	if _, err := Open("no-such-device", nil); !isErrno(err, syscall.ENODEV) {
		t.Errorf("unknown name: %v", err)
	}
	pd := must[provider.PD](t)(d.AllocPD())
	self := d.GIDs()[0]
	for name, a := range map[string]ib.AHAttr{
		"unset":        {},
		"other family": {DGID: ib.GIDFromAddr(netip.MustParseAddr("::1"))},
		"GID index":    {DGID: self, SGIDIndex: 1},
		"negative":     {DGID: self, SGIDIndex: -1},
		"port":         {DGID: self, PortNum: 2},
	} {
		_, err := pd.CreateAH(a)
		wantErrno(t, name, err, syscall.EINVAL)
	}
	closeAll(t, pd)
}

// Locking memory is limited for programs without privilege. A strict device refuses a region
// that cannot be locked; by default the region works all the same, and reports why it is not
// locked. (internal/mem, TestHostLockLimit, has more limits.)
func TestMemlockLimit(t *testing.T) {
	const inChild = "VERBENA_TEST_MEMLOCK_CHILD"
	if os.Getenv(inChild) == "" {
		// In another process: the rings that hold pages count against the limit only if they
		// are made without privilege, and tests before this one may have made them.
		cmd := exec.Command(must[string](t)(os.Executable()), "-test.run=^TestMemlockLimit$")
		cmd.Env = append(os.Environ(), inChild+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	auto := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 1<<20)
	t.Cleanup(auto.close)
	auto.connect(auto)
	strict := must[provider.PD](t)(openDevice(t, provider.Config{Link: linkLoop, Lock: ib.LockStrict}).AllocPD())
	defer closeAll(t, strict)
	big, small := mapping(t, 1<<20), mapping(t, 16<<10)
	var old unix.Rlimit
	must0(t, unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old))
	must0(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: 64 << 10, Max: old.Max}))
	defer func() { must0(t, unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)) }()
	var below, above provider.MR
	var refused error
	unprivileged(t, func() {
		below, _ = auto.pd.RegMR(small, allRemote)
		above, _ = auto.pd.RegMR(big, allRemote)
		_, refused = strict.RegMR(big, allRemote)
	})
	if below == nil || above == nil {
		t.Fatal("a region was refused")
	}
	defer closeAll(t, below, above)
	if locked, note := below.Locked(); !locked {
		t.Errorf("a region below the limit is not locked: %s", note)
	}
	if locked, note := above.Locked(); locked || !strings.Contains(note, "RLIMIT_MEMLOCK") {
		t.Errorf("a region above the limit is locked: %v (%s)", locked, note)
	}
	wantErrno(t, "strict", refused, syscall.ENOMEM)
	fill(auto.buf, 5)
	auto.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: auto.sge(0, len(big)), RemoteAddr: above.Addr(), RKey: above.RKey()})
	auto.ok()
	if k := firstDifference(big, auto.buf); k >= 0 {
		t.Errorf("wrong from byte %d on", k)
	}
}

// unprivileged calls f on a thread that may not exceed the limit of locked memory, and ends
// the thread.
func unprivileged(t *testing.T, f func()) {
	t.Helper()
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlocks: the thread ends with the goroutine
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var data [2]unix.CapUserData
		err := unix.Capget(&head, &data[0])
		data[0].Effective &^= 1 << unix.CAP_IPC_LOCK
		if err = errors.Join(err, unix.Capset(&head, &data[0])); err == nil {
			f()
		}
		done <- err
	}()
	must0(t, <-done)
}

// mapping returns memory outside the Go heap.
func mapping(t testing.TB, n int) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// copyForAll copies this program to where any user can run it.
func copyForAll(t testing.TB, exe string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "verbena-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "child")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}
