package device

// Imported regions, here of another device of the same process, by the same means as between
// processes. (The tests with other processes are in interop/programs.)

import (
	"bytes"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// exporter is a device with objects that others import.
type exporter struct {
	*end
	handle string

	mu  sync.Mutex    // guards mrs
	mrs []provider.MR // by numbers from 1
}

func newExporter(t testing.TB, size int) *exporter {
	t.Helper()
	x := &exporter{end: newEnd(t, openDevice(t, provider.Config{Link: linkLocal}), ib.RC, size)}
	t.Cleanup(x.close)
	x.mrs = []provider.MR{x.mr}
	x.handle = x.dev.Publish(func(object uint64) (Published, error) {
		x.mu.Lock()
		defer x.mu.Unlock()
		switch {
		case object == 0:
			return Published{Destroy: func() error { return syscall.EINVAL }}, nil
		case object > uint64(len(x.mrs)):
			return Published{}, syscall.ENOENT
		}
		mr := x.mrs[object-1]
		return Published{MR: mr, Destroy: mr.Close}, nil
	})
	return x
}

func (x *exporter) importTo(e *end, object uint64) (provider.MR, Origin) {
	e.t.Helper()
	mr, o, err := e.pd.(*PD).ImportMR(x.handle, object)
	if err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(func() { closeAll(e.t, mr, o) })
	return mr, o
}

// readOnlyPage is memory that cannot be written to.
func readOnlyPage(t *testing.T) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) }) // it was mapped: it cannot fail
	return b
}

// Kinds of memory that can be imported, and what cannot.
func TestImportedKinds(t *testing.T) {
	x := newExporter(t, 4096)
	a, b := connected(t, openFor(t, linkRings), openFor(t, linkRings), ib.RC, 4096, nil)
	dm, dmr := x.deviceMemory(4096)
	alloc := must[provider.MR](t)(x.pd.AllocMR(4096, allRemote))
	od := make([]byte, 4096)
	demand := must[provider.MR](t)(x.pd.RegMR(od, allRemote|ib.AccessOnDemand))
	all := must[provider.MR](t)(x.pd.RegImplicitMR(allRemote | ib.AccessOnDemand))
	zero := must[provider.MR](t)(x.pd.RegMR(x.buf, ib.AccessRemoteRead|ib.AccessZeroBased))
	null := must[provider.MR](t)(x.pd.(*PD).AllocNullMR())
	page := readOnlyPage(t)
	fixed := must[provider.MR](t)(x.pd.RegMRAddr(uintptr(sys.AddrOf(page)), uint64(len(page)), 0, allRemote|ib.AccessOnDemand))
	t.Cleanup(func() { closeAll(t, alloc, demand, all, zero, null, fixed) })
	x.mu.Lock()
	x.mrs = []provider.MR{x.mr, dmr, alloc, demand, zero, null, all, fixed}
	x.mu.Unlock()
	fill(x.buf, 1)
	fill(alloc.Bytes(), 3)
	fill(od, 4)
	secret := make([]byte, 4096)
	fill(secret, 2)
	if _, err := dm.WriteAt(secret, 0); err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		name  string
		bytes []byte
		off   uint64
	}{{"heap", x.buf, 0}, {"device", secret, 0}, {"allocated", alloc.Bytes(), 0}, {"on demand", od, 0}, {"zero-based", x.buf, 0}} {
		mr, _ := x.importTo(a, uint64(i+1))
		a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: []ib.SGE{{Addr: mr.Addr() + want.off, Length: 4096, LKey: mr.LKey()}}, RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey()})
		a.ok()
		if !bytes.Equal(b.buf, want.bytes) {
			t.Errorf("%s: other bytes", want.name)
		}
	}
	for name, object := range map[string]uint64{"null": 6, "implicit": 7} {
		_, _, err := a.pd.(*PD).ImportMR(x.handle, object)
		wantErrno(t, name, err, syscall.EOPNOTSUPP)
	}
	// The kernel would write to pages that the owner itself cannot.
	for object, want := range map[uint64]ib.Access{4: ib.AccessRemoteWrite, 8: 0} {
		if mr, _ := x.importTo(a, object); mr.Access()&ib.AccessRemoteWrite != want {
			t.Errorf("object %d has the rights %v", object, mr.Access())
		}
	}
	readOnly, _ := x.importTo(a, 5)
	b.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: b.sge(0, 8), RemoteAddr: readOnly.Addr(), RKey: readOnly.RKey()})
	b.status(ib.WCRemAccessErr)
}

func TestImportRefused(t *testing.T) {
	x := newExporter(t, 4096)
	e := newEnd(t, openDevice(t, provider.Config{Link: linkLoop, Limits: provider.Limits{MRs: 2}}), ib.RC, 64)
	defer e.close()
	mr, o := x.importTo(e, 1)
	before := descriptors(t)
	for _, c := range []struct {
		name, handle string
		object       uint64
		errno        syscall.Errno
	}{
		{"no such object", x.handle, 9, syscall.ENOENT}, {"no region", x.handle, 0, syscall.EPROTO},
		{"another secret", x.handle[:len(x.handle)-1] + "x", 1, syscall.ENOENT}, {"nobody", "127.1.2.3/1-0#00", 1, syscall.ENOENT},
		{"nonsense", "nonsense", 1, syscall.EINVAL}, {"nothing", "", 1, syscall.EINVAL}, {"loop", "#12", 1, syscall.EOPNOTSUPP},
		{"one more than there may be", x.handle, 1, syscall.ENOMEM},
	} {
		_, _, err := e.pd.(*PD).ImportMR(c.handle, c.object)
		wantErrno(t, c.name, err, c.errno)
	}
	if h := e.dev.Publish(nil); !strings.HasPrefix(h, "#") {
		t.Errorf("a device on the loop link alone is %s to others", h)
	}
	rights := ib.AccessLocalWrite
	wantErrno(t, "other rights", mr.Rereg(provider.MRChange{Access: &rights}), syscall.EOPNOTSUPP)
	eventually(t, "nothing is left of what was refused", func() bool { return descriptors(t) <= before })
	closeAll(t, mr, o, mr, o)
	x.dev.Unpublish(x.handle)
	_, err := Import("import_device", x.handle, 0)
	wantErrno(t, "what is not published any more", err, syscall.ENOENT)
}

