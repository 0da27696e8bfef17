package device

// Device memory as a device offers it. Each process has memory of its own, since it is
// reached only through that process's queue pairs; the processes share only the limit: its
// bytes are counted like objects.

import (
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// defaultDM is how much device memory an unconfigured device has.
const defaultDM = 256 << 20

// dmSizeVar is the environment variable that sets how much it has.
const dmSizeVar = "VERBENA_DM_SIZE"

// dmSize returns how much device memory is asked for.
func dmSize(cfg *provider.Config) int {
	switch {
	case cfg.DMSize < 0:
		return 0
	case cfg.DMSize > 0:
		return int(cfg.DMSize)
	}
	if n, ok := parseSize(Getenv(dmSizeVar)); ok {
		return n
	}
	return defaultDM
}

// parseSize reads a number of bytes, with a K, M or G behind it for so many KiB,
// MiB or GiB.
func parseSize(s string) (int, bool) {
	shift := 0
	if s != "" {
		if i := strings.IndexByte("KMG", s[len(s)-1]); i >= 0 {
			s, shift = s[:len(s)-1], 10*(i+1)
		}
	}
	n, err := strconv.ParseUint(s, 10, 63)
	if err != nil || n > math.MaxInt>>shift {
		return 0, false
	}
	return int(n) << shift, true
}

// maxDM is how much device memory all processes together may have: what the first
// of them has asked for.
func (d *Device) maxDM() int {
	if d.member != nil {
		return d.member.Limit(host.DMBytes)
	}
	return dmSize(&d.cfg)
}

// DM is a buffer of device memory.
type DM struct {
	dev    *Device
	number uint32
	mem    *mem.DeviceMem
	n      int          // bytes that it counts for
	lent   atomic.Int32 // calls of Lend whose memory was not given back

	mu      sync.Mutex // guards what follows
	closed  bool
	revokes map[*func()]struct{} // see OnFree
}

// AllocDM takes a buffer of device memory.
func (d *Device) AllocDM(cfg provider.DMConfig) (provider.DM, error) {
	const op = "alloc_dm"
	switch {
	case cfg.Length == 0:
		return nil, ib.Errorf(op, syscall.EINVAL, "no bytes")
	case cfg.LogAlign < 0 || cfg.LogAlign > 62:
		return nil, ib.Errorf(op, syscall.EINVAL, "an alignment of 2^%d", cfg.LogAlign)
	case cfg.Class > ib.DMCoherent:
		return nil, ib.Errorf(op, syscall.EINVAL, "%v", cfg.Class)
	case cfg.Length > uint64(math.MaxInt-os.Getpagesize()):
		return nil, ib.Errorf(op, syscall.ENOMEM, "%d bytes, the device has %d", cfg.Length, d.maxDM())
	}
	n := int(cfg.Length)
	if cfg.Export { // it takes whole pages
		n = (n + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	}
	d.mu.Lock()
	err := d.addLocked(op, &d.counts.dm, n, d.maxDM())
	d.mu.Unlock()
	if err != nil {
		return nil, err
	}
	m, err := d.dm.Alloc(mem.DeviceMemConfig{Length: cfg.Length, LogAlign: uint(cfg.LogAlign),
		Coherent: cfg.Class == ib.DMCoherent, Export: cfg.Export})
	if err != nil {
		d.freeDM(nil, n)
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.nextDM++
	buffer := &DM{dev: d, number: d.nextDM, mem: m, n: n}
	if d.buffers == nil {
		d.buffers = make(map[*DM]struct{})
	}
	d.buffers[buffer] = struct{}{}
	return buffer, nil
}

func (d *Device) freeDM(m *DM, n int) {
	d.mu.Lock()
	delete(d.buffers, m)
	d.counts.dm -= n
	d.publishLocked()
	d.mu.Unlock()
}

func (m *DM) Length() uint64                             { return m.mem.Len() }
func (m *DM) WriteAt(b []byte, off int64) (int, error)   { return m.mem.WriteAt(b, off) }
func (m *DM) ReadAt(b []byte, off int64) (int, error)    { return m.mem.ReadAt(b, off) }
func (m *DM) Bytes() ([]byte, error)                     { return m.mem.Bytes() }
func (m *DM) Export() (f *os.File, off int64, err error) { return m.mem.Export() }

// Class returns the class of memory.
func (m *DM) Class() ib.DMClass {
	if m.mem.Coherent() {
		return ib.DMCoherent
	}
	return ib.DMPlain
}

// Close frees the buffer, unless regions are registered on it.
func (m *DM) Close() error {
	m.mu.Lock()
	if m.closed {
		m.mu.Unlock()
		return nil
	}
	revokes := slices.Collect(maps.Keys(m.revokes))
	m.mu.Unlock()
	if m.mem.Regions() > int(m.lent.Load()) {
		return m.mem.Free() // EBUSY: regions are registered on it
	}
	for _, revoke := range revokes {
		(*revoke)()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	if err := m.mem.Free(); err != nil {
		return err
	}
	m.closed = true
	m.dev.freeDM(m, m.n)
	return nil
}

// Lend returns the buffer itself. It cannot be freed until giveBack is called.
func (m *DM) Lend() (b []byte, giveBack func(), err error) {
	b, back, err := m.mem.Lend()
	if err != nil {
		return nil, nil, err
	}
	m.lent.Add(1)
	return b, func() { m.lent.Add(-1); back() }, nil
}

// OnFree has revoke called when the buffer is about to be freed, to have what was lent given
// back, until cancel is called. It fails with EINVAL if the buffer is freed.
func (m *DM) OnFree(revoke func()) (cancel func(), err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, ib.Errorf("export_dm", syscall.EINVAL, "the device memory is freed")
	}
	if m.revokes == nil {
		m.revokes = make(map[*func()]struct{})
	}
	m.revokes[&revoke] = struct{}{}
	return func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.revokes, &revoke)
	}, nil
}

// RegDMMR registers a part of a buffer.
func (p *PD) RegDMMR(dm provider.DM, off, length uint64, access ib.Access) (provider.MR, error) {
	const op = "reg_dm_mr"
	m, ok := dm.(*DM)
	switch {
	case !ok || m.dev != p.dev:
		return nil, ib.Errorf(op, syscall.EINVAL, "the device memory belongs to another device")
	case access&ib.AccessZeroBased == 0:
		return nil, errZeroBased(op)
	}
	r, err := p.registerWith(memory{dm: true}, access, func() (mem.Backing, error) { return m.mem.Backing(off, length) })
	if err != nil {
		return nil, named(op, err)
	}
	return r, nil
}

// errZeroBased: device memory has no other addresses than offsets (ibv_reg_dm_mr(3)).
func errZeroBased(op string) error {
	return ib.Errorf(op, syscall.EINVAL, "device memory is registered with AccessZeroBased")
}
