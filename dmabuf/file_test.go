package dmabuf

import (
	"bytes"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// ofFile makes a memory file and its buffer, and maps the file as the program does.
func ofFile(t *testing.T, size int) (m *Memory, fd int, cpu []byte) {
	t.Helper()
	fd, cpu, err := sys.NewMappedFile("test", size)
	check(t, err)
	t.Cleanup(func() { check(t, sys.FreeMapped(cpu)) })
	b, err := FromFile(fd, "drm", "an object")
	check(t, err)
	return b.Priv().(*Memory), fd, cpu
}

// What the CPU writes to the file, importers see, wherever the buffer has moved to; who looks at its
// former place sees poison.
func TestFileMoves(t *testing.T) {
	m, fd, cpu := ofFile(t, 3*os.Getpagesize())
	b := m.Buffer()
	if b.Size() != uint64(len(cpu)) || b.Exporter() != "drm" || b.Name() != "an object" {
		t.Errorf("%d bytes of %q, called %q", b.Size(), b.Exporter(), b.Name())
	}
	rng, q := random(t), attachQuick(t, m, false)
	late, table, _ := slow(t, m)
	for range 5 {
		for i := range cpu {
			cpu[i] = byte(rng.Uint32())
		}
		if !bytes.Equal(q.mapped(t), cpu) {
			t.Fatal("an importer sees other bytes than the CPU")
		}
		locked(b.resv, func() { q.table.Segments()[0][7] ^= 0xff })
		if cpu[7] != q.mapped(t)[7] {
			t.Fatal("the CPU does not see what an importer has written")
		}
		check(t, m.Move(background(t)))
		check(t, m.Evict(background(t)))
	}
	if q.told != 10 || m.Moves() != 14 { // four times it came back, for the importer
		t.Errorf("the importer was told %d times, the buffer has moved %d times", q.told, m.Moves())
	}
	if old := table.Segments()[0]; !bytes.Equal(old, bytes.Repeat([]byte{poison}, len(old))) {
		t.Error("the place that the buffer has left is not poisoned")
	}
	locked(b.resv, func() { late.Unmap(table, Bidirectional) })
	late.Detach()
	q.leave()
	check(t, sys.CloseFD(fd))
	m.finish(t)
	if len(ofFiles.by) != 0 {
		t.Error("the file is still known")
	}
}

// A file has one buffer as long as that lives; its memory file can be had back.
func TestFileIsKnown(t *testing.T) {
	m, fd, cpu := ofFile(t, os.Getpagesize())
	again, err := sys.DupFD(fd)
	check(t, err)
	b, err := FromFile(again, "drm", "")
	check(t, err)
	if b != m.Buffer() {
		t.Error("the same file has another buffer")
	}
	b.Put()
	own, err := b.File()
	check(t, err)
	want, err := sys.HandleIDOf(fd)
	check(t, err)
	if got, err := sys.HandleIDOf(own); err != nil || got != want {
		t.Errorf("the buffer's file is %v, %v; want %v", got, err, want)
	}
	check(t, sys.CloseFD(own))
	check(t, m.Revoke(background(t)))
	cpu[0] = 1 // the program keeps its memory
	m.finish(t)
	b, err = FromFile(fd, "drm", "")
	check(t, err)
	if b == m.Buffer() {
		t.Error("a buffer that is released came back")
	}
	b.Put()
	check(t, sys.CloseFD(fd))
	check(t, sys.CloseFD(again))
}

func TestFileRefuses(t *testing.T) {
	_, err := FromFile(-1, "", "")
	wantErr(t, "no descriptor", err, syscall.EBADF)
	null, err := os.Open(os.DevNull)
	check(t, err)
	_, err = FromFile(int(null.Fd()), "", "")
	wantErr(t, "no memory file", err, syscall.EINVAL)
	check(t, null.Close())
	open, err := unix.MemfdCreate("test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	check(t, err)
	check(t, unix.Ftruncate(open, 4096))
	_, err = FromFile(open, "", "")
	wantErr(t, "a file that can shrink", err, syscall.EINVAL)
	check(t, sys.CloseFD(open))
	empty, err := sys.NewMemfd("test", 0)
	check(t, err)
	_, err = FromFile(empty, "", "")
	wantErr(t, "an empty file", err, syscall.EINVAL)
	check(t, sys.CloseFD(empty))
	whole, err := sys.NewMemfd("test", 4096)
	check(t, err)
	_, err = FromFile(whole, "", string(make([]byte, maxName+1)))
	wantErr(t, "a long name", err, syscall.EINVAL)
	check(t, sys.CloseFD(whole))
	m, err := Alloc(MemoryConfig{Size: 1})
	check(t, err)
	_, err = m.Buffer().File()
	wantErr(t, "memory of Alloc", err, syscall.EOPNOTSUPP)
	m.finish(t)
	if len(ofFiles.by) != 0 {
		t.Error("a file is known that was refused")
	}
}
