package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Software GPUs for C: verbena/gpu.h. Memory is known by its address, streams and events by handles.

const opGPU = "gpu"

type gpuEvent struct {
	mu   sync.Mutex // guards last
	last *gpu.Event // nil: it was never recorded
}

var (
	streams = table[gpu.Stream]{kind: C.VBE_STREAM}
	events  = table[gpuEvent]{kind: C.VBE_EVENT}
)

// allocation is what the program frees, or closes, by its address.
type allocation struct {
	buf  *gpu.Buffer
	kind C.int32_t
}

// hostRange is memory of the program that it has registered.
type hostRange struct{ addr, n, id uint64 }

// gpus has the GPUs of the process. They are open until it ends.
var gpus struct {
	mu    sync.Mutex // guards what follows
	cards []*gpu.Device
	by    map[uint64][]allocation // by address: the process may have opened a handle of its own memory
	host  []hostRange             // in the order of their addresses
	hosts uint64                  // how many there were
	idle  [][]*gpu.Stream         // by GPU: streams for operations without a stream
}

//export vbe_gpu_init
func vbe_gpu_init() C.int64_t {
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	set := conf().GPU
	for i := len(gpus.cards); i < set.Count; i++ {
		d, err := gpu.Open("soft:"+strconv.Itoa(i), &gpu.Config{VRAM: set.VRAM, BAR: set.BAR})
		if err != nil {
			return failed(err)
		}
		gpus.cards, gpus.idle = append(gpus.cards, d), append(gpus.idle, nil)
	}
	if gpus.by == nil {
		gpus.by = make(map[uint64][]allocation)
	}
	return C.int64_t(len(gpus.cards))
}

// cardOf returns a GPU by its number.
func cardOf(i C.int32_t) (*gpu.Device, error) {
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	if i < 0 || int(i) >= len(gpus.cards) {
		return nil, ib.Errorf(opGPU, syscall.EINVAL, "there is no GPU %d", int(i))
	}
	return gpus.cards[i], nil
}

// indexOf returns the number of a GPU by its name.
func indexOf(name string) int {
	n, err := strconv.Atoi(strings.TrimPrefix(name, "soft:"))
	if err != nil {
		return -1
	}
	return n
}

// pciDomain is one that machines do not have.
const pciDomain = 0xbe7a

//export vbe_gpu_info
func vbe_gpu_info(i C.int32_t, to *C.struct_verbena_gpu_info) C.int64_t {
	d, err := cardOf(i)
	if err != nil {
		return failed(err)
	}
	stats := d.Stats()
	setChars(to.name[:], "Verbena software GPU")
	sum := sha256.Sum256([]byte("verbena " + d.Name()))
	for k := range to.uuid {
		to.uuid[k] = C.uint8_t(sum[k])
	}
	to.pci_domain, to.pci_bus = pciDomain, C.uint32_t(i)+1
	to.vram, to.vram_free, to.bar = C.uint64_t(stats.VRAM), C.uint64_t(stats.VRAMFree), C.uint64_t(d.BAR())
	return 0
}

//export vbe_gpu_alloc
func vbe_gpu_alloc(i C.int32_t, size C.uint64_t, kind C.int32_t, addr *C.uint64_t) C.int64_t {
	d, err := cardOf(i)
	if err != nil {
		return failed(err)
	}
	opts := gpu.AllocOptions{CPU: kind != C.VERBENA_GPU_VRAM}
	switch kind {
	case C.VERBENA_GPU_VRAM, C.VERBENA_GPU_VISIBLE, C.VERBENA_GPU_MANAGED:
	case C.VERBENA_GPU_HOST:
		opts.Placement = gpu.InHost
	default:
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "memory of kind %d", int(kind)))
	}
	b, err := d.AllocWith(uint64(size), opts)
	if err != nil {
		return failed(err)
	}
	*addr = own(b, kind)
	return 0
}

