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
// arrives is what is mapped. On both sides, with a key of their own and with one key for
// everything.
func TestOnDemandSurvivesRemap(t *testing.T) {
	const n = 10 << 16
	onDemandWays(t, func(t *testing.T, link string, implicit bool) {
		x, y := openDevice(t, provider.Config{Link: link}), openDevice(t, provider.Config{Link: link})
		a, b := connected(t, x, y, ib.RC, 64, nil)
		src, dst := newMapped(t, n), newMapped(t, n)
		register := func(e *end, m *mapped) (provider.MR, []ib.SGE) {
			t.Helper()
			var mr provider.MR
			if implicit {
				mr = must[provider.MR](t)(e.pd.RegImplicitMR(odpAccess))
			} else {
				mr = must[provider.MR](t)(e.pd.RegMRAddr(m.addr, m.n, uint64(m.addr), odpAccess))
			}
			return mr, []ib.SGE{{Addr: uint64(m.addr), Length: uint32(m.n), LKey: mr.LKey()}}
		}
		from, fromAll := register(a, src)
		to, toAll := register(b, dst)
		defer closeAll(t, from, to)
		for round := range byte(3) {
			fill(src.bytes(), round)
			b.recv(ib.RecvWR{SGL: toAll})
			a.post(ib.SendWR{Op: ib.OpSend, SGL: fromAll})
			a.ok()
			b.ok()
			if !bytes.Equal(src.bytes(), dst.bytes()) {
				t.Fatalf("round %d: not what was sent", round)
			}
			for _, m := range []*mapped{src, dst} {
				m.unmap()
				m.remap()
			}
		}
		for _, mr := range []provider.MR{from, to} {
			s := mr.PagingStats()
			exact := s.PageFaultPages == 3*n/4096 && s.InvalidationPages == 3*n/4096
			if reported := mem.PagingMeans().Notifier == "userfaultfd"; s.FailedResolutions != 0 || reported && !exact {
				t.Errorf("%+v", s)
			}
		}
	})
}

// What advice is refused, with the errnos of the man page, and how often the rest is counted.
func TestAdvise(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd, other := must[provider.PD](t)(d.AllocPD()), must[provider.PD](t)(d.AllocPD())
	const n = 64 << 12
	m := newMapped(t, n)
	reg := func(access ib.Access) provider.MR {
		return must[provider.MR](t)(pd.RegMRAddr(m.addr, n, 0x1000, access))
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
	must0(t, pd.Advise(ib.AdvisePrefetchWrite, true, []ib.SGE{all, with(func(e *ib.SGE) { e.LKey = mr.LKey(); e.Length = 1 })}))
	if s := mr.PagingStats(); s.Prefetches != 1 || s.PrefetchPages != 64 || s.PageFaults != 0 {
		t.Errorf("one call: %+v", s)
	}
	// A call counts once for the device and once for each region, if all of it worked.
	both := []ib.SGE{all, with(func(e *ib.SGE) { e.LKey = readOnly.LKey() })}
	must0(t, pd.Advise(ib.AdvisePrefetch, true, both))
	counted := func(what string, first, second, device uint64) {
		t.Helper()
		got := [3]uint64{mr.PagingStats().Prefetches, readOnly.PagingStats().Prefetches, d.PagingStats().Prefetches}
		if want := [3]uint64{first, second, device}; got != want {
			t.Errorf("%s: the regions and the device count %d calls, want %d", what, got, want)
		}
	}
	counted("two regions", 2, 1, 2)
	must0(t, pd.Advise(ib.AdvisePrefetchNoFault, true, []ib.SGE{with(func(e *ib.SGE) { e.Length = 0 })}))
	counted("no bytes", 3, 1, 3)
	unix.Syscall(unix.SYS_MUNMAP, m.addr+n/2, n/2, 0)
	half := []ib.SGE{with(func(e *ib.SGE) { e.Length /= 2 }), both[1]}
	wantErrno(t, "half of it not mapped", pd.Advise(ib.AdvisePrefetch, true, half), syscall.EFAULT)
	must0(t, pd.Advise(ib.AdvisePrefetch, false, half)) // a failure that no caller waits for is not reported
	must0(t, pd.Advise(ib.AdvisePrefetch, false, half[:1]))
	eventually(t, "the last is done", func() bool { return mr.PagingStats().Prefetches > 3 })
	counted("half of it not mapped", 4, 1, 4)
}
