package device

import (
	"bytes"
	"math/rand/v2"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Memory is mapped and unmapped behind the Go runtime's back here, so addresses
// are numbers; they are turned into slices only while they are mapped.

const odpAccess = ib.AccessLocalWrite | ib.AccessRemote | ib.AccessOnDemand

// mapped is addresses that a test maps at will, far from where the kernel or
// the runtime would put anything.
type mapped struct {
	t    testing.TB
	addr uintptr
	n    uint64
}

func newMapped(t testing.TB, n uint64) *mapped {
	for range 100 {
		addr := uintptr(0x5000_0000_0000) + uintptr(rand.Uint32())<<12
		m := &mapped{t, addr, n}
		_, _, errno := unix.Syscall6(unix.SYS_MMAP, addr, uintptr(n), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE|unix.MAP_NORESERVE, ^uintptr(0), 0)
		if errno == 0 {
			t.Cleanup(m.unmap)
			return m
		}
	}
	t.Fatal("no free addresses")
	return nil
}

func (m *mapped) unmap() {
	if _, _, errno := unix.Syscall(unix.SYS_MUNMAP, m.addr, uintptr(m.n), 0); errno != 0 {
		m.t.Error(errno)
	}
}

func (m *mapped) remap() {
	if _, _, errno := unix.Syscall6(unix.SYS_MMAP, m.addr, uintptr(m.n), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, ^uintptr(0), 0); errno != 0 {
		m.t.Error(errno)
	}
}

func (m *mapped) bytes() []byte {
	addr := m.addr
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), m.n)
}

// Register, send, unmap, map anew, send: nothing is registered again, and what
// arrives is what is mapped. Explicitly and with one key for everything, on both
// sides.
func TestOnDemandSurvivesRemap(t *testing.T) {
	const n = 10 << 16
	for _, implicit := range []bool{false, true} {
		for _, link := range []string{linkLoop, linkUDP} {
			t.Run(map[bool]string{false: "explicit", true: "implicit"}[implicit]+"/"+link, func(t *testing.T) {
				x := openDevice(t, provider.Config{Link: link})
				y := openDevice(t, provider.Config{Link: link})
				a, b := connected(t, x, y, ib.RC, 64, nil)
				src, dst := newMapped(t, n), newMapped(t, n)
				reg := func(e *end, m *mapped) provider.MR {
					t.Helper()
					var mr provider.MR
					var err error
					if implicit {
						mr, err = e.pd.RegImplicitMR(odpAccess)
					} else {
						mr, err = e.pd.RegMRAddr(m.addr, m.n, uint64(m.addr), odpAccess)
					}
					if err != nil {
						t.Fatal(err)
					}
					return mr
				}
				from, to := reg(a, src), reg(b, dst)
				defer closeAll(t, from, to)
				sge := func(m *mapped, mr provider.MR) []ib.SGE {
					return []ib.SGE{{Addr: uint64(m.addr), Length: uint32(m.n), LKey: mr.LKey()}}
				}
				for round := range byte(3) {
					for i := range src.bytes() {
						src.bytes()[i] = byte(i) ^ round
					}
					if _, err := b.qp.PostRecv([]ib.RecvWR{{ID: 1, SGL: sge(dst, to)}}); err != nil {
						t.Fatal(err)
					}
					if _, err := a.qp.PostSend([]ib.SendWR{{ID: 2, Op: ib.OpSend, SGL: sge(src, from), Flags: ib.SendSignaled}}); err != nil {
						t.Fatal(err)
					}
					wantWC(t, a.wait(), 2, ib.WCSuccess)
					wantWC(t, b.wait(), 1, ib.WCSuccess)
					if !bytes.Equal(src.bytes(), dst.bytes()) {
						t.Fatalf("round %d: not what was sent", round)
					}
					src.unmap()
					src.remap()
					dst.unmap()
					dst.remap()
				}
				for _, mr := range []provider.MR{from, to} {
					s := mr.PagingStats()
					exact := s.PageFaultPages == 3*n/4096 && s.InvalidationPages == 3*n/4096
					if toldOfChanges := mem.PagingMeans().Notifier == "userfaultfd"; s.FailedResolutions != 0 || toldOfChanges && !exact {
						t.Errorf("%+v", s)
					}
				}
				// The side whose memory is not mapped gets the error.
				src.unmap()
				defer src.remap()
				if _, err := b.qp.PostRecv([]ib.RecvWR{{ID: 1, SGL: sge(dst, to)}}); err != nil {
					t.Fatal(err)
				}
				if _, err := a.qp.PostSend([]ib.SendWR{{ID: 3, Op: ib.OpSend, SGL: sge(src, from), Flags: ib.SendSignaled}}); err != nil {
					t.Fatal(err)
				}
				wantWC(t, a.wait(), 3, ib.WCLocProtErr)
			})
		}
	}
}

