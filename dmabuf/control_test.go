package dmabuf

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// control sends a CONTROL to this process's own socket, as the preloaded library does, and returns the
// answer.
func control(t *testing.T, request, flags uint64, name string, fds ...int) (errno syscall.Errno, fence int) {
	t.Helper()
	c := dialServer(t)
	defer func() { _ = c.Close() }()
	var text [32]byte
	copy(text[:], name)
	msg := encode(msgControl, remoteVersion, request, flags)
	check(t, sys.SendFDs(c, append(msg, text[:]...), fds...))
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	b := make([]byte, 64)
	n, got, err := sys.RecvFDs(c, b)
	check(t, err)
	kind, args := decode(b[:n])
	if kind != msgControlled || len(args) != 1 || len(got) > 1 {
		t.Fatalf("answer %v %v with %d descriptors", kind, args, len(got))
	}
	fence = -1
	if len(got) == 1 {
		fence = got[0]
		t.Cleanup(func() { _ = sys.CloseFD(fence) })
	}
	return syscall.Errno(args[0]), fence
}

// The ioctls of dma-bufs, with the kernel's errnos.
func TestControl(t *testing.T) {
	e := export(t, nil)
	fd, err := e.buffer.FD()
	check(t, err)
	f := NewFence()
	shown := fdOf(t, f)
	for _, c := range []struct {
		what           string
		request, flags uint64
		name           string
		fds            []int
		errno          syscall.Errno
		fence          bool
	}{
		{"SYNC without a direction", ioctlSync, 0, "", nil, syscall.EINVAL, false},
		{"SYNC, end without a direction", ioctlSync, syncEnd, "", nil, syscall.EINVAL, false},
		{"SYNC with a flag that there is not", ioctlSync, 8 | syncRead, "", nil, syscall.EINVAL, false},
		{"SYNC", ioctlSync, syncRead, "", nil, 0, true},
		{"SYNC, end", ioctlSync, syncRead | syncEnd, "", nil, 0, false},
		{"SYNC with a fence", ioctlSync, syncRead, "", []int{shown}, syscall.EPROTO, false},
		{"EXPORT without a direction", ioctlExportSyncFile, 0, "", nil, syscall.EINVAL, false},
		{"EXPORT with a flag that there is not", ioctlExportSyncFile, 4, "", nil, syscall.EINVAL, false},
		{"EXPORT", ioctlExportSyncFile, syncRead | syncWrite, "", nil, 0, true},
		{"IMPORT without a direction", ioctlImportSyncFile, 0, "", []int{shown}, syscall.EINVAL, false},
		{"IMPORT without a fence", ioctlImportSyncFile, syncRead, "", nil, syscall.EINVAL, false},
		{"IMPORT of what is no fence", ioctlImportSyncFile, syncRead, "", []int{fd}, syscall.EINVAL, false},
		{"SET_NAME", ioctlSetName, 0, "abc", nil, 0, false},
		{"SET_NAME with too long a name", ioctlSetName, 0, "0123456789abcdef0123456789abcdef", nil, syscall.EINVAL, false},
		{"an ioctl that there is not", 9, 0, "", nil, syscall.ENOTTY, false},
		{"a huge number", 1 << 63, 1 << 63, "", nil, syscall.ENOTTY, false},
	} {
		errno, fence := control(t, c.request, c.flags, c.name, append([]int{fd}, c.fds...)...)
		if errno != c.errno || (fence >= 0) != c.fence {
			t.Errorf("%s: %v, fence %d; should be %v, %v", c.what, errno, fence, c.errno, c.fence)
		}
	}
	e.want("begin 1, end 1")
	if e.buffer.Name() != "abc" {
		t.Errorf("the name is %q", e.buffer.Name())
	}
	if errno, _ := control(t, ioctlSync, syncRead, "", unix.Stderr); errno != syscall.EINVAL {
		t.Errorf("a descriptor that is no buffer: %v", errno)
	}
	// A fence that comes in as a writer's, goes out to readers and writers, and keeps SYNC waiting.
	if errno, _ := control(t, ioctlImportSyncFile, syncWrite, "", fd, shown); errno != 0 {
		t.Errorf("IMPORT: %v", errno)
	}
	_, read := control(t, ioctlExportSyncFile, syncRead, "", fd)
	_, sync := control(t, ioctlSync, syncRead, "", fd)
	if readable(t, read, 0) || readable(t, sync, 0) {
		t.Error("readable while the fence is pending")
	}
	f.Signal(nil)
	if !readable(t, read, time.Minute) || !readable(t, sync, time.Minute) {
		t.Error("not readable")
	}
	// Messages that are none.
	for name, msg := range map[string][]byte{
		"short": encode(msgControl, remoteVersion, 0, 1), "another version": encode(msgControl, 9, 0, 1, 0, 0, 0, 0),
		"long": append(encode(msgControl, remoteVersion, 0, 1, 0, 0, 0, 0), make([]byte, 8)...),
	} {
		c := dialServer(t)
		_ = sys.SendFDs(c, msg, fd) // the server may have gone
		if !hungUp(t, c) {
			t.Errorf("%s: the connection has not ended", name)
		}
		_ = c.Close()
	}
	three := binary.LittleEndian.AppendUint64(encode(msgControl, remoteVersion, ioctlImportSyncFile, 1, 0, 0, 0), 0)
	c := dialServer(t)
	_ = sys.SendFDs(c, three, fd, fd, fd)
	if !hungUp(t, c) {
		t.Error("three descriptors: the connection has not ended")
	}
	_ = c.Close()
	check(t, sys.CloseFD(fd))
	eventually(t, "the descriptor's reference is back", func() bool { return e.buffer.refs.Load() == 1 })
	e.end()
}

// The preloaded library has the numbers of the messages, too.
func TestControlNumbers(t *testing.T) {
	source, err := os.ReadFile("../clib/files/dmabuf.c")
	check(t, err)
	want := fmt.Sprintf("enum { MSG_CONTROL = %d, MSG_CONTROLLED = %d, VERSION = %d };", msgControl, msgControlled, remoteVersion)
	if !strings.Contains(string(source), want) {
		t.Errorf("clib/files/dmabuf.c has no line %q", want)
	}
}
