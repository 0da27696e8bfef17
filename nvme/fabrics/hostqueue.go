package fabrics

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/internal/pages"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/verbs"
)

// ErrEnded is the error of commands on a queue whose connection has ended.
var ErrEnded = fmt.Errorf("the connection to the target has ended: %w", syscall.ENOTCONN)

// RefusedError is the error of a connection that the target refuses. errors.Is knows it as cm.ErrRefused.
type RefusedError struct {
	Refusal Refusal
	err     error
}

// Error says why.
func (e *RefusedError) Error() string {
	return fmt.Sprintf("nvme_connect: the target refuses: %v", e.Refusal)
}

// Unwrap returns the error of the connection manager.
func (e *RefusedError) Unwrap() error { return e.err }

// hostQueue is a queue as the host has it: a connection, and slots for commands.
type hostQueue struct {
	h    *Host
	qid  uint16
	size int
	room int // bytes of a capsule behind the command
	most int // bytes of memory, and of a command's data at most

	conn     *cm.Conn
	channel  *verbs.Channel
	cq       *verbs.CQ
	answers  *verbs.MR
	receives []verbs.RecvWR
	capsules *verbs.MR
	memory   *slab

	cancel context.CancelFunc
	ctx    context.Context
	all    sync.WaitGroup // the queue's goroutine
	users  sync.WaitGroup // calls of do; none begins when the queue has ended

	mu      sync.Mutex // guards what follows, and memory
	changed *sync.Cond // a slot or memory is free, or the queue has ended
	unused  []uint16   // numbers of slots, which are the commands'
	slots   []hostSlot
	ended   bool
}

// hostSlot is a command on its way. It is over when its capsule is known to have arrived, and its answer has come.
type hostSlot struct {
	done   chan nvme.Completion // nil: the slot is not in use
	part   pages.Range          // the memory of its data
	sent   bool
	answer *nvme.Completion
	left   bool // nobody waits for it any more
}

func (h *Host) newQueue(ctx context.Context, qid uint16, size, room int) (q *hostQueue, err error) {
	q = &hostQueue{h: h, qid: qid, size: size, room: room, slots: make([]hostSlot, size)}
	q.changed = sync.NewCond(&q.mu)
	q.ctx, q.cancel = context.WithCancel(context.Background())
	defer func() {
		if err != nil {
			_ = q.close() // the first error says more
			q = nil
		}
	}()
	for i := range size {
		q.unused = append(q.unused, uint16(i)) //nolint:gosec // at most maxQueueSize
	}
	if q.channel, err = h.dev.CreateChannel(); err != nil {
		return q, err
	}
	if q.cq, err = h.dev.CreateCQ(2*size+4, q.channel); err != nil {
		return q, err
	}
	if q.answers, err = h.pd.AllocMR(size*answerBytes, verbs.AccessLocalWrite); err != nil {
		return q, err
	}
	for i := range size {
		q.receives = append(q.receives, verbs.RecvWR{ID: idRecv | uint64(i), SGL: []verbs.SGE{q.answers.SGE(i*answerBytes, answerBytes)}}) //nolint:gosec // an index
	}
	if q.capsules, err = h.pd.AllocMR(size*(commandBytes+room), 0); err != nil {
		return q, err
	}
	q.most = size*page + 2*h.transfer
	mr, err := h.pd.AllocMR(q.most, verbs.AccessLocalWrite|verbs.AccessRemoteRead|verbs.AccessRemoteWrite)
	if err != nil {
		return q, err
	}
	q.memory = newSlab(mr, mr.Bytes(), nil)
	want := request{qid: qid, recvSize: uint16(size), sendSize: uint16(size - 1)} //nolint:gosec // at most maxQueueSize
	if qid != 0 {
		want.controller = h.controller
	}
	conf := h.cfg.Config
	conf.Device, conf.PD, conf.SendCQ, conf.RecvCQ, conf.Private = h.dev, h.pd, q.cq, q.cq, want.pack()
	conf.Cap = verbs.QPCap{MaxSendWR: size + 1, MaxRecvWR: size + 1, MaxSendSGE: 1, MaxRecvSGE: 1}
	conf.Setup = func(c *cm.Conn) error {
		for i := range size {
			if err := q.receive(c.QP(), i); err != nil {
				return err
			}
		}
		return nil
	}
	if q.conn, err = cm.Dial(ctx, h.address, &conf); err != nil {
		var no *cm.RejectError
		if errors.As(err, &no) && no.Reason == cm.ReasonProgram && len(no.Private) >= refuseBytes {
			err = &RefusedError{Refusal: Refusal(le.Uint16(no.Private[2:])), err: err}
		}
		return q, err
	}
	q.all.Go(q.serve)
	return q, nil
}

