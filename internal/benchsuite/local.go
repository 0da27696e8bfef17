package main

// Two processes of one host, by shared memory; and packets for the second process of an
// address.

import (
	"errors"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

func (b *bench) localBandwidth(size, depth int, g *goal) ([]contender, error) {
	sp := spec{Link: verbs.LinkLocal, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: depth}
	quiet, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	reads, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	const ucx = "UCX, tag_bw, posix and cma"
	return []contender{
		newUCX("tag_bw", "posix,cma,self", size).bandwidth(ucx),
		quiet.bandwidth(row{"WRITE", "GB/s", ucx, g}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		quiet.bandwidth(row{"WRITE, the target polls", "GB/s", ucx, nil}, verbs.OpRDMAWrite, 1, depth, inTurn, modePoll),
		reads.bandwidth(row{"READ", "GB/s", ucx, nil}, verbs.OpRDMARead, 1, depth, inTurn, modePassive),
	}, nil
}

// sharedBandwidth measures memory that both processes can map.
func (b *bench) sharedBandwidth(size, depth int) ([]contender, error) {
	sp := spec{Link: verbs.LinkLocal, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: depth, Into: shared, From: shared}
	r, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	const ucx = "UCX, put_bw, posix"
	return []contender{
		newUCX("ucp_put_bw", "posix,self", size).bandwidth(ucx),
		r.bandwidth(row{"WRITE", "GB/s", ucx, &goal{"≥", 0.7}}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		r.bandwidth(row{"READ", "GB/s", ucx, nil}, verbs.OpRDMARead, 1, depth, inTurn, modePassive),
	}, nil
}

// localLatency writes into memory that both processes can map, as UCX does, and into
// memory that only its owner can.
func (b *bench) localLatency() ([]contender, error) {
	const ucx = "UCX, put_lat, posix"
	all := []contender{newUCX("ucp_put_lat", "posix,self", pingPongSize).latency(ucx + ", p50")}
	for _, kind := range []memory{shared, ""} {
		sp := eight(verbs.LinkLocal, verbs.RC)
		sp.Inline, sp.Into = true, kind
		rc, err := b.newPeerRig(sp)
		if err != nil {
			return nil, err
		}
		pingPong := func(name string, op verbs.Opcode, m mode, g *goal, ping func(*pinger, time.Duration, *sampler) error) {
			p := newPinger(rc.near, op)
			c := b.quantiles(name, "µs", 1e3, ucx, g, func(d time.Duration, keep *sampler) error {
				if err := rc.serve(m, false); err != nil {
					return err
				}
				err := ping(p, d, keep)
				_, stopErr := rc.finish()
				return errors.Join(err, stopErr)
			})
			c.rows[1].against = "" // UCX has only a median
			c.side = rc.near
			all = append(all, c)
		}
		g, where := &goal{"≤", 2}, ""
		if kind != shared {
			g, where = nil, "plain memory, "
		}
		pingPong(where+"WRITE", verbs.OpRDMAWrite, modePongWrite, g, pingWrite)
		pingPong(where+"WRITE, memory watched", verbs.OpRDMAWrite, modePongWatch, g, pingMemory)
		if kind != shared {
			pingPong("SEND", verbs.OpSend, modePongSend, nil, pingSend)
		}
	}
	return all, nil
}

// second measures packets to a process whose address another one has opened before it.
func (b *bench) second() ([]contender, error) {
	const size, depth, addr = 64 << 10, 32, "127.77.1.77"
	sp := spec{Link: verbs.LinkUDP, Type: verbs.RC, QPs: 1, Size: size, Slots: 1, Sends: depth}
	alone, err := b.newPeerRig(sp)
	if err != nil {
		return nil, err
	}
	other, err := b.newPeer()
	if err != nil {
		return nil, err
	}
	first := sp
	first.Addr = addr
	if _, err := other.call(request{Op: opMake, Spec: &first}); err != nil {
		return nil, err
	}
	beside, err := b.newPeerRigAt(sp, addr)
	if err != nil {
		return nil, err
	}
	const own = "WRITE to a process alone"
	return []contender{
		alone.bandwidth(row{name: own, unit: "GB/s"}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
		beside.bandwidth(row{"WRITE to a second process", "GB/s", own, &goal{"≥", 0.9}}, verbs.OpRDMAWrite, 1, depth, inTurn, modePassive),
	}, nil
}
