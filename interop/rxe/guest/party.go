package main

import (
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// party is a device that a case controls: ours, by package verbs, or the kernel's, by kverbs.
// A case is written once, for two of them, and runs with either as initiator. Both use the
// types of package verbs.
type party interface {
	who() string
	gid() verbs.GID

	alloc(size int, access verbs.Access) (*region, error)
	fill(r *region, off, n int, seed uint64) error
	check(r *region, off, n int, seed uint64) error
	peek(r *region, off, n int) ([]byte, error)
	poke(r *region, off int, b []byte) error

	newQP(typ verbs.QPType, c verbs.QPCap) (qp int, qpn uint32, err error)
	connect(qp int, typ verbs.QPType, a *verbs.QPAttr) error // RESET to RTS
	reject(qp int) error                                     // to ERR
	state(qp int) (verbs.QPState, error)
	destroy(qp int) error
	address(to verbs.GID) (ah int, err error)

	send(qp int, wr *verbs.SendWR, ah int) error
	recv(qp int, wr *verbs.RecvWR) error
	sent(qp int, d time.Duration) (verbs.WC, error)     // the next completion of a send
	received(qp int, d time.Duration) (verbs.WC, error) // the next completion of a receive

	// killable returns a key that the peer may invalidate by SEND.
	killable(qp int) (rkey uint32, err error)

	// newWindow makes a memory window. bind binds it to n bytes of a region, on a queue pair,
	// and returns the completion of the bind. endWindow deallocates it.
	newWindow(typ verbs.MWType) (*window, error)
	bind(qp int, w *window, r *region, off, n int, access verbs.Access) (verbs.WC, error)
	endWindow(w *window) error

	// clear destroys all objects.
	clear() error
}

// region is registered memory of a party.
type region struct {
	id         int
	addr       uint64
	size       int
	lkey, rkey uint32

	buf   []byte         // ours
	moves *dmabuf.Memory // ours: memory that moves, instead of buf
	mr    *verbs.MR      // ours
}

// window is a memory window of a party.
type window struct {
	id   int
	typ  verbs.MWType
	rkey uint32 // since the last bind

	mw *verbs.MW // ours
}

func (r *region) sge(off, n int) verbs.SGE {
	return verbs.SGE{Addr: r.addr + uint64(off), Length: uint32(n), LKey: r.lkey}
}

// errNone is the error if nothing completes in time.
type errNone struct {
	who, what string
	after     time.Duration
}

func (e errNone) Error() string {
	return fmt.Sprintf("%s: no completion of a %s after %v", e.who, e.what, e.after)
}

// patternWord returns word i, of eight bytes, of the pattern that regions are filled with.
// kverbs computes the same in C.
func patternWord(seed, i uint64) uint64 {
	x := seed*0x9e3779b97f4a7c15 + i
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// pattern calls fn with each byte of the pattern until it returns false.
func pattern(n int, seed uint64, fn func(i int, b byte) bool) {
	var w uint64
	for i := range n {
		if i%8 == 0 {
			w = patternWord(seed, uint64(i/8))
		}
		if !fn(i, byte(w>>(8*(i%8)))) {
			return
		}
	}
}