func (q *hostQueue) receive(qp *verbs.QP, i int) error {
	_, err := qp.PostRecv(q.receives[i : i+1])
	return err
}

// close ends the queue. A second call does nothing.
func (q *hostQueue) close() error {
	q.end()
	q.all.Wait()
	q.users.Wait()
	var err error
	if q.conn != nil {
		err = q.conn.Close()
		q.conn = nil
	}
	if q.cq != nil {
		err = errors.Join(err, q.cq.Close())
	}
	if q.channel != nil {
		err = errors.Join(err, q.channel.Close())
	}
	for _, mr := range []*verbs.MR{q.answers, q.capsules} {
		if mr != nil {
			err = errors.Join(err, mr.Close())
		}
	}
	if q.memory != nil {
		err = errors.Join(err, q.memory.close())
		q.memory = nil
	}
	return err
}

// end lets all commands fail, and the queue's goroutine end.
func (q *hostQueue) end() {
	q.cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended = true
	for i := range q.slots {
		if s := &q.slots[i]; s.done != nil {
			close(s.done)
			*s = hostSlot{}
		}
	}
	q.changed.Broadcast()
}

// serve takes completions until the connection ends.
func (q *hostQueue) serve() {
	defer q.end()
	wcs := make([]verbs.WC, 32)
	take := func() (n int, ok bool) {
		n, err := q.cq.Poll(wcs)
		if err != nil {
			return 0, false
		}
		for i := range wcs[:n] {
			if !q.completed(&wcs[i]) {
				return n, false
			}
		}
		return n, true
	}
	for q.ctx.Err() == nil {
		n, ok := take()
		if !ok {
			return
		}
		if n > 0 {
			continue
		}
		if q.cq.RequestNotify(false) != nil {
			return
		}
		if n, ok = take(); !ok { // what came before the queue was armed
			return
		}
		if n > 0 {
			continue
		}
		e, err := q.channel.Next(q.ctx)
		if err != nil {
			return
		}
		e.Ack()
	}
}

func (q *hostQueue) completed(wc *verbs.WC) bool {
	if wc.Status != verbs.WCSuccess {
		return false
	}
	i := int(uint32(wc.ID))
	if wc.ID&^0xffffffff != idRecv {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.slots[i].sent = true
		q.overLocked(i)
		return true
	}
	if wc.ByteLen < answerBytes {
		return false // not an answer
	}
	c := nvme.ParseCompletion((*[answerBytes]byte)(q.answers.Bytes()[i*answerBytes:]))
	if q.receive(q.conn.QP(), i) != nil {
		return false
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if int(c.CID) >= len(q.slots) || q.slots[c.CID].done == nil || q.slots[c.CID].answer != nil {
		return false // the target answers what was not asked
	}
	q.slots[c.CID].answer = &c
	q.overLocked(int(c.CID))
	return true
}

// overLocked tells who waits for a command that it is over, if it is.
func (q *hostQueue) overLocked(i int) {
	s := &q.slots[i]
	switch {
	case !s.sent || s.answer == nil:
	case s.left:
		q.freeLocked(i)
	default:
		s.done <- *s.answer // it has room for one
	}
}

// freeLocked gives a slot and its memory back.
func (q *hostQueue) freeLocked(i int) {
	if s := &q.slots[i]; s.part.N > 0 {
		q.memory.pool.Free(s.part)
	}
	q.slots[i] = hostSlot{}
	q.unused = append(q.unused, uint16(i)) //nolint:gosec // at most maxQueueSize
	q.changed.Broadcast()
}

// begin gets a slot, and memory for data. The caller is one of users then.
func (q *hostQueue) begin(ctx context.Context, n int) (cid uint16, p pages.Range, done chan nvme.Completion, err error) {
	stop := context.AfterFunc(ctx, func() {
		q.mu.Lock() // nobody is between looking and waiting
		defer q.mu.Unlock()
		q.changed.Broadcast()
	})
	defer stop()
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if q.ended {
			return 0, p, nil, ErrEnded
		}
		if err := ctx.Err(); err != nil {
			return 0, p, nil, err
		}
		if len(q.unused) > 0 {
			ok := n == 0
			if !ok {
				p, ok = q.memory.pool.Alloc(uint64(n)) //nolint:gosec // positive
			}
			if ok {
				break
			}
		}
		q.changed.Wait()
	}
	last := len(q.unused) - 1
	cid, q.unused = q.unused[last], q.unused[:last]
	done = make(chan nvme.Completion, 1)
	q.slots[cid] = hostSlot{done: done, part: p}
	q.users.Add(1)
	return cid, p, done, nil
}

