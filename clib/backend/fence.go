package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"errors"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// vbe_post_fence posts a request that waits for the fence of a descriptor, or signals it.
//
//export vbe_post_fence
func vbe_post_fence(h C.uint64_t, wr *C.struct_vbe_fence_wr) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil || q.sender == nil {
		return failed(errStale)
	}
	flags, ok := sendFlags(wr.flags)
	if !ok || wr.flags&sendInline != 0 {
		return failed(ib.Errorf("post_send", syscall.EINVAL, "flags %#x are not for fences", wr.flags))
	}
	send := ib.SendWR{ID: uint64(wr.id), Op: ib.OpWaitFence, Flags: flags, Timeout: time.Duration(wr.timeout)}
	var giveUp func()
	if wr.signals != 0 {
		f, end, err := dmabuf.FenceToSignal(int(wr.fd))
		if err != nil {
			return failed(err)
		}
		send.Op, send.Fence, giveUp = ib.OpSignalFence, f, end
	} else {
		f, err := dmabuf.FenceFromFD(int(wr.fd))
		if err != nil {
			return failed(err)
		}
		send.Fence, giveUp = awaited{f}, f.Forget
	}
	_, err := q.sender.PostSend([]ib.SendWR{send})
	if err != nil {
		giveUp()
	}
	return result(err)
}

// awaited is a fence that one request waits for, and nothing else: when that does not wait any more, the
// fence's descriptor is given up.
type awaited struct{ *dmabuf.Fence }

// Abandoned is called by the queue pair.
func (a awaited) Abandoned() { a.Forget() }

// vbe_fence makes the descriptor of a fence, signals the fence, or returns its status.
//
//export vbe_fence
func vbe_fence(what C.uint32_t, fd, code C.int32_t) C.int64_t {
	switch what {
	case C.VBE_FENCE_CREATE:
		got, err := dmabuf.NewFence().FD()
		if err != nil {
			return failed(err)
		}
		return C.int64_t(got)
	case C.VBE_FENCE_SIGNAL:
		f, _, err := dmabuf.FenceToSignal(int(fd))
		if err != nil {
			return failed(err)
		}
		var failure error
		if code != 0 {
			failure = syscall.Errno(code)
		}
		f.Signal(failure)
		return 0
	case C.VBE_FENCE_STATUS:
		signaled, failure, err := dmabuf.FenceStatus(int(fd))
		switch {
		case err != nil:
			return failed(err)
		case !signaled:
			return 0
		case failure == nil:
			return 1
		}
		number := syscall.EIO
		_ = errors.As(failure, &number)
		return 1 + C.int64_t(number)
	}
	return failed(ib.Errorf("fence", syscall.EINVAL, "call %d", what))
}
