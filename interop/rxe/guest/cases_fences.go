package main

// Fences of the kernel's dma-bufs, which only vgem lets a program attach and signal. Other buffers get them as
// sync files. A fence is attached for the whole of a step; the kernel ends it after ten seconds.
//
//  1. A region is registered and used while a fence is pending: devices do not wait for those of readers and
//     writers.
//  2. Requests are put behind a fence: ours by OpWaitFence, the kernel's by a message that we send behind one.

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/dmabuftest"
	"github.com/verbena-rdma/verbena/verbs"
)

const fencedBytes = 32 << 10

func bufferFences() (rows []*testCase) {
	for _, kind := range dmabuftest.Kinds() {
		for _, op := range []struct {
			name string
			op   verbs.Opcode
		}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"send", verbs.OpSend}} {
			rows = append(rows, everyWay(testCase{name: "rc/dmabuf/fence/" + kind.Name + "/" + op.name, shortV4: kind.Name == "vgem" && op.op == verbs.OpRDMAWrite},
				func(s *scene) error { return s.fenced(kind, op.op) })...)
		}
	}
	return rows
}

// fencedBuffer is a dma-buf of the kernel with fences.
type fencedBuffer struct {
	fd     int
	seen   []byte
	buffer *dmabuf.Buffer
	vgem   *dmabuftest.VGEMBuffer // has the fences
	source *dmabuf.Buffer         // the buffer of vgem, if buffer is another one; else nil
}

// newFencedBuffer makes a buffer of a kind.
func (o *ours) newFencedBuffer(kind dmabuftest.Kind) (b *fencedBuffer, err error) {
	b = new(fencedBuffer)
	if b.vgem, err = dmabuftest.NewVGEMBuffer(bufferSize); err != nil {
		return nil, err
	}
	o.keep(closer(b.vgem.Close))
	if b.fd = b.vgem.FD; kind.Name != "vgem" {
		var cleanup func()
		if b.fd, cleanup, err = kind.New(bufferSize); err != nil {
			return nil, err
		}
		o.keep(closer(cleanup))
		if b.source, err = dmabuf.Get(b.vgem.FD); err != nil {
			return nil, err
		}
		o.keep(closer(b.source.Put))
	}
	if b.buffer, err = dmabuf.Get(b.fd); err != nil {
		return nil, err
	}
	o.keep(closer(b.buffer.Put))
	if b.seen, err = sys.MapDMABuf(b.fd, bufferSize, true); err == nil {
		o.keep(closer(func() { _ = sys.Unmap(b.seen) }))
	}
	return b, err
}

// attach adds a fence to the buffer: of a writer, for which readers wait, or of a reader, for which
// writers wait.
func (b *fencedBuffer) attach(usage dmabuf.Usage) (signal func() error, err error) {
	if signal, err = b.vgem.Fence(usage == dmabuf.Write); err != nil {
		return nil, err
	}
	if b.source != nil {
		fd, err := b.source.ExportFence(context.Background(), usage)
		if err != nil {
			return nil, err
		}
		defer func() { _ = sys.CloseFD(fd) }() // the buffer keeps the fence
		if err := b.buffer.ImportFence(context.Background(), fd, usage); err != nil {
			return nil, err
		}
	}
	return signal, b.wantPending(usage, true)
}

// wantPending checks whether the buffer has fences that are pending, by a wait for them and by poll(2).
func (b *fencedBuffer) wantPending(usage dmabuf.Usage, want bool) error {
	d := time.Millisecond
	if !want {
		d = patience
	}
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	err := b.buffer.WaitFences(ctx, usage)
	if got := errors.Is(err, syscall.ETIMEDOUT); got != want || !got && err != nil {
		return fmt.Errorf("a wait for the fences of %v: %w; pending is %v, want %v", usage, err, got, want)
	}
	if got := !sys.DMABufReady(b.fd, usage == dmabuf.Read); got != want {
		return fmt.Errorf("poll reports of the fences of %v that pending is %v, want %v", usage, got, want)
	}
	return nil
}

