package driver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/pci"
)

func TestIdentify(t *testing.T) {
	r := newRig(t, pci.Config{IOQueues: 3, QueueEntries: 100, MDTS: 4}, Config{})
	info := r.c.Info()
	want := Info{Version: nvme.Version14, Serial: "S7", Model: "Verbena", Firmware: "1.0", NQN: testNQN, CNTLID: r.model.CNTLID(),
		MaxTransfer: 64 << 10, SGLS: 1, IOQueues: 3, MaxEntries: 100}
	if info != want {
		t.Errorf("%+v, should be %+v", info, want)
	}
	if want := (Namespace{ID: 1, Blocks: 16384, BlockSize: 512}); r.ns != want {
		t.Errorf("%+v, should be %+v", r.ns, want)
	}
	for id := uint32(2); id < 1024; id += 7 {
		check(t, r.sub.AddNamespace(id, must(nvme.NewMemory(int64(id)*4096, 4096))(t)))
	}
	list := must(r.c.Namespaces(longTime(t)))(t)
	if len(list) != 147 || list[146].ID != 1017 || list[146].Blocks != 1017 || list[146].BlockSize != 4096 {
		t.Errorf("%d namespaces", len(list))
	}
	if r.c.CMB() != nil {
		t.Error("a buffer that there is not")
	}
}

// Each command by each kind of pointer, at odd places in memory.
func TestCommands(t *testing.T) {
	for _, sgl := range []bool{false, true} {
		t.Run(fmt.Sprintf("SGL=%v", sgl), func(t *testing.T) {
			r := newRig(t, pci.Config{}, Config{SGL: sgl})
			rnd, ctx := seeded(t), longTime(t)
			q := r.queue(t, QueueConfig{})
			image := make([]byte, 8<<20)
			mem := r.memory(t, 1<<20+8192)
			for _, n := range []int{512, 1024, 4096, 4608, 8192, 12288, 65536, 300 << 10, 1 << 20} {
				for _, off := range []int{0, 4, 512, 2048, 4092} {
					lba := rnd.IntN(16384 - n/512 + 1)
					part := image[512*lba:][:n]
					m := mem.Slice(off, n)
					fill(m.Bytes, rnd)
					copy(part, m.Bytes)
					check(t, q.Write(ctx, r.ns, uint64(lba), m))
					check(t, q.Compare(ctx, r.ns, uint64(lba), m))
					m.Bytes[n-1]++
					if err := q.Compare(ctx, r.ns, uint64(lba), m); !errors.Is(err, nvme.StatusCompareFailure) {
						t.Fatalf("%d bytes at %d: %v", n, off, err)
					}
					clear(m.Bytes)
					check(t, q.Read(ctx, r.ns, uint64(lba), m))
					if !bytes.Equal(m.Bytes, part) {
						t.Fatalf("%d bytes at %d: other bytes were read than written", n, off)
					}
				}
			}
			check(t, q.Flush(ctx, r.ns))
			check(t, q.WriteZeroes(ctx, r.ns, 100, 50))
			check(t, q.Deallocate(ctx, r.ns, 200, 3000))
			clear(image[512*100 : 512*150])
			clear(image[512*200 : 512*3200])
			for lba := 0; lba < 16384; lba += 2048 {
				m := mem.Slice(0, 1<<20)
				check(t, q.Read(ctx, r.ns, uint64(lba), m))
				if !bytes.Equal(m.Bytes, image[512*lba:][:1<<20]) {
					t.Fatalf("other bytes behind block %d", lba)
				}
			}
			check(t, q.Close())
			check(t, q.Close())
		})
	}
}