func wantWC(t *testing.T, wc ib.WC, id uint64, status ib.WCStatus) {
	t.Helper()
	if wc.ID != id || wc.Status != status {
		t.Fatalf("completion %d %v, want %d %v", wc.ID, wc.Status, id, status)
	}
}

func TestAdvise(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	other, err := d.AllocPD()
	if err != nil {
		t.Fatal(err)
	}
	const n = 64 << 12
	m := newMapped(t, n)
	reg := func(access ib.Access) provider.MR {
		mr, err := pd.RegMRAddr(m.addr, n, 0x1000, access)
		if err != nil {
			t.Fatal(err)
		}
		return mr
	}
	mr, readOnly, pinned := reg(odpAccess), reg(ib.AccessOnDemand), reg(ib.AccessLocalWrite)
	defer closeAll(t, mr, readOnly, pinned, pd, other)
	all := ib.SGE{Addr: 0x1000, Length: n, LKey: mr.LKey()}
	with := func(change func(*ib.SGE)) ib.SGE { e := all; change(&e); return e }
	for _, tt := range []struct {
		name   string
		pd     provider.PD
		advice ib.Advice
		sge    ib.SGE
		want   syscall.Errno
	}{
		{"other domain", other, ib.AdvisePrefetch, all, syscall.EPERM},
		{"not writable", pd, ib.AdvisePrefetchWrite, with(func(e *ib.SGE) { e.LKey = readOnly.LKey() }), syscall.EPERM},
		{"pinned", pd, ib.AdvisePrefetch, with(func(e *ib.SGE) { e.LKey = pinned.LKey() }), syscall.EINVAL},
		{"no such key", pd, ib.AdvisePrefetch, with(func(e *ib.SGE) { e.LKey ^= 1 }), syscall.ENOENT},
		{"too long", pd, ib.AdvisePrefetch, with(func(e *ib.SGE) { e.Length++ }), syscall.EFAULT},
		{"before it", pd, ib.AdvisePrefetch, with(func(e *ib.SGE) { e.Addr--; e.Length = 1 }), syscall.EFAULT},
		{"unknown", pd, 7, all, syscall.EOPNOTSUPP},
	} {
		wantErrno(t, tt.name, tt.pd.Advise(tt.advice, false, []ib.SGE{tt.sge}), tt.want)
	}
	if err := pd.Advise(ib.AdvisePrefetchWrite, true, []ib.SGE{all, with(func(e *ib.SGE) { e.LKey = mr.LKey(); e.Length = 1 })}); err != nil {
		t.Fatal(err)
	}
	if s := mr.PagingStats(); s.Prefetches != 1 || s.PrefetchPages != 64 || s.PageFaults != 0 {
		t.Errorf("one call: %+v", s)
	}
	// A call counts once for the device and once for each region, if all of it worked.
	both := []ib.SGE{all, with(func(e *ib.SGE) { e.LKey = readOnly.LKey() })}
	if err := pd.Advise(ib.AdvisePrefetch, true, both); err != nil {
		t.Fatal(err)
	}
	counted := func(what string, first, second, device uint64) {
		t.Helper()
		got := [3]uint64{mr.PagingStats().Prefetches, readOnly.PagingStats().Prefetches, d.PagingStats().Prefetches}
		if want := [3]uint64{first, second, device}; got != want {
			t.Errorf("%s: the regions and the device count %d calls, want %d", what, got, want)
		}
	}
	counted("two regions", 2, 1, 2)
	if err := pd.Advise(ib.AdvisePrefetchNoFault, true, []ib.SGE{with(func(e *ib.SGE) { e.Length = 0 })}); err != nil {
		t.Fatal(err)
	}
	counted("no bytes", 3, 1, 3)
	unix.Syscall(unix.SYS_MUNMAP, m.addr+n/2, n/2, 0)
	half := []ib.SGE{with(func(e *ib.SGE) { e.Length /= 2 }), both[1]}
	wantErrno(t, "half of it not mapped", pd.Advise(ib.AdvisePrefetch, true, half), syscall.EFAULT)
	if err := pd.Advise(ib.AdvisePrefetch, false, half); err != nil {
		t.Errorf("nobody waits for it: %v", err)
	}
	if err := pd.Advise(ib.AdvisePrefetch, false, half[:1]); err != nil {
		t.Error(err)
	}
	eventually(t, "the last is done", func() bool { return mr.PagingStats().Prefetches > 3 })
	counted("half of it not mapped", 4, 1, 4)
	m.unmap()
	wantErrno(t, "not mapped", pd.Advise(ib.AdvisePrefetch, true, []ib.SGE{all}), syscall.EFAULT)
	if err := pd.Advise(ib.AdvisePrefetch, false, []ib.SGE{all}); err != nil {
		t.Errorf("nobody waits for it: %v", err)
	}
	m.remap()
}
