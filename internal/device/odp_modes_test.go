package device

import (
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

// On-demand memory over devices, on machines that can do less.
func TestOnDemandModes(t *testing.T) {
	tests, storage := "TestOnDemand(LargerThanMemory|Faults|StormOfHoles)", "|TestSlowStorageKeepsNobodyWaiting"
	if fullMatrix() {
		tests, storage = "TestOnDemand.*|TestPrefetchStorm", "|TestSlowStorage.*"
	}
	for _, mode := range []modetest.Mode{modetest.NoUserfault, modetest.OldKernel, modetest.Unprivileged} {
		which := tests
		if mode != modetest.Unprivileged { // an unprivileged process cannot mount the slow file system
			which += storage
		}
		t.Run(string(mode), func(t *testing.T) { modetest.Rerun(t, mode, "^("+which+")$") })
	}
}

// 64 GiB are registered, written and read, by a process that may lock hardly any memory, on a
// machine that may have less; nothing is locked, and only what was touched is in memory.
func TestOnDemandLargerThanMemory(t *testing.T) {
	const n = 64 << 30
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, x, y, ib.RC, 1<<20, nil)
	m := newMapped(t, n)
	mr := must[provider.MR](t)(b.pd.RegMRAddr(m.addr, n, 0, odpAccess))
	defer closeAll(t, mr)
	fill(a.buf, 5)
	for _, off := range []uint64{0, 4<<30 - 4096, 17<<30 + 123, n - 1<<20} {
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 1<<20), RemoteAddr: off, RKey: mr.RKey()})
		a.ok()
		if k := firstDifference(m.bytes()[off:][:1<<20], a.buf); k >= 0 {
			t.Fatalf("at %#x: wrong from byte %d on", off, k)
		}
	}
	if s := mr.PagingStats(); s.PageFaultPages < 4<<20>>12 || s.PageFaultPages > 4<<20>>12+4 {
		t.Errorf("%+v", s)
	}
	if locked := field(t, "/proc/self/status", "VmLck:"); modetest.Current() == modetest.Unprivileged && locked != "0 kB" {
		t.Errorf("%s are locked", locked)
	}
	if modetest.Current() != modetest.Unprivileged {
		return
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit); err != nil || limit.Max != modetest.MemlockLimit || os.Getuid() == 0 {
		t.Errorf("user %d may lock %d bytes, %v", os.Getuid(), limit.Max, err)
	}
	// The same memory cannot be pinned.
	d := openDevice(t, provider.Config{Link: linkLoop, Lock: ib.LockStrict})
	pd := must[provider.PD](t)(d.AllocPD())
	defer closeAll(t, pd)
	_, err := pd.RegMRAddr(m.addr, 1<<20, 0, ib.AccessLocalWrite)
	wantErrno(t, "pinning", err, syscall.ENOMEM)
}

// field returns what stands behind a name in a file of /proc.
func field(t testing.TB, file, name string) string {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(rest)
		}
	}
	t.Fatalf("%s has no %s", file, name)
	return ""
}
