package device

// Objects of other processes that this one imports: exports.go is the other side. An imported
// region is one of this device, with keys of its own, on memory of another process
// (mem.Imported). Its rights are those of the original, but for what cannot be done in
// another process's memory: atomics, persistence, and paging, which the owner process does.

import (
	"bytes"
	"errors"
	"math"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Origin is an object of another process that was imported. Destroy destroys it there. Close
// ends the import; that of a region ends with the region.
type Origin interface {
	Destroy() error
	Close() error
}

// importedAccess are the rights that an imported region can have.
const importedAccess = ib.AccessLocalWrite | ib.AccessRemoteWrite | ib.AccessRemoteRead | ib.AccessMWBind | ib.AccessFlushGlobal | ib.AccessRelaxedOrdering

// Import imports an object that is no region: it only shows that the object is there.
func Import(op, handle string, object uint64) (Origin, error) {
	i, err := fetch(op, handle, object)
	if err != nil {
		return nil, err
	}
	if i.Guard >= 0 { // of a region, which was not asked for
		_ = sys.CloseFD(i.Guard) // it was open: it cannot fail
	}
	return i, nil
}

func fetch(op, handle string, object uint64) (*host.Import, error) {
	if strings.HasPrefix(handle, "#") {
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "a device on the loop link alone is not to be found by other processes")
	}
	i, err := host.FetchObject(handle, object)
	if err != nil {
		return nil, opError(op, err)
	}
	return i, nil
}

// ImportMR registers a region of another process. The region is to be closed before its
// origin is forgotten.
func (p *PD) ImportMR(handle string, object uint64) (provider.MR, Origin, error) {
	i, err := fetch("import_mr", handle, object)
	if err != nil {
		return nil, nil, err
	}
	b, err := reachMemory(i)
	if err != nil {
		return nil, nil, errors.Join(err, i.Close())
	}
	mr, err := p.registerWith(memoryAt(0, 0, i.IOVA), ib.Access(i.Access)&importedAccess, func() (mem.Backing, error) {
		mine := b
		b = nil // the region closes it
		return mine, nil
	})
	if b != nil {
		_ = b.Close() // the first error says more
	}
	if err != nil {
		return nil, nil, named("import_mr", err)
	}
	return mr, i, nil
}

// reachMemory makes a backing of what was imported.
func reachMemory(i *host.Import) (mem.Backing, error) {
	const op = "import_mr"
	if i.Guard < 0 {
		return nil, ib.Errorf(op, syscall.EPROTO, "the region came without a guard")
	}
	g, err := mem.OpenGuard(i.Guard)
	_ = sys.CloseFD(i.Guard) // it was open: it cannot fail
	if err != nil {
		return nil, opError(op, err)
	}
	fd, err := openMemory(i, g.Proof())
	if err != nil {
		_ = g.Close() // the first error says more
		return nil, err
	}
	return mem.NewImported(mem.ImportedConfig{Memory: fd, Addr: i.Addr, Length: i.Length, Guard: g, Link: i}), nil
}

// openMemory opens the memory of the process that exports, and checks that it is that one.
func openMemory(i *host.Import, proof []byte) (int, error) {
	const op = "import_mr"
	if i.Length == 0 || i.Length > math.MaxInt64 || i.Addr > math.MaxInt64-i.Length {
		return -1, ib.Errorf(op, syscall.EPROTO, "%d bytes at %#x are no memory of a process", i.Length, i.Addr)
	}
	if i.PID <= 0 {
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the process that shares the region is in another PID namespace, and cannot be seen from here")
	}
	fd, err := sys.OpenMemory(i.PID)
	switch {
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return -1, ib.Errorf(op, syscall.EACCES, "the kernel does not let this process access the memory of process %d, as a debugger would (kernel.yama.ptrace_scope is %d)",
			i.PID, sys.YamaScope())
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOMEM):
		return -1, opError(op, err)
	case err != nil:
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the memory of process %d: %v", i.PID, err)
	}
	// The PID may be another process's: if /proc is that of another PID namespace, or if the
	// process that exports has ended.
	there := make([]byte, len(proof))
	if !sys.ReadMemory(fd, there, i.Proof) || !bytes.Equal(there, proof) {
		_ = sys.CloseFD(fd) // the first error says more
		return -1, ib.Errorf(op, syscall.EOPNOTSUPP, "the process that shares the region is gone, or /proc does not show it as process %d", i.PID)
	}
	return fd, nil
}
