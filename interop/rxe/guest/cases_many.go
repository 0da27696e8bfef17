package main

// Many queue pairs, bad networks, very long messages.

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func crowds() (rows []*testCase) {
	const most = 200
	rows = append(rows, everyWay(testCase{name: fmt.Sprintf("rc/qps%d", most), limit: 10 * time.Minute}, func(s *scene) error { return s.crowd(most) })...)
	rows = append(rows, everyWay(testCase{name: "rc/qps20", short: true}, func(s *scene) error { return s.crowd(20) })...)
	return rows
}

// crowd connects many queue pairs, then posts to all of them at once.
func (s *scene) crowd(n int) error {
	const size = 6000
	type couple struct{ i, t *end }
	a, b := s.sides()
	local, remote, err := buffers(a, b, n*size)
	if err != nil {
		return err
	}
	var all []couple
	for k := range n {
		i, t, err := s.connect(connection{psn: uint32(1 + 7919*k), depth: 4, sges: 1})
		if err != nil {
			return fmt.Errorf("queue pair %d: %w", k, err)
		}
		all = append(all, couple{i, t})
		if err := errors.Join(a.fill(local, k*size, size, uint64(k)), t.receive(uint64(k))); err != nil {
			return err
		}
	}
	for k, c := range all {
		if err := c.i.post(verbs.SendWR{ID: uint64(k), Op: verbs.OpRDMAWriteImm, Imm: uint32(k), SGL: []verbs.SGE{local.sge(k*size, size)},
			RemoteAddr: remote.addr + uint64(k*size), RKey: remote.rkey}); err != nil {
			return err
		}
	}
	for k, c := range all {
		wc, err := c.i.sent(c.i.qp, patience)
		if err := wantStatus(fmt.Sprint(c.i.who(), " ", k), wc, err, verbs.WCSuccess); err != nil {
			return err
		}
		if err := c.t.wantReceived(verbs.WC{ID: uint64(k), Op: verbs.WCRecvRDMAWithImm, Flags: verbs.WCWithImm, Imm: uint32(k), ByteLen: size}); err != nil {
			return err
		}
		if err := b.check(remote, k*size, size, uint64(k)); err != nil {
			return fmt.Errorf("queue pair %d: %w", k, err)
		}
	}
	return nil
}

func losses() (rows []*testCase) {
	for _, net := range []struct{ name, netem string }{
		{"loss1", "loss 1%"},
		{"loss5", "loss 5%"},
		{"reorder", "limit 20000 delay 2ms reorder 25% 50%"},
	} {
		for _, op := range opNames {
			if op.op == verbs.OpSendInv {
				continue
			}
			for _, noGSO := range []bool{false, true} {
				c := testCase{name: fmt.Sprintf("rc/%s/%s", net.name, op.name), netem: net.netem, noGSO: noGSO, limit: 8 * time.Minute}
				if noGSO { // with GSO, netem drops all packets of a send at once
					c.name += "/nogso"
				}
				c.shortV4 = noGSO && net.name == "loss1" && (op.op == verbs.OpSend || op.op == verbs.OpRDMARead)
				rows = append(rows, everyWay(c, func(s *scene) error { return s.lossy(op.op) })...)
			}
		}
		rows = append(rows, everyWay(testCase{name: fmt.Sprintf("rc/%s/fadd", net.name), netem: net.netem, limit: 8 * time.Minute}, (*scene).lossyAdd)...)
	}
	return rows
}

// lossy streams for at least two rounds, and until netem has dropped something if it drops.
func (s *scene) lossy(op verbs.Opcode) error {
	c := connection{timeout: 14, depth: 16}
	c.defaults()
	i, t, err := s.connect(c)
	if err != nil {
		return err
	}
	for round := range 100 { // of few sends, 1 % may be none
		if err := s.streamBetween(i, t, c.depth, streaming{op: op, size: 40_000, count: 16}); err != nil {
			return err
		}
		n, err := lost()
		if err != nil {
			return err
		}
		if round > 0 && (n > 0 || s.netem[:4] != "loss") {
			return nil
		}
	}
	return errors.New("netem has dropped nothing")
}

// lossyAdd checks that each addition is executed once, however often it is sent.
func (s *scene) lossyAdd() error {
	i, t, err := s.connect(connection{timeout: 12})
	if err != nil {
		return err
	}
	result, target, err := buffers(i, t, 64)
	if err != nil {
		return err
	}
	const times = 300
	for n := range uint64(times) {
		if _, err := i.do(verbs.SendWR{ID: n, Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{result.sge(0, 8)},
			RemoteAddr: target.addr, RKey: target.rkey, CompareAdd: 3}); err != nil {
			return err
		}
		if got, err := word(i, result, 0); err != nil || got != 3*n {
			return errors.Join(fmt.Errorf("%s: addition %d found %d, want %d", i.who(), n, got, 3*n), err)
		}
	}
	if got, err := word(t, target, 0); err != nil || got != 3*times {
		return errors.Join(fmt.Errorf("%s: the word is %d, want %d", t.who(), got, 3*times), err)
	}
	return nil
}

// giants are messages of 1 GiB.
func giants() (rows []*testCase) {
	for _, op := range opNames {
		switch op.op {
		case verbs.OpSend, verbs.OpRDMAWrite, verbs.OpRDMARead:
			for _, way := range bothWays {
				rows = append(rows, &testCase{name: fmt.Sprintf("rc/%s/%d/mtu4096/v4/%s", op.name, 1<<30, way), family: "v4", soak: true, quiet: true,
					limit: 30 * time.Minute, run: func(s *scene) error { return s.operate(verbs.RC, op.op, verbs.MTU4096, 1<<30) }})
			}
		}
	}
	return rows
}