func TestErrors(t *testing.T) {
	r := newRig(t, pci.Config{IOQueues: 2, QueueEntries: 16}, Config{})
	ctx := longTime(t)
	q := r.queue(t, QueueConfig{Entries: 2})
	m := r.memory(t, 8192)
	wantErr := func(what string, err, want error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: %v, should be %v", what, err, want)
		}
	}
	wantErr("behind the end", q.Read(ctx, r.ns, 16384, m), nvme.StatusLBAOutOfRange)
	wantErr("no such namespace", q.Read(ctx, Namespace{ID: 9, BlockSize: 512}, 0, m), nvme.StatusInvalidField)
	wantErr("no whole block", q.Read(ctx, r.ns, 0, m.Slice(0, 100)), syscall.EINVAL)
	wantErr("metadata", q.Read(ctx, Namespace{ID: 1, BlockSize: 512, Metadata: 8}, 0, m), syscall.EOPNOTSUPP)
	wantErr("misaligned", q.Read(ctx, r.ns, 0, m.Slice(2, 512)), syscall.EINVAL)
	wantErr("nothing there", q.Read(ctx, r.ns, 0, Memory{Bytes: m.Bytes, Addr: 0x10}), nvme.StatusDataTransferError)
	wantErr("the last addresses", q.Read(ctx, r.ns, 0, Memory{Bytes: m.Bytes, Addr: ^uint64(4095)}), nvme.StatusDataTransferError)
	wantErr("no blocks", q.WriteZeroes(ctx, r.ns, 0, 0), syscall.EINVAL)
	_, err := q.Do(ctx, nvme.Command{Opcode: 0x7d, NSID: 1}, Memory{}, 0)
	wantErr("no such command", err, nvme.StatusInvalidOpcode)
	_, err = q.Submit(ctx, nvme.Command{Opcode: nvme.IORead, NSID: 1}, m, 9000)
	wantErr("more than the memory has", err, syscall.EINVAL)

	for entries, want := range map[int]error{1: syscall.EINVAL, 17: syscall.EINVAL} {
		_, err := r.c.NewQueue(ctx, QueueConfig{Entries: entries})
		wantErr(fmt.Sprint(entries, " entries"), err, want)
	}
	_, err = r.c.NewQueue(ctx, QueueConfig{SQInCMB: true})
	wantErr("no CMB", err, syscall.EOPNOTSUPP)
	r.queue(t, QueueConfig{})
	_, err = r.c.NewQueue(ctx, QueueConfig{})
	wantErr("a third queue of two", err, syscall.ENOSPC)
	check(t, q.Close())
	wantErr("a queue that is closed", q.Read(ctx, r.ns, 0, m), ErrClosed)
	r.queue(t, QueueConfig{}) // its number is free again

	ended, cancel := context.WithCancel(ctx)
	cancel()
	_, err = r.c.NextEvent(ended)
	wantErr("no event", err, context.Canceled)
	_, err = r.c.Admin(ctx, nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: uint32(nvme.FeatureQueues)}, Memory{}, 0)
	wantErr("the number of queues, with queues", err, nvme.StatusCommandSequence)
}

// Queues of many lengths, full all the time, many rounds; every completion is of its own command.
func TestWrap(t *testing.T) {
	for _, entries := range []int{2, 3, 4, 7, 64, 1024} {
		t.Run(fmt.Sprint(entries), func(t *testing.T) {
			r := newRig(t, pci.Config{}, Config{})
			ctx := longTime(t)
			q := r.queue(t, QueueConfig{Entries: entries})
			mem := r.memory(t, 512*(entries+1))
			var under []*Request
			rounds := 5*entries + 50
			for i := range rounds {
				slot := mem.Slice(512*(i%(entries+1)), 512)
				if len(under) > entries {
					if _, err := under[0].Wait(ctx); err != nil {
						t.Fatal(err)
					}
					under = under[1:]
				}
				for j := range slot.Bytes {
					slot.Bytes[j] = byte(i)
				}
				cmd := must(BlockCommand(nvme.IOWrite, r.ns, uint64(i%16384), 512))(t)
				under = append(under, must(q.Submit(ctx, cmd, slot, 512))(t))
			}
			for _, req := range under {
				if _, err := req.Wait(ctx); err != nil {
					t.Fatal(err)
				}
			}
			for i := range rounds {
				slot := mem.Slice(0, 512)
				check(t, q.Read(ctx, r.ns, uint64(i), slot))
				if slot.Bytes[0] != byte(i) || slot.Bytes[511] != byte(i) {
					t.Fatalf("block %d is %d", i, slot.Bytes[0])
				}
			}
		})
	}
}

