package tour

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// bufferSteps are a tour of dma-bufs: memory of an exporter, which the second device registers
// and the first one, its peer, reads and writes.
var bufferSteps = []step{
	{"RC", "reg_dmabuf_mr", shareStep},
	{"RC", "refused", refusedBuffersStep},
	{"RC", "move", moveStep},
	{"RC", "evict", evictStep},
	{"RC", "Kernel fence", fenceStep},
	{"RC", "revoke", revokeBufferStep},
	{"RC", "device memory", exportedDMStep},
	{"RC", "rereg_mr", reregBufferStep},
	{"RC", "pinned", pinnedStep},
}

const (
	bufferSegments = 5
	bufferIOVA     = 0x7e00_0000_0000 // where the peer finds the buffer: requests name no address of the exporter's
	bufferRights   = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite
)

// shared is a buffer of half bytes that a device has registered, and a connection to a peer that
// accesses it.
type shared struct {
	*lab
	*pair
	memory *dmabuf.Memory
	mr     *verbs.MR
	data   []byte // what the buffer holds
}

// withShared runs a step with a buffer of several segments, filled with fresh data and registered
// by its descriptor on the second device.
func withShared(l *lab, f func(s *shared) (string, error)) (detail string, err error) {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: half, Segments: bufferSegments, Name: "demo"})
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, m.Close()) }()
	return l.withPair(verbs.RC, func(p *pair) (string, error) {
		s := &shared{lab: l, pair: p, memory: m, data: bytes.Clone(l.source(l.a, half))}
		if _, err := m.WriteAt(s.data, 0); err != nil {
			return "", err
		}
		if err := s.register(); err != nil {
			return "", err
		}
		detail, err := f(s)
		return detail, errors.Join(err, s.mr.Close())
	})
}

// register registers the buffer by a descriptor, which it closes at once.
func (s *shared) register() error {
	fd, err := s.memory.Buffer().FD()
	if err != nil {
		return err
	}
	s.mr, err = s.lab.b.pd.RegDMABufMR(verbs.DMABuf{FD: fd, Length: half, IOVA: bufferIOVA}, bufferRights)
	return errors.Join(err, closeFD(fd))
}

func closeFD(fd int) error { return os.NewFile(uintptr(fd), "dma-buf").Close() }

// counted returns an error unless the buffer was taken away and found again so many times.
func (s *shared) counted(moves uint64) error {
	if st := s.mr.PagingStats(); st.Invalidations != moves || st.PageFaults != moves || st.RemoteFaults != moves || st.FailedResolutions != 0 {
		return fmt.Errorf("after %d moves the region has counted %+v", moves, st)
	}
	return nil
}

// request returns a request of the peer's for the whole buffer: what is sent, or what
// was read, lies at off of the first device's memory.
func (s *shared) request(op verbs.Opcode, off int) verbs.SendWR {
	return verbs.SendWR{Op: op, SGL: []verbs.SGE{s.lab.a.mr.SGE(off, half)}, RemoteAddr: bufferIOVA, RKey: s.mr.RKey()}
}

// read has the peer read the buffer, and compares what came.
func (s *shared) read() error {
	if err := s.postRead(); err != nil {
		return err
	}
	return s.arrived()
}

func (s *shared) postRead() error {
	_, off := s.lab.a.sink(half)
	return post(s.pair.a, s.request(verbs.OpRDMARead, off))
}

func (s *shared) arrived() error {
	if _, err := s.expect(s.lab.a.cq, verbs.WCRDMARead); err != nil {
		return err
	}
	return same(s.lab.a.buf[half:], s.data)
}

// write has the peer write fresh data to the buffer, and compares what the exporter has.
func (s *shared) write() error {
	s.data = bytes.Clone(s.source(s.lab.a, half))
	if err := post(s.pair.a, s.request(verbs.OpRDMAWrite, 0)); err != nil {
		return err
	}
	if _, err := s.expect(s.lab.a.cq, verbs.WCRDMAWrite); err != nil {
		return err
	}
	return s.exporterHas(s.data)
}

func (s *shared) exporterHas(want []byte) error {
	got := make([]byte, half)
	if _, err := s.memory.ReadAt(got, 0); err != nil {
		return err
	}
	return same(got, want)
}

