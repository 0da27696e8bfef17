package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// Posting. Requests are translated without copying what they point to: the device copies
// that before the call returns.

// scratch holds translated requests, for posts of several.
type scratch struct {
	send [batch]ib.SendWR
	keys [batch]ib.MKeyConfig
	recv [batch]ib.RecvWR
}

var scratches = sync.Pool{New: func() any { return new(scratch) }}

// vbe_post_send posts the requests before the first one that is refused, and stores their
// number in *posted. If *posted is negative at the call, vbe_post_send posts nothing of a list
// for which the send queue has too little room.
//
//export vbe_post_send
func vbe_post_send(h C.uint64_t, wrs *C.struct_vbe_send_wr, n C.int64_t, posted *C.int64_t) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil || q.sender == nil {
		*posted = 0
		return failed(errStale)
	}
	if *posted < 0 {
		*posted = 0
		if room := q.sender.Room(); int64(n) > int64(room) {
			return failed(ib.Errorf("post_send", syscall.ENOMEM, "%d requests, the send queue has room for %d", n, room))
		}
	}
	var one [1]ib.SendWR // most posts have one, and need no scratch
	send := one[:]
	var s *scratch
	if n > 1 || wrs.layout != 0 {
		s = scratches.Get().(*scratch)
		send = s.send[:]
	}
	list := view(wrs, int(n))
	done := 0
	var err error
	for done < len(list) && err == nil {
		part := list[done:min(done+len(send), len(list))]
		good := len(part)
		for i := range part {
			var key *ib.MKeyConfig
			if s != nil {
				key = &s.keys[i]
			}
			if refused := sendFrom(&send[i], key, &part[i]); refused != nil {
				good, err = i, refused
				break
			}
		}
		k, refused := q.sender.PostSend(send[:good])
		if refused != nil {
			err = refused
		}
		done += k
	}
	if s != nil {
		scratches.Put(s)
	}
	*posted = C.int64_t(done)
	return result(err)
}

// sendFrom translates a request. The configuration of an indirect key goes to key.
func sendFrom(to *ib.SendWR, key *ib.MKeyConfig, f *C.struct_vbe_send_wr) error {
	op := opcode(f.opcode)
	flags, ok := sendFlags(f.flags)
	if op == 0 || !ok {
		return ib.Errorf("post_send", syscall.EINVAL, "opcode %d, flags %#x: unknown to the device", f.opcode, f.flags)
	}
	*to = ib.SendWR{} // then field by field: a literal is built elsewhere, and the copy waits for these stores
	to.ID, to.Op, to.Flags, to.Imm = uint64(f.id), op, flags, uint32(f.imm)
	to.RemoteAddr, to.RKey, to.RemoteSRQN = uint64(f.remote_addr), uint32(f.rkey), uint32(f.srqn)
	to.CompareAdd, to.Swap = uint64(f.compare_add), uint64(f.swap)
	if f.flags&sendInline != 0 {
		to.Inline = bytesAt(uint64(f.inline_data), uint64(f.inline_len))
	} else {
		to.SGL = sges(uint64(f.sgl), uint32(f.num_sge))
	}
	switch op {
	case ib.OpSendInv, ib.OpLocalInv:
		to.InvalidateKey = uint32(f.inv_key)
	case ib.OpBindMW:
		to.Bind = bindOf(f)
	case ib.OpConfigureMKey:
		if f.layout == 0 {
			return ib.Errorf("post_send", syscall.EINVAL, "indirect keys are configured by mlx5dv_wr_mr_list and its like")
		}
		*key = layoutOf(layoutAt(uint64(f.layout)))
		to.Configure = key
	case ib.OpFlush:
		to.RemoteLength, to.FlushType, to.FlushLevel = uint32(f.flush_len), ib.FlushType(f.flush_type), ib.FlushLevel(f.flush_level)+ib.FlushRange
	}
	if f.ah != 0 {
		a := ahs.get(uint64(f.ah))
		if a == nil {
			return ib.Errorf("post_send", syscall.EINVAL, "the address handle is gone")
		}
		to.AH, to.RemoteQPN, to.RemoteQKey = a.AH, uint32(f.qpn), uint32(f.qkey)
	}
	return nil
}

// poster is a receive queue.
type poster interface {
	PostRecv([]ib.RecvWR) (int, error)
}

func postRecv(q poster, wrs *C.struct_vbe_recv_wr, n C.int64_t, posted *C.int64_t) C.int64_t {
	s := scratches.Get().(*scratch)
	list := view(wrs, int(n))
	done := 0
	var err error
	for done < len(list) && err == nil {
		part := list[done:min(done+batch, len(list))]
		for i := range part {
			s.recv[i] = ib.RecvWR{ID: uint64(part[i].id), SGL: sges(uint64(part[i].sgl), uint32(part[i].num_sge))}
		}
		var k int
		k, err = q.PostRecv(s.recv[:len(part)])
		done += k
	}
	scratches.Put(s)
	*posted = C.int64_t(done)
	return result(err)
}

//export vbe_post_recv
func vbe_post_recv(h C.uint64_t, wrs *C.struct_vbe_recv_wr, n C.int64_t, posted *C.int64_t) C.int64_t {
	q := qps.get(uint64(h))
	if q == nil {
		*posted = 0
		return failed(errStale)
	}
	return postRecv(q.QP, wrs, n, posted)
}

//export vbe_post_srq_recv
func vbe_post_srq_recv(h C.uint64_t, wrs *C.struct_vbe_recv_wr, n C.int64_t, posted *C.int64_t) C.int64_t {
	q := srqs.get(uint64(h))
	if q == nil {
		*posted = 0
		return failed(errStale)
	}
	return postRecv(q.SRQ, wrs, n, posted)
}