// worker writes and reads its own blocks until the time is over, or an error that is expected comes.
func worker(ctx context.Context, r *rig, q *Queue, rnd *rand.Rand, first, blocks, rounds int, from DMA) error {
	m, err := from.Alloc(4096)
	if err != nil {
		return err
	}
	defer m.Free()
	image := make([]byte, 512*blocks)
	known := make([]bool, blocks)
	for range rounds {
		n := 1 + rnd.IntN(8)
		at := rnd.IntN(blocks - n + 1)
		part := m.Slice(0, 512*n)
		if rnd.IntN(2) == 0 {
			fill(part.Bytes, rnd)
			if err := q.Write(ctx, r.ns, uint64(first+at), part); err != nil {
				return err
			}
			copy(image[512*at:], part.Bytes)
			for i := range n {
				known[at+i] = true
			}
			continue
		}
		if err := q.Read(ctx, r.ns, uint64(first+at), part); err != nil {
			return err
		}
		for i := range n {
			if known[at+i] && !bytes.Equal(part.Bytes[512*i:512*(i+1)], image[512*(at+i):512*(at+i+1)]) {
				return fmt.Errorf("block %d has other bytes", first+at+i)
			}
		}
	}
	return nil
}

// Several queues, by several goroutines each; queues and data in host memory and in the CMB.
func TestManyQueues(t *testing.T) {
	for _, inCMB := range []bool{false, true} {
		t.Run(fmt.Sprintf("CMB=%v", inCMB), func(t *testing.T) {
			r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20)}}, Config{})
			seed := seeded(t).Uint64()
			ctx := longTime(t)
			var from DMA = r.host
			if inCMB {
				from = r.c.CMB()
			}
			var wg sync.WaitGroup
			for i := range 4 {
				q := r.queue(t, QueueConfig{Entries: 2 + 3*i, SQInCMB: inCMB, CQInCMB: inCMB})
				for j := range 3 {
					first := 1000 * (3*i + j)
					rnd := rand.New(rand.NewPCG(seed, uint64(first)))
					wg.Go(func() {
						if err := worker(ctx, r, q, rnd, first, 1000, 300, from); err != nil {
							t.Error(err)
						}
					})
				}
			}
			wg.Wait()
		})
	}
}

// Data in a peer's memory, which is another function's BAR on the same bus.
func TestPeerMemory(t *testing.T) {
	r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20)}}, Config{})
	ctx, q := longTime(t), r.queue(t, QueueConfig{})
	peer := make([]byte, 1<<20)
	check(t, r.host.space.Add(0x8000000000, peer))
	m := Memory{Bytes: peer[8192 : 8192+65536], Addr: 0x8000000000 + 8192}
	fill(m.Bytes, seeded(t))
	before := r.model.Stats()
	check(t, q.Write(ctx, r.ns, 0, m))
	buffer := must(r.c.CMB().Alloc(65536))(t)
	check(t, q.Read(ctx, r.ns, 0, buffer))
	check(t, q.Read(ctx, r.ns, 0, buffer.Slice(0, 4096)))
	if s := r.model.Stats(); s.Commands-before.Commands != 3 || s.BusBytes-before.BusBytes != 65536 || s.CMBBytes-before.CMBBytes != 65536+4096 {
		t.Errorf("%+v, before %+v", s, before)
	}
	if !bytes.Equal(buffer.Bytes, m.Bytes) || !bytes.Contains(r.cmb, m.Bytes) {
		t.Error("other bytes in the CMB than in the peer's memory")
	}
	buffer.Free()
	check(t, r.host.space.Remove(0x8000000000))
	if err := q.Write(ctx, r.ns, 0, m); !errors.Is(err, nvme.StatusDataTransferError) {
		t.Errorf("memory that is gone: %v", err)
	}
}