// own notes memory that the program frees by its address, which it returns.
func own(b *gpu.Buffer, kind C.int32_t) C.uint64_t {
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	gpus.by[b.Addr()] = append(gpus.by[b.Addr()], allocation{b, kind})
	return C.uint64_t(b.Addr())
}

// vbe_gpu_free frees what was allocated, or closes what was opened.
//
//export vbe_gpu_free
func vbe_gpu_free(addr C.uint64_t, opened C.uint32_t) C.int64_t {
	gpus.mu.Lock()
	all := gpus.by[uint64(addr)]
	i := slices.IndexFunc(all, func(a allocation) bool { return (a.kind == C.VERBENA_GPU_IMPORTED) == (opened != 0) })
	if i < 0 {
		gpus.mu.Unlock()
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "nothing that can be freed begins at %#x", uint64(addr)))
	}
	b := all[i].buf
	if len(all) == 1 {
		delete(gpus.by, uint64(addr))
	} else {
		gpus.by[uint64(addr)] = slices.Delete(slices.Clone(all), i, i+1)
	}
	gpus.mu.Unlock()
	return result(b.Free())
}

//export vbe_gpu_register
func vbe_gpu_register(addr, size C.uint64_t) C.int64_t {
	r := hostRange{addr: uint64(addr), n: uint64(size)}
	if _, err := hostMem(r.addr, r.n); err != nil || r.addr == 0 || r.n == 0 {
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "%d bytes at %#x are no memory of the program", r.n, r.addr))
	}
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	i := slices.IndexFunc(gpus.host, func(o hostRange) bool { return o.addr+o.n > r.addr })
	if i < 0 {
		i = len(gpus.host)
	} else if gpus.host[i].addr < r.addr+r.n {
		return failed(ib.Errorf(opGPU, syscall.EEXIST, "%d bytes at %#x are registered in part", r.n, r.addr))
	}
	gpus.hosts++
	r.id = 1<<63 | gpus.hosts // objects of GPUs have small numbers
	gpus.host = slices.Insert(gpus.host, i, r)
	return 0
}

//export vbe_gpu_unregister
func vbe_gpu_unregister(addr C.uint64_t) C.int64_t {
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	i := slices.IndexFunc(gpus.host, func(o hostRange) bool { return o.addr == uint64(addr) })
	if i < 0 {
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "nothing that is registered begins at %#x", uint64(addr)))
	}
	gpus.host = slices.Delete(gpus.host, i, i+1)
	return 0
}

//export vbe_gpu_lookup
func vbe_gpu_lookup(addr C.uint64_t, to *C.struct_verbena_gpu_pointer) C.int64_t {
	a := uint64(addr)
	p, err := gpu.Lookup(a)
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	if err != nil {
		for _, r := range gpus.host {
			if a-r.addr < r.n {
				to.gpu, to.kind, to.visible = -1, C.VERBENA_GPU_REGISTERED, 1
				to.base, to.size, to.id = C.uint64_t(r.addr), C.uint64_t(r.n), C.uint64_t(r.id)
				return 0
			}
		}
		return -C.EFAULT // not failed: programs look up addresses to find out
	}
	to.gpu, to.kind = C.int32_t(indexOf(p.GPU)), C.VERBENA_GPU_IMPORTED
	to.base, to.size, to.id = C.uint64_t(p.Base), C.uint64_t(p.Size), C.uint64_t(p.ID)
	to.visible, to.resident = number(p.CPU), number(p.Resident)
	for _, o := range gpus.by[p.Base] {
		if o.buf.ID() == p.ID { // imported memory has whole pages: the handle is of the first bytes
			to.size = C.uint64_t(o.buf.Len())
			to.kind = min(to.kind, o.kind) // what the process has allocated is not imported
		}
	}
	return 0
}

// hostMem returns memory of the program.
func hostMem(addr, n uint64) (gpu.Mem, error) {
	if n == 0 || n > math.MaxInt || addr >= addressLimit() || n > addressLimit()-addr || gpu.Reserved(addr) || gpu.Reserved(addr+n-1) {
		return gpu.Mem{}, ib.Errorf(opGPU, syscall.EFAULT, "%d bytes at %#x are not one piece of memory", n, addr)
	}
	return gpu.Host(bytesAt(addr, n)), nil
}

