package device

// Regions whose memory the library allocates, in one process and in several.

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A region is allocated, zero and of any length. What it took is given back, by the peer too
// that has mapped the memory.
func TestAllocMR(t *testing.T) {
	a, b := connected(t, openFor(t, linkRings), openFor(t, linkRings), ib.RC, 3<<20, nil)
	fill(a.buf, 1)
	closeAll(t, must[provider.MR](t)(b.pd.AllocMR(1, 0))) // the process's notifier is opened for good
	before := descriptors(t)
	for _, n := range []int{1, 4095, 4096, 4097, 64 << 10, 2 << 20, 2<<20 + 1} {
		mr := must[provider.MR](t)(b.pd.AllocMR(uint64(n), allRemote|ib.AccessMWBind))
		m := mr.Bytes()
		if len(m) != n || cap(m) != n || mr.Length() != uint64(n) || mr.Addr() != uint64(addrOf(m)) || !bytes.Equal(m, make([]byte, n)) {
			t.Fatalf("%d bytes: %d of %d, at %#x", n, len(m), cap(m), mr.Addr())
		}
		if n >= 2<<20 && addrOf(m)%(2<<20) != 0 {
			t.Errorf("%d bytes lie at %#x, where huge pages do not fit", n, addrOf(m))
		}
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, n), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
		a.ok()
		if k := firstDifference(m, a.buf[:n]); k >= 0 {
			t.Errorf("%d bytes: byte %d is wrong", n, k)
		}
		if !strings.Contains(mapsOf(t), "memfd:verbena-mr") {
			t.Error("it is not a memory file")
		}
		closeAll(t, mr)
		if mr.Bytes() != nil {
			t.Error("a closed region still gives its memory out")
		}
	}
	// A peer that has mapped the memory too gives it up when it hears of it.
	eventually(t, "nothing is left", func() bool {
		return descriptors(t) <= before && !strings.Contains(mapsOf(t), "memfd:verbena-mr")
	})
}

func mapsOf(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestAllocMRRefused(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{MRs: 2}})
	e := newEnd(t, d, ib.RC, 64)
	defer e.close()
	closeAll(t, must[provider.MR](t)(e.pd.AllocMR(1, 0))) // the process's notifier is opened for good
	before := descriptors(t)
	try := func(name string, n uint64, access ib.Access, errno syscall.Errno) {
		t.Helper()
		_, err := e.pd.AllocMR(n, access)
		wantErrno(t, name, err, errno)
	}
	try("on demand", 4096, ib.AccessOnDemand, syscall.EINVAL)
	try("no bytes", 0, 0, syscall.EINVAL)
	try("more than there is", 1<<62, 0, syscall.ENOMEM)
	try("more than can be counted", ^uint64(0), 0, syscall.ENOMEM)
	try("remote write alone", 4096, ib.AccessRemoteWrite, syscall.EINVAL)
	try("persistence", 4096, ib.AccessFlushPersistent, syscall.EINVAL)
	mr := must[provider.MR](t)(e.pd.AllocMR(4096, 0))
	try("one more than there may be", 4096, 0, syscall.ENOMEM)
	_, err := mr.Share()
	wantErrno(t, "sharing on the loop link", err, syscall.EOPNOTSUPP)
	_, err = e.mr.Share()
	wantErrno(t, "sharing the program's memory", err, syscall.EINVAL)
	onDemand := ib.AccessOnDemand
	wantErrno(t, "on demand afterwards", mr.Rereg(provider.MRChange{Access: &onDemand}), syscall.EINVAL)
	closeAll(t, mr)
	_, err = mr.Share()
	wantErrno(t, "sharing a closed region", err, syscall.EINVAL)
	if after := descriptors(t); after > before || strings.Contains(mapsOf(t), "memfd:verbena-mr") {
		t.Errorf("%d descriptors, %d before; or a mapping is left", after, before)
	}
}