// What the CMB's registers do not allow is refused.
func TestCMBLimits(t *testing.T) {
	t.Run("uses", func(t *testing.T) {
		r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20), Without: nvme.CMBSZCQ | nvme.CMBSZWrite}}, Config{})
		ctx := longTime(t)
		if _, err := r.c.NewQueue(ctx, QueueConfig{CQInCMB: true}); !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Error(err)
		}
		q := r.queue(t, QueueConfig{SQInCMB: true})
		m := must(r.c.CMB().Alloc(4096))(t)
		check(t, q.Read(ctx, r.ns, 0, m))
		if err := q.Write(ctx, r.ns, 0, m); !errors.Is(err, nvme.StatusInvalidCMBUse) {
			t.Error(err)
		}
	})
	t.Run("combinations", func(t *testing.T) {
		r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20), Restrict: nvme.CMBLOCIndependent}}, Config{})
		ctx := longTime(t)
		host, own := r.queue(t, QueueConfig{}), r.queue(t, QueueConfig{Entries: 8, SQInCMB: true})
		m := r.memory(t, 65536)
		check(t, host.Read(ctx, r.ns, 0, m))
		check(t, own.Read(ctx, r.ns, 0, m)) // its lists are in the CMB, too
	})
	t.Run("legacy", func(t *testing.T) {
		r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20), Legacy: true, Address: cmbAddr}}, Config{})
		q := r.queue(t, QueueConfig{SQInCMB: true, CQInCMB: true})
		m := must(r.c.CMB().Alloc(8192))(t)
		check(t, q.Write(longTime(t), r.ns, 0, m))
	})
	t.Run("allocator", func(t *testing.T) {
		c := newCMB(Memory{Bytes: make([]byte, 16*pageSize)})
		rnd := seeded(t)
		var held []Memory
		total := 0
		for range 2000 {
			if n := 1 + rnd.IntN(5*pageSize); rnd.IntN(2) == 0 {
				m, err := c.Alloc(n)
				switch {
				case err == nil:
					for i := range m.Bytes {
						if m.Bytes[i] != 0 {
							t.Fatal("memory was given out twice")
						}
						m.Bytes[i] = 1
					}
					held, total = append(held, m), total+len(m.Bytes)
				case !errors.Is(err, syscall.ENOMEM) || total == 0:
					t.Fatal(err)
				}
			} else if len(held) > 0 {
				i := rnd.IntN(len(held))
				total -= len(held[i].Bytes)
				clear(held[i].Bytes)
				held[i].Free()
				held[i] = held[len(held)-1]
				held = held[:len(held)-1]
			}
		}
		for i := range held {
			held[i].Free()
		}
		if n := c.pool.Available(); n != 16*pageSize {
			t.Errorf("%d bytes are free", n)
		}
		for n, want := range map[int]error{0: syscall.EINVAL, -1: syscall.EINVAL, 17 * pageSize: syscall.ENOMEM} {
			if _, err := c.Alloc(n); !errors.Is(err, want) {
				t.Errorf("%d bytes: %v", n, err)
			}
		}
	})
}

