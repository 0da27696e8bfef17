package nvme

// I/O commands (NVMe Base 1.4, 6). A command holds its namespace while it is executed (Subsystem.lookup). Ranges are
// checked in blocks, by subtracting, and only then become bytes.

import (
	"bytes"
	"errors"
	"io"
	"sync"
	"syscall"
)

// blockBytes returns how many bytes a read, write or compare moves.
func (c *Controller) blockBytes(cmd *Command) (int, Status) {
	a, st := c.sub.lookup(cmd.NSID)
	if st != StatusSuccess {
		return 0, st
	}
	defer a.release()
	_, n, st := a.extent(cmd.SLBA(), cmd.blocks())
	if st == StatusSuccess && n > int64(c.MaxTransfer()) {
		return 0, StatusInvalidField | StatusDNR
	}
	return int(n), st
}

// extent returns where blocks lie in bytes.
func (a *attached) extent(lba, blocks uint64) (off, n int64, st Status) {
	size := a.blocks()
	if lba > size || blocks > size-lba {
		return 0, 0, StatusLBAOutOfRange | StatusDNR
	}
	return int64(lba << a.shift), int64(blocks << a.shift), StatusSuccess
}

// executeIO executes a command that check has passed.
func (c *Controller) executeIO(info *commandInfo, cmd *Command, data [][]byte) Status {
	if cmd.Opcode == IOFlush && cmd.NSID == NSIDAll {
		return c.flushAll()
	}
	a, st := c.sub.lookup(cmd.NSID)
	if st != StatusSuccess {
		return st
	}
	defer a.release()
	if info.effects&effectWrites != 0 && a.readOnly && cmd.Opcode != IOFlush {
		return StatusWriteProtected | StatusDNR
	}
	switch cmd.Opcode {
	case IOFlush:
		return c.status(a.Flush(), true)
	case IODatasetManagement:
		return c.datasetManagement(a, cmd, data)
	}

	off, n, st := a.extent(cmd.SLBA(), cmd.blocks())
	if st != StatusSuccess {
		return st
	}
	if cmd.Opcode == IOWriteZeroes {
		return c.writeZeroes(a, cmd, off, n)
	}
	if n > int64(c.MaxTransfer()) {
		return StatusInvalidField | StatusDNR
	}
	if !holds(data, int(n)) {
		return StatusDataSGLLength | StatusDNR
	}
	switch cmd.Opcode {
	case IORead:
		c.counts.read(n)
		return c.status(a.transfer(data, off, int(n), false), false)
	case IOWrite:
		c.counts.write(n)
		return c.finishWrite(a, cmd, a.transfer(data, off, int(n), true))
	case IOCompare:
		c.counts.read(n)
		return c.compare(a, data, off, int(n))
	}
	return StatusInvalidOpcode | StatusDNR
}

// finishWrite makes what was written persistent, if the host wants that at once.
func (c *Controller) finishWrite(a *attached, cmd *Command, err error) Status {
	if err == nil && (cmd.CDW12&CDW12FUA != 0 || c.writeThrough.Load()) {
		err = a.Flush()
	}
	return c.status(err, true)
}

// status turns an error of a namespace into a status.
func (c *Controller) status(err error, write bool) Status {
	switch {
	case err == nil:
		return StatusSuccess
	case errors.Is(err, ErrReadOnly):
		return StatusWriteProtected | StatusDNR
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT), errors.Is(err, syscall.EFBIG):
		return StatusCapacityExceeded
	case !ofMedium(err):
		return StatusInternal // without DNR: a path that is lost or slow may come back
	}
	c.counts.mediaErrors.Add(1)
	if write {
		return StatusWriteFault
	}
	return StatusUnrecoveredRead
}

