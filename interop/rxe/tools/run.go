package tools

// The run of a perftest test: run chooses one of three loops, which are those of
// the programs.
//
//   - stream: the bandwidth tests, and the latency of READs and atomics, where
//     only one side initiates. It keeps as many requests as allowed under way, and
//     counts received messages.
//   - answer: the latency of messages that consume a receive. Each side sends
//     when it has received.
//   - watch: the latency of WRITEs. Each side writes when it sees the other's
//     write in its memory.

import (
	"context"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// run runs the test and, where the programs do so, exchanges reports.
func (b *bench) run(ctx context.Context, x *exchange) error {
	initiates := b.cfg.Role == Client || b.cfg.Duplex
	receives := b.receives() && (b.cfg.Role == Server || b.cfg.Duplex || b.lat)
	if receives {
		if err := b.postReceives(); err != nil {
			return err
		}
	}
	if b.receives() || b.cfg.Duplex {
		if err := b.sync(x); err != nil {
			return err
		}
	}
	if err := b.loop(ctx, initiates, receives); err != nil {
		return err
	}
	oneSided := !b.receives() && !b.cfg.Duplex
	if b.lat || (!oneSided && !b.cfg.Duplex) {
		return nil
	}
	if oneSided {
		if err := b.sync(x); err != nil {
			return err
		}
	}
	theirs, err := x.swapReports(b.report())
	if initiated := b.cfg.Role == Server || b.cfg.Duplex; initiated {
		b.result.PeerReport = theirs // a peer that only served does not initialise its report
	}
	return err
}

func (b *bench) loop(ctx context.Context, initiates, receives bool) error {
	start := time.Now()
	defer func() { b.result.Elapsed = time.Since(start) }()
	switch {
	case b.lat && b.receives():
		return b.answer(ctx)
	case b.lat && b.verb == verbWrite:
		return b.watch(ctx)
	}
	return b.stream(ctx, initiates, receives)
}

// stream posts all requests of this side, if it initiates, and receives all messages of the
// peer, if it receives. A server that does both waits for the first message before it posts.
func (b *bench) stream(ctx context.Context, initiates, receives bool) error {
	want := uint64(b.cfg.Iters)
	held := receives && b.cfg.Role == Server
	for {
		if initiates && !held {
			if err := b.postSome(want); err != nil {
				return err
			}
		}
		if b.finished(want, initiates, receives) {
			return nil
		}
		wcs, err := b.poll()
		if err != nil {
			return err
		}
		for i := range wcs {
			if err := b.completed(&wcs[i]); err != nil {
				return err
			}
		}
		if held && b.result.Received > 0 {
			held = false
			continue
		}
		if len(wcs) == 0 {
			if err := b.rest(ctx); err != nil {
				return err
			}
		}
	}
}

// postSome posts as many requests as there is room for; with a gap, at most one of each queue
// pair.
func (b *bench) postSome(want uint64) error {
	depth := uint64(b.cfg.TxDepth)
	if b.verb == verbRead || b.verb == verbAtomic {
		depth = min(depth, uint64(b.inSlots))
	}
	if b.cfg.CAS {
		depth = min(depth, uint64(b.slots)) // the value of a word is known when the last atomic on it has completed
	}
	for _, f := range b.flows {
		for f.posted < want && f.posted-f.done < depth {
			if b.cfg.Gap > 0 {
				time.Sleep(b.cfg.Gap)
			}
			if err := b.post(f); err != nil {
				return err
			}
			if b.cfg.Gap > 0 {
				break
			}
		}
	}
	return nil
}

func (b *bench) finished(want uint64, initiates, receives bool) bool {
	for _, f := range b.flows {
		if initiates && f.done < want || receives && f.received < want {
			return false
		}
	}
	return true
}

// answer is the ping-pong by receives. In a SEND test the client begins, in a WRITE test the
// server.
func (b *bench) answer(ctx context.Context) error {
	first := Client
	if b.verb == verbWrite {
		first = Server
	}
	f, want := b.flows[0], uint64(b.cfg.Iters)
	awaited := uint64(0) // not f.received: a message may come before the SEND is acknowledged
	for f.posted < want || awaited < want {
		if awaited < want && (f.posted > 0 || b.cfg.Role != first) {
			awaited++
			if err := b.until(ctx, &f.received, awaited); err != nil {
				return err
			}
		}
		if f.posted < want {
			if err := b.post(f); err != nil {
				return err
			}
			if err := b.until(ctx, &f.done, f.posted); err != nil {
				return err
			}
		}
	}
	return nil
}

// until handles completions until a counter has come to n.
func (b *bench) until(ctx context.Context, counter *uint64, n uint64) error {
	for *counter < n {
		wcs, err := b.wait(ctx)
		if err != nil {
			return err
		}
		for i := range wcs {
			if err := b.completed(&wcs[i]); err != nil {
				return err
			}
		}
	}
	return nil
}

// watch is the ping-pong by memory. The last byte of a message is its number. The server
// begins.
func (b *bench) watch(ctx context.Context) error {
	f, want := b.flows[0], uint64(b.cfg.Iters)
	mark := b.target(0) + b.cfg.Size - 1
	for f.posted < want || f.received < want {
		if f.received < want && (f.posted > 0 || b.cfg.Role != Server) {
			if err := b.see(ctx, mark, byte(f.received+1)); err != nil {
				return err
			}
			f.received++
			b.result.Received++
			b.result.ReceivedBytes += uint64(b.cfg.Size)
		}
		if f.posted < want {
			b.main[b.source(0)+b.cfg.Size-1] = byte(f.posted + 1)
			if err := b.post(f); err != nil {
				return err
			}
			if err := b.until(ctx, &f.done, f.posted); err != nil {
				return err
			}
		}
	}
	return nil
}

// see waits for a byte in memory. It polls the completion queue, which is empty, to make
// progress and to notice a queue pair that has failed.
func (b *bench) see(ctx context.Context, at int, v byte) error {
	for loadByte(b.main, at) != v {
		wcs, err := b.poll()
		if err != nil {
			return err
		}
		if len(wcs) > 0 {
			return fmt.Errorf("completion with nothing under way: %w", wcs[0].Err())
		}
		if err := b.rest(ctx); err != nil {
			return err
		}
	}
	b.idle = 0
	return nil
}

// completed handles a completion.
func (b *bench) completed(wc *verbs.WC) error {
	if wc.Status != verbs.WCSuccess {
		return wc.Err()
	}
	recv, i, n := splitID(wc.ID)
	if i >= len(b.flows) || wc.QPN != b.flows[i].qp.Number() {
		return fmt.Errorf("completion %#x of queue pair %#06x, which is none of ours", wc.ID, wc.QPN)
	}
	f := b.flows[i]
	if recv {
		return b.received(f, n, wc)
	}
	if n != f.done {
		return fmt.Errorf("request %d completed before request %d", n, f.done)
	}
	f.done++
	b.result.Sent++
	b.result.SentBytes += uint64(b.cfg.Size)
	if b.verb == verbRead || b.verb == verbAtomic {
		return b.returned(f, n, wc)
	}
	return nil
}

// received checks a message and posts its slot again.
func (b *bench) received(f *flow, slot uint64, wc *verbs.WC) error {
	if length := int(wc.ByteLen) - b.header; length != b.cfg.Size {
		return fmt.Errorf("message %d has %d bytes, not %d", f.received, length, b.cfg.Size)
	}
	want := verbs.WCRecv
	if b.cfg.Imm {
		want = verbs.WCRecvRDMAWithImm
	}
	if wc.Op != want {
		return fmt.Errorf("message %d completed as %v, not %v", f.received, wc.Op, want)
	}
	data := b.in[b.inSlot(f.index, slot):][:b.header+b.cfg.Size]
	if b.cfg.Type == verbs.UD {
		if err := CheckGRH(data[:b.header], f.peer.GID, b.gid, b.cfg.Size); err != nil {
			return fmt.Errorf("message %d: %w", f.received, err)
		}
		b.result.GRHs++
	}
	if b.verb == verbSend {
		if err := b.checkMessage(f, data[b.header:]); err != nil {
			return err
		}
	}
	f.received++
	b.result.Received++
	b.result.ReceivedBytes += uint64(b.cfg.Size)
	return b.postReceive(f, slot)
}

// report returns this side's report of a bandwidth test.
func (b *bench) report() *Report {
	r := &Report{Size: uint64(b.cfg.Size), Iters: uint64(b.cfg.Iters) * uint64(b.cfg.QPs)}
	if s := b.result.Elapsed.Seconds(); s > 0 {
		r.Average = float64(b.result.SentBytes) / s / (1 << 20)
		r.MsgRate = float64(b.result.Sent) / s / 1e6
	}
	r.Peak = r.Average
	return r
}