// shareStep registers a buffer by its descriptor.
func shareStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (string, error) {
		if err := errors.Join(s.read(), s.write(), s.read(), s.counted(0)); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d KiB in %d segments, by a descriptor that is closed at once; read and written by the peer", half>>10, bufferSegments), nil
	})
}

// refusedBuffersStep tries registrations that are refused, in the order in which the reasons
// are looked for.
func refusedBuffersStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (_ string, err error) {
		fd, err := s.memory.Buffer().FD()
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, closeFD(fd)) }()
		file, err := os.Open(os.DevNull)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, file.Close()) }()
		for _, c := range []struct {
			why   string
			part  verbs.DMABuf
			more  verbs.Access // rights beside the usual ones
			errno syscall.Errno
		}{
			{"another place in a page", verbs.DMABuf{FD: -1, Offset: 8, Length: 8, IOVA: 16}, 0, syscall.EINVAL},
			{"on demand", verbs.DMABuf{FD: -1, Length: half}, verbs.AccessOnDemand, syscall.EINVAL},
			{"no descriptor", verbs.DMABuf{FD: -1}, 0, syscall.EBADF},
			{"no dma-buf", verbs.DMABuf{FD: int(file.Fd()), Length: half}, 0, syscall.EINVAL},
			{"no bytes", verbs.DMABuf{FD: fd}, 0, syscall.EINVAL},
			{"beyond the end", verbs.DMABuf{FD: fd, Length: half + 1}, 0, syscall.EINVAL},
		} {
			if err := s.mustFail(c.part, c.more, c.errno); err != nil {
				return "", fmt.Errorf("%s: %w", c.why, err)
			}
		}
		return "a descriptor that is not open: EBADF; another file, wrong rights, a wrong part: EINVAL", s.read()
	})
}

// mustFail returns an error unless a registration fails with errno.
func (s *shared) mustFail(part verbs.DMABuf, more verbs.Access, errno syscall.Errno) error {
	mr, err := s.lab.b.pd.RegDMABufMR(part, bufferRights|more)
	if mr != nil {
		return errors.Join(errors.New("registered"), mr.Close())
	}
	if !errors.Is(err, errno) {
		return fmt.Errorf("%w, not %w", err, errno)
	}
	return nil
}

// whileRead runs f while the peer reads the buffer all the time; every READ is compared. f gets a
// function that waits until a READ has ended that began after the call.
func (s *shared) whileRead(f func(readAgain func() error) error) (reads uint64, err error) {
	var done atomic.Uint64
	var stop atomic.Bool
	var failed error // read when the reader has ended
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for !stop.Load() && failed == nil {
			if failed = s.read(); failed == nil {
				done.Add(1)
			}
		}
	}()
	err = f(func() error {
		for from := done.Load(); done.Load() < from+2; { // the first may have begun before
			select {
			case <-ended:
				return errors.New("the peer does not read any more")
			case <-time.After(100 * time.Microsecond):
			}
		}
		return nil
	})
	stop.Store(true)
	<-ended
	return done.Load(), errors.Join(failed, err)
}

const bufferMoves = 20

// moveStep moves the buffer while the peer reads it.
func moveStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (string, error) {
		reads, err := s.whileRead(func(readAgain func() error) error {
			for range bufferMoves {
				if err := errors.Join(s.memory.Move(l.ctx), readAgain()); err != nil {
					return err
				}
			}
			return nil
		})
		if err := errors.Join(err, s.write(), s.moved(bufferMoves), s.counted(bufferMoves)); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d times, while the peer reads it %d times; %d faults, no error", bufferMoves, reads, bufferMoves), nil
	})
}

// moved returns an error unless the exporter has moved the buffer so many times.
func (s *shared) moved(times uint64) error {
	if n := s.memory.Moves(); n != times {
		return fmt.Errorf("the exporter has moved the buffer %d times, not %d times", n, times)
	}
	return nil
}

// evictStep has the exporter take the buffer to where the device cannot reach it. The peer's
// next READ brings it back.
func evictStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (string, error) {
		reads, err := s.whileRead(func(readAgain func() error) error {
			for range bufferMoves {
				if err := errors.Join(s.memory.Evict(l.ctx), readAgain()); err != nil {
					return err
				}
			}
			return nil
		})
		if err := errors.Join(err, s.moved(2*bufferMoves), s.counted(bufferMoves)); err != nil {
			return "", err
		}
		return fmt.Sprintf("%d times, and brought back by a READ each time; %d READs, no error", bufferMoves, reads), nil
	})
}

