package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"context"
	"math"
	"runtime"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/peermem"
)

// PeerDirect clients of the program. Their functions are C, and called by call.c, which also keeps
// what belongs to a claim: Go has its address as a number.

type peerClient struct{ *peermem.Registered }

var peers = table[peerClient]{kind: C.VBE_PEER}

// unregisterLimit is how long a client may have regions after it was unregistered.
const unregisterLimit = 10 * time.Second

// maxSegments is how many segments a client's table may have.
const maxSegments = 1 << 24

// errnoOf returns the error for what a client's function returns: 0 or a negative errno.
func errnoOf(r C.int64_t) error {
	switch {
	case r == 0:
		return nil
	case r < 0 && r > -4096:
		return syscall.Errno(-r)
	}
	return ib.Errorf("peer_mem", syscall.EIO, "a client has returned %d", int64(r))
}

// addressLimit is where the addresses of processes end.
func addressLimit() uint64 {
	if runtime.GOARCH == "amd64" {
		return 1 << 47
	}
	return 1 << 48
}

// segmentsOf returns the segments of a claim's table.
func segmentsOf(claim C.uint64_t) ([][]byte, error) {
	n := uint64(C.peer_count(claim))
	if n > maxSegments {
		return nil, ib.Errorf("dma_map", syscall.EINVAL, "a table of %d segments", n)
	}
	segments := make([][]byte, 0, n)
	for i := range n {
		var addr, length C.uint64_t
		C.peer_segment(claim, C.uint64_t(i), &addr, &length)
		a, l := uint64(addr), uint64(length)
		if a == 0 || l == 0 || l > math.MaxInt || a >= addressLimit() || l > addressLimit()-a {
			return nil, ib.Errorf("dma_map", syscall.EINVAL, "a segment of %d bytes at %#x", l, a)
		}
		segments = append(segments, bytesAt(a, l))
	}
	return segments, nil
}

//export vbe_peer_register
func vbe_peer_register(c *C.struct_verbena_peer_memory_client, invalidates C.uint32_t) C.int64_t {
	const op = "register_peer_memory_client"
	name, ok := textOf(c.name[:])
	version, ok2 := textOf(c.version[:])
	if !ok || !ok2 || C.peer_whole(c) == 0 || c.flags&^C.VERBENA_PEER_MEM_INVALIDATE_UNMAPS != 0 {
		return failed(ib.Errorf(op, syscall.EINVAL, "the client has no name or version that ends, lacks a function, or has flags %#x", uint32(c.flags)))
	}
	client := peermem.Client{
		Name: name, Version: version,
		Invalidates: invalidates != 0, UnmapsItself: invalidates != 0 && c.flags&C.VERBENA_PEER_MEM_INVALIDATE_UNMAPS != 0,
		Acquire: func(addr uintptr, size uint64) (any, bool) {
			claim := C.peer_acquire(c, C.uint64_t(addr), C.uint64_t(size))
			return claim, claim != 0
		},
		GetPages: func(claim any, addr uintptr, size uint64, write, force bool, core uint64) error {
			return errnoOf(C.peer_get_pages(claim.(C.uint64_t), C.uint64_t(addr), C.uint64_t(size), number(write), number(force), C.uint64_t(core)))
		},
		DMAMap: func(claim any) ([][]byte, error) {
			if err := errnoOf(C.peer_dma_map(claim.(C.uint64_t))); err != nil {
				return nil, err
			}
			segments, err := segmentsOf(claim.(C.uint64_t))
			if err != nil {
				C.peer_dma_unmap(claim.(C.uint64_t))
			}
			return segments, err
		},
		DMAUnmap: func(claim any) { C.peer_dma_unmap(claim.(C.uint64_t)) },
		PutPages: func(claim any) { C.peer_put_pages(claim.(C.uint64_t)) },
		PageSize: func(claim any) uint64 { return uint64(C.peer_page_size(claim.(C.uint64_t))) },
		Release:  func(claim any) { C.peer_release(claim.(C.uint64_t)) },
	}
	if c.get_page_size == nil {
		client.PageSize = nil
	}
	r, err := peermem.Register(client)
	if err != nil {
		return failed(err)
	}
	h := peers.add(&peerClient{r})
	if h == 0 {
		_ = r.Unregister(context.Background()) // nothing uses it yet
		return -C.ENOMEM
	}
	return C.int64_t(h)
}

func number(is bool) C.int {
	if is {
		return 1
	}
	return 0
}

// textOf returns the text in an array, and reports whether it ends there.
func textOf(array []C.char) (string, bool) {
	var text []byte
	for _, c := range array {
		if c == 0 {
			return string(text), true
		}
		text = append(text, byte(c))
	}
	return "", false
}

//export vbe_peer_unregister
func vbe_peer_unregister(h C.uint64_t) C.int64_t {
	p := peers.get(uint64(h))
	if p == nil {
		return failed(errStale)
	}
	ctx, cancel := context.WithTimeout(context.Background(), unregisterLimit)
	defer cancel()
	if p.Unregister(ctx) != nil {
		return failed(ib.Errorf("unregister_peer_memory_client", syscall.ETIMEDOUT, "there are regions of the client %s", p.Name()))
	}
	peers.remove(uint64(h))
	return 0
}

//export vbe_peer_invalidate
func vbe_peer_invalidate(h, core C.uint64_t) C.int64_t {
	p := peers.get(uint64(h))
	if p == nil {
		return failed(errStale)
	}
	return result(p.Invalidate(uint64(core)))
}

//export vbe_peer_stats
func vbe_peer_stats(h C.uint64_t, to *C.uint64_t) C.int64_t {
	p := peers.get(uint64(h))
	if p == nil {
		return failed(errStale)
	}
	stats := p.Stats()
	for i, s := range stats.All() {
		view(to, C.VBE_PEER_STATS)[i] = C.uint64_t(s.Value)
	}
	return 0
}
