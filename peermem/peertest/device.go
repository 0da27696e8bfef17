// Package peertest is a device for tests of PeerDirect: memory with addresses at which the CPU
// finds nothing, and a client for it. A program that registers such an address gets the memory
// through the client only.
//
// The device looks whether the client's operations are called in order, each one once, and it can
// be told to fail, to hang, and to lie about where its memory is.
package peertest

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/peermem"
)

// Config is what a device is made of.
type Config struct {
	Name     string // of the client; "": "peertest"
	Pages    int
	PageSize int // a multiple of the system's; 0: 64 KiB
	// Flat: the pages lie one behind the other. Otherwise they lie in the opposite order.
	Flat         bool
	UnmapsItself bool // see peermem.Client
	Mute         bool // the client does not invalidate
}

// Device is a device with memory.
type Device struct {
	cfg        Config
	reserved   []byte // the addresses
	memory     []byte
	registered *peermem.Registered

	mu       sync.Mutex // guards what follows
	fail     map[string]error
	hang     map[string]chan struct{}
	hangs    map[string]int
	table    func() [][]byte // what DMAMap returns; nil: the truth
	pageSize uint64          // what PageSize returns
	asked    int             // calls of Acquire
	claims   []*Claim
	wrong    []string // operations that were called out of order
}

// Claim is memory that the client has claimed, with the calls for it.
type Claim struct {
	Off, Len uint64
	Core     uint64
	Force    bool
	calls    []string
	freed    bool // Free was called
}

// New makes a device and registers its client.
func New(cfg Config) (*Device, error) {
	if cfg.Name == "" {
		cfg.Name = "peertest"
	}
	if cfg.PageSize == 0 {
		cfg.PageSize = 64 << 10
	}
	n := cfg.Pages * cfg.PageSize
	reserved, err := sys.Reserve(n + 3*cfg.PageSize) // room to align it, and for addresses before it and behind it that are nobody's
	if err != nil {
		return nil, err
	}
	d := &Device{cfg: cfg, reserved: reserved, memory: make([]byte, n), pageSize: uint64(cfg.PageSize),
		fail: map[string]error{}, hang: map[string]chan struct{}{}, hangs: map[string]int{}}
	d.registered, err = peermem.Register(peermem.Client{
		Name: cfg.Name, Version: "1.0",
		Acquire: d.acquire, GetPages: d.getPages, DMAMap: d.dmaMap, DMAUnmap: d.dmaUnmap, PutPages: d.putPages,
		PageSize: d.getPageSize,
		Release:  d.release, Invalidates: !cfg.Mute, UnmapsItself: cfg.UnmapsItself,
	})
	if err != nil {
		_ = sys.Unmap(reserved) // the first error says more
		return nil, err
	}
	return d, nil
}

// Close unregisters the client, when its last region is closed, and gives the addresses back.
func (d *Device) Close(ctx context.Context) error {
	if err := d.registered.Unregister(ctx); err != nil {
		return err
	}
	return sys.Unmap(d.reserved)
}

// Addr returns the address of the memory, a multiple of the page size.
func (d *Device) Addr() uintptr {
	p := uintptr(d.cfg.PageSize)
	return (addrOf(d.reserved) + 2*p - 1) / p * p
}

// Len returns the number of bytes.
func (d *Device) Len() uint64 { return uint64(len(d.memory)) }

// Client returns the client.
func (d *Device) Client() *peermem.Registered { return d.registered }

// page returns a page of the memory.
func (d *Device) page(i int) []byte {
	if !d.cfg.Flat {
		i = d.cfg.Pages - 1 - i
	}
	return d.memory[i*d.cfg.PageSize:][:d.cfg.PageSize]
}

// ReadAt and WriteAt access the memory as the device does. The range must be inside it.
func (d *Device) ReadAt(b []byte, off uint64) {
	d.access(b, off, func(mine, b []byte) { copy(b, mine) })
}

// WriteAt is the other way.
func (d *Device) WriteAt(b []byte, off uint64) {
	d.access(b, off, func(mine, b []byte) { copy(mine, b) })
}

func (d *Device) access(b []byte, off uint64, do func(mine, b []byte)) {
	for len(b) > 0 {
		mine := d.page(int(off / uint64(d.cfg.PageSize)))[off%uint64(d.cfg.PageSize):]
		n := min(len(b), len(mine))
		do(mine[:n], b[:n])
		b, off = b[n:], off+uint64(n)
	}
}

// Fill writes a byte to all of the memory.
func (d *Device) Fill(v byte) {
	for i := range d.memory {
		d.memory[i] = v
	}
}

// Fail has an operation fail from now on: acquire (whatever the error is), get_pages or dma_map; nil:
// it succeeds.
func (d *Device) Fail(op string, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.fail[op] = err
}

// Lie has the client return another table and page size; nil and 0: the truth.
func (d *Device) Lie(table func() [][]byte, pageSize uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.table = table; pageSize == 0 {
		pageSize = uint64(d.cfg.PageSize)
	}
	d.pageSize = pageSize
}

// SetPageSize has the client report another page size.
func (d *Device) SetPageSize(n uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pageSize = n
}

