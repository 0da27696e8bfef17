package cuda

import (
	"fmt"
	"runtime"
	"strings"
	"time"
	"unsafe"

	"github.com/ebitengine/purego"
)

// The driver's functions, as far as they are used.
//
// It is sound: a variable whose address the driver gets stays where it is during the call, because
// call is marked uintptrescapes, and the driver does not keep the address; bytes of the host that it
// copies later are kept by the operation, in memory that the collector does not move. The only
// pointer that is made of a number is one that the driver has returned, of memory of its own.

// call calls a function of the driver.
//
//go:uintptrescapes
func (d *Driver) call(f function, args ...uintptr) Result {
	if d.at[f] == 0 {
		return notSupported
	}
	slot := d.calls.enter(f, args, time.Now())
	r, _, _ := purego.SyscallN(d.at[f], args...)
	slot.leave()
	return Result(uint32(r)) //nolint:gosec // the driver returns 32 bits
}

// resultName returns the driver's name of a result, and its number.
func (d *Driver) resultName(r Result) string {
	var p *byte
	if d.call(fnGetErrorName, uintptr(r), uintptr(unsafe.Pointer(&p))) != success || p == nil {
		return fmt.Sprintf("error %d", r)
	}
	return fmt.Sprintf("%s (%d)", textAt(p), r)
}

// textAt returns the text of the driver's that begins at p.
func textAt(p *byte) string {
	var b strings.Builder
	for ; *p != 0 && b.Len() < 256; p = (*byte)(unsafe.Add(unsafe.Pointer(p), 1)) {
		b.WriteByte(*p)
	}
	return b.String()
}

func (d *Driver) init() Result { return d.call(fnInit, 0) }

func (d *Driver) deviceCount() (n int32, r Result) {
	r = d.call(fnDeviceGetCount, uintptr(unsafe.Pointer(&n)))
	return n, r
}

func (d *Driver) device(i int32) (dev int32, r Result) {
	r = d.call(fnDeviceGet, uintptr(unsafe.Pointer(&dev)), uintptr(i))
	return dev, r
}

func (d *Driver) deviceName(dev int32) (string, Result) {
	var b [256]byte
	r := d.call(fnDeviceGetName, uintptr(unsafe.Pointer(&b)), uintptr(len(b)-1), uintptr(dev))
	return textAt(&b[0]), r
}

func (d *Driver) uuid(dev int32) (id [16]byte, r Result) {
	r = d.call(fnDeviceGetUuid, uintptr(unsafe.Pointer(&id)), uintptr(dev))
	return id, r
}

func (d *Driver) retainPrimary(dev int32) (ctx uintptr, r Result) {
	r = d.call(fnPrimaryCtxRetain, uintptr(unsafe.Pointer(&ctx)), uintptr(dev))
	return ctx, r
}

func (d *Driver) releasePrimary(dev int32) Result { return d.call(fnPrimaryCtxRelease, uintptr(dev)) }

func (d *Driver) primaryActive(dev int32) bool {
	var flags uint32
	var active int32
	return d.call(fnPrimaryCtxGetState, uintptr(dev), uintptr(unsafe.Pointer(&flags)), uintptr(unsafe.Pointer(&active))) == success && active != 0
}

func (d *Driver) current() (ctx uintptr, r Result) {
	r = d.call(fnCtxGetCurrent, uintptr(unsafe.Pointer(&ctx)))
	return ctx, r
}

func (d *Driver) setCurrent(ctx uintptr) Result { return d.call(fnCtxSetCurrent, ctx) }

// Attributes of pointers.
const (
	attrContext     = 1
	attrMemoryType  = 2
	attrSyncMemops  = 6
	attrBufferID    = 7
	attrIsManaged   = 8
	attrOrdinal     = 9
	attrLegacyIPC   = 10
	attrRangeStart  = 11
	attrRangeSize   = 12
	attrMapped      = 13
	attrHandleTypes = 14
)

// Types of memory.
const (
	typeHost   = 1
	typeDevice = 2
)

