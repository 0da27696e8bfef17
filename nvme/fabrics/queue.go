package fabrics

import (
	"context"
	"errors"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/internal/pages"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// queue is a host's queue: a connection, with a receive for each command that the host may have under way, and slots for
// commands. A slot is in use from the moment a capsule has come until the host's device has confirmed the answer; by then
// the host may have sent its next command, so there are more slots than receives.
//
// One goroutine takes completions, and owns everything but what a worker has: a slot, from the moment it gets it until
// it has posted the answer. It takes what has come since it looked last, and posts all answers to that together: so one
// acknowledgement and one system call are for many commands when there is much to do.
type queue struct {
	t     *Target
	qid   uint16
	size  int // of the connection: commands that may be under way
	conn  *cm.Conn
	of    *association // nil until the host has sent its Connect; set under the target's mu
	since time.Time

	ctx    context.Context
	cancel context.CancelFunc

	channel  *verbs.Channel
	cq       *verbs.CQ
	capsules *verbs.MR // for the receives
	receives []verbs.RecvWR
	stride   int   // of capsules
	memory   *slab // for data; nil until the host has sent its Connect
	connects *slab // for the data of Connect commands
	slots    []slot
	unused   []*slot
	early    []capsule // came when no slot was free
	backlog  []*slot   // wait for memory, the first one longest
	flow     bool      // the host is told how far its queue is taken
	entries  int       // of the host's queue, by its Connect
	leaves   *slot     // a Disconnect: when it is answered, the queue ends
	heard    bool      // a command has come since seen of the association was set
	out      outbox    // of the queue's goroutine

	mu     sync.Mutex // guards what follows
	head   uint16     // how far the host's queue is taken
	events []*slot    // async event requests, which wait: only of the first queue

	workers chan *slot // nil: the queue's goroutine executes
	working sync.WaitGroup
}

// capsule is a receive that has completed.
type capsule struct {
	recv int // which one
	n    int // bytes
}

// slot is a command on its way.
type slot struct {
	i int
	capsule
	cmd   nvme.Command
	where nvme.SGL
	need  int // bytes that the command moves
	dir   nvme.Direction
	data  [1][]byte // what the command works on; part is where that lies
	part  pages.Range
	prior *slot // whose answer was posted together with this one, before it; nil: none was
	sge   [1]verbs.SGE
	reply [answerBytes]byte
}

// outbox is what is posted together. Receives come first: the host may send its next command when it has an answer. Of the
// answers only the last one asks for a completion, which is for all of them.
type outbox struct {
	receives []verbs.RecvWR
	sends    []verbs.SendWR
	bytes    int   // that the sends move
	last     *slot // of the last answer; nil: there is none
	answer   int   // which of sends that is
}

// outboxBytes is how many bytes wait for others at most: the network is not idle while the answers to long reads are made.
const outboxBytes = 64 << 10

// add returns a request to fill in.
func (o *outbox) add() *verbs.SendWR {
	o.sends = append(o.sends, verbs.SendWR{})
	return &o.sends[len(o.sends)-1]
}

// What a work request was: in the high half of its ID. The low half is the slot, or the receive.
const (
	idRecv = iota << 32
	idRead
	idReply
)

// allocate makes what the queue needs, but for the connection, and for the memory that data passes through: whoever connects
// and sends no Connect command gets none of that.
func (q *queue) allocate() (err error) {
	if q.channel, err = q.t.dev.CreateChannel(); err != nil {
		return err
	}
	if q.cq, err = q.t.dev.CreateCQ(6*q.size, q.channel); err != nil {
		return err
	}
	q.stride = commandBytes
	if q.qid != 0 {
		q.stride += q.t.cfg.InCapsule
	}
	if q.capsules, err = q.t.pd.AllocMR(q.size*q.stride, verbs.AccessLocalWrite); err != nil {
		return err
	}
	for i := range q.size {
		q.receives = append(q.receives, verbs.RecvWR{ID: idRecv | uint64(i), SGL: []verbs.SGE{q.capsules.SGE(i*q.stride, q.stride)}}) //nolint:gosec // an index
	}
	if q.connects, err = q.t.ownSlab(page); err != nil {
		return err
	}
	q.slots = make([]slot, 2*q.size)
	for i := range q.slots {
		q.slots[i].i = i
		q.unused = append(q.unused, &q.slots[i])
	}
	return nil
}

// connect accepts the host's request.
func (q *queue) connect(r *cm.Request) (err error) {
	conf := q.t.cfg.Config
	conf.Device, conf.PD, conf.SendCQ, conf.RecvCQ = q.t.dev, q.t.pd, q.cq, q.cq
	conf.Cap = verbs.QPCap{MaxSendWR: 4 * q.size, MaxRecvWR: q.size, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: answerBytes}
	conf.Private = accepted(q.size)
	conf.Setup = func(c *cm.Conn) error {
		for i := range q.size {
			if err := q.receive(c.QP(), i); err != nil {
				return err
			}
		}
		return nil
	}
	q.conn, err = r.Accept(q.ctx, &conf)
	return err
}

// receive posts a receive.
func (q *queue) receive(qp *verbs.QP, i int) error {
	_, err := qp.PostRecv(q.receives[i : i+1])
	return err
}

// end gives everything back. It is called once, by the queue's goroutine.
func (q *queue) end() {
	q.cancel()
	defer q.t.removeQueue(q)
	if q.workers != nil {
		close(q.workers)
		q.working.Wait()
	}
	if q.of != nil {
		q.of.leave(q)
		if q.qid == 0 {
			q.of.close()
		}
	}
	var err error
	if q.conn != nil {
		err = q.conn.Close()
	}
	if q.cq != nil {
		err = errors.Join(err, q.cq.Close())
	}
	if q.channel != nil {
		err = errors.Join(err, q.channel.Close())
	}
	if q.capsules != nil {
		err = errors.Join(err, q.capsules.Close())
	}
	for _, m := range []*slab{q.connects, q.memory} {
		if m != nil {
			err = errors.Join(err, m.close())
		}
	}
	if err != nil {
		q.t.cfg.Log.Error("a queue is not closed", "queue", q.qid, "error", err)
	}
}

// spin is how long a queue looks for completions before it sleeps.
const spin = 30 * time.Microsecond

// serve takes completions until the connection ends.
func (q *queue) serve() {
	if n := q.t.cfg.Workers; n > 0 && q.qid != 0 {
		q.workers = make(chan *slot, q.size)
		for range n {
			q.working.Go(func() {
				debug.SetPanicOnFault(true) // for guarded
				var out outbox
				for s := range q.workers {
					q.execute(s, &out)
					q.post(&out)
				}
			})
		}
	}
	debug.SetPanicOnFault(true) // for guarded
	wcs := make([]verbs.WC, 32)
	idle := time.Now()
	for q.ctx.Err() == nil {
		n, ok := q.take(wcs)
		switch {
		case !ok:
			return
		case n > 0:
			idle = time.Now()
			if q.heard && q.of != nil {
				q.of.seen.Store(idle.UnixNano())
				q.heard = false
			}
		case time.Since(idle) < spin:
			runtime.Gosched()
		case !q.sleep(wcs):
			return
		}
	}
}

// take takes what has come, and posts what that leads to. It reports whether the queue goes on.
func (q *queue) take(wcs []verbs.WC) (n int, ok bool) {
	n, err := q.cq.Poll(wcs)
	if err != nil {
		return 0, false
	}
	for i := range wcs[:n] {
		if !q.completed(&wcs[i]) {
			return n, false
		}
	}
	q.post(&q.out)
	return n, true
}

// sleep waits for a completion. It reports whether the queue goes on.
func (q *queue) sleep(wcs []verbs.WC) bool {
	if err := q.cq.RequestNotify(false); err != nil {
		return false
	}
	if n, ok := q.take(wcs); n > 0 || !ok { // what came before the queue was armed
		return ok
	}
	e, err := q.channel.Next(q.ctx)
	if err != nil {
		return false
	}
	e.Ack()
	return true
}

// completed takes a completion. It reports whether the queue goes on.
func (q *queue) completed(wc *verbs.WC) bool {
	if wc.Status != verbs.WCSuccess {
		if wc.Status != verbs.WCWRFlushErr {
			q.t.cfg.Log.Warn("a request has failed", "queue", q.qid, "status", wc.Status)
		}
		return false
	}
	i := int(uint32(wc.ID))
	switch wc.ID &^ 0xffffffff {
	case idRecv:
		return q.came(capsule{recv: i, n: int(wc.ByteLen)})
	case idRead:
		s := &q.slots[i]
		q.t.stats.read.Add(uint64(s.need))
		q.run(s)
	case idReply:
		for s := &q.slots[i]; s != nil; {
			prior := s.prior // release may use the slot again
			if !q.release(s) {
				return false
			}
			s = prior
		}
	}
	return true
}

// release ends the use of a slot, and lets what waits for it or for its memory go on.
func (q *queue) release(s *slot) bool {
	if s.part.N > 0 {
		q.memoryOf(s).pool.Free(s.part)
		s.part = pages.Range{}
		for len(q.backlog) > 0 && q.fetch(q.backlog[0]) {
			q.backlog = q.backlog[1:]
		}
	}
	if s == q.leaves {
		return false
	}
	q.unused = append(q.unused, s)
	if len(q.early) == 0 {
		return true
	}
	c := q.early[0]
	q.early = q.early[1:]
	return q.came(c)
}

// came takes a capsule that has come. It reports whether the queue goes on.
func (q *queue) came(c capsule) bool {
	if c.n < commandBytes {
		q.t.cfg.Log.Warn("a capsule is too short", "queue", q.qid, "bytes", c.n)
		return false // there is no command to answer
	}
	last := len(q.unused) - 1
	if last < 0 {
		q.early = append(q.early, c)
		return true
	}
	s := q.unused[last]
	q.unused = q.unused[:last]
	s.capsule = c
	q.command(s)
	return true
}

// command takes a command.
func (q *queue) command(s *slot) {
	q.t.stats.commands.Add(1)
	q.heard = true
	b := q.capsules.Bytes()[s.recv*q.stride:]
	s.cmd = nvme.ParseCommand((*[commandBytes]byte)(b))
	s.where = s.cmd.SGL()
	var st nvme.Status
	if s.need, s.dir, st = q.transfer(s); st == nvme.StatusSuccess {
		st = q.checkData(s)
	}
	if st != nvme.StatusSuccess {
		s.dir = nvme.NoData // nothing was moved
		q.answer(s, nvme.Completion{Status: st}, &q.out)
		return
	}
	if len(q.backlog) > 0 || !q.fetch(s) {
		q.t.stats.waited.Add(1)
		q.backlog = append(q.backlog, s)
	}
}

// transfer returns how many bytes a command moves, and which way.
func (q *queue) transfer(s *slot) (int, nvme.Direction, nvme.Status) {
	if s.cmd.Opcode == nvme.OpcodeFabrics {
		if s.cmd.FabricsType() == nvme.FabricsConnect {
			return nvme.ConnectDataSize, nvme.FromHost, nvme.StatusSuccess
		}
		return 0, nvme.NoData, nvme.StatusSuccess
	}
	if q.of == nil || !q.of.props.up.Load() {
		return 0, 0, nvme.StatusCommandSequence
	}
	return q.of.ctrl.Load().Transfer(q.qid == 0, &s.cmd)
}

// checkData compares what the command moves with what its descriptor says.
func (q *queue) checkData(s *slot) nvme.Status {
	d, behind := &s.where, uint64(s.n-commandBytes) //nolint:gosec // a capsule has at least a command
	switch {
	case s.cmd.Flags&nvme.FlagPSDTMask != nvme.FlagSGL:
		return nvme.StatusInvalidField | nvme.StatusDNR
	case s.dir == nvme.NoData || s.need == 0:
		return nvme.StatusSuccess
	case !isInCapsule(d) && !isKeyed(d), isInCapsule(d) && s.dir != nvme.FromHost:
		return nvme.StatusSGLType | nvme.StatusDNR
	case uint64(d.Length) != uint64(s.need): //nolint:gosec // positive
		return nvme.StatusDataSGLLength | nvme.StatusDNR
	case isKeyed(d) && s.need > q.t.cfg.MaxTransfer:
		return nvme.StatusInvalidField | nvme.StatusDNR
	case isInCapsule(d) && (d.Addr > behind || uint64(d.Length) > behind-d.Addr):
		return nvme.StatusSGLOffset | nvme.StatusDNR
	}
	return nvme.StatusSuccess
}

// memoryOf returns the memory that a command's data passes through. Connect is the only command of the transport with data,
// and transfer refuses the others until a Connect was taken.
func (q *queue) memoryOf(s *slot) *slab {
	if s.cmd.Opcode == nvme.OpcodeFabrics {
		return q.connects
	}
	return q.memory
}

// fetch gets a command's data, or the memory for it, and has the command executed when it is there. It reports whether
// there was memory.
func (q *queue) fetch(s *slot) bool {
	s.data[0] = nil
	if s.dir == nvme.NoData || s.need == 0 {
		q.run(s)
		return true
	}
	if isInCapsule(&s.where) {
		at := s.recv*q.stride + commandBytes + int(s.where.Addr) //nolint:gosec // it lies in the capsule
		s.data[0] = q.capsules.Bytes()[at : at+s.need]
		q.t.stats.inCapsule.Add(uint64(s.need))
		q.run(s)
		return true
	}
	m := q.memoryOf(s)
	var ok bool
	if s.part, ok = m.pool.Alloc(uint64(s.need)); !ok {
		return false
	}
	s.data[0] = m.bytes(s.part, s.need)
	if s.dir == nvme.ToHost {
		q.run(s)
		return true
	}
	s.sge[0] = m.sge(s.part, s.need)
	w := q.out.add()
	w.ID, w.Op, w.Flags, w.SGL, w.RemoteAddr, w.RKey = idRead|uint64(s.i), verbs.OpRDMARead, verbs.SendSignaled, s.sge[:], s.where.Addr, s.where.Key
	return true
}

// post posts what is in an outbox. If it fails, the connection has ended, and completions say so.
func (q *queue) post(o *outbox) {
	qp := q.conn.QP()
	var err error
	if len(o.receives) > 0 {
		_, err = qp.PostRecv(o.receives)
	}
	if o.last != nil {
		o.sends[o.answer].Flags |= verbs.SendSignaled
	}
	if err == nil && len(o.sends) > 0 {
		_, err = qp.PostSend(o.sends)
	}
	if err != nil {
		q.t.cfg.Log.Warn("a request was not taken", "queue", q.qid, "error", err)
		q.cancel()
	}
	*o = outbox{receives: o.receives[:0], sends: o.sends[:0]}
}

// run has a command executed whose data is there.
func (q *queue) run(s *slot) {
	if q.workers != nil && s.cmd.Opcode != nvme.OpcodeFabrics {
		q.workers <- s // it has room for all slots
		return
	}
	q.execute(s, &q.out)
}

// execute executes a command, and answers.
func (q *queue) execute(s *slot, o *outbox) {
	if s.cmd.Opcode == nvme.OpcodeFabrics {
		q.answer(s, q.fabrics(s), o)
		return
	}
	waits := q.qid == 0 && s.cmd.Opcode == nvme.AdminAsyncEventRequest
	if waits && !q.addEvent(s) {
		q.answer(s, nvme.Completion{Status: nvme.StatusCIDConflict | nvme.StatusDNR}, o)
		return
	}
	c, now, err := q.guarded(s)
	switch {
	case err != nil:
		q.t.cfg.Log.Warn("memory of the queue has gone away", "queue", q.qid, "error", err)
		q.cancel()
	case !now: // event answers
	case !waits || q.takeEvent(func(e *slot) bool { return e == s }) != nil:
		q.answer(s, c, o)
	}
}

// guarded executes a command. Memory of Buffers may go away, with the device that has it: that is an error, and no end of
// the program. The goroutine has called debug.SetPanicOnFault.
func (q *queue) guarded(s *slot) (c nvme.Completion, now bool, err error) {
	defer func() {
		if r := recover(); r != nil {
			fault, ok := r.(interface {
				error
				Addr() uintptr
			})
			if !ok {
				panic(r)
			}
			err = fault
		}
	}()
	data := s.data[:]
	if s.data[0] == nil {
		data = nil
	}
	c, now = q.of.ctrl.Load().Execute(q.qid == 0, &s.cmd, data)
	return c, now, nil
}

// addEvent notes an async event request. It reports whether no other one with its number waits.
func (q *queue) addEvent(s *slot) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if slices.ContainsFunc(q.events, func(e *slot) bool { return e.cmd.CID == s.cmd.CID }) {
		return false
	}
	q.events = append(q.events, s)
	return true
}