// ofMedium reports whether an error says that the medium has lost data or does not take it: EIO, a file that has become
// shorter, or the same of a controller that the namespace lies behind.
func ofMedium(err error) bool {
	for _, e := range []error{syscall.EIO, io.ErrUnexpectedEOF, StatusWriteFault, StatusUnrecoveredRead} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

// flushAll flushes all namespaces: VWC in identify data offers that.
func (c *Controller) flushAll() Status {
	for _, nsid := range c.sub.table.Load().ids {
		a, st := c.sub.lookup(nsid)
		if st != StatusSuccess {
			continue // it was removed meanwhile
		}
		st = c.status(a.Flush(), true)
		a.release()
		if st != StatusSuccess {
			return st
		}
	}
	return StatusSuccess
}

// holds reports whether the pieces have n bytes.
func holds(data [][]byte, n int) bool {
	for _, p := range data {
		if n -= min(n, len(p)); n == 0 {
			return true
		}
	}
	return n == 0
}

// transfer moves n bytes at off between the namespace and the pieces, which hold that much. Pieces that are no whole
// blocks go through a buffer, so that a block is never moved in two halves.
func (a *attached) transfer(data [][]byte, off int64, n int, write bool) error {
	block := 1 << a.shift
	for n > 0 {
		p := data[0][:min(n, len(data[0]))]
		if len(p)%block != 0 {
			return a.bounce(data, off, n, write)
		}
		if err := a.move(p, off, write); err != nil {
			return err
		}
		data, off, n = data[1:], off+int64(len(p)), n-len(p)
	}
	return nil
}

// move moves bytes between the namespace and one piece. A namespace that moves fewer than all without an error breaks
// its promise, and is not believed.
func (a *attached) move(p []byte, off int64, write bool) error {
	if len(p) == 0 {
		return nil
	}
	var got int
	var err error
	if write {
		got, err = a.WriteAt(p, off)
	} else {
		got, err = a.ReadAt(p, off)
	}
	if err == nil && got != len(p) {
		err = syscall.EIO
	}
	return err
}

// bounceSize is a multiple of every block size.
const bounceSize = 1 << maxBlockShift

var bouncePool = sync.Pool{New: func() any { return new([bounceSize]byte) }}

func (a *attached) bounce(data [][]byte, off int64, n int, write bool) error {
	buf := bouncePool.Get().(*[bounceSize]byte)
	defer bouncePool.Put(buf)
	cur := pieces{rest: data}
	for n > 0 {
		part := buf[:min(n, bounceSize)]
		if write {
			cur.gather(part)
		}
		if err := a.move(part, off, write); err != nil {
			return err
		}
		if !write {
			cur.scatter(part)
		}
		off, n = off+int64(len(part)), n-len(part)
	}
	return nil
}

// pieces is a place in the memory of a command.
type pieces struct {
	rest [][]byte
	at   int // in the first of rest
}

// next returns at most n of the bytes that follow. There are some.
func (p *pieces) next(n int) []byte {
	for p.at == len(p.rest[0]) {
		p.rest, p.at = p.rest[1:], 0
	}
	b := p.rest[0][p.at:]
	b = b[:min(n, len(b))]
	p.at += len(b)
	return b
}

// gather fills b from the pieces, which have that much.
func (p *pieces) gather(b []byte) {
	for len(b) > 0 {
		b = b[copy(b, p.next(len(b))):]
	}
}

// scatter writes b to the pieces, which have room for it.
func (p *pieces) scatter(b []byte) {
	for len(b) > 0 {
		b = b[copy(p.next(len(b)), b):]
	}
}

// compare compares n bytes at off with the pieces.
func (c *Controller) compare(a *attached, data [][]byte, off int64, n int) Status {
	stored := bouncePool.Get().(*[bounceSize]byte)
	defer bouncePool.Put(stored)
	cur := pieces{rest: data}
	for n > 0 {
		part := stored[:min(n, bounceSize)]
		if err := a.move(part, off, false); err != nil {
			return c.status(err, false)
		}
		for rest := part; len(rest) > 0; {
			p := cur.next(len(rest))
			if !bytes.Equal(p, rest[:len(p)]) {
				return StatusCompareFailure // without DNR: others may write what is compared with
			}
			rest = rest[len(p):]
		}
		off, n = off+int64(len(part)), n-len(part)
	}
	return StatusSuccess
}

// writeZeroes makes blocks zero. It may deallocate them if the host says so: they read as zeros either way (DLFEAT).
func (c *Controller) writeZeroes(a *attached, cmd *Command, off, n int64) Status {
	if cmd.CDW12&CDW12Deallocate != 0 {
		return c.finishWrite(a, cmd, a.Discard(off, n))
	}
	for n > 0 {
		part := min(n, int64(len(zeros)))
		if err := a.move(zeros[:part], off, true); err != nil {
			return c.status(err, true)
		}
		off, n = off+part, n-part
	}
	return c.finishWrite(a, cmd, nil)
}

// rangeSize is the size of a range of dataset management; a command has at most 256.
const (
	rangeSize = 16
	maxRanges = 256
)

// datasetManagement deallocates ranges, after it has looked at all of them. Other attributes are hints, which are
// taken and not used.
func (c *Controller) datasetManagement(a *attached, cmd *Command, data [][]byte) Status {
	n := rangeSize * (int(cmd.CDW10&0xff) + 1)
	if !holds(data, n) {
		return StatusDataSGLLength | StatusDNR
	}
	var buf [rangeSize * maxRanges]byte
	(&pieces{rest: data}).gather(buf[:n])
	each := func(do func(off, n int64) Status) Status {
		for r := buf[:n]; len(r) > 0; r = r[rangeSize:] {
			off, n, st := a.extent(le.Uint64(r[8:]), uint64(le.Uint32(r[4:])))
			if st == StatusSuccess && n > 0 {
				st = do(off, n)
			}
			if st != StatusSuccess {
				return st
			}
		}
		return StatusSuccess
	}
	st := each(func(_, _ int64) Status { return StatusSuccess })
	if st != StatusSuccess || cmd.CDW11&CDW11Deallocate == 0 {
		return st
	}
	return each(func(off, n int64) Status { return c.status(a.Discard(off, n), true) })
}

// PutRange writes a range of dataset management.
func PutRange(b *[16]byte, lba uint64, blocks uint32) {
	le.PutUint32(b[0:], 0)
	le.PutUint32(b[4:], blocks)
	le.PutUint64(b[8:], lba)
}
