package tour

// GPU, RDMA adapter and NVMe disk together: a disk's data lands in the memory of a GPU, a fence says so, and a remote
// host fetches it from there by RDMA READ. Three legs do that with the same data: with a buffer that the GPU evicts and
// brings back meanwhile, with a pinned one, and through system memory, with devices that do not reach the GPU.
//
// Top-down: RunUnified makes the machine (unified_machine.go) and goes through the legs; a leg goes through its rounds.
// unified_report.go has the table and the picture. All figures are counters of the parts.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme/direct"
	"github.com/verbena-rdma/verbena/verbs"
)

// TopicUnified is the topic that RunUnified shows.
const TopicUnified = "unified"

const (
	fileSize   = 16 << 20 // what is on the disk
	roundSize  = 2 << 20  // what one round moves: the size of the GPU's buffer
	readSize   = 64 << 10 // of one RDMA READ
	unifiedRAM = 4 << 20  // VRAM: the buffer fits, and not with what another job wants beside it
	otherJob   = 3 << 20
	otherEach  = 3 << 20   // after how many bytes of the leg the other job comes
	otherStays = 512 << 10 // after how many more it goes
	otherLate  = 256 << 10 // by how many it may be late
	sumSize    = 4         // of a checksum

	// enough is how often the buffer has to be evicted and to come back before the first leg ends; mostRounds bounds it.
	enough     = 4
	mostRounds = 512
)

// leg is one way of the data.
type leg struct {
	name, about string
	pin, system bool
}

var legs = []leg{
	{name: "may move", about: "peer to peer; the GPU evicts the buffer when others need VRAM"},
	{name: "pinned", about: "peer to peer; the buffer is held in VRAM", pin: true},
	{name: "system", about: "disk and adapter do not reach the GPU: through system memory", system: true},
}

// RunUnified shows a GPU, an RDMA adapter and a disk that use each other's memory. It goes on after a failure.
func RunUnified(ctx context.Context, out *term.Printer) error {
	t := &tour{ctx: ctx, out: out, began: time.Now(), total: len(legs)}
	out.Printf("%s\n", out.Paint(term.Bold, "A disk's data lands in a GPU's memory; a remote host READs it from there."))
	m, err := newUnified(ctx)
	if err != nil {
		return err
	}
	out.Printf("Each round: NVMe read of %d MiB, fence, message, RDMA READs, checksum.\n\n", roundSize>>20)
	results := make([]result, len(legs))
	for i, g := range legs {
		t.at++
		out.Progress("[%d/%d] %s …", t.at, t.total, g.name)
		r, err := m.run(g)
		results[i] = r
		switch cause := context.Cause(ctx); {
		case cause != nil:
			out.Clear()
			return errors.Join(cause, m.close())
		case err != nil:
			t.fail("", g.name, err)
		default:
			t.passed++
			out.Printf("%s  %-8s  %s\n", out.Paint(term.Green, "ok  "), g.name, g.about)
		}
	}
	if err := m.close(); err != nil {
		t.fail("", "close the devices", err)
	}
	m.report(out, results)
	return t.summary()
}

// result is what the parts have counted in a leg.
type result struct {
	rounds int
	time   time.Duration
	sums   int // of rounds, that were equal

	disk   direct.Stats
	card   gpu.Stats // differences; of what changes only
	copied uint64    // bytes that the GPU's stream has copied to system memory

	fetched  uint64 // that READs have moved, as the remote device counts it
	fromVRAM uint64 // of them, those of READs while the buffer lay in VRAM throughout
	evicted  uint64 // ... in system memory throughout
	moving   uint64 // ... the others: it has moved meanwhile
	faults   uint64 // READs that found the buffer moved, as the adapter counts them
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// checksum returns the checksum that GPUs compute.
func checksum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// run runs a leg, and holds the counters to what must have happened.
func (m *unified) run(g leg) (r result, err error) {
	w, err := m.newWay(g)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, w.close()) }()
	before := m.card.Stats()
	reads, faults := m.counted(w)
	w.job = w.startJob()
	begin := time.Now()
	for err == nil && (r.rounds < fileSize/roundSize || !g.pin && !g.system && !w.seen(before, &r)) {
		if r.rounds == mostRounds {
			err = fmt.Errorf("in %d rounds the buffer was not found at both places: %+v, %+v", r.rounds, m.card.Stats(), w.disk.Stats())
			break
		}
		if err = w.round(&r); err == nil {
			r.rounds++
		}
	}
	r.time = time.Since(begin)
	if e := w.job.end(); err == nil {
		err = e
	}
	r.disk = w.disk.Stats()
	now := m.card.Stats()
	r.card = gpu.Stats{Moves: now.Moves - before.Moves, MovedBytes: now.MovedBytes - before.MovedBytes,
		Evictions: now.Evictions - before.Evictions, Returns: now.Returns - before.Returns}
	r.copied = now.Bytes - before.Bytes - uint64(r.rounds)*sumSize // streams have written the checksums, too
	readsNow, faultsNow := m.counted(w)
	r.fetched, r.faults = readsNow-reads, faultsNow-faults
	if err != nil {
		return r, err
	}
	return r, r.check(g)
}

