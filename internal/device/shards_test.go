package device

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// loads returns how many queue pairs have numbers of each shard.
func (d *Device) loads() (list []int) {
	d.spread.mu.Lock()
	defer d.spread.mu.Unlock()
	for _, s := range d.spread.list {
		list = append(list, s.load)
	}
	return list
}

// another makes an end with the same completion queue and protection domain.
func (e *end) another() *end {
	o := *e
	o.buf = make([]byte, len(e.buf))
	o.mr = must[provider.MR](e.t)(e.pd.RegMR(o.buf, allRemote))
	o.qp = must[provider.QP](e.t)(e.pd.CreateQP(provider.QPConfig{Type: e.qp.Type(), SendCQ: e.cq, RecvCQ: e.cq,
		Cap: ib.QPCap{MaxSendWR: 128, MaxRecvWR: 128, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInlineData: 128}}))
	return &o
}

// Queue pairs are spread over receivers two by two, each gets its packets there, and a poll of
// their completion queue reads all of them; when they are closed, everything is as before.
func TestReceivers(t *testing.T) {
	const most, pairs, size = 4, 9, 70_000
	var ends [2][]*end
	for i := range ends {
		d := openDevice(t, provider.Config{Link: linkUDP, Receivers: most})
		first := newEnd(t, d, ib.RC, size)
		ends[i] = append(ends[i], first)
		for range pairs - 1 {
			ends[i] = append(ends[i], first.another())
		}
		if got := d.loads(); !slices.Equal(got, []int{2, 2, 2, 3}) {
			t.Errorf("queue pairs in the shards: %v", got)
		}
		if got := first.cq.(*CQ).polled.shards(); !slices.Equal(got, []*shard{d.first}) {
			t.Errorf("a poll reads %d shards before a queue pair is connected", len(got))
		}
	}
	for k := range pairs {
		a, b := ends[0][k], ends[1][k]
		a.connect(b)
		b.connect(a)
	}
	homes := map[*shard]int{}
	for k, e := range ends[1] {
		q := e.qp.(*QP)
		if q.shard.Load() != q.home || q.dev.spread.byPlace[sys.Place(q.number)].Load() != q.home {
			t.Errorf("queue pair %d is not in the shard of its number", k)
		}
		homes[q.home]++
	}
	if n := len(ends[1][0].cq.(*CQ).polled.shards()); n != most || len(homes) != most {
		t.Errorf("%d shards, of which polls read %d", len(homes), n)
	}
	for k := range pairs {
		a, b := ends[0][k], ends[1][k]
		letter(a.buf, uint32(k))
		b.recv(ib.RecvWR{ID: uint64(k), SGL: b.sge(0, size)})
		a.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: a.sge(0, size), Flags: ib.SendSignaled})
		a.ok()
		if wc := b.ok(); wc.ID != uint64(k) {
			t.Errorf("completion of %d, want %d", wc.ID, k)
		}
		if got, err := number(b.buf); err != nil || got != uint32(k) {
			t.Fatalf("queue pair %d got %d, %v", k, got, err)
		}
	}
	// Nobody polls the target: its background goroutines receive.
	for k := range pairs {
		a, b := ends[0][k], ends[1][k]
		letter(a.buf, uint32(100+k))
		a.post(a.write(b, 0, size))
	}
	for range pairs {
		ends[0][0].ok()
	}
	for k, b := range ends[1] {
		if got, err := number(b.buf); err != nil || got != uint32(100+k) {
			t.Fatalf("queue pair %d was written %d, %v", k, got, err)
		}
	}
	for i := range ends {
		d, cq := ends[i][0].dev, ends[i][0].cq.(*CQ)
		for _, e := range ends[i] {
			closeAll(t, e.qp, e.mr)
		}
		if got := d.loads(); slices.Max(got) != 0 {
			t.Errorf("queue pairs in the shards: %v", got)
		}
		if got := cq.polled.shards(); !slices.Equal(got, []*shard{d.first}) {
			t.Errorf("a poll reads %d shards when all queue pairs are closed", len(got))
		}
		closeAll(t, cq, ends[i][0].pd)
	}
}

// A queue pair that is reached without packets stays in the first shard, and so do datagrams.
func TestReceiversOwnProcess(t *testing.T) {
	x := openDevice(t, provider.Config{Receivers: 4})
	y := openDevice(t, provider.Config{Receivers: 4})
	for _, typ := range []ib.QPType{ib.RC, ib.UC, ib.UD} {
		var all []*end
		for range 4 {
			a, b := newEnd(t, x, typ, 4096), newEnd(t, y, typ, 4096)
			if typ != ib.UD {
				a.connect(b)
				b.connect(a)
			}
			all = append(all, a, b)
		}
		for _, e := range all {
			if q := e.qp.(*QP); q.shard.Load() != e.dev.first || len(e.cq.(*CQ).polled.shards()) != 1 {
				t.Errorf("a queue pair of type %v has left the first shard", typ)
			}
			if typ == ib.UD && e.qp.(*QP).home != e.dev.first {
				t.Error("a datagram queue pair has a number of another shard")
			}
			e.close()
		}
	}
}

// Bad numbers of receivers are refused.
func TestReceiversLimits(t *testing.T) {
	for _, n := range []int{-1, maxReceivers + 1} {
		_, err := Open("", &provider.Config{Link: linkUDP, Receivers: n})
		wantErrno(t, fmt.Sprint(n), err, syscall.EINVAL)
	}
}

// Queue pairs are made, connected, reset, connected again and closed by several goroutines,
// under traffic: each gets its own bytes, and nothing is left.
func TestReceiversStorm(t *testing.T) {
	seed := testSeed(t)
	cfg := provider.Config{Link: linkUDP, Receivers: 3}
	x, y := openDevice(t, cfg), openDevice(t, cfg)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(seed, uint64(g)))
			for round := range lastingOps(6, 100) {
				size := 1 + rng.IntN(20_000) + 8
				a, b := newEnd(t, x, ib.RC, size), newEnd(t, y, ib.RC, size)
				a.connect(b)
				b.connect(a)
				for i := range 1 + rng.IntN(8) {
					if i > 0 && rng.IntN(4) == 0 {
						again(a, b)
					}
					want := uint32(g<<16 | round<<8 | i)
					letter(a.buf, want)
					a.post(a.write(b, 0, size))
					a.ok()
					if got, err := number(b.buf); err != nil || got != want {
						t.Errorf("%#x arrived as %#x, %v", want, got, err)
					}
				}
				a.close()
				b.close()
			}
		})
	}
	wg.Wait()
	for _, d := range []*Device{x, y} {
		if got := d.loads(); slices.Max(got) != 0 || len(got) > 3 {
			t.Errorf("queue pairs in the shards: %v", got)
		}
	}
}
