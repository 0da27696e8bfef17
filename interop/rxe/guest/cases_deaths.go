package main

// Peers that go away.

import (
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// mortal is a connection that soon notices the end of its peer: three retries of 67 ms.
var mortal = connection{timeout: 14, retry: 3}

func deaths() (rows []*testCase) {
	for _, family := range bothFamilies {
		add := func(name, way string, short bool, run func(*scene) error) {
			rows = append(rows, &testCase{name: fmt.Sprintf("rc/death/%s/%s/%s", name, family, way), family: family, short: short && family == "v4", run: run})
		}
		for _, way := range bothWays {
			add("queuepair", way, true, (*scene).peerClosed)
			add("queuepair-busy", way, false, (*scene).peerClosedBusy)
			add("error-state", way, false, (*scene).peerInError)
		}
		add("process", "we", true, (*scene).kernelKilled)
		add("process", "kernel", true, (*scene).weKilled)
		add("process-busy", "we", false, (*scene).kernelKilledBusy)
		add("initiator-busy", "kernel", false, (*scene).kernelKilledInitiating)
	}
	return rows
}

// alone checks the completions of n requests, numbered from first, to a peer that no longer
// answers. Some may have been executed before; the next one fails, the others are flushed.
//
// A process that is killed loses its regions before its queue pairs, so the last answer of
// its device may be a NAK for a remote access error; refusal says whether that is allowed.
func alone(i *end, first uint64, n int, refusal bool) error {
	for id := first; n > 0; id, n = id+1, n-1 {
		wc, err := i.sent(i.qp, patience)
		if err != nil || wc.Status != verbs.WCSuccess {
			return forsaken(i, wc, err, id, n, refusal)
		}
	}
	return fmt.Errorf("%s: all requests succeeded, though the peer is gone", i.who())
}

// forsaken checks the first completion that is not a success, which must be that of request
// id, and those of the n-1 requests behind it.
func forsaken(i *end, wc verbs.WC, err error, id uint64, n int, refusal bool) error {
	want := verbs.WCRetryExcErr
	if refusal && err == nil && wc.Status == verbs.WCRemAccessErr {
		want = wc.Status
	}
	for {
		if err := errors.Join(wantStatus(i.who(), wc, err, want), wantID(i, wc, id)); err != nil {
			return err
		}
		if id, n = id+1, n-1; n == 0 {
			return wantState(i, verbs.QPErr)
		}
		want = verbs.WCWRFlushErr
		wc, err = i.sent(i.qp, patience)
	}
}

// busy calls leave, which ends the peer, while requests are under way. It keeps eight of them
// under way until one fails, so that it does not depend on how fast the two sides are.
func busy(i *end, wr verbs.SendWR, leave func() error, refusal bool) error {
	if err := post8(i, wr); err != nil {
		return err
	}
	left := make(chan error, 1)
	go func() { left <- leave() }()
	deadline := time.Now().Add(patience)
	for id := uint64(2); ; id++ {
		wc, err := i.sent(i.qp, patience)
		if err == nil && wc.Status == verbs.WCSuccess && time.Now().Before(deadline) {
			wr.ID = id + 8
			if err = i.post(wr); err == nil {
				continue
			}
		} else {
			err = forsaken(i, wc, err, id, 8, refusal)
		}
		return errors.Join(err, <-left)
	}
}

// acquaint connects, and shows that the connection works.
func (s *scene) acquaint() (i, t *end, wr verbs.SendWR, err error) {
	const size = 1 << 20
	if i, t, err = s.connect(mortal); err != nil {
		return
	}
	local, remote, err := buffers(i, t, size)
	if err != nil {
		return
	}
	wr = verbs.SendWR{ID: 1, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}
	_, err = i.do(wr)
	return
}

// post8 posts eight requests of 1 MiB, numbered from 2.
func post8(i *end, wr verbs.SendWR) error {
	for k := range uint64(8) {
		wr.ID = 2 + k
		if err := i.post(wr); err != nil {
			return err
		}
	}
	return nil
}

func (s *scene) peerClosed() error {
	i, t, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	if err := t.destroy(t.qp); err != nil {
		return err
	}
	if err := post8(i, wr); err != nil {
		return err
	}
	return alone(i, 2, 8, false)
}

func (s *scene) peerClosedBusy() error {
	i, t, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	return busy(i, wr, func() error { return t.destroy(t.qp) }, false)
}

// peerInError has the target's queue pair in the error state: it does not answer (IBA 10.3.1).
func (s *scene) peerInError() error {
	i, t, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	if err := t.reject(t.qp); err != nil {
		return err
	}
	if err := post8(i, wr); err != nil {
		return err
	}
	return alone(i, 2, 8, false)
}

func (s *scene) kernelKilled() error {
	i, _, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	s.kernel.die()
	if err := post8(i, wr); err != nil {
		return err
	}
	return alone(i, 2, 8, false)
}

func (s *scene) kernelKilledBusy() error {
	i, _, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	return busy(i, wr, func() error { s.kernel.die(); return nil }, true)
}

// kernelKilledInitiating kills the initiator: the target does not notice, and stays in RTS.
func (s *scene) kernelKilledInitiating() error {
	i, t, wr, err := s.acquaint()
	if err != nil {
		return err
	}
	if err := post8(i, wr); err != nil {
		return err
	}
	s.kernel.die()
	time.Sleep(300 * time.Millisecond)
	return wantState(t, verbs.QPRTS)
}

// weKilled has the kernel write to a process of ours that is then killed.
func (s *scene) weKilled() error {
	v, err := startVictim(families[s.family].victim)
	if err != nil {
		return err
	}
	defer v.kill()
	qp, qpn, err := s.kernel.newQP(verbs.RC, verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1})
	if err != nil {
		return err
	}
	i := &end{party: s.kernel, qp: qp, qpn: qpn, psn: 1000, patience: patience}
	local, err := i.alloc(victimBytes, allRights)
	if err != nil {
		return err
	}
	if err := v.connect(verbs.Endpoint{GID: s.kernel.gid(), QPN: qpn, PSN: i.psn}); err != nil {
		return err
	}
	if err := i.connect(qp, verbs.RC, &verbs.QPAttr{
		Access: verbs.AccessRemote, Port: 1, AV: verbs.AHAttr{DGID: v.hello.GID, PortNum: 1}, PathMTU: verbs.MTU1024,
		Timeout: mortal.timeout, RetryCnt: mortal.retry, RNRRetry: 7, MinRNRTimer: 12, RQPSN: v.hello.PSN, SQPSN: i.psn,
		DestQPN: v.hello.QPN, MaxRDAtomic: 16, MaxDestRDAtomic: 16,
	}); err != nil {
		return err
	}
	wr := verbs.SendWR{ID: 1, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, victimBytes)}, RemoteAddr: v.hello.Addr, RKey: v.hello.RKey}
	if _, err := i.do(wr); err != nil {
		return err
	}
	v.kill()
	if err := post8(i, wr); err != nil {
		return err
	}
	return alone(i, 2, 8, false)
}