// pointer is what the driver knows about an address.
type pointer struct {
	ctx         uintptr // 0: the memory belongs to no context
	memoryType  uint32  // 0: the driver does not know the address
	managed     bool
	device      int32
	id          uint64 // another one for each allocation
	start, size uint64 // of the allocation, or of what is mapped at the address
	legacyIPC   bool
	handleTypes uint64
}

// lookup asks for what the driver knows about an address.
func (d *Driver) lookup(addr uint64) (p pointer, r Result) {
	var flags struct{ managed, ipc uint32 }
	attributes := [...]uint32{attrContext, attrMemoryType, attrIsManaged, attrOrdinal, attrBufferID, attrRangeStart, attrRangeSize, attrLegacyIPC, attrHandleTypes}
	to := [...]unsafe.Pointer{unsafe.Pointer(&p.ctx), unsafe.Pointer(&p.memoryType), unsafe.Pointer(&flags.managed), unsafe.Pointer(&p.device), unsafe.Pointer(&p.id),
		unsafe.Pointer(&p.start), unsafe.Pointer(&p.size), unsafe.Pointer(&flags.ipc), unsafe.Pointer(&p.handleTypes)}
	r = d.call(fnPointerGetAttributes, uintptr(len(to)), uintptr(unsafe.Pointer(&attributes)), uintptr(unsafe.Pointer(&to)), uintptr(addr))
	p.managed, p.legacyIPC = flags.managed&0xff != 0, flags.ipc&0xff != 0
	return p, r
}

// mapping returns where the allocation that is mapped at an address begins, and its size. Of memory
// that was made by cuMemCreate, lookup returns instead the range of addresses that was reserved,
// which may have many allocations, each with a number of its own. A context has to be current.
func (d *Driver) mapping(addr uint64) (start, size uint64, r Result) {
	r = d.call(fnMemGetAddressRange, uintptr(unsafe.Pointer(&start)), uintptr(unsafe.Pointer(&size)), uintptr(addr))
	return start, size, r
}

// bufferID returns the number of the allocation that an address lies in; 0: there is none.
func (d *Driver) bufferID(addr uint64, id *uint64) Result {
	return d.call(fnPointerGetAttribute, uintptr(unsafe.Pointer(id)), attrBufferID, uintptr(addr))
}

// isLocked reports whether an address is one of page-locked memory of the host.
func (d *Driver) isLocked(addr uint64) bool {
	var t uint32
	return d.call(fnPointerGetAttribute, uintptr(unsafe.Pointer(&t)), attrMemoryType, uintptr(addr)) == success && t == typeHost
}

// syncMemops makes copies of the program's own to and from the memory synchronous.
func (d *Driver) syncMemops(addr uint64) Result {
	on := uint32(1)
	return d.call(fnPointerSetAttribute, uintptr(unsafe.Pointer(&on)), attrSyncMemops, uintptr(addr))
}

// memoryInfo returns how much memory the current context's GPU has, and how much of it is free.
func (d *Driver) memoryInfo() (free, total uint64, r Result) {
	r = d.call(fnMemGetInfo, uintptr(unsafe.Pointer(&free)), uintptr(unsafe.Pointer(&total)))
	return free, total, r
}

func (d *Driver) alloc(n uint64) (addr uint64, r Result) {
	r = d.call(fnMemAlloc, uintptr(unsafe.Pointer(&addr)), uintptr(n))
	return addr, r
}

func (d *Driver) free(addr uint64) Result { return d.call(fnMemFree, uintptr(addr)) }

// Flags.
const (
	hostPortable     = 1 // of page-locked memory: for all contexts
	streamNonBlock   = 1
	eventNoTiming    = 2
	captureRelaxed   = 2
	ipcLazyPeers     = 1
	handlePosix      = 1 // of handle types: a descriptor
	locationDevice   = 1
	accessReadWrite  = 3
	allocationPinned = 1
	rangeDMABuf      = 1
)

func (d *Driver) lockHost(addr, n uint64) Result {
	return d.call(fnMemHostRegister, uintptr(addr), uintptr(n), hostPortable)
}

