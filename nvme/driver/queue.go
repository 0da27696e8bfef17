package driver

// I/O queues, and the commands that a program uses.

import (
	"context"
	"fmt"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/nvme"
)

// QueueConfig describes an I/O queue.
type QueueConfig struct {
	Entries int  // at least 2; 0: 64, or what the controller has at most
	SQInCMB bool // commands in the controller memory buffer
	CQInCMB bool // completions there
}

// Queue is a pair of I/O queues. All methods may be called at the same time.
type Queue struct {
	c    *Controller
	ring *ring

	deletion  *Request // guarded by c.admin: a command of delete that was not waited for to its end; nil: none
	sqDeleted bool     // guarded by c.admin
}

// NewQueue makes a pair of I/O queues.
//
// Errors: EINVAL for a length that is not possible; EOPNOTSUPP if queues cannot lie in the CMB; ENOSPC if the controller
// has granted no more queues; statuses of commands; those of DMA.Alloc. After ErrTimeout, ErrFatal and ErrBroken the
// controller may know of the queue, which keeps its number and memory until a reset.
func (c *Controller) NewQueue(ctx context.Context, cfg QueueConfig) (*Queue, error) {
	const op = "nvme_new_queue"
	c.admin.Lock()
	defer c.admin.Unlock()
	if c.closed {
		return nil, ErrClosed
	}
	if err := c.ring.refusal(); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	if cfg.Entries == 0 {
		cfg.Entries = min(64, c.info.MaxEntries)
	}
	if cfg.Entries < 2 || cfg.Entries > c.info.MaxEntries {
		return nil, ib.Errorf(op, syscall.EINVAL, "%d entries: 2 to %d are possible", cfg.Entries, c.info.MaxEntries)
	}
	sq, cq, lists, err := c.places(op, cfg)
	if err != nil {
		return nil, err
	}
	id := uint16(1)
	for c.queues[id] != nil {
		id++
	}
	if int(id) > c.info.IOQueues {
		return nil, ib.Errorf(op, syscall.ENOSPC, "the controller has granted %d queues", c.info.IOQueues)
	}
	r, err := c.newRing(id, cfg.Entries, sq, cq, lists)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	r.sgl = c.cfg.SGL && c.info.SGLS&3 != 0
	q := &Queue{c: c, ring: r}
	if err := q.create(); err != nil {
		if givenUp(err) { // the controller may still come to use the memory, so it stays until a reset
			r.refuse(ErrClosed)
			c.queues[id] = q
		} else {
			r.release()
		}
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	c.queues[id] = q
	return q, nil
}

// places returns where the memory of a queue is taken from.
func (c *Controller) places(op string, cfg QueueConfig) (sq, cq, lists DMA, err error) {
	sq, cq, lists = c.dma, c.dma, c.dma
	have := func(use nvme.CMBSZ) bool { return c.buffer != nil && c.info.CMB&use != 0 }
	if cfg.SQInCMB {
		if !have(nvme.CMBSZSQ) {
			return nil, nil, nil, ib.Errorf(op, syscall.EOPNOTSUPP, "submission queues cannot lie in the controller memory buffer")
		}
		sq = c.buffer
		if c.info.CMBLocation&nvme.CMBLOCIndependent == 0 { // lists have to lie where the command does
			if !have(nvme.CMBSZLists) {
				return nil, nil, nil, ib.Errorf(op, syscall.EOPNOTSUPP, "lists can lie neither in the controller memory buffer nor elsewhere")
			}
			lists = c.buffer
		}
	}
	if cfg.CQInCMB {
		if !have(nvme.CMBSZCQ) {
			return nil, nil, nil, ib.Errorf(op, syscall.EOPNOTSUPP, "completion queues cannot lie in the controller memory buffer")
		}
		cq = c.buffer
	}
	return sq, cq, lists, nil
}

// create has the controller use the memory: the completion queue first.
func (q *Queue) create() error {
	r, ctx := q.ring, context.Background()
	const contiguous = 1
	cmd := nvme.Command{Opcode: nvme.AdminCreateCQ, CDW10: uint32(r.id) | uint32(r.entries-1)<<16, CDW11: contiguous}
	cmd.SetPRP(r.cq.Addr, 0)
	if _, err := q.c.do(ctx, cmd, Memory{}, 0); err != nil {
		return err
	}
	cmd = nvme.Command{Opcode: nvme.AdminCreateSQ, CDW10: cmd.CDW10, CDW11: contiguous | uint32(r.id)<<16}
	cmd.SetPRP(r.sq.Addr, 0)
	_, err := q.c.do(ctx, cmd, Memory{}, 0)
	if err != nil {
		_, _ = q.c.do(ctx, nvme.Command{Opcode: nvme.AdminDeleteCQ, CDW10: uint32(r.id)}, Memory{}, 0)
	}
	return err
}

// delete has the controller use the memory no more. After an error, the next call goes on where this one ended. The
// caller holds admin.
func (q *Queue) delete() error {
	if !q.sqDeleted {
		if err := q.deleteStep(nvme.AdminDeleteSQ); err != nil {
			return err
		}
		q.sqDeleted = true
		q.ring.mute()
	}
	return q.deleteStep(nvme.AdminDeleteCQ)
}

// deleteStep executes a command, or waits again for the one that an earlier call has given up.
func (q *Queue) deleteStep(opcode uint8) error {
	ctx := context.Background()
	if q.deletion == nil {
		req, err := q.c.ring.submit(ctx, true, nvme.Command{Opcode: opcode, CDW10: uint32(q.ring.id)}, Memory{}, 0, nil)
		if err != nil {
			return err
		}
		q.deletion = req
	}
	_, err := q.deletion.Wait(ctx)
	if !givenUp(err) {
		q.deletion = nil
	}
	return err
}

// Close deletes the queue. Commands that are under way return ErrClosed, or their completions. Closing again, or after
// the controller, does nothing. After an error, closing again does what is left to be done.
func (q *Queue) Close() error {
	c := q.c
	c.admin.Lock()
	defer c.admin.Unlock()
	if c.queues[q.ring.id] != q {
		return nil
	}
	q.ring.refuse(ErrClosed)
	if err := q.delete(); err != nil {
		return fmt.Errorf("nvme_close_queue: %w", err) // the controller may still use the memory, so it stays
	}
	delete(c.queues, q.ring.id)
	q.ring.kill(ErrClosed)
	q.ring.release()
	return nil
}

// Submit hands an I/O command to the controller, with n bytes of data, and does not wait for its completion. It waits
// while the queue is full. The data pointer and the CID are the driver's.
func (q *Queue) Submit(ctx context.Context, cmd nvme.Command, data Memory, n int) (*Request, error) {
	return q.ring.submit(ctx, false, cmd, data, n, nil)
}

// Do executes an I/O command.
func (q *Queue) Do(ctx context.Context, cmd nvme.Command, data Memory, n int) (nvme.Completion, error) {
	req, err := q.Submit(ctx, cmd, data, n)
	if err != nil {
		return nvme.Completion{}, err
	}
	return req.Wait(ctx)
}

// Read reads blocks into all of data.
func (q *Queue) Read(ctx context.Context, ns Namespace, lba uint64, data Memory) error {
	return q.move(ctx, nvme.IORead, ns, lba, data)
}

// Write writes blocks from all of data.
func (q *Queue) Write(ctx context.Context, ns Namespace, lba uint64, data Memory) error {
	return q.move(ctx, nvme.IOWrite, ns, lba, data)
}

// Compare compares blocks with all of data: nvme.StatusCompareFailure if they differ.
func (q *Queue) Compare(ctx context.Context, ns Namespace, lba uint64, data Memory) error {
	return q.move(ctx, nvme.IOCompare, ns, lba, data)
}

func (q *Queue) move(ctx context.Context, opcode uint8, ns Namespace, lba uint64, data Memory) error {
	cmd, err := BlockCommand(opcode, ns, lba, len(data.Bytes))
	if err == nil {
		_, err = q.Do(ctx, cmd, data, len(data.Bytes))
	}
	return err
}

// BlockCommand makes a read, write or compare of n bytes, for Submit.
//
// Errors: EINVAL if n is not one to 65536 blocks; EOPNOTSUPP for a namespace with metadata.
func BlockCommand(opcode uint8, ns Namespace, lba uint64, n int) (nvme.Command, error) {
	const op = "nvme_block_command"
	switch {
	case ns.Metadata != 0:
		return nvme.Command{}, ib.Errorf(op, syscall.EOPNOTSUPP, "namespace %d has metadata", ns.ID)
	case ns.BlockSize <= 0 || n <= 0 || n%ns.BlockSize != 0 || n/ns.BlockSize > 65536:
		return nvme.Command{}, ib.Errorf(op, syscall.EINVAL, "%d bytes in blocks of %d", n, ns.BlockSize)
	}
	cmd := nvme.Command{Opcode: opcode, NSID: ns.ID}
	cmd.SetLBA(lba, n/ns.BlockSize)
	return cmd, nil
}

// Flush returns when everything that was written before is on stable storage.
func (q *Queue) Flush(ctx context.Context, ns Namespace) error {
	_, err := q.Do(ctx, nvme.Command{Opcode: nvme.IOFlush, NSID: ns.ID}, Memory{}, 0)
	return err
}

// WriteZeroes makes 1 to 65536 blocks zero.
func (q *Queue) WriteZeroes(ctx context.Context, ns Namespace, lba uint64, blocks int) error {
	if blocks < 1 || blocks > 65536 {
		return ib.Errorf("nvme_write_zeroes", syscall.EINVAL, "%d blocks", blocks)
	}
	cmd := nvme.Command{Opcode: nvme.IOWriteZeroes, NSID: ns.ID}
	cmd.SetLBA(lba, blocks)
	_, err := q.Do(ctx, cmd, Memory{}, 0)
	return err
}

// Deallocate tells the controller that blocks are not needed.
func (q *Queue) Deallocate(ctx context.Context, ns Namespace, lba uint64, blocks uint32) error {
	cmd, ranges := deallocation(ns, lba, blocks)
	req, err := q.ring.submit(ctx, false, cmd, Memory{}, 0, ranges)
	if err == nil {
		_, err = req.Wait(ctx)
	}
	return err
}

// deallocation makes a dataset management command, and the one range that is its data.
func deallocation(ns Namespace, lba uint64, blocks uint32) (cmd nvme.Command, ranges []byte) {
	var b [16]byte
	nvme.PutRange(&b, lba, blocks)
	return nvme.Command{Opcode: nvme.IODatasetManagement, NSID: ns.ID, CDW11: nvme.CDW11Deallocate}, b[:]
}