// memAt returns the memory at an address. card is the number of its GPU, -1 for memory of the program. The caller calls
// done when the operation is queued.
func memAt(addr, n uint64) (m gpu.Mem, card int, done func(), err error) {
	if !gpu.Reserved(addr) {
		m, err = hostMem(addr, n)
		return m, -1, func() {}, err
	}
	b, card, err := bufferAt(addr, n)
	if err != nil {
		return m, -1, nil, err
	}
	return b.All(), card, func() { _ = b.Free() }, nil
}

// bufferAt returns memory of a GPU, as a Buffer that the caller frees, and the GPU's number.
func bufferAt(addr, n uint64) (*gpu.Buffer, int, error) {
	p, err := gpu.Lookup(addr)
	if err != nil {
		return nil, -1, err
	}
	if n == 0 {
		return nil, -1, ib.Errorf(opGPU, syscall.EINVAL, "no bytes")
	}
	i := indexOf(p.GPU)
	d, err := cardOf(C.int32_t(i))
	if err != nil {
		return nil, -1, err
	}
	b, err := d.BufferAt(addr, n)
	return b, i, err
}

// borrow returns a stream for one operation, which giveBack takes.
func borrow(card int) (*gpu.Stream, error) {
	gpus.mu.Lock()
	if free := gpus.idle[card]; len(free) > 0 {
		gpus.idle[card] = free[:len(free)-1]
		gpus.mu.Unlock()
		return free[len(free)-1], nil
	}
	d := gpus.cards[card]
	gpus.mu.Unlock()
	return d.NewStream()
}

func giveBack(card int, s *gpu.Stream) {
	_ = s.Reset() // the operation's error was returned
	gpus.mu.Lock()
	defer gpus.mu.Unlock()
	gpus.idle[card] = append(gpus.idle[card], s)
}

// perform has a GPU execute an operation that queue queues: on the stream of a handle; without one and with a function,
// on one of our own, at whose end the function is called; without either it waits for the end.
func perform(stream C.uint64_t, card int, queue func(*gpu.Stream) error, function, arg C.uint64_t) error {
	if stream != 0 {
		s := streams.get(uint64(stream))
		if s == nil {
			return errStale
		}
		return queue(s)
	}
	card = max(card, 0)
	s, err := borrow(card)
	if err != nil {
		return err
	}
	err = queue(s)
	switch {
	case err != nil:
	case function != 0:
		return s.Call(func(err error) {
			go giveBack(card, s) // not from within the stream: it is still under way
			C.call_gpu(function, arg, C.int(errnoFor(err)))
		})
	default:
		err = s.Sync(context.Background())
	}
	giveBack(card, s)
	return err
}

// errnoFor returns 0 or the negative errno of an error.
func errnoFor(err error) C.int64_t {
	if err == nil {
		return 0
	}
	return failed(err)
}

//export vbe_gpu_copy
func vbe_gpu_copy(stream, to, from, n, function, arg C.uint64_t) C.int64_t {
	if n == 0 && function == 0 {
		return 0
	}
	if n == 0 { // the function is called by another thread, as always: it may start the next copy
		return result(perform(0, 0, func(*gpu.Stream) error { return nil }, function, arg))
	}
	dst, card, done, err := memAt(uint64(to), uint64(n))
	if err != nil {
		return failed(err)
	}
	defer done()
	src, other, done2, err := memAt(uint64(from), uint64(n))
	if err != nil {
		return failed(err)
	}
	defer done2()
	return result(perform(stream, max(card, other), func(s *gpu.Stream) error { return s.Copy(dst, src) }, function, arg))
}