// seen reports whether the buffer was evicted and has come back often enough, and whether the disk and the remote host
// have found it at both places.
func (w *way) seen(before gpu.Stats, r *result) bool {
	now, d := w.m.card.Stats(), w.disk.Stats()
	return now.Evictions-before.Evictions >= enough && now.Returns-before.Returns >= enough &&
		d.Bus > 0 && d.System > 0 && r.fromVRAM > 0 && r.evicted > 0
}

// check holds the counters to each other.
func (r *result) check(g leg) error {
	total := uint64(r.rounds) * roundSize
	d, peer := r.disk, r.disk.Bus+r.disk.System
	switch {
	case r.sums != r.rounds:
		return fmt.Errorf("%d of %d checksums are equal", r.sums, r.rounds)
	case r.fetched < total:
		return fmt.Errorf("the remote host's device has counted %d bytes of %d", r.fetched, total)
	case g.system && (d.Copied != total || peer != 0 || r.copied != total || r.card.Moves != 0):
		return fmt.Errorf("through system memory: %+v, %d bytes copied by the GPU", r, r.copied)
	case g.pin && (d.Bus != total || d.System+d.Copied != 0 || r.fromVRAM != total || r.card.Moves+r.faults+d.Faults != 0):
		return fmt.Errorf("pinned: %+v", r)
	case !g.pin && !g.system && (peer != total || d.Copied != 0 || r.fromVRAM+r.evicted+r.moving != total || d.Faults == 0 || r.faults == 0):
		return fmt.Errorf("with a buffer that moves: %+v", r)
	}
	return nil
}

// round moves one part of the file: disk, GPU, remote host.
func (w *way) round(r *result) error {
	m, part := w.m, int64(r.rounds%(fileSize/roundSize))*roundSize
	// All is queued before there is any data, and waits for a fence.
	landed := gpu.NewFence("the data has landed")
	err := w.disk.Start(m.ctx, direct.Transfer{Memory: w.memory, Length: roundSize, Offset: part, Done: landed})
	if err != nil {
		return err
	}
	ready, err := w.compute(landed)
	if err != nil {
		return err
	}
	var message [16]byte
	binary.LittleEndian.PutUint64(message[:], w.mr.Addr())
	binary.LittleEndian.PutUint32(message[8:], w.mr.RKey())
	if err := postRecv(w.far, verbs.RecvWR{SGL: []verbs.SGE{m.remote.mr.SGE(roundSize, len(message))}}); err != nil {
		return err
	}
	if err := post(w.near, verbs.SendWR{Op: verbs.OpWaitFence, Fence: ready, Timeout: time.Minute}, verbs.SendWR{Op: verbs.OpSend, Inline: message[:], Flags: verbs.SendSignaled}); err != nil {
		return err
	}
	if _, err := m.lab.expect(m.remote.cq, verbs.WCRecv); err != nil {
		if e := landed.Err(); e != nil {
			err = e // it says more
		}
		return err
	}
	if _, err := m.lab.expect(w.adapter.cq, verbs.WCSend); err != nil {
		return err
	}
	got := m.remote.buf[:roundSize]
	clear(got)
	for off := 0; off < roundSize; off += readSize {
		if err := w.read(r, off); err != nil {
			return err
		}
	}
	want := m.sums[part/roundSize]
	sum, err := w.checksum()
	if err != nil {
		return err
	}
	if here := checksum(got); sum != want || here != want {
		return fmt.Errorf("the checksum of %d bytes at %d is %#x on the disk, %#x at the GPU, %#x at the remote host", roundSize, part, want, sum, here)
	}
	r.sums++
	return nil
}