// fenceStep adds fences to a buffer that has moved. A Write fence does not hold the peer's
// request. A Kernel fence does, until it is signalled.
func fenceStep(l *lab) (string, error) {
	const held = 20 * time.Millisecond
	return withShared(l, func(s *shared) (string, error) {
		write, err := s.moveAndFence(dmabuf.Write)
		if err != nil {
			return "", err
		}
		err = s.read()
		write.Signal(nil)
		if err != nil {
			return "", fmt.Errorf("with a Write fence: %w", err)
		}
		kernel, err := s.moveAndFence(dmabuf.Kernel)
		if err != nil {
			return "", err
		}
		defer kernel.Signal(nil) // for the returns before it is signalled
		if err := s.postRead(); err != nil {
			return "", err
		}
		time.Sleep(held)
		if err := s.nothingLeft(); err != nil {
			return "", fmt.Errorf("before the Kernel fence is signalled: %w", err)
		}
		if n := s.mr.PagingStats().PageFaults; n != 1 {
			return "", fmt.Errorf("%d faults have ended before the Kernel fence is signalled, not 1", n)
		}
		kernel.Signal(nil)
		return fmt.Sprintf("a READ waits until it is signalled, here %v; a Write fence holds no READ", held), errors.Join(s.arrived(), s.counted(2))
	})
}

// moveAndFence moves the buffer, so that the device maps it anew, and adds a fence.
func (s *shared) moveAndFence(usage dmabuf.Usage) (*dmabuf.Fence, error) {
	if err := s.memory.Move(s.ctx); err != nil {
		return nil, err
	}
	fence, r := dmabuf.NewFence(), s.memory.Buffer().Reservation()
	r.Lock()
	defer r.Unlock()
	r.Add(fence, usage)
	return fence, nil
}

// revokeBufferStep takes the buffer away while the peer reads it.
func revokeBufferStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (string, error) {
		key := s.mr.RKey()
		reads, err := s.readUntilRevoked()
		if err != nil {
			return "", err
		}
		if st := s.mr.PagingStats(); st.Invalidations != 1 || st.PageFaults != 0 {
			return "", fmt.Errorf("the region has counted %+v", st)
		}
		if err := s.mustFail(*s.part(), 0, syscall.ENODEV); err != nil {
			return "", fmt.Errorf("registering it again: %w", err)
		}
		other, err := l.b.pd.RegMR(make([]byte, 8), verbs.AccessLocalWrite)
		if err != nil {
			return "", err
		}
		if s.mr.RKey() != key || other.RKey() == key {
			err = fmt.Errorf("the key %#x does not stay: the region has %#x, another one %#x", key, s.mr.RKey(), other.RKey())
		}
		return fmt.Sprintf("%d READs of the peer have the data, the next one ends with %q; the key stays until Close", reads, verbs.WCRemAccessErr), errors.Join(err, other.Close())
	})
}

// readUntilRevoked revokes the buffer while the peer reads it. It returns how many READs had data,
// all of it right; the one behind them is refused.
func (s *shared) readUntilRevoked() (reads int, err error) {
	const before = 4 // READs before it is revoked
	begun, revoked := make(chan struct{}), make(chan error, 1)
	go func() {
		<-begun
		revoked <- s.memory.Revoke(s.ctx)
	}()
	for deadline := time.Now().Add(patience); ; reads++ {
		if reads == before {
			close(begun)
		}
		if err = s.postRead(); err != nil {
			break
		}
		wc, e := s.next(s.lab.a.cq)
		if err = e; err != nil || wc.Status == verbs.WCRemAccessErr {
			break
		}
		if err = errors.Join(wc.Err(), same(s.lab.a.buf[half:], s.data)); err != nil {
			break
		}
		if time.Now().After(deadline) {
			err = errors.New("the peer still reads")
			break
		}
	}
	if reads < before {
		close(begun)
	}
	return reads, errors.Join(err, <-revoked)
}

