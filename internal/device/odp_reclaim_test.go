package device

// Regions that are larger than the memory there is. A child process in a memory
// cgroup of its own writes such a region through a connection, and reads it back,
// while the kernel takes pages away to make room: all arrives, in the memory that
// the cgroup allows.

import (
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

const (
	reclaimGroup = "VERBENA_TEST_RECLAIM_GROUP" // the cgroup's directory
	reclaimFile  = "VERBENA_TEST_RECLAIM_FILE"  // what is mapped; empty: anonymous memory
	reclaimSize  = "VERBENA_TEST_RECLAIM_SIZE"
	reclaimLimit = "VERBENA_TEST_RECLAIM_LIMIT"
)

// memoryGroup makes a memory cgroup of a limit and removes it after the test. It
// skips the test where there is none to be had.
func memoryGroup(t *testing.T, limit int64) (dir string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can make a memory cgroup")
	}
	for _, root := range []struct{ dir, limit string }{
		{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"/sys/fs/cgroup", "memory.max"},
	} {
		dir := filepath.Join(root.dir, fmt.Sprintf("verbena-test-%d-%s", os.Getpid(), filepath.Base(t.Name())))
		if err := os.Mkdir(dir, 0o755); err != nil {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, root.limit), []byte(strconv.FormatInt(limit, 10)), 0); err != nil {
			_ = os.Remove(dir)
			continue
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		return dir
	}
	t.Skip("no memory cgroup can be made here")
	return ""
}

// reclaim runs the child.
func reclaim(t *testing.T, file string, size, limit int64) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-test.run=^TestReclaimChild$", "-test.v", "-test.timeout=50m")
	cmd.Env = append(os.Environ(), reclaimGroup+"="+memoryGroup(t, limit), reclaimFile+"="+file,
		reclaimSize+"="+strconv.FormatInt(size, 10), reclaimLimit+"="+strconv.FormatInt(limit, 10), "GOMEMLIMIT=32MiB", "VERBENA_SEED=")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestReclaimChild") {
		t.Fatalf("%v\n%s", err, out)
	}
	for line := range strings.Lines(string(out)) {
		if _, text, ok := strings.Cut(line, "reclaimed: "); ok {
			t.Log(strings.TrimSpace(text))
		}
	}
}

// A file under a memory cgroup of a part of its size.
func TestReclaimFile(t *testing.T) {
	size, limit := int64(144<<20), int64(64<<20)
	if fullMatrix() {
		size = 512 << 20
	}
	dir := t.TempDir()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		t.Fatal(err)
	}
	if free := int64(st.Bavail) * st.Bsize; free < size*5/4 || st.Type == unix.TMPFS_MAGIC {
		t.Skipf("%s has no room for a file of %d MiB", dir, size>>20)
	}
	file := filepath.Join(dir, "region")
	f, err := os.Create(file)
	if err == nil {
		err = f.Truncate(size)
	}
	if err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	reclaim(t, file, size, limit)
}

// Anonymous memory and shared memory, which go to a compressed device.
func TestReclaimAnonymous(t *testing.T) {
	modetest.Swap(t, "2G")
	t.Run("private", func(t *testing.T) { reclaim(t, "", 512<<20, 64<<20) })
	t.Run("shared", func(t *testing.T) {
		f, err := os.CreateTemp("/dev/shm", "verbena-test")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = os.Remove(f.Name()) })
		const size = 256 << 20
		if err := f.Truncate(size); err != nil {
			t.Fatal(err)
		}
		_ = f.Close()
		reclaim(t, f.Name(), size, 32<<20)
	})
}

// TestReclaimChild is what runs in the cgroup.
func TestReclaimChild(t *testing.T) {
	group := os.Getenv(reclaimGroup)
	if group == "" {
		t.Skip("full: runs as a child of TestReclaimFile")
	}
	if err := os.WriteFile(filepath.Join(group, "cgroup.procs"), []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	size, err := strconv.ParseUint(os.Getenv(reclaimSize), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop})
	const piece = 1 << 20
	a, b := connected(t, x, y, ib.RC, piece, nil)
	m := newMapped(t, size)
	if file := os.Getenv(reclaimFile); file != "" {
		f, err := os.OpenFile(file, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		m.mapFile(int(f.Fd()), 0, size)
		_ = f.Close()
	}
	mr, err := b.pd.RegMRAddr(m.addr, size, 0, odpAccess)
	if err != nil {
		t.Fatal(err)
	}
	defer closeAll(t, mr)
	mark := func(off uint64) { // noise, and the page's place at its beginning and its end
		copy(a.buf, noise)
		for p := uint64(0); p < piece; p += 4096 {
			binary.NativeEndian.PutUint64(a.buf[p:], off+p)
			binary.NativeEndian.PutUint64(a.buf[p+4088:], ^(off + p))
		}
	}
	for off := uint64(0); off < size; off += piece {
		mark(off)
		a.post(ib.SendWR{ID: off, Op: ib.OpRDMAWrite, SGL: a.sge(0, piece), RemoteAddr: off, RKey: mr.RKey()})
		a.ok()
	}
	want := make([]byte, piece)
	for off := uint64(0); off < size; off += piece {
		mark(off)
		copy(want, a.buf)
		clear(a.buf)
		a.post(ib.SendWR{ID: off, Op: ib.OpRDMARead, SGL: a.sge(0, piece), RemoteAddr: off, RKey: mr.RKey()})
		a.ok()
		if k := firstDifference(a.buf, want); k >= 0 {
			t.Fatalf("at %#x: wrong from byte %d on", off, k)
		}
	}
	eventually(t, "pages are found to be gone", func() bool { return mr.PagingStats().InvalidationPages != 0 })
	s := mr.PagingStats()
	peak, err := strconv.ParseUint(strings.TrimSuffix(field(t, "/proc/self/status", "VmHWM:"), " kB"), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	fmt.Printf("reclaimed: %d MiB written and read, never more than %d MiB in memory; %+v\n", size>>20, peak>>10, s)
	// The program's own pages, which others may have brought in, count as well.
	if limit, err := strconv.ParseUint(os.Getenv(reclaimLimit), 10, 64); err != nil || peak<<10 > limit+64<<20 {
		t.Errorf("%d MiB of %d were in memory at once, %d are allowed (%v)", peak>>10, size>>20, limit>>20, err)
	}
	if s.FailedResolutions != 0 || s.PageFaultPages < size>>12 || s.InvalidationPages == 0 {
		t.Errorf("%+v", s)
	}
}