// read fetches one part of the buffer, and notes where that lay.
func (w *way) read(r *result, off int) error {
	w.job.letIn()
	m, message := w.m, w.m.remote.buf[roundSize:]
	vram, moves := w.buffer.Resident(), w.mr.PagingStats().Invalidations
	if err := post(w.far, verbs.SendWR{Op: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGL: []verbs.SGE{m.remote.mr.SGE(off, readSize)},
		RemoteAddr: binary.LittleEndian.Uint64(message) + uint64(off), RKey: binary.LittleEndian.Uint32(message[8:])}); err != nil {
		return err
	}
	if _, err := m.lab.expect(m.remote.cq, verbs.WCRDMARead); err != nil {
		return err
	}
	w.reads.Add(1)
	switch {
	case w.leg.system:
	case w.mr.PagingStats().Invalidations != moves || w.buffer.Resident() != vram:
		r.moving += readSize
	case vram:
		r.fromVRAM += readSize
	default:
		r.evicted += readSize
	}
	return nil
}

// compute has the GPU use its buffer, when the data has landed: it computes a checksum. If the adapter does not reach the
// GPU, it also copies the buffer to system memory. The event is signalled when that is done.
func (w *way) compute(landed gpu.Fence) (*gpu.Event, error) {
	if err := w.stream.Wait(landed); err != nil {
		return nil, err
	}
	if err := w.stream.Checksum(w.sum.All(), w.buffer.All()); err != nil {
		return nil, err
	}
	if w.leg.system {
		if err := w.stream.Copy(gpu.Host(w.bounce), w.buffer.All()); err != nil {
			return nil, err
		}
	}
	return w.stream.Record()
}

// checksum returns what the GPU has computed.
func (w *way) checksum() (uint32, error) {
	b := make([]byte, sumSize)
	_, err := w.sum.ReadAt(b, 0)
	return binary.LittleEndian.Uint32(b), err
}

// job is another job on the GPU. Each time that the leg has moved some more it allocates memory, and keeps it until the leg
// has moved a part of that.
type job struct {
	w      *way
	due    atomic.Uint64 // how many bytes the leg has moved when the job comes; never: the job is there
	ctx    context.Context
	cancel context.CancelFunc
	ended  chan struct{}
	err    error // guarded by ended: it is read when that is closed
}

const never = math.MaxUint64

func (w *way) startJob() *job {
	j := &job{w: w, ended: make(chan struct{})}
	j.ctx, j.cancel = context.WithCancel(w.m.ctx)
	j.due.Store(otherEach / 4)
	go j.run()
	return j
}

// end ends the job.
func (j *job) end() error {
	j.cancel()
	<-j.ended
	return j.err
}

func (j *job) run() {
	defer close(j.ended)
	for j.await(j.due.Load()) {
		b, err := j.w.m.card.Alloc(otherJob)
		if err != nil {
			j.err = err
			return
		}
		j.due.Store(never)
		j.await(j.w.moved() + otherStays)
		if j.err = b.Free(); j.err != nil {
			return
		}
		j.due.Store(j.w.moved() + otherEach)
	}
}

// await waits until the leg has moved so many bytes. It reports whether the job goes on.
func (j *job) await(bytes uint64) bool {
	for j.ctx.Err() == nil && j.w.moved() < bytes {
		pause(j.ctx)
	}
	return j.ctx.Err() == nil
}

// letIn waits for the job if it is late by a part of a round, so that it comes however busy the machine is.
func (j *job) letIn() {
	for due := j.due.Load(); due != never && j.w.moved() > due+otherLate; due = j.due.Load() {
		select {
		case <-j.ended:
			return
		default:
			pause(j.ctx)
		}
	}
}

// moved returns how much the leg has moved so far.
func (w *way) moved() uint64 {
	s := w.disk.Stats()
	return s.Bus + s.System + s.Copied + w.reads.Load()*readSize
}

// pause waits for a moment, in which others get on.
func pause(ctx context.Context) {
	select {
	case <-time.After(50 * time.Microsecond):
	case <-ctx.Done():
	}
}