func (d *Driver) unlockHost(addr uint64) Result { return d.call(fnMemHostUnregister, uintptr(addr)) }

func (d *Driver) allocHost(n uint64) (addr uint64, r Result) {
	r = d.call(fnMemHostAlloc, uintptr(unsafe.Pointer(&addr)), uintptr(n), hostPortable)
	return addr, r
}

func (d *Driver) freeHost(addr uint64) Result { return d.call(fnMemFreeHost, uintptr(addr)) }

// copyIn, copyOut and copyWithin queue a copy: from the host to the GPU, back, and on the GPU.
func (d *Driver) copyIn(to uint64, from []byte, stream uintptr) Result {
	return d.call(fnHtoDAsync, uintptr(to), uintptr(unsafe.Pointer(unsafe.SliceData(from))), uintptr(len(from)), stream)
}

func (d *Driver) copyOut(to []byte, from uint64, stream uintptr) Result {
	return d.call(fnDtoHAsync, uintptr(unsafe.Pointer(unsafe.SliceData(to))), uintptr(from), uintptr(len(to)), stream)
}

func (d *Driver) copyWithin(to, from, n uint64, stream uintptr) Result {
	return d.call(fnDtoDAsync, uintptr(to), uintptr(from), uintptr(n), stream)
}

// copyRows queues a copy of two rows of bytes, one behind the other, from the host to the GPU.
func (d *Driver) copyRows(to uint64, from []byte, stream uintptr) Result {
	type side struct {
		x, y   uintptr
		kind   uint32
		host   unsafe.Pointer
		device uint64
		array  uintptr
		pitch  uintptr
	}
	row := uintptr(len(from) / 2)
	copy2D := struct {
		src, dst      side
		width, height uintptr
	}{
		src:   side{kind: typeHost, host: unsafe.Pointer(unsafe.SliceData(from)), pitch: row},
		dst:   side{kind: typeDevice, device: to, pitch: row},
		width: row, height: 2,
	}
	return d.call(fnCopy2DAsync, uintptr(unsafe.Pointer(&copy2D)), stream)
}

func (d *Driver) newStream() (s uintptr, r Result) {
	r = d.call(fnStreamCreate, uintptr(unsafe.Pointer(&s)), streamNonBlock)
	return s, r
}

func (d *Driver) destroyStream(s uintptr) Result { return d.call(fnStreamDestroy, s) }

// synchronize waits until nothing is under way on a stream.
func (d *Driver) synchronize(s uintptr) Result { return d.call(fnStreamSynchronize, s) }

func (d *Driver) newEvent() (e uintptr, r Result) {
	r = d.call(fnEventCreate, uintptr(unsafe.Pointer(&e)), eventNoTiming)
	return e, r
}

func (d *Driver) destroyEvent(e uintptr) Result   { return d.call(fnEventDestroy, e) }
func (d *Driver) record(e, stream uintptr) Result { return d.call(fnEventRecord, e, stream) }
func (d *Driver) query(e uintptr) Result          { return d.call(fnEventQuery, e) }

// relax lets the thread call the driver while the program captures a graph.
func (d *Driver) relax() Result {
	mode := uint32(captureRelaxed)
	return d.call(fnExchangeCaptureMode, uintptr(unsafe.Pointer(&mode)))
}

// IPCHandle is how other processes know an allocation.
type IPCHandle [64]byte

func (d *Driver) ipcOf(addr uint64) (h IPCHandle, r Result) {
	r = d.call(fnIpcGetMemHandle, uintptr(unsafe.Pointer(&h)), uintptr(addr))
	return h, r
}

func (d *Driver) closeIPC(addr uint64) Result { return d.call(fnIpcCloseMemHandle, uintptr(addr)) }

func (d *Driver) allocationOf(addr uint64) (h uint64, r Result) {
	r = d.call(fnRetainAllocationHandle, uintptr(unsafe.Pointer(&h)), uintptr(addr))
	return h, r
}

func (d *Driver) release(h uint64) Result { return d.call(fnRelease, uintptr(h)) }