//export vbe_gpu_fill
func vbe_gpu_fill(stream, to C.uint64_t, pattern, width C.uint32_t, count C.uint64_t) C.int64_t {
	if width != 1 && width != 2 && width != 4 || uint64(to)%uint64(width) != 0 {
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "a pattern of %d bytes at %#x", uint32(width), uint64(to)))
	}
	if count == 0 {
		return 0
	}
	if uint64(count) > math.MaxInt/uint64(width) {
		return failed(ib.Errorf(opGPU, syscall.EFAULT, "%d patterns", uint64(count)))
	}
	dst, card, done, err := memAt(uint64(to), uint64(count)*uint64(width))
	if err != nil {
		return failed(err)
	}
	defer done()
	value := binary.LittleEndian.AppendUint32(nil, uint32(pattern))[:width]
	return result(perform(stream, card, func(s *gpu.Stream) error { return s.FillPattern(dst, value) }, 0, 0))
}

//export vbe_gpu_stream
func vbe_gpu_stream(i C.int32_t) C.int64_t {
	d, err := cardOf(i)
	if err != nil {
		return failed(err)
	}
	s, err := d.NewStream()
	if err != nil {
		return failed(err)
	}
	h := streams.add(s)
	if h == 0 {
		_ = s.Close() // it has no error
		return -C.ENOMEM
	}
	return C.int64_t(h)
}

//export vbe_gpu_stream_do
func vbe_gpu_stream_do(h C.uint64_t, what C.uint32_t) C.int64_t {
	s := streams.get(uint64(h))
	if s == nil {
		return failed(errStale)
	}
	switch what {
	case C.VBE_GPU_DESTROY:
		if !streams.remove(uint64(h)) {
			return failed(errStale)
		}
		_ = s.Sync(context.Background()) // nobody asks for its error any more
		return result(s.Close())
	case C.VBE_GPU_SYNC:
		err := s.Sync(context.Background())
		if err != nil {
			_ = s.Reset() // it is returned now
		}
		return result(err)
	case C.VBE_GPU_QUERY:
		switch {
		case !s.Query():
			return -C.EAGAIN
		case s.Err() != nil:
			return failed(s.Reset())
		}
		return 0
	}
	return -C.EINVAL
}

//export vbe_gpu_stream_call
func vbe_gpu_stream_call(h, function, arg C.uint64_t) C.int64_t {
	s := streams.get(uint64(h))
	if s == nil {
		return failed(errStale)
	}
	return result(s.Call(func(err error) { C.call_gpu(function, arg, C.int(errnoFor(err))) }))
}

//export vbe_gpu_event
func vbe_gpu_event() C.int64_t {
	h := events.add(new(gpuEvent))
	if h == 0 {
		return -C.ENOMEM
	}
	return C.int64_t(h)
}

//export vbe_gpu_event_do
func vbe_gpu_event_do(h, stream C.uint64_t, what C.uint32_t) C.int64_t {
	e := events.get(uint64(h))
	if e == nil {
		return failed(errStale)
	}
	if what == C.VBE_GPU_DESTROY {
		if !events.remove(uint64(h)) {
			return failed(errStale)
		}
		return 0
	}
	if what == C.VBE_GPU_RECORD {
		s := streams.get(uint64(stream))
		if s == nil {
			return failed(errStale)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		now, err := s.Record()
		if err == nil {
			e.last = now
		}
		return result(err)
	}
	last := e.recorded()
	switch what {
	case C.VBE_GPU_WAIT:
		s := streams.get(uint64(stream))
		switch {
		case s == nil:
			return failed(errStale)
		case last == nil:
			return 0
		}
		return result(s.Wait(last))
	case C.VBE_GPU_SYNC:
		if last == nil {
			return 0
		}
		return result(last.Wait(context.Background()))
	case C.VBE_GPU_QUERY:
		if last == nil {
			return 0
		}
		if !last.Signaled() {
			return -C.EAGAIN
		}
		return result(last.Err())
	}
	return -C.EINVAL
}

// recorded returns where the event was recorded last; nil: nowhere.
func (e *gpuEvent) recorded() *gpu.Event {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.last
}

//export vbe_gpu_elapsed
func vbe_gpu_elapsed(from, to C.uint64_t, ns *C.int64_t) C.int64_t {
	a, b := events.get(uint64(from)), events.get(uint64(to))
	if a == nil || b == nil {
		return failed(errStale)
	}
	first, last := a.recorded(), b.recorded()
	if first == nil || last == nil {
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "an event was never recorded"))
	}
	d, err := first.Elapsed(last)
	if errors.Is(err, syscall.EAGAIN) {
		return -C.EAGAIN
	}
	*ns = C.int64_t(d)
	return result(err)
}