// count returns how many leases of its regions a device has.
func (e *exports) count() (n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.leases {
		n += len(l)
	}
	return n
}

// However a region ends, or changes: its imports do, and nothing is stored any more.
func TestImportRevoked(t *testing.T) {
	access := allRemote
	for name, end := range map[string]func(x *exporter, o Origin) error{
		"closed":         func(x *exporter, _ Origin) error { return x.mr.Close() },
		"destroyed":      func(_ *exporter, o Origin) error { return o.Destroy() },
		"changed rights": func(x *exporter, _ Origin) error { return x.mr.Rereg(provider.MRChange{Access: &access}) },
		"other memory":   func(x *exporter, _ Origin) error { return x.mr.Rereg(provider.MRChange{Buf: make([]byte, 64)}) },
		"invalidated": func(x *exporter, _ Origin) error {
			x.beside().localInvalidate(x.mr.RKey())
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			const size = 256 << 10
			x := newExporter(t, size)
			invalidatable := allRemote | ib.AccessRemoteInvalidate
			must0(t, x.mr.Rereg(provider.MRChange{Access: &invalidatable}))
			a, b := connected(t, openFor(t, linkLoop), openFor(t, linkLoop), ib.RC, 2*size, neverAgain)
			mr, o := x.importTo(b, 1)
			second, _ := x.importTo(b, 1)
			wr := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: mr.Addr(), RKey: mr.RKey()}
			revokedUnderLoad(t, a, b, wr, x.buf, func() { must0(t, end(x, o)) }, ib.WCRemAccessErr)
			closeAll(t, mr, second)
			eventually(t, "no lease is left", func() bool { return x.dev.exports.count() == 0 })
		})
	}
}

// The call that closes a region waits for a process that is accessing it, also when its
// connection has ended, until the process leaves or ends.
func TestImportEndsInside(t *testing.T) {
	for _, ends := range []bool{true, false} {
		t.Run(fmt.Sprint(ends), func(t *testing.T) {
			x := newExporter(t, 4096)
			a := newEnd(t, openDevice(t, provider.Config{Link: linkLoop}), ib.RC, 64)
			defer a.close()
			mr, o := x.importTo(a, 1)
			// The importer is this process; another process stands in for it.
			user := exec.Command("/bin/sleep", "100")
			must0(t, user.Start())
			x.dev.exports.mu.Lock()
			l := x.dev.exports.leases[x.mr.(*MR).region][0]
			fd := must[int](t)(sys.OpenPidfd(user.Process.Pid))
			must0(t, unix.Dup3(fd, l.pidfd, unix.O_CLOEXEC))
			must0(t, sys.CloseFD(fd))
			x.dev.exports.mu.Unlock()
			if _, kind := l.guard.Enter(); kind != mem.FaultNone {
				t.Fatal("nobody may enter")
			}
			var over atomic.Bool // set before the user leaves or ends
			early := make(chan bool)
			go func() {
				closeAll(t, x.mr)
				early <- !over.Load()
			}()
			eventually(t, "the region is dead", func() bool { return !x.mr.(*MR).region.Alive() })
			closeAll(t, o)
			eventually(t, "the connection has ended", func() bool { return sys.HungUp(l.c) })
			over.Store(true)
			if ends {
				must0(t, user.Process.Kill())
			} else {
				l.guard.Leave()
			}
			if <-early {
				t.Error("the call did not wait for the user")
			}
			_ = user.Process.Kill() // if it has not ended yet
			_ = user.Wait()         // it was killed
			closeAll(t, mr)
		})
	}
}

// Imports that are left when the exporter closes its device end with it, and their
// accesses fail.
func TestImportOutlivesExporter(t *testing.T) {
	d := must[*Device](t)(Open("", &provider.Config{Link: linkLocal}))
	e := newEnd(t, d, ib.RC, 4096)
	handle := d.Publish(func(uint64) (Published, error) { return Published{MR: e.mr, Destroy: e.mr.Close}, nil })
	a, b := connected(t, openFor(t, linkLoop), openFor(t, linkLoop), ib.RC, 64, nil)
	mr, o, err := a.pd.(*PD).ImportMR(handle, 1)
	if err != nil {
		t.Fatal(err)
	}
	e.close()
	closeAll(t, d) // does not wait for the importer
	b.post(ib.SendWR{Op: ib.OpRDMARead, SGL: b.sge(0, 8), RemoteAddr: mr.Addr(), RKey: mr.RKey()})
	b.status(ib.WCRemAccessErr)
	if err := o.Destroy(); err != nil {
		t.Errorf("destroying what has ended: %v", err)
	}
	closeAll(t, mr, o)
}
