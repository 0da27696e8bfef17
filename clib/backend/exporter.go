package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"context"
	"math"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
)

// Memory of our exporter of dma-bufs, for C programs that test what they do with dma-bufs.

var memories = table[dmabuf.Memory]{kind: C.VBE_MEMORY}

// moveLimit is how long importers may take to let memory go.
const moveLimit = 10 * time.Second

//export vbe_memory_alloc
func vbe_memory_alloc(size C.uint64_t, segments C.uint32_t) C.int64_t {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(size), Segments: int(min(segments, math.MaxInt32))})
	if err != nil {
		return failed(err)
	}
	h := memories.add(m)
	if h == 0 {
		_ = m.Close() // it is new: nothing else holds it
		return -C.ENOMEM
	}
	return C.int64_t(h)
}

//export vbe_memory_fd
func vbe_memory_fd(h C.uint64_t) C.int64_t {
	m := memories.get(uint64(h))
	if m == nil {
		return failed(errStale)
	}
	fd, err := m.Buffer().FD()
	if err != nil {
		return failed(err)
	}
	return C.int64_t(fd)
}

//export vbe_memory_do
func vbe_memory_do(h C.uint64_t, what C.uint32_t) C.int64_t {
	m := memories.get(uint64(h))
	if m == nil {
		return failed(errStale)
	}
	ctx, cancel := context.WithTimeout(context.Background(), moveLimit)
	defer cancel()
	switch what {
	case C.VBE_MEMORY_MOVE:
		return result(m.Move(ctx))
	case C.VBE_MEMORY_EVICT:
		return result(m.Evict(ctx))
	case C.VBE_MEMORY_REVOKE:
		return result(m.Revoke(ctx))
	}
	return -C.EINVAL
}

//export vbe_memory_copy
func vbe_memory_copy(h, offset, addr, length C.uint64_t, write C.uint32_t) C.int64_t {
	m := memories.get(uint64(h))
	if m == nil {
		return failed(errStale)
	}
	size := m.Buffer().Size()
	if uint64(length) > size || uint64(offset) > size-uint64(length) {
		return failed(ib.Errorf("dmabuf", syscall.EINVAL, "%d bytes at %d of %d", uint64(length), uint64(offset), size))
	}
	b := bytesAt(uint64(addr), uint64(length))
	var err error
	if write != 0 {
		_, err = m.WriteAt(b, int64(offset))
	} else {
		_, err = m.ReadAt(b, int64(offset))
	}
	return result(err)
}

//export vbe_memory_free
func vbe_memory_free(h C.uint64_t) C.int64_t {
	m := memories.get(uint64(h))
	if m == nil || !memories.remove(uint64(h)) {
		return failed(errStale)
	}
	return result(m.Close())
}