// fenced does operations on a buffer with fences.
func (s *scene) fenced(kind dmabuftest.Kind, op verbs.Opcode) error {
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	b, err := s.ours.newFencedBuffer(kind)
	if dmabuftest.Absent(err) {
		return skipError(err.Error())
	}
	if err != nil {
		return err
	}
	theirs, err := s.kernel.alloc(bufferSize, allRights)
	if err != nil {
		return err
	}
	usage := dmabuf.Read // the operation writes the buffer
	if s.weInit != (op == verbs.OpRDMARead) {
		usage = dmabuf.Write
	}

	signal, err := b.attach(usage)
	if err != nil {
		return err
	}
	mr, err := s.ours.pd.RegDMABufMR(verbs.DMABuf{FD: b.fd, Length: bufferSize, IOVA: bufferAddr}, bufferRights)
	mine, err := s.ours.bufferRegion(mr, err, &region{buf: b.seen})
	if err != nil {
		return err
	}
	local, remote := mine, theirs
	if !s.weInit {
		local, remote = theirs, mine
	}
	if err := s.exchange(i, t, local, remote, op, fencedBytes, 1); err != nil {
		return fmt.Errorf("while a fence is pending: %w", err)
	}
	if err := errors.Join(b.wantPending(usage, true), signal(), b.wantPending(usage, false)); err != nil {
		return err
	}

	if signal, err = b.attach(usage); err != nil {
		return err
	}
	if s.weInit {
		err = s.behindFence(i, t, mine, theirs, op, b, usage, signal)
	} else {
		err = s.toldBehindFence(i, t, b, usage, signal)
	}
	if err != nil {
		return fmt.Errorf("behind a fence: %w", err)
	}
	return s.exchange(i, t, local, remote, op, fencedBytes, 4)
}

// post puts a wait for the fences of a class into our send queue.
func (b *fencedBuffer) post(e *end, usage dmabuf.Usage) error {
	fd, err := b.buffer.ExportFence(context.Background(), usage)
	if err != nil {
		return err
	}
	fence, err := dmabuf.FenceFromFD(fd)
	_ = sys.CloseFD(fd) // the fence has a copy
	if err != nil {
		return err
	}
	return e.post(verbs.SendWR{ID: 100, Op: verbs.OpWaitFence, Fence: fence})
}

// wantNone checks that nothing completes yet.
func wantNone(wc verbs.WC, err error) error {
	if errors.As(err, new(errNone)) {
		return nil
	}
	return errors.Join(err, fmt.Errorf("%+v completed before the fence was signalled", wc))
}

// wantSent waits for the completion of a request of ours.
func wantSent(e *end, id uint64, op verbs.WCOpcode) error {
	wc, err := e.sent(e.qp, e.patience)
	if err == nil {
		err = wc.Err()
	}
	if err != nil || wc.ID != id || wc.Op != op {
		return fmt.Errorf("%s: completed %+v, want request %d: %w", e.who(), wc, id, err)
	}
	return nil
}

// behindFence posts an operation of ours behind a fence. The bytes that it is to move come into their place
// after that, and before the fence is signalled; those that it overwrites stay until then.
func (s *scene) behindFence(i, t *end, mine, theirs *region, op verbs.Opcode, b *fencedBuffer, usage dmabuf.Usage, signal func() error) error {
	const early, late, id = 2, 3, 101
	reads := op == verbs.OpRDMARead
	if err := errors.Join(s.ours.fill(mine, 0, fencedBytes, early), s.kernel.fill(theirs, 0, fencedBytes, early)); err != nil {
		return err
	}
	if op == verbs.OpSend {
		if err := t.receive(id, theirs.sge(0, fencedBytes)); err != nil {
			return err
		}
	}
	wr := verbs.SendWR{ID: id, Op: op, SGL: []verbs.SGE{mine.sge(0, fencedBytes)}, RemoteAddr: theirs.addr, RKey: theirs.rkey}
	if err := errors.Join(b.post(i, usage), i.post(wr)); err != nil {
		return err
	}
	if err := wantNone(i.sent(i.qp, 50*time.Millisecond)); err != nil {
		return err
	}
	from, src := party(s.ours), mine
	if reads {
		from, src = s.kernel, theirs
	}
	if err := errors.Join(from.fill(src, 0, fencedBytes, late), signal()); err != nil {
		return err
	}
	if err := errors.Join(wantSent(i, 100, verbs.WCWaitFence), wantSent(i, id, completedAs[op])); err != nil {
		return err
	}
	if op == verbs.OpSend {
		if err := t.wantReceived(verbs.WC{ID: id, Op: verbs.WCRecv, ByteLen: fencedBytes}); err != nil {
			return err
		}
	}
	return errors.Join(s.kernel.check(theirs, 0, fencedBytes, late), s.ours.check(mine, 0, fencedBytes, late))
}

// toldBehindFence sends the kernel a message behind a fence, upon which it may begin.
func (s *scene) toldBehindFence(i, t *end, b *fencedBuffer, usage dmabuf.Usage, signal func() error) error {
	const id = 101
	if err := errors.Join(i.receive(id), b.post(t, usage), t.post(verbs.SendWR{ID: id, Op: verbs.OpSend})); err != nil {
		return err
	}
	if err := wantNone(i.received(i.qp, 50*time.Millisecond)); err != nil {
		return err
	}
	return errors.Join(signal(), wantSent(t, 100, verbs.WCWaitFence), wantSent(t, id, verbs.WCSend),
		i.wantReceived(verbs.WC{ID: id, Op: verbs.WCRecv}))
}
