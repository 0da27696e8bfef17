package perf

import (
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/word"
	"github.com/verbena-rdma/verbena/verbs"
)

// memKind is a kind of memory: how a buffer of it is made, of at least n bytes and
// in whole pages, with some rights.
type memKind struct {
	name string
	make func(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error)
}

// memKinds are the kinds of memory that can be measured. The first is the
// default.
var memKinds = []memKind{
	{"pinned", mapped((*verbs.PD).RegMR)},
	{"odp", mapped(func(pd *verbs.PD, b []byte, access verbs.Access) (*verbs.MR, error) {
		return pd.RegMR(b, access|verbs.AccessOnDemand)
	})},
	{"implicit", mapped(func(pd *verbs.PD, _ []byte, access verbs.Access) (*verbs.MR, error) {
		return pd.RegImplicitMR(access | verbs.AccessOnDemand)
	})},
	{"mw", windowed},
	{"shared", allocated},
	{"umr-list", listed},
	{"umr-strided", strided},
	{"dm", onDevice},
	{"dmabuf", exported},
}

// MemKinds returns the names of the kinds of memory that can be measured.
func MemKinds() []string {
	var names []string
	for i := range memKinds {
		names = append(names, memKinds[i].name)
	}
	return names
}

// memKindOf returns the kind with a name, or nil.
func memKindOf(name string) *memKind {
	for i := range memKinds {
		if memKinds[i].name == name {
			return &memKinds[i]
		}
	}
	return nil
}

// buffer is registered memory.
type buffer struct {
	bytes  []byte
	addr   uint64 // of the first byte, in requests
	mr     *verbs.MR
	lkey   uint32       // of requests of this side; 0: the region's
	rkey   uint32       // of requests of the peer
	key    *indirect    // the indirect key that is both lkey and rkey; or nil
	window *window      // the window that has rkey, or the queue pair that configured key; or nil
	free   func() error // gives the memory back; nil: there is nothing to do
}

// sge returns the element for n bytes from off on.
func (b *buffer) sge(off, n int) verbs.SGE {
	lkey := b.lkey
	if lkey == 0 {
		lkey = b.mr.LKey()
	}
	return verbs.SGE{Addr: b.addr + uint64(off), Length: uint32(n), LKey: lkey}
}

func (b *buffer) close() error {
	var errs []error
	if b.key != nil && b.key.key != nil {
		errs = append(errs, b.key.key.Close())
	}
	if b.window != nil {
		errs = append(errs, b.window.close())
	}
	if b.mr != nil {
		errs = append(errs, b.mr.Close())
	}
	if b.free != nil {
		errs = append(errs, b.free())
	}
	return errors.Join(errs...)
}

// mapped makes buffers of fresh pages outside the Go heap, as most RDMA programs have
// them, and registers them by register. So kinds of memory that differ only in their
// registration are measured with the same memory.
func mapped(register func(*verbs.PD, []byte, verbs.Access) (*verbs.MR, error)) func(*verbs.Device, *verbs.PD, int, verbs.Access) (buffer, error) {
	return func(_ *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
		bytes, err := sys.Map(n)
		if err != nil {
			return buffer{}, fmt.Errorf("mmap of %d bytes: %w", n, err)
		}
		b := buffer{bytes: bytes, addr: uint64(word.Addr(bytes)), free: func() error { return sys.Unmap(bytes) }}
		if b.mr, err = register(pd, bytes, access); err != nil {
			return buffer{}, errors.Join(err, b.close())
		}
		b.rkey = b.mr.RKey()
		return b, nil
	}
}

// allocated makes buffers of memory that the library allocates.
func allocated(_ *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	mr, err := pd.AllocMR((n+4095)&^4095, access)
	if err != nil {
		return buffer{}, err
	}
	return buffer{bytes: mr.Bytes(), addr: mr.Addr(), mr: mr, rkey: mr.RKey()}, nil
}

// windowed makes pinned buffers that peers reach through memory windows, and in no
// other way.
func windowed(dev *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	pinned := mapped((*verbs.PD).RegMR)
	b, err := pinned(dev, pd, n, access&verbs.AccessLocalWrite|verbs.AccessMWBind)
	if err != nil {
		return b, err
	}
	b.window = new(window)
	if err := b.window.open(dev, pd, b.mr, access&^verbs.AccessLocalWrite); err != nil {
		return buffer{}, errors.Join(err, b.close())
	}
	b.rkey = b.window.mw.RKey()
	return b, nil
}
