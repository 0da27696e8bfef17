// Package cuda lets the device move bytes to, from and between memory of NVIDIA's GPUs, by
// NVIDIA's driver library, libcuda.so.1. The library is loaded at run time: there is nothing of
// it in the build.
//
//  1. Open finds the library (driver.go).
//  2. Memory is found by its address, with what the driver knows about it, and becomes a region
//     (memory.go, register.go).
//  3. A card is the engine for the memory of one context: a few threads, each with a stream of
//     its own, on which it has bytes copied (card.go, worker.go).
//  4. What is freed is revoked first if the program is watched (Gone in register.go). If it is
//     not, each operation compares the number that the driver gives every allocation (still.go).
//  5. Other processes open the memory, so that bytes between them stay on the GPU (share.go).
//  6. Memory of the host that is page-locked is read and written in place (host.go).
//  7. Go programs allocate and share memory themselves (gpu.go); other programs have their own
//     ways.
//
// The driver is called by threads of this package, which do nothing else: a context that is
// current in a thread of the program's stays current, and no thread that posts a request waits
// for the driver. None of the calls after the registration waits for work of the program's on
// the GPU: a kernel may be waiting for the bytes that are to be moved. For a watched program those
// that bytes wait for are copies on streams of this package, and its events: nothing is asked then,
// since the driver may answer only when a thread of the program's has given a lock back. A call that
// does not return is reported (watch.go).
package cuda

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/ebitengine/purego"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// Library is the name by which the driver's library is known.
const Library = "libcuda.so.1"

// ErrNone means that there is no CUDA here: no library, or no GPU that it knows.
var ErrNone = errors.New("no CUDA here")

// Result is what a function of the driver returns.
type Result uint32

// Results that are treated in a way of their own.
const (
	success        Result = 0
	invalidValue   Result = 1
	notInitialized Result = 3
	noDevice       Result = 100
	invalidContext Result = 201
	notReady       Result = 600
	notSupported   Result = 801
)

// errnos are the errors that callers of verbs know, by the driver's.
var errnos = map[Result]syscall.Errno{
	2:              syscall.ENOMEM,
	notInitialized: syscall.ENODEV,
	noDevice:       syscall.ENODEV,
	notSupported:   syscall.EOPNOTSUPP,
}

// errno returns the error of the kernel's that comes closest: EINVAL unless there is a better one.
func (r Result) errno() syscall.Errno {
	if n, ok := errnos[r]; ok {
		return n
	}
	return syscall.EINVAL
}

// function is a function of the driver.
type function int

const (
	fnInit function = iota
	fnGetErrorName
	fnDeviceGet
	fnDeviceGetCount
	fnDeviceGetName
	fnDeviceGetUuid
	fnPrimaryCtxRetain
	fnPrimaryCtxRelease
	fnPrimaryCtxGetState
	fnCtxGetCurrent
	fnCtxSetCurrent
	fnPointerGetAttributes
	fnPointerGetAttribute
	fnPointerSetAttribute
	fnMemGetInfo
	fnMemGetAddressRange
	fnMemAlloc
	fnMemFree
	fnMemHostAlloc
	fnMemFreeHost
	fnMemHostRegister
	fnMemHostUnregister
	fnHtoDAsync
	fnDtoHAsync
	fnDtoDAsync
	fnCopy2DAsync
	fnStreamCreate
	fnStreamDestroy
	fnStreamSynchronize
	fnEventCreate
	fnEventDestroy
	fnEventRecord
	fnEventQuery
	fnExchangeCaptureMode
	fnIpcGetMemHandle
	fnIpcOpenMemHandle
	fnIpcCloseMemHandle
	fnRetainAllocationHandle
	fnExportToShareableHandle
	fnImportFromShareableHandle
	fnGetHandleForAddressRange
	fnGetAllocationGranularity
	fnMemCreate
	fnAddressReserve
	fnAddressFree
	fnMap
	fnSetAccess
	fnUnmap
	fnRelease
	numFunctions
)

// names are the functions' symbols: of those with several versions, the one whose arguments are
// those of calls_unsafe.go.
var names = [numFunctions]string{
	fnInit: "cuInit", fnGetErrorName: "cuGetErrorName",
	fnDeviceGet: "cuDeviceGet", fnDeviceGetCount: "cuDeviceGetCount", fnDeviceGetName: "cuDeviceGetName", fnDeviceGetUuid: "cuDeviceGetUuid_v2",
	fnPrimaryCtxRetain: "cuDevicePrimaryCtxRetain", fnPrimaryCtxRelease: "cuDevicePrimaryCtxRelease_v2",
	fnPrimaryCtxGetState: "cuDevicePrimaryCtxGetState", fnCtxGetCurrent: "cuCtxGetCurrent", fnCtxSetCurrent: "cuCtxSetCurrent",
	fnPointerGetAttributes: "cuPointerGetAttributes",
	fnPointerGetAttribute:  "cuPointerGetAttribute", fnPointerSetAttribute: "cuPointerSetAttribute",
	fnMemGetInfo: "cuMemGetInfo_v2", fnMemGetAddressRange: "cuMemGetAddressRange_v2", fnMemAlloc: "cuMemAlloc_v2", fnMemFree: "cuMemFree_v2",
	fnMemHostAlloc: "cuMemHostAlloc", fnMemFreeHost: "cuMemFreeHost",
	fnMemHostRegister: "cuMemHostRegister_v2", fnMemHostUnregister: "cuMemHostUnregister",
	fnHtoDAsync: "cuMemcpyHtoDAsync_v2", fnDtoHAsync: "cuMemcpyDtoHAsync_v2", fnDtoDAsync: "cuMemcpyDtoDAsync_v2", fnCopy2DAsync: "cuMemcpy2DAsync_v2",
	fnStreamCreate: "cuStreamCreate", fnStreamDestroy: "cuStreamDestroy_v2", fnStreamSynchronize: "cuStreamSynchronize",
	fnEventCreate: "cuEventCreate", fnEventDestroy: "cuEventDestroy_v2", fnEventRecord: "cuEventRecord", fnEventQuery: "cuEventQuery",
	fnExchangeCaptureMode: "cuThreadExchangeStreamCaptureMode",
	fnIpcGetMemHandle:     "cuIpcGetMemHandle", fnIpcOpenMemHandle: "cuIpcOpenMemHandle_v2", fnIpcCloseMemHandle: "cuIpcCloseMemHandle",
	fnRetainAllocationHandle:  "cuMemRetainAllocationHandle",
	fnExportToShareableHandle: "cuMemExportToShareableHandle", fnImportFromShareableHandle: "cuMemImportFromShareableHandle",
	fnGetHandleForAddressRange: "cuMemGetHandleForAddressRange", fnGetAllocationGranularity: "cuMemGetAllocationGranularity", fnMemCreate: "cuMemCreate",
	fnAddressReserve: "cuMemAddressReserve", fnAddressFree: "cuMemAddressFree", fnMap: "cuMemMap", fnSetAccess: "cuMemSetAccess",
	fnUnmap: "cuMemUnmap", fnRelease: "cuMemRelease",
}