// exportedDMStep registers device memory of the first device on the second one, by a dma-buf. The
// peer writes into it, until it is freed.
func exportedDMStep(l *lab) (string, error) {
	dm, err := l.a.dev.AllocDM(half, 0)
	if err != nil {
		return "", err
	}
	detail, err := l.withPair(verbs.RC, func(p *pair) (_ string, err error) {
		buffer, err := dm.DMABuf()
		if err != nil {
			return "", err
		}
		defer buffer.Put()
		mr, err := l.b.pd.RegDMABufMR(verbs.DMABuf{Buffer: buffer, Length: half, IOVA: bufferIOVA}, bufferRights)
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, mr.Close()) }()
		src, got := l.source(l.a, length), make([]byte, length)
		write := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RemoteAddr: bufferIOVA + 99, RKey: mr.RKey()}
		if err := post(p.a, write); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
			return "", err
		}
		if _, err := dm.ReadAt(got, 99); err != nil {
			return "", err
		}
		if err := same(got, src); err != nil {
			return "", err
		}
		if err := dm.Close(); err != nil {
			return "", err
		}
		if err := post(p.a, write); err != nil {
			return "", err
		}
		if err := l.expectStatus(l.a.cq, verbs.WCRemAccessErr); err != nil {
			return "", fmt.Errorf("after the device memory is freed: %w", err)
		}
		if st := mr.PagingStats(); st.Invalidations != 1 || st.PageFaults != 0 {
			return "", fmt.Errorf("the region has counted %+v", st)
		}
		return fmt.Sprintf("of one device, registered on the other: %d bytes written; once it is freed: %q", length, verbs.WCRemAccessErr), nil
	})
	return detail, errors.Join(err, dm.Close())
}

// reregBufferStep gives a region of ordinary memory a buffer instead, and when that is revoked
// another one.
func reregBufferStep(l *lab) (string, error) {
	return withShared(l, func(s *shared) (_ string, err error) {
		plain := make([]byte, half)
		mr, err := l.b.pd.RegMR(plain, bufferRights)
		if err != nil {
			return "", err
		}
		direct := s.mr
		defer func() {
			s.mr = direct // which withShared closes
			err = errors.Join(err, mr.Close())
		}()
		s.mr = mr
		if err := mr.Rereg(verbs.MRChange{DMABuf: s.part()}); err != nil {
			return "", err
		}
		if err := errors.Join(s.read(), s.write(), same(plain, make([]byte, half))); err != nil {
			return "", err
		}
		if err := s.memory.Revoke(l.ctx); err != nil {
			return "", err
		}
		next, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: half})
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, next.Close()) }()
		s.memory = next
		if err := mr.Rereg(verbs.MRChange{DMABuf: s.part()}); err != nil {
			return "", fmt.Errorf("after the first buffer is revoked: %w", err)
		}
		return "ordinary memory, then a dma-buf, and when that is revoked another one, in place", errors.Join(s.write(), s.read())
	})
}

// part returns the buffer as something to register.
func (s *shared) part() *verbs.DMABuf {
	return &verbs.DMABuf{Buffer: s.memory.Buffer(), Length: half, IOVA: bufferIOVA}
}

// pinnedStep registers the buffer on a device that holds it in place.
func pinnedStep(l *lab) (_ string, err error) {
	cfg := l.cfg
	cfg.PCAP, cfg.PinDMABuf = "", true
	n, err := newNode(&cfg)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, n.close()) }()
	pins := &lab{ctx: l.ctx, cfg: cfg, a: l.a, b: n, rand: l.rand}
	return withShared(pins, func(s *shared) (string, error) {
		for name, move := range map[string]func(context.Context) error{"Move": s.memory.Move, "Evict": s.memory.Evict} {
			if err := move(l.ctx); !errors.Is(err, syscall.EBUSY) {
				return "", fmt.Errorf("%s of the buffer: %w, not EBUSY", name, err)
			}
		}
		if err := errors.Join(s.read(), s.moved(0), s.counted(0)); err != nil {
			return "", err
		}
		fixed, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: half, NoPin: true})
		if err != nil {
			return "", err
		}
		if err := errors.Join(s.mustFail(verbs.DMABuf{Buffer: fixed.Buffer(), Length: half}, 0, syscall.EOPNOTSUPP), fixed.Close()); err != nil {
			return "", fmt.Errorf("memory that cannot be pinned: %w", err)
		}
		if err := s.mr.Close(); err != nil {
			return "", err
		}
		return "Move and Evict: EBUSY until the region is closed; memory that cannot be pinned: EOPNOTSUPP",
			errors.Join(s.memory.Move(l.ctx), s.moved(1), s.exporterHas(s.data))
	})
}
