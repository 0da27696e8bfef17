package main

// #include "call.h"
import "C"

import (
	"sync/atomic"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cuda"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Memory of real GPUs, by the libcuda that the program has loaded. Softgpu's libcuda is told apart:
// its memory is registered without it, unless VERBENA_CUDA says "driver".

// driver is the process's libcuda, once the program has loaded one. It is used until the process
// ends.
var driver atomic.Pointer[cuda.Driver]

// nvidia returns the driver; nil if there is none, or it is not to be used.
func nvidia() *cuda.Driver {
	if d := driver.Load(); d != nil {
		return d
	}
	if conf().CUDA["off"] {
		return nil
	}
	d, err := cuda.Open(false)
	if err != nil {
		return nil
	}
	if d.Soft() && !conf().CUDA["driver"] || !driver.CompareAndSwap(nil, d) {
		d.Close()
		return driver.Load()
	}
	if C.cuda_is_watched() != 0 {
		d.Watch()
	}
	return d
}

// cudaMemory registers memory at an address, if it is a GPU's; handled is false if it is not.
func cudaMemory(pd provider.PD, m *C.struct_vbe_mr) (r provider.MR, handled bool, err error) {
	d := nvidia()
	if d == nil || !d.Device(uint64(m.addr)) {
		return nil, false, nil
	}
	r, err = d.Register(pd, uint64(m.addr), uint64(m.length), uint64(m.iova), ib.Access(m.access), d.Current())
	return r, true, err
}

// cudaBuffer registers a dma-buf, if it is CUDA's; handled is false if it is not.
func cudaBuffer(pd provider.PD, m *C.struct_vbe_mr) (r provider.MR, handled bool, err error) {
	d, b := nvidia(), bufferOf(m)
	if d == nil || !b.IsBuffer() {
		return nil, false, nil
	}
	asked := rangeOf(m)
	if err := asked.Check("reg_dmabuf_mr", ib.Access(m.access)); err != nil {
		return nil, true, err
	}
	r, err = d.RegisterBuffer(pd, b, ib.Access(m.access), d.Current())
	return r, true, err
}

// cudaChange registers a region anew, if its new memory is a GPU's; handled is false if it is not.
func cudaChange(mr provider.MR, m *C.struct_vbe_mr, c provider.MRChange, buffer bool) (handled bool, err error) {
	d := nvidia()
	if d == nil {
		return false, nil
	}
	if b := bufferOf(m); buffer && b.IsBuffer() {
		asked, access := rangeOf(m), mr.Access()
		if c.Access != nil {
			access = *c.Access
		}
		if err := asked.Check("rereg_mr", access); err != nil {
			return true, &ib.ReregError{State: ib.ReregOldValid, Err: err}
		}
		return true, d.ReregBuffer(mr, b, c, d.Current())
	}
	if !buffer && c.Range != nil && d.Device(uint64(m.addr)) {
		c.Range = nil
		return true, d.Rereg(mr, uint64(m.addr), uint64(m.length), uint64(m.iova), c, d.Current())
	}
	return false, nil
}

func bufferOf(m *C.struct_vbe_mr) cuda.Buffer {
	return cuda.Buffer{FD: int(m.fd), Offset: uint64(m.addr), Length: uint64(m.length), IOVA: uint64(m.iova),
		Exported: uint64(m.exported), Size: uint64(m.exported_size)}
}

// vbe_cuda_gone is called before the program frees memory that CUDA knows.
//
//export vbe_cuda_gone
func vbe_cuda_gone(what C.uint32_t, addr, size C.uint64_t) C.int64_t {
	if d := driver.Load(); d != nil {
		d.Leave(cuda.Gone(what), uint64(addr), uint64(size))
	}
	return 0
}
