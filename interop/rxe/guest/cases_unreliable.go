package main

// UC and UD: nothing is acknowledged, so the cases wait until it has arrived at the target.

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func unreliable() (rows []*testCase) {
	for _, op := range opNames {
		if op.op == verbs.OpSendInv || op.op == verbs.OpRDMARead {
			continue
		}
		for _, mtu := range allMTUs {
			m := mtu.Bytes()
			for _, size := range []int{0, 1, m - 1, m, m + 1, 64 << 10} {
				c := testCase{name: fmt.Sprintf("uc/%s/%d/mtu%d", op.name, size, m), shortV4: mtu == verbs.MTU1024 && (size == m+1 || size == 64<<10)}
				rows = append(rows, everyWay(c, func(s *scene) error { return s.operate(verbs.UC, op.op, mtu, size) })...)
			}
		}
	}
	return rows
}

func datagrams() (rows []*testCase) {
	for _, op := range opNames {
		if op.op != verbs.OpSend && op.op != verbs.OpSendImm {
			continue
		}
		for _, size := range []int{0, 1, 2, 3, 1023, 1024, 2048, 4096} {
			c := testCase{name: fmt.Sprintf("ud/%s/%d", op.name, size), short: size == 1 || size == 4096}
			rows = append(rows, everyWay(c, func(s *scene) error { return s.datagram(op.op, size) })...)
		}
	}
	return rows
}

// datagram sends a datagram each way, and checks data, completion and header.
func (s *scene) datagram(op verbs.Opcode, size int) error {
	i, t, err := s.connect(connection{typ: verbs.UD})
	if err != nil {
		return err
	}
	for n, way := range []struct{ from, to *end }{{i, t}, {t, i}} {
		out, in, err := buffers(way.from, way.to, verbs.GRHLength+size+guard)
		if err != nil {
			return err
		}
		seed := uint64(20 + n)
		if err := way.from.fill(out, 0, size, seed); err != nil {
			return err
		}
		if err := way.to.receive(5, in.sge(0, verbs.GRHLength+size)); err != nil {
			return err
		}
		wr := verbs.SendWR{ID: 6, Op: op, RemoteQPN: way.to.qpn, RemoteQKey: qkey}
		want := verbs.WC{ID: 5, Op: verbs.WCRecv, Flags: verbs.WCGRH, ByteLen: uint32(verbs.GRHLength + size), SrcQP: way.from.qpn}
		if way.to.who() == s.ours.who() { // the kernel's rxe leaves it at 0
			want.SL = verbs.WCIPv6
			if way.from.gid().Addr().Is4() {
				want.SL = verbs.WCIPv4
			}
		}
		if size > 0 {
			wr.SGL = []verbs.SGE{out.sge(0, size)}
		}
		if op == verbs.OpSendImm {
			wr.Imm, want.Imm = 0xfeedf00d, 0xfeedf00d
			want.Flags |= verbs.WCWithImm
		}
		if _, err := way.from.do(wr); err != nil {
			return err
		}
		if err := way.to.wantReceived(want); err != nil {
			return err
		}
		if err := way.to.check(in, verbs.GRHLength, size, seed); err != nil {
			return err
		}
		head, err := way.to.peek(in, 0, verbs.GRHLength)
		if err != nil {
			return err
		}
		if err := checkHeader(head, way.from.gid().Addr(), way.to.gid().Addr(), op, size); err != nil {
			return fmt.Errorf("%s: %w, in %x", way.to.who(), err, head)
		}
	}
	return nil
}

// checkHeader checks the 40 bytes in front of a datagram: the IPv6 header, or 20 undefined
// bytes and the IPv4 header (RoCE v2 annex, A17.4.5.2).
func checkHeader(b []byte, src, dst netip.Addr, op verbs.Opcode, size int) error {
	const udp, bth, deth, imm, icrc = 8, 12, 8, 4, 4
	packet := udp + bth + deth + (size+3)/4*4 + icrc
	if op == verbs.OpSendImm {
		packet += imm
	}
	if src.Is4() {
		h := b[20:]
		switch length := int(binary.BigEndian.Uint16(h[2:])); {
		case h[0] != 0x45:
			return fmt.Errorf("not an IPv4 header")
		case length != 20+packet:
			return fmt.Errorf("the header says %d bytes, the packet had %d", length, 20+packet)
		case h[9] != 17 || h[8] == 0:
			return fmt.Errorf("protocol %d, time to live %d", h[9], h[8])
		case !bytes.Equal(h[12:16], src.AsSlice()) || !bytes.Equal(h[16:20], dst.AsSlice()):
			return fmt.Errorf("addresses that are not %v and %v", src, dst)
		}
		return nil
	}
	switch length := int(binary.BigEndian.Uint16(b[4:])); {
	case b[0]>>4 != 6:
		return fmt.Errorf("not an IPv6 header")
	case length != packet:
		return fmt.Errorf("the header says %d bytes, the packet had %d", length, packet)
	case b[6] != 17 || b[7] == 0:
		return fmt.Errorf("next header %d, hop limit %d", b[6], b[7])
	case !bytes.Equal(b[8:24], src.AsSlice()) || !bytes.Equal(b[24:40], dst.AsSlice()):
		return fmt.Errorf("addresses that are not %v and %v", src, dst)
	}
	return nil
}

// eventually repeats a check until it holds: for data that arrives without a completion.
func eventually(check func() error) (err error) {
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		if err = check(); err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