// A reset in the middle of traffic: commands end, new queues work, and what was written before is there.
func TestResetInTraffic(t *testing.T) {
	r := newRig(t, pci.Config{CMB: &pci.CMB{Memory: make([]byte, 1<<20)}}, Config{})
	seed := seeded(t).Uint64()
	ctx := longTime(t)
	mark := r.memory(t, 512)
	copy(mark.Bytes, "before all resets")
	check(t, r.queue(t, QueueConfig{}).Write(ctx, r.ns, 16000, mark))
	check(t, r.c.Reset())
	for round := range 10 {
		var wg sync.WaitGroup
		for i := range 3 {
			q := r.queue(t, QueueConfig{Entries: 4, SQInCMB: i == 1, CQInCMB: i == 2})
			rnd := rand.New(rand.NewPCG(seed, uint64(3*round+i)))
			wg.Go(func() {
				err := worker(ctx, r, q, rnd, 1000*i, 1000, 1<<30, r.host)
				// A reset of the subsystem takes the CMB away with queues in it.
				if !errors.Is(err, ErrReset) && (round%2 == 0 || !errors.Is(err, ErrFatal)) {
					t.Error(err)
				}
			})
		}
		time.Sleep(time.Duration(round) * 200 * time.Microsecond)
		if round%2 == 1 {
			r.model.Write32(nvme.RegNSSR, nvme.NSSRMagic) // the subsystem is reset under the driver
		}
		check(t, r.c.Reset())
		wg.Wait()
	}
	got := r.memory(t, 512)
	check(t, r.queue(t, QueueConfig{}).Read(ctx, r.ns, 16000, got))
	if !bytes.Equal(got.Bytes, mark.Bytes) {
		t.Error("what was written before is not there")
	}
}

// The controller vanishes under its driver, with commands under way.
func TestSurpriseRemoval(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	ctx, q := longTime(t), r.queue(t, QueueConfig{})
	var wg sync.WaitGroup
	for i := range 2 {
		rnd := rand.New(rand.NewPCG(1, uint64(i)))
		wg.Go(func() {
			err := worker(ctx, r, q, rnd, 1000*i, 1000, 1<<30, r.host)
			if !errors.Is(err, ErrGone) {
				t.Error(err)
			}
		})
	}
	time.Sleep(time.Millisecond)
	r.model.Close()
	wg.Wait()
	if err := r.c.Reset(); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
	if _, err := Open(r.model, r.host, nil); !errors.Is(err, ErrGone) {
		t.Error(err)
	}
}