// takeEvent returns the slot of an async event request that waits.
func (q *queue) takeEvent(is func(*slot) bool) *slot {
	q.mu.Lock()
	defer q.mu.Unlock()
	i := slices.IndexFunc(q.events, is)
	if i < 0 {
		return nil
	}
	s := q.events[i]
	q.events = slices.Delete(q.events, i, i+1)
	return s
}

// event answers an async event request: the controller calls it.
func (q *queue) event(c nvme.Completion) {
	if s := q.takeEvent(func(e *slot) bool { return e.cmd.CID == c.CID }); s != nil {
		var out outbox
		q.answer(s, c, &out)
		q.post(&out)
	}
}

// dropEvents answers the async event requests that wait: the controller does not know them any more.
func (q *queue) dropEvents() {
	for {
		s := q.takeEvent(func(*slot) bool { return true })
		if s == nil {
			return
		}
		var out outbox
		q.answer(s, nvme.Completion{Status: nvme.StatusAbortRequested}, &out)
		q.post(&out)
	}
}

// answer puts the data of a read and the answer into an outbox, and the capsule's receive.
func (q *queue) answer(s *slot, c nvme.Completion, o *outbox) {
	c.CID, c.SQID = s.cmd.CID, 0
	c.SQHead = q.taken()
	c.Put(&s.reply)
	o.receives = append(o.receives, q.receives[s.recv])
	if s.dir == nvme.ToHost && c.Status == nvme.StatusSuccess && s.need > 0 {
		s.sge[0] = q.memory.sge(s.part, s.need)
		w := o.add()
		w.Op, w.SGL, w.RemoteAddr, w.RKey = verbs.OpRDMAWrite, s.sge[:], s.where.Addr, s.where.Key
		q.t.stats.written.Add(uint64(s.need))
		o.bytes += s.need
	}
	s.prior, o.last, o.answer = o.last, s, len(o.sends)
	w := o.add()
	w.ID, w.Op, w.Inline = idReply|uint64(s.i), verbs.OpSend, s.reply[:]
	if s.where.Type == nvme.SGLKeyed && s.where.Sub == nvme.SGLInvalidate && s.dir != nvme.NoData && s.need > 0 {
		w.Op, w.InvalidateKey = verbs.OpSendInv, s.where.Key
	}
	if o.bytes >= outboxBytes {
		q.post(o)
	}
}

// taken counts a command as taken out of the host's queue, and returns how far that is.
func (q *queue) taken() uint16 {
	if !q.flow {
		return 0xffff
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	q.head++
	if int(q.head) >= q.entries {
		q.head = 0
	}
	return q.head
}
