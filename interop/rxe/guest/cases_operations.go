package main

// Every operation with every size and every MTU.

import (
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

// opNames are the operations that move data, and their names in the table.
var opNames = []struct {
	name string
	op   verbs.Opcode
}{
	{"send", verbs.OpSend},
	{"send_imm", verbs.OpSendImm},
	{"send_inv", verbs.OpSendInv},
	{"write", verbs.OpRDMAWrite},
	{"write_imm", verbs.OpRDMAWriteImm},
	{"read", verbs.OpRDMARead},
}

func operations() (rows []*testCase) {
	for _, op := range opNames {
		for _, mtu := range allMTUs {
			m := mtu.Bytes()
			for _, size := range []int{0, 1, m - 1, m, m + 1, 64 << 10, 4 << 20} {
				c := testCase{name: fmt.Sprintf("rc/%s/%d/mtu%d", op.name, size, m)}
				// The short form has the sizes around the usual MTU, and one long message.
				c.short = mtu == verbs.MTU1024 && (size == m+1 || size == 64<<10)
				c.shortV4 = mtu == verbs.MTU1024 && size < 64<<10 || mtu == verbs.MTU4096 && size == 4<<20
				rows = append(rows, everyWay(c, func(s *scene) error { return s.operate(verbs.RC, op.op, mtu, size) })...)
			}
		}
	}
	return rows
}

// operate does an operation once, and checks the completions of both sides and every byte.
func (s *scene) operate(typ verbs.QPType, op verbs.Opcode, mtu verbs.MTU, size int) error {
	i, t, err := s.connect(connection{typ: typ, mtu: mtu})
	if err != nil {
		return err
	}
	local, remote, err := buffers(i, t, min(size+guard, maxRegion))
	if err != nil {
		return err
	}
	const seed, old = 7, 8
	wr := verbs.SendWR{ID: 1, Op: op, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}
	want := verbs.WC{ID: 2, Op: verbs.WCRecv, ByteLen: uint32(size)}
	receive := []verbs.SGE{remote.sge(0, size)}
	switch op {
	case verbs.OpSendImm:
		wr.Imm, want.Imm, want.Flags = 0xdeadbeef, 0xdeadbeef, verbs.WCWithImm
	case verbs.OpRDMAWriteImm:
		wr.Imm, want.Imm, want.Flags = 0x01020304, 0x01020304, verbs.WCWithImm
		want.Op, receive = verbs.WCRecvRDMAWithImm, nil
	case verbs.OpSendInv:
		key, err := t.killable(t.qp)
		if err != nil {
			return err
		}
		wr.InvalidateKey, want.InvalidatedKey, want.Flags = key, key, verbs.WCWithInv
	case verbs.OpRDMAWrite, verbs.OpRDMARead:
		want.ID = 0 // no receive
	}
	if size == 0 { // no piece rather than an empty one
		wr.SGL, receive = nil, nil
	}
	from, to, src, dst := i.party, t.party, local, remote
	if op == verbs.OpRDMARead {
		from, to, src, dst = t.party, i.party, remote, local
	}
	if err := errors.Join(from.fill(src, 0, size, seed), to.fill(dst, 0, dst.size, old)); err != nil {
		return err
	}
	if want.ID != 0 {
		if err := t.receive(want.ID, receive...); err != nil {
			return err
		}
	}
	wc, err := i.do(wr)
	if err != nil {
		return err
	}
	if op == verbs.OpRDMARead && int(wc.ByteLen) != size {
		return fmt.Errorf("%s: READ of %d bytes completed with %d", i.who(), size, wc.ByteLen)
	}
	if want.ID != 0 {
		if err := t.wantReceived(want); err != nil {
			return err
		}
	}
	if typ == verbs.UC && want.ID == 0 { // no completion says when it has arrived
		return eventually(func() error { return s.arrived(to, dst, size, seed, old) })
	}
	return s.arrived(to, dst, size, seed, old)
}

// arrived checks that the data has arrived, and that the bytes behind it are unchanged.
func (s *scene) arrived(p party, r *region, size int, seed, old uint64) error {
	if err := p.check(r, 0, size, seed); err != nil {
		return err
	}
	if r.size == size {
		return nil
	}
	behind, err := p.peek(r, size, r.size-size)
	if err != nil {
		return err
	}
	bad := -1
	pattern(r.size, old, func(i int, b byte) bool {
		if i >= size && behind[i-size] != b {
			bad = i
		}
		return bad < 0
	})
	if bad >= 0 {
		return fmt.Errorf("%s: byte %d, behind the %d that were moved, was changed", p.who(), bad, size)
	}
	return nil
}
