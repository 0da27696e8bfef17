package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"bytes"
	"errors"
	"syscall"
)

// The connection manager's file, /dev/infiniband/rdma_cm, behind the distribution's
// librdmacm: ../front/ucma.c has the file's side of it, internal/cma the connections. In
// between:
//
//   - ucma.go: the calls from C.
//   - ucma_channel.go: ids by number, and the events that the program has not taken.
//   - ucma_command.go: the commands.
//   - ucma_layout.go: structures of the kernel's headers.
//   - ucma_engine.go: what is needed of internal/cma.
//   - ucma_readiness.go: the readiness of a channel.
//
// The numbers of errors are those of the kernel's drivers/infiniband/core/ucma.c.

var (
	cmProcess  = newCMFiles(newEngine)
	cmChannels = table[cmChannel]{kind: C.VBE_CM}
)

//export vbe_cm_open
func vbe_cm_open(fd C.int) C.int64_t {
	s, err := newEventfd(int(fd), descriptors)
	if err != nil {
		return failed(err)
	}
	c := cmProcess.open(s)
	h := cmChannels.add(c)
	if h == 0 {
		cmProcess.close(c)
		return -C.int64_t(C.ENOMEM)
	}
	return C.int64_t(h)
}

//export vbe_cm_command
func vbe_cm_command(h C.uint64_t, cmd C.uint32_t, in *C.uint8_t, inLen C.uint32_t, out *C.uint8_t, room C.uint32_t, aux C.int64_t) C.int64_t {
	c := cmChannels.get(uint64(h))
	if c == nil {
		return -C.int64_t(C.EBADF) // another thread has closed it
	}
	call := cmCall{channel: c, in: bytes.Clone(octets(in, int(inLen))), room: int(room)}
	switch {
	case cmd == cmGetEvent:
		call.hasRead = aux != 0
	case aux != 0:
		call.other = cmChannels.get(uint64(aux))
	}
	got, err := cmProcess.command(uint32(cmd), &call)
	switch {
	case cmd == cmGetEvent && errors.Is(err, syscall.EAGAIN):
		return -C.int64_t(C.EAGAIN) // no failure to be told of
	case err != nil:
		return failed(err)
	}
	return C.int64_t(copy(octets(out, int(room)), got))
}

//export vbe_cm_close
func vbe_cm_close(h C.uint64_t) C.int64_t {
	if h == C.VBE_CM_ALL {
		return result(cmProcess.closeAll())
	}
	c := cmChannels.get(uint64(h))
	if c == nil || !cmChannels.remove(uint64(h)) {
		return failed(errStale)
	}
	cmProcess.close(c)
	return 0
}