// exportFD returns a descriptor of an allocation.
func (d *Driver) exportFD(h uint64) (fd int32, r Result) {
	r = d.call(fnExportToShareableHandle, uintptr(unsafe.Pointer(&fd)), uintptr(h), handlePosix, 0)
	return fd, r
}

// importFD makes an allocation of a descriptor.
func (d *Driver) importFD(fd int) (h uint64, r Result) {
	r = d.call(fnImportFromShareableHandle, uintptr(unsafe.Pointer(&h)), uintptr(fd), handlePosix)
	return h, r
}

// allocationProp is CUmemAllocationProp.
type allocationProp struct {
	kind, handleTypes uint32
	location          struct {
		kind uint32
		id   int32
	}
	_     uintptr
	flags struct {
		compression, gpuDirect uint8
		usage                  uint16
		_                      [4]uint8
	}
}

// shareable returns the properties of memory of a GPU that other processes open by a descriptor.
func shareable(dev int32) *allocationProp {
	p := &allocationProp{kind: allocationPinned, handleTypes: handlePosix}
	p.location.kind, p.location.id = locationDevice, dev
	p.flags.gpuDirect = 1
	return p
}

// granularity returns what lengths of allocations are multiples of.
func (d *Driver) granularity(p *allocationProp) (n uint64, r Result) {
	r = d.call(fnGetAllocationGranularity, uintptr(unsafe.Pointer(&n)), uintptr(unsafe.Pointer(p)), 0)
	return n, r
}

func (d *Driver) create(n uint64, p *allocationProp) (h uint64, r Result) {
	r = d.call(fnMemCreate, uintptr(unsafe.Pointer(&h)), uintptr(n), uintptr(unsafe.Pointer(p)), 0)
	return h, r
}

// exportRange makes a dma-buf of memory.
func (d *Driver) exportRange(addr, n uint64) (fd int32, r Result) {
	r = d.call(fnGetHandleForAddressRange, uintptr(unsafe.Pointer(&fd)), uintptr(addr), uintptr(n), rangeDMABuf, 0)
	return fd, r
}

func (d *Driver) reserve(n uint64) (addr uint64, r Result) {
	r = d.call(fnAddressReserve, uintptr(unsafe.Pointer(&addr)), uintptr(n), 0, 0, 0)
	return addr, r
}

func (d *Driver) unreserve(addr, n uint64) Result {
	return d.call(fnAddressFree, uintptr(addr), uintptr(n))
}

func (d *Driver) mapAt(addr, n, h uint64) Result {
	return d.call(fnMap, uintptr(addr), uintptr(n), 0, uintptr(h), 0)
}

func (d *Driver) unmap(addr, n uint64) Result { return d.call(fnUnmap, uintptr(addr), uintptr(n)) }

// allow lets a device read and write what is mapped.
func (d *Driver) allow(addr, n uint64, dev int32) Result {
	access := struct {
		kind uint32
		id   int32
		how  uint32
	}{locationDevice, dev, accessReadWrite}
	return d.call(fnSetAccess, uintptr(addr), uintptr(n), uintptr(unsafe.Pointer(&access)), 1)
}

// openIPC opens an allocation of another process. The driver takes the handle by value: on
// x86-64 it lies on the stack, behind six words that are in registers; on arm64 the caller passes
// a pointer to it.
func (d *Driver) openIPC(h *IPCHandle) (addr uint64, r Result) {
	if runtime.GOARCH == "amd64" {
		w := (*[8]uintptr)(unsafe.Pointer(h))
		r = d.call(fnIpcOpenMemHandle, uintptr(unsafe.Pointer(&addr)), ipcLazyPeers, 0, 0, 0, 0, w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7])
		return addr, r
	}
	r = d.call(fnIpcOpenMemHandle, uintptr(unsafe.Pointer(&addr)), uintptr(unsafe.Pointer(h)), ipcLazyPeers)
	return addr, r
}

// bytesAt returns n bytes of memory of the driver's.
func bytesAt(addr, n uint64) []byte {
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&addr))), n)
}

func addrOf(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