// A second region is opened on the same memory, with other rights, by another
// device. It outlives the first. Other memory ends the sharing.
func TestSharedMR(t *testing.T) {
	x, y := openFor(t, linkRings), openFor(t, linkRings)
	a, b := connected(t, x, y, ib.RC, 4096, nil)
	first := must[provider.MR](t)(a.pd.AllocMR(10_000, allRemote))
	handle := must[string](t)(first.Share())
	if again := must[string](t)(first.Share()); again != handle {
		t.Errorf("two handles: %s, %s", handle, again)
	}
	second := must[provider.MR](t)(b.pd.OpenSharedMR(handle, ib.AccessRemoteRead))
	if second.Length() != 10_000 || second.Access() != ib.AccessRemoteRead || addrOf(second.Bytes()) == addrOf(first.Bytes()) {
		t.Errorf("%d bytes, %v", second.Length(), second.Access())
	}
	fill(first.Bytes(), 7)
	if !bytes.Equal(first.Bytes(), second.Bytes()) {
		t.Error("it is not the same memory")
	}
	a.post(ib.SendWR{Op: ib.OpRDMARead, SGL: a.sge(0, 4096), RemoteAddr: second.Addr() + 5000, RKey: second.RKey()})
	a.ok()
	if !bytes.Equal(first.Bytes()[5000:][:4096], a.buf) {
		t.Error("a READ of the second region does not read the first one's memory")
	}
	for _, bad := range []struct {
		handle string
		errno  syscall.Errno
	}{
		{"", syscall.EINVAL}, {"nonsense", syscall.EINVAL}, {handle[:strings.Index(handle, "#")], syscall.EINVAL}, {"#", syscall.EINVAL},
		{strings.Repeat("x", 5000) + "#1", syscall.EINVAL}, {"127.1.2.3/1-0#00", syscall.ENOENT},
		{handle[:len(handle)-1] + "x", syscall.ENOENT},
	} {
		_, err := b.pd.OpenSharedMR(bad.handle, 0)
		wantErrno(t, fmt.Sprintf("%.60q", bad.handle), err, bad.errno)
	}
	_, err := b.pd.OpenSharedMR(handle, ib.AccessOnDemand)
	wantErrno(t, "on demand", err, syscall.EINVAL)

	rights := ib.AccessRemoteRead
	if err := first.Rereg(provider.MRChange{Access: &rights}); err != nil { // the same memory
		t.Fatal(err)
	}
	closeAll(t, must[provider.MR](t)(b.pd.OpenSharedMR(handle, 0)))
	if err := first.Rereg(provider.MRChange{Buf: make([]byte, 100)}); err != nil {
		t.Fatal(err)
	}
	if first.Bytes() != nil {
		t.Error("the memory is still there")
	}
	_, err = b.pd.OpenSharedMR(handle, 0)
	wantErrno(t, "a region with other memory", err, syscall.ENOENT)
	_, err = first.Share()
	wantErrno(t, "sharing the program's memory", err, syscall.EINVAL)
	closeAll(t, first)
	want := make([]byte, 10_000)
	fill(want, 7)
	if !bytes.Equal(second.Bytes(), want) {
		t.Error("the second region's memory went with the first")
	}
	// A process that has opened it can share it, too.
	third := must[provider.MR](t)(a.pd.OpenSharedMR(must[string](t)(second.Share()), 0))
	closeAll(t, second)
	if !bytes.Equal(third.Bytes(), want) {
		t.Error("the third region's memory went with the second")
	}
	closeAll(t, third)
}

// child is this test program, run again as another process.
type child struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

const childMark = "CHILD "