// finish gives a slot back, or leaves it to be given back when the command is over.
func (q *hostQueue) finish(cid uint16, over bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	s := &q.slots[cid]
	switch {
	case q.ended: // all of them are gone
	case over, s.sent && s.answer != nil:
		q.freeLocked(int(cid))
	default:
		s.left = true
	}
}

// do executes a command, and returns its answer. Data goes to the target, or comes from it. A context that ends leaves
// the command to the target: what it needs is given back when its answer comes.
func (q *hostQueue) do(ctx context.Context, cmd nvme.Command, data []byte, dir nvme.Direction) (nvme.Completion, error) {
	if most := min(q.h.transfer, q.most); len(data) > most { // the first queue's memory was made when transfer was a page
		return nvme.Completion{}, fmt.Errorf("nvme: a command of %d bytes, at most %d: %w", len(data), most, syscall.EINVAL)
	}
	inline := dir == nvme.FromHost && len(data) <= q.room
	n := len(data)
	if inline || dir == nvme.NoData {
		n = 0
	}
	cid, p, done, err := q.begin(ctx, n)
	if err != nil {
		return nvme.Completion{}, err
	}
	defer q.users.Done()
	cmd.CID = cid
	d := nvme.SGL{Type: nvme.SGLKeyed}
	length := commandBytes
	at := int(cid) * (commandBytes + q.room)
	capsule := q.capsules.Bytes()[at : at+commandBytes+q.room]
	switch {
	case dir == nvme.NoData:
	case inline:
		d = nvme.SGL{Type: nvme.SGLData, Sub: nvme.SGLOffset, Length: uint32(len(data))} //nolint:gosec // at most room
		length += copy(capsule[commandBytes:], data)
	default:
		d.Addr, d.Length, d.Key = q.memory.mr.Addr()+p.Off, uint32(len(data)), q.memory.mr.RKey() //nolint:gosec // at most transfer
		if dir == nvme.FromHost {
			copy(q.memory.bytes(p, len(data)), data)
		}
	}
	cmd.SetSGL(d)
	cmd.Put((*[commandBytes]byte)(capsule))
	if _, err := q.conn.QP().PostSend([]verbs.SendWR{{ID: idReply | uint64(cid), Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{q.capsules.SGE(at, length)}}}); err != nil {
		q.finish(cid, true)
		return nvme.Completion{}, fmt.Errorf("%w: %w", ErrEnded, err)
	}
	select {
	case c, ok := <-done:
		if !ok {
			return c, ErrEnded
		}
		if dir == nvme.ToHost && c.Status == nvme.StatusSuccess {
			copy(data, q.memory.bytes(p, len(data)))
		}
		q.finish(cid, true)
		return c, nil
	case <-ctx.Done():
		q.finish(cid, false)
		return nvme.Completion{}, ctx.Err()
	}
}
