package p2p

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// SysProvider is a real device of this machine whose memory the kernel gives to processes, by the file p2pmem/allocate
// (Linux 6.2 and later, built with PCI_P2PDMA). An NVMe controller with a memory buffer is one, if the kernel's driver
// has it. The file belongs to root.
type SysProvider struct {
	at  Address
	dir string // of its files in /sys
}

// OpenSysProvider returns the provider at an address.
//
// Errors: ENODEV if there is no such device, or it has published no memory; EOPNOTSUPP if the kernel does not give it to
// processes.
func OpenSysProvider(at Address) (*SysProvider, error) {
	const op = "p2p_sys_provider"
	p := &SysProvider{at: at, dir: filepath.Join("/sys/bus/pci/devices", at.String(), "p2pmem")}
	published, err := p.number("published")
	switch {
	case err != nil:
		return nil, ib.Errorf(op, syscall.ENODEV, "%v has no peer memory", at)
	case published == 0:
		return nil, ib.Errorf(op, syscall.ENODEV, "the memory of %v is not published", at)
	}
	if _, err := os.Stat(filepath.Join(p.dir, "allocate")); err != nil {
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the kernel does not give the memory of %v to processes", at)
	}
	return p, nil
}

func (p *SysProvider) number(name string) (uint64, error) {
	b, err := os.ReadFile(filepath.Join(p.dir, name)) //nolint:gosec // a file of /sys
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

// Address returns where the provider is.
func (p *SysProvider) Address() Address { return p.at }

// Available returns how many bytes are free, as the kernel says.
func (p *SysProvider) Available() (uint64, error) { return p.number("available") }

// Alloc takes memory of the device and maps it into this process. It can be registered as a memory region, and given to
// reads and writes of files with O_DIRECT. release gives it back. When the device's driver is removed, the memory goes
// away: accesses of this process then are faults, those by a memory region fail.
//
// Errors: EINVAL for a length that cannot be; ENOMEM if the device has not so much left; EACCES without root; ENODEV if the
// device, or its memory, has gone since.
func (p *SysProvider) Alloc(n int) (b []byte, release func(), err error) {
	const op = "p2p_sys_alloc"
	if n <= 0 {
		return nil, nil, ib.Errorf(op, syscall.EINVAL, "%d bytes", n)
	}
	f, err := os.OpenFile(filepath.Join(p.dir, "allocate"), os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, ib.Errorf(op, syscall.ENODEV, "the memory of %v has gone", p.at)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", op, err)
	}
	b, err = sys.MapDMABuf(int(f.Fd()), uint64(n), true) // mapped as a dma-buf is: shared, from its beginning
	_ = f.Close()                                        // the mapping keeps the memory
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %v: %w", op, p.at, err)
	}
	return b, sync.OnceFunc(func() { _ = sys.Unmap(b) }), nil
}