// Hang has an operation hang until goOn is called.
func (d *Device) Hang(op string) (goOn func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	c := make(chan struct{})
	d.hang[op] = c
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.hang, op)
		close(c)
	})
}

// Hanging returns how many calls of an operation hang.
func (d *Device) Hanging(op string) int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.hangs[op]
}

// Asked returns how often the client was asked for memory.
func (d *Device) Asked() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked
}

// Claims returns what was claimed, in order.
func (d *Device) Claims() []*Claim {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.claims)
}

// Calls returns the operations that were called for a claim, in order.
func (d *Device) Calls(c *Claim) []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(c.calls)
}

// Wrong returns what was called out of order, or for memory that is released.
func (d *Device) Wrong() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.wrong)
}

// Open returns how many claims are not released.
func (d *Device) Open() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, c := range d.claims {
		if !slices.Contains(c.calls, "release") {
			n++
		}
	}
	return n
}

// Free frees the memory, as a program of the device would: all that is registered is invalidated.
func (d *Device) Free() error {
	for _, c := range d.Claims() {
		d.mu.Lock()
		core := c.Core
		c.freed = core != 0
		d.mu.Unlock()
		if err := d.registered.Invalidate(core); err != nil {
			return err
		}
		if d.cfg.UnmapsItself && core != 0 { // else the client had no pages to unmap, whatever has come since
			d.note(c, "unmapped by itself")
		}
	}
	return nil
}

// --- the client ---

// after has what may have been called last when an operation is called.
var after = map[string][]string{
	"get_pages":          {"acquire"},
	"dma_map":            {"get_pages"},
	"dma_unmap":          {"dma_map"},
	"put_pages":          {"get_pages", "dma_unmap"},
	"release":            {"acquire", "put_pages", "unmapped by itself"},
	"unmapped by itself": {"dma_map", "unmapped by itself"},
}

// op hangs and fails as the test wants. c may be nil.
func (d *Device) op(c *Claim, name string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if wait := d.hang[name]; wait != nil {
		d.hangs[name]++
		d.mu.Unlock()
		<-wait
		d.mu.Lock()
		d.hangs[name]--
	}
	if err := d.fail[name]; err != nil {
		return err
	}
	if c != nil {
		d.noteLocked(c, name)
	}
	return nil
}

func (d *Device) note(c *Claim, name string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.noteLocked(c, name)
}

func (d *Device) noteLocked(c *Claim, name string) {
	if name == "unmapped by itself" && (!slices.Contains(c.calls, "dma_map") || slices.Contains(c.calls, "dma_unmap") || slices.Contains(c.calls, "release")) {
		return // the region was not there yet, or is closed: there was nothing to invalidate
	}
	// A client that unmaps by itself does so after Invalidate, and the region may be closed meanwhile.
	early := name == "release" && c.freed && d.cfg.UnmapsItself
	if n := len(c.calls); n > 0 && !slices.Contains(after[name], c.calls[n-1]) && !early {
		d.wrong = append(d.wrong, fmt.Sprintf("%s after %v", name, c.calls))
	}
	c.calls = append(c.calls, name)
}

func (d *Device) acquire(addr uintptr, size uint64) (any, bool) {
	d.mu.Lock()
	d.asked++
	d.mu.Unlock()
	start := d.Addr()
	if addr < start || uint64(addr-start) > d.Len() || size > d.Len()-uint64(addr-start) {
		return nil, false
	}
	c := &Claim{Off: uint64(addr - start), Len: size}
	if d.op(c, "acquire") != nil {
		return nil, false
	}
	d.mu.Lock()
	d.claims = append(d.claims, c)
	d.mu.Unlock()
	return c, true
}

func (d *Device) getPages(private any, addr uintptr, size uint64, write, force bool, core uint64) error {
	c := private.(*Claim)
	if !write || addr != d.Addr()+uintptr(c.Off) || size != c.Len {
		return ib.Errorf("get_pages", syscall.EINVAL, "%d bytes at %#x, and %d at %d were claimed", size, addr, c.Len, c.Off)
	}
	if err := d.op(c, "get_pages"); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	c.Core, c.Force = core, force
	return nil
}

func (d *Device) dmaMap(private any) ([][]byte, error) {
	c := private.(*Claim)
	if err := d.op(c, "dma_map"); err != nil {
		return nil, err
	}
	d.mu.Lock()
	table := d.table
	d.mu.Unlock()
	if table != nil {
		return table(), nil
	}
	return d.Table(c.Off, c.Len), nil
}

func (d *Device) getPageSize(any) uint64 {
	_ = d.op(nil, "get_page_size") // it does not fail
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pageSize
}

// Table returns the pages of a range.
func (d *Device) Table(off, n uint64) (pages [][]byte) {
	p := uint64(d.cfg.PageSize)
	for i := off / p; i <= (off+n-1)/p; i++ {
		pages = append(pages, d.page(int(i)))
	}
	return pages
}

func (d *Device) dmaUnmap(private any) { d.undo(private, "dma_unmap") }
func (d *Device) putPages(private any) { d.undo(private, "put_pages") }
func (d *Device) release(private any)  { d.undo(private, "release") }

func (d *Device) undo(private any, op string) {
	_ = d.op(private.(*Claim), op) // they do not fail
}