// startChild runs the calling test again in another process, of another user if as is not nil. A
// variable of the environment, which is only set there, makes the test the child.
func startChild(t *testing.T, variable, value string, as *syscall.Credential) *child {
	t.Helper()
	exe := must[string](t)(os.Executable())
	if as != nil {
		exe = copyForAll(t, exe)
	}
	cmd := exec.CommandContext(t.Context(), exe, "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+value)
	cmd.SysProcAttr, cmd.Dir, cmd.Stderr = &syscall.SysProcAttr{Credential: as}, "/", os.Stderr
	in := must[io.WriteCloser](t)(cmd.StdinPipe())
	out := must[io.ReadCloser](t)(cmd.StdoutPipe())
	must0(t, cmd.Start())
	t.Cleanup(func() { _ = in.Close() }) // which ends a child that waits
	return &child{t, cmd, in, bufio.NewScanner(out)}
}

// tellParent prints a line for hear.
func tellParent(args ...any) { fmt.Println(append([]any{"\n" + childMark}, args...)...) }

// hear waits for the next line that the child prints by tellParent.
func (c *child) hear() string {
	c.t.Helper()
	for c.out.Scan() {
		if text, ok := strings.CutPrefix(c.out.Text(), childMark); ok {
			return strings.TrimSpace(text)
		}
	}
	c.t.Fatal("the child has ended")
	return ""
}

// goOn lets a child go on that waits for a line.
func (c *child) goOn() {
	c.t.Helper()
	must[int](c.t)(c.in.Write([]byte("\n")))
}

// wait waits for the end of the child.
func (c *child) wait() error {
	for c.out.Scan() {
	}
	return c.cmd.Wait()
}

const sharedChild = "VERBENA_TEST_SHARED_CHILD"

// Another process opens the region, reads and writes it, and keeps it when the
// first has closed it. Another user's process does not get it.
func TestSharedMRBetweenProcesses(t *testing.T) {
	if handle := os.Getenv(sharedChild); handle != "" {
		serveShared(t, handle)
		return
	}
	d := openDevice(t, provider.Config{Link: linkLocal})
	pd := must[provider.PD](t)(d.AllocPD())
	defer func() { closeAll(t, pd) }()
	mr := must[provider.MR](t)(pd.AllocMR(1<<20, ib.AccessLocalWrite))
	fill(mr.Bytes(), 5)
	c := startChild(t, sharedChild, must[string](t)(mr.Share()), nil)
	wants := func(what string, first []byte) {
		t.Helper()
		if got, want := c.hear(), fmt.Sprintf("%x of %d", first, 1<<20); got != want {
			t.Errorf("%s: the child finds %s, want %s", what, got, want)
		}
	}
	wants("opened", mr.Bytes()[:16])
	eventually(t, "the other process has written", func() bool { return mr.Bytes()[1<<20-1] == 0xa5 })
	fill(mr.Bytes(), 9)
	first := bytes.Clone(mr.Bytes()[:16])
	closeAll(t, mr)
	c.goOn()
	wants("after the first region is closed", first)
	c.goOn()
	must0(t, c.wait())

	if os.Getuid() != 0 {
		return // only root can become another user
	}
	mr = must[provider.MR](t)(pd.AllocMR(4096, ib.AccessLocalWrite))
	defer func() { closeAll(t, mr) }()
	c = startChild(t, sharedChild, must[string](t)(mr.Share()), &syscall.Credential{Uid: 65534, Gid: 65534})
	if got := c.hear(); got != "not allowed" {
		t.Errorf("another user finds %s", got)
	}
	must0(t, c.wait())
}

// serveShared is the other process.
func serveShared(t *testing.T, handle string) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	pd := must[provider.PD](t)(d.AllocPD())
	defer func() { closeAll(t, pd) }()
	mr, err := pd.OpenSharedMR(handle, ib.AccessLocalWrite|ib.AccessRemoteWrite)
	if isErrno(err, syscall.EACCES) {
		tellParent("not allowed")
		return
	}
	must0(t, err)
	defer func() { closeAll(t, mr) }()
	m := mr.Bytes()
	first := bytes.Clone(m[:16])
	m[len(m)-1] = 0xa5
	tellParent(fmt.Sprintf("%x of %d", first, mr.Length()))
	in := bufio.NewScanner(os.Stdin)
	in.Scan()
	tellParent(fmt.Sprintf("%x of %d", m[:16], mr.Length()))
	in.Scan()
}