//export vbe_gpu_export
func vbe_gpu_export(addr, size C.uint64_t, offset *C.uint64_t) C.int64_t {
	b, _, err := bufferAt(uint64(addr), uint64(size))
	if err != nil {
		return failed(err)
	}
	defer func() { _ = b.Free() }() // it is new, and the caller's alone
	var buf *dmabuf.Buffer
	var off uint64
	if offset == nil {
		buf, err = b.PartDMABuf()
	} else {
		buf, off, err = b.DMABuf()
	}
	if err != nil {
		return failed(err)
	}
	defer buf.Put()
	fd, err := buf.FD()
	if err != nil {
		return failed(err)
	}
	if offset != nil {
		*offset = C.uint64_t(off)
	}
	return C.int64_t(fd)
}

//export vbe_gpu_ipc_get
func vbe_gpu_ipc_get(addr C.uint64_t, handle *C.uint8_t) C.int64_t {
	gpus.mu.Lock()
	all := gpus.by[uint64(addr)]
	gpus.mu.Unlock()
	i := slices.IndexFunc(all, func(a allocation) bool { return a.kind != C.VERBENA_GPU_IMPORTED })
	if i < 0 {
		return failed(ib.Errorf(opGPU, syscall.EINVAL, "no memory that was allocated begins at %#x", uint64(addr)))
	}
	h, err := all[i].buf.IPCHandle()
	if err != nil {
		return failed(err)
	}
	copy(octets(handle, len(h)), h[:])
	return 0
}

//export vbe_gpu_ipc_open
func vbe_gpu_ipc_open(i C.int32_t, handle *C.uint8_t, addr *C.uint64_t) C.int64_t {
	d, err := cardOf(i)
	if err != nil {
		return failed(err)
	}
	var h gpu.IPCHandle
	copy(h[:], octets(handle, len(h)))
	b, err := d.OpenIPC(h)
	if err != nil {
		return failed(err)
	}
	*addr = own(b, C.VERBENA_GPU_IMPORTED)
	return 0
}

// rangeAt returns memory of a GPU as what a device registers. The caller puts the Buffer.
func rangeAt(m *C.struct_vbe_mr) (importer.Range, error) {
	b, _, err := bufferAt(uint64(m.addr), uint64(m.length))
	if err != nil {
		return importer.Range{}, err
	}
	defer func() { _ = b.Free() }() // a region has no part in the memory's life: it loses what is freed
	buf, off, n, _, err := b.Region()
	return importer.Range{Buffer: buf, Offset: off, Length: n, IOVA: uint64(m.iova)}, err
}

// registerGPU registers memory of a GPU by its address, as programs do that rely on PeerDirect.
func registerGPU(pd provider.PD, m *C.struct_vbe_mr) (provider.MR, error) {
	r, err := rangeAt(m)
	if err != nil {
		return nil, err
	}
	defer r.Buffer.Put()
	return importer.RegisterAddr(pd, r, ib.Access(m.access))
}

// reregisterGPU makes memory of a GPU that of a region, as its dma-buf would be.
func reregisterGPU(mr provider.MR, m *C.struct_vbe_mr, change provider.MRChange) error {
	r, err := rangeAt(m)
	if err != nil {
		return &ib.ReregError{State: ib.ReregOldValid, Err: err}
	}
	defer r.Buffer.Put()
	return importer.Rereg(mr, r, change)
}