func TestEvents(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	ctx := longTime(t)
	if _, err := r.c.Admin(ctx, nvme.Command{Opcode: nvme.AdminSetFeatures, CDW10: uint32(nvme.FeatureAsyncEvents), CDW11: nvme.AsyncNamespaces}, Memory{}, 0); err != nil {
		t.Fatal(err)
	}
	check(t, r.sub.AddNamespace(5, must(nvme.NewMemory(1<<20, 512))(t)))
	if e, err := r.c.NextEvent(ctx); err != nil || e != (nvme.Event{Type: nvme.EventNotice, LogPage: nvme.LogChangedNamespaces}) {
		t.Errorf("%+v, %v", e, err)
	}
	page := r.memory(t, 4096)
	read := func(id uint8) {
		t.Helper()
		if _, err := r.c.Admin(ctx, nvme.LogPageCommand(id, 0, 4096, false), page, 4096); err != nil {
			t.Fatal(err)
		}
	}
	read(nvme.LogChangedNamespaces)
	if page.Bytes[0] != 5 || page.Bytes[4] != 0 {
		t.Errorf("% x", page.Bytes[:8])
	}
	// Doorbells that are not possible.
	for _, bad := range []struct {
		what     string
		off, val uint32
		info     uint8
	}{
		{"a queue that there is not", 0x1000 + 8*3, 1, nvme.ErrorInvalidDoorbell},
		{"a completion queue that there is not", 0x1004 + 8*9, 1, nvme.ErrorInvalidDoorbell},
		{"a tail behind the queue", 0x1000 + 8, 64, nvme.ErrorInvalidDoorbellValue},
		{"the same tail", 0x1000 + 8, 0, nvme.ErrorInvalidDoorbellValue},
		{"a head that takes what is not there", 0x1004 + 8, 1, nvme.ErrorInvalidDoorbellValue},
		{"a head behind the queue", 0x1004 + 8, 1 << 31, nvme.ErrorInvalidDoorbellValue},
	} {
		q := r.queue(t, QueueConfig{})
		r.model.Write32(bad.off, bad.val)
		if e, err := r.c.NextEvent(ctx); err != nil || e != (nvme.Event{Type: nvme.EventError, Info: bad.info, LogPage: nvme.LogErrors}) {
			t.Errorf("%s: %+v, %v", bad.what, e, err)
		}
		read(nvme.LogErrors)
		check(t, q.Flush(ctx, r.ns)) // nothing else has happened
		check(t, q.Close())
	}
	// A wait that is given up is taken up again.
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	if _, err := r.c.NextEvent(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	check(t, r.sub.RemoveNamespace(5))
	if e, err := r.c.NextEvent(ctx); err != nil || e.Type != nvme.EventNotice {
		t.Errorf("%+v, %v", e, err)
	}
	read(nvme.LogChangedNamespaces)
	// A reset ends it.
	if _, err := r.c.NextEvent(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	check(t, r.c.Reset())
	if _, err := r.c.NextEvent(ctx); !errors.Is(err, ErrReset) {
		t.Error(err)
	}
}

// badDoorbell makes the controller report an event.
func (r *rig) badDoorbell() { r.model.Write32(nvme.RegDoorbells+8*40, 1) }

// An event that comes beside the end of a context is returned once.
func TestEventOnce(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	ended, cancel := context.WithCancel(longTime(t))
	cancel()
	want := nvme.Event{Type: nvme.EventError, Info: nvme.ErrorInvalidDoorbell, LogPage: nvme.LogErrors}
	if _, err := r.c.NextEvent(ended); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	r.badDoorbell()
	seen := 0
	for range 20 {
		if e, err := r.c.NextEvent(ended); err == nil {
			if seen++; e != want {
				t.Errorf("%+v", e)
			}
		}
		time.Sleep(time.Millisecond)
	}
	if seen == 0 { // it is slower than all that
		if e, err := r.c.NextEvent(longTime(t)); err != nil || e != want {
			t.Errorf("%+v, %v", e, err)
		}
	}
	if seen > 1 {
		t.Errorf("an event was returned %d times", seen)
	}
}

// Several calls wait for events: each ends with its own context, and an event goes to one of them.
func TestEventCallers(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	long, cancel := context.WithCancel(longTime(t))
	defer cancel()
	type result struct {
		event nvme.Event
		err   error
	}
	results := make(chan result, 3)
	for range 3 {
		go func() {
			e, err := r.c.NextEvent(long)
			results <- result{e, err}
		}()
	}
	for begun := false; !begun; time.Sleep(time.Millisecond) {
		r.c.ring.mu.Lock()
		begun = len(r.c.ring.free) < r.c.ring.entries-1
		r.c.ring.mu.Unlock()
	}
	short, stop := context.WithTimeout(long, 10*time.Millisecond)
	defer stop()
	done := make(chan error, 1)
	go func() {
		_, err := r.c.NextEvent(short)
		done <- err
	}()
	select {
	case err := <-done:
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Error("a call waits for the context of another")
	}
	r.badDoorbell()
	if got := <-results; got.err != nil || got.event.Info != nvme.ErrorInvalidDoorbell {
		t.Errorf("%+v", got)
	}
	cancel()
	for range 2 {
		if got := <-results; !errors.Is(got.err, context.Canceled) {
			t.Errorf("%+v", got)
		}
	}
}

// An admin queue that has ended ends a wait for events, for whatever reason.
func TestEventDeadQueue(t *testing.T) {
	r := newRig(t, pci.Config{}, Config{})
	short, stop := context.WithTimeout(longTime(t), time.Millisecond)
	defer stop()
	if _, err := r.c.NextEvent(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	r.c.ring.kill(ErrTimeout) // as after an identify command that was given up
	if _, err := r.c.NextEvent(longTime(t)); !errors.Is(err, ErrTimeout) {
		t.Error(err)
	}
	check(t, r.c.Reset())
}