// required are the functions without which nothing works; where others are missing, what needs
// them is refused.
var required = []function{fnPointerGetAttributes, fnPointerGetAttribute, fnCtxSetCurrent, fnHtoDAsync, fnDtoHAsync, fnDtoDAsync, fnStreamCreate,
	fnEventCreate, fnEventRecord, fnEventQuery}

// Driver is the driver's library.
type Driver struct {
	at   [numFunctions]uintptr // 0: the library does not have it
	soft bool                  // it is softgpu's
	room bool                  // see queues.go

	watched atomic.Bool // see Watch
	calls   calls

	saidNoAnswer atomic.Bool // see askInTime

	asks   *thread // answers questions about memory
	checks *thread // answers those that requests have, if the program is not watched: see still.go
	slow   *thread // opens and closes memory, and locks pages: what may take milliseconds

	host hostMemory

	mu    sync.Mutex // guards what follows, and what cards have
	users int
	cards map[uintptr]*card // by context
}

// loaded is the driver of the process, once there is one: the library cannot be unloaded.
var loaded struct {
	mu  sync.Mutex // guards drv; it is held while the library is loaded
	drv *Driver
}

// How a library is opened: see dlopen(3).
const rtldNoLoad = 4

// Open returns the driver. With load it loads the library, otherwise it looks whether the
// program has. The caller closes it.
//
// Errors: ErrNone.
func Open(load bool) (*Driver, error) {
	loaded.mu.Lock()
	defer loaded.mu.Unlock()
	if loaded.drv == nil {
		d, err := find(load)
		if err != nil {
			return nil, err
		}
		loaded.drv = d
	}
	loaded.drv.use()
	return loaded.drv, nil
}

func find(load bool) (*Driver, error) {
	mode := purego.RTLD_NOW | rtldNoLoad
	if load {
		mode = purego.RTLD_NOW | purego.RTLD_GLOBAL
	}
	lib, err := purego.Dlopen(Library, mode)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNone, errors.Join(err, syscall.ENODEV))
	}
	d := &Driver{cards: make(map[uintptr]*card), room: hasRoom(os.Getenv)}
	if _, err := purego.Dlsym(lib, "verbena_gpu_shim"); err == nil {
		d.soft = true
	}
	for f, name := range names {
		d.at[f], _ = purego.Dlsym(lib, name) // 0 if it is not there
	}
	for _, f := range required {
		if d.at[f] == 0 {
			return nil, fmt.Errorf("%w: the driver has no %s: %w", ErrNone, names[f], syscall.ENODEV)
		}
	}
	d.asks, d.checks, d.slow = newThread(d), newThread(d), newThread(d)
	d.checks.lingers = lingers
	mem.AddOpener(openerName, d.openShared) // for good, as the library is there for good
	return d, nil
}

// use counts a user of the driver; Close ends one.
func (d *Driver) use() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.users++; d.users == 1 {
		d.asks.start()
		d.checks.start()
		d.slow.start()
		d.calls.stop, d.calls.gone = make(chan struct{}), make(chan struct{})
		go d.calls.watch(d.calls.stop, d.calls.gone, time.Second, tooLate)
	}
}

// Close ends the use of the driver. With the last one its threads end.
func (d *Driver) Close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.users--; d.users == 0 {
		d.asks.end()
		d.checks.end()
		d.slow.end()
		close(d.calls.stop)
		<-d.calls.gone
	}
}

// check makes an error of a result.
func (d *Driver) check(op string, f function, r Result) error {
	if r == success {
		return nil
	}
	return ib.Errorf(op, r.errno(), "%s: %s", names[f], d.resultName(r))
}

// Watch notes that the program is watched from now on: Leave is called before it frees memory that the
// driver knows. So requests need not ask whether their memory is still there.
func (d *Driver) Watch() { d.watched.Store(true) }

// Soft reports whether the library is the one by which programs use software GPUs.
func (d *Driver) Soft() bool { return d.soft }

// Current returns the context that is current in the calling thread, 0 if there is none.
func (d *Driver) Current() uintptr {
	ctx, _ := d.current()
	return ctx
}
