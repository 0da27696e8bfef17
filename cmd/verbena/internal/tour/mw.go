package tour

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// windowSteps are a tour of memory windows, re-registration and allocated regions.
var windowSteps = []step{
	{"RC", "BIND_MW, type 2", bindStep},
	{"RC", "bind_mw, type 1", bindType1Step},
	{"RC", "rights by peer", peersStep},
	{"RC", "SEND_WITH_INV", windowInvStep},
	{"RC", "LOCAL_INV under load", revokeStep},
	{"RC", "rereg_mr", reregStep},
	{"RC", "alloc_mr", allocStep},
}

// yard is a region of the second device that peers can access only through windows.
type yard struct {
	*lab
	memory []byte
	mr     *verbs.MR
	mws    []*verbs.MW
}

// withYard runs a step in a fresh one.
func withYard(l *lab, f func(y *yard) (string, error)) (string, error) {
	y := &yard{lab: l, memory: bytes.Repeat([]byte{0x5a}, half)}
	var err error
	if y.mr, err = l.b.pd.RegMR(y.memory, verbs.AccessLocalWrite|verbs.AccessMWBind); err != nil {
		return "", err
	}
	detail, err := f(y)
	for _, mw := range y.mws {
		err = errors.Join(err, mw.Close())
	}
	return detail, errors.Join(err, y.mr.Close())
}

// window makes a window, which the yard closes.
func (y *yard) window(typ verbs.MWType) (*verbs.MW, error) {
	mw, err := y.b.pd.AllocMW(typ)
	if err == nil {
		y.mws = append(y.mws, mw)
	}
	return mw, err
}

// bind binds a window on a queue pair of the second device and waits for the completion.
func (y *yard) bind(qp *verbs.QP, mw *verbs.MW, off, n int, access verbs.Access) error {
	b := mw.Bind(y.mr, off, n, access)
	var err error
	if mw.Type() == verbs.MWType1 {
		_, err = qp.BindMW(mw, 0, 0, b)
	} else {
		err = post(qp, verbs.SendWR{Op: verbs.OpBindMW, Bind: b})
	}
	if err != nil {
		return err
	}
	_, err = y.expect(y.b.cq, verbs.WCBindMW)
	return err
}

// through returns a request of the first device with a key, for n bytes at an offset of
// the yard.
func (y *yard) through(op verbs.Opcode, rkey uint32, off, n int) verbs.SendWR {
	return verbs.SendWR{Op: op, SGL: []verbs.SGE{y.a.mr.SGE(0, n)}, RemoteAddr: y.mr.Addr() + uint64(off), RKey: rkey}
}

// write writes fresh data with a key and compares the memory with it.
func (y *yard) write(p *pair, rkey uint32, off, n int) error {
	src := y.source(y.a, n)
	if err := post(p.a, y.through(verbs.OpRDMAWrite, rkey, off, n)); err != nil {
		return err
	}
	if _, err := y.expect(y.a.cq, verbs.WCRDMAWrite); err != nil {
		return err
	}
	return same(y.memory[off:off+n], src)
}

// refused posts a request and returns an error unless it is refused and changes nothing.
// Its queue pairs are in ERR afterwards.
func (y *yard) refused(p *pair, wr verbs.SendWR) error {
	before := bytes.Clone(y.memory)
	if err := post(p.a, wr); err != nil {
		return err
	}
	if err := y.expectStatus(y.a.cq, verbs.WCRemAccessErr); err != nil {
		return err
	}
	return same(y.memory, before)
}

// bindStep binds a window to a part of a region and tries to access bytes beside it.
func bindStep(l *lab) (string, error) {
	return withYard(l, func(y *yard) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			mw, err := y.window(verbs.MWType2)
			if err != nil {
				return "", err
			}
			if err := y.bind(p.b, mw, 1000, length, verbs.AccessRemoteWrite); err != nil {
				return "", err
			}
			if err := y.write(p, mw.RKey(), 1000, length); err != nil {
				return "", err
			}
			if err := y.mr.Close(); !errors.Is(err, syscall.EBUSY) {
				return "", fmt.Errorf("closing the region with a window on it: %v", err)
			}
			if err := y.refused(p, y.through(verbs.OpRDMAWrite, mw.RKey(), 999, 8)); err != nil {
				return "", fmt.Errorf("one byte before the window: %w", err)
			}
			return fmt.Sprintf("%d bytes of a region that grants nothing; one byte before: %q", length, verbs.WCRemAccessErr), nil
		})
	})
}

// bindType1Step binds a window again: the old key is refused.
func bindType1Step(l *lab) (string, error) {
	return withYard(l, func(y *yard) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			mw, err := y.window(verbs.MWType1)
			if err != nil {
				return "", err
			}
			if err := y.bind(p.b, mw, 0, 4096, verbs.AccessRemoteWrite); err != nil {
				return "", err
			}
			old := mw.RKey()
			if err := y.write(p, old, 0, 4096); err != nil {
				return "", err
			}
			if err := y.bind(p.b, mw, 4096, 4096, verbs.AccessRemoteWrite); err != nil {
				return "", err
			}
			if err := y.write(p, mw.RKey(), 4096, 4096); err != nil {
				return "", err
			}
			if err := y.refused(p, y.through(verbs.OpRDMAWrite, old, 0, 8)); err != nil {
				return "", fmt.Errorf("the old key: %w", err)
			}
			return fmt.Sprintf("bound elsewhere: rkey %#08x instead of %#08x, which is refused", mw.RKey(), old), nil
		})
	})
}

// peersStep gives two peers different rights to different parts of one region.
func peersStep(l *lab) (string, error) {
	return withYard(l, func(y *yard) (string, error) {
		return l.withPair(verbs.RC, func(first *pair) (string, error) {
			return l.withPair(verbs.RC, func(second *pair) (string, error) {
				one, err := y.window(verbs.MWType2)
				if err != nil {
					return "", err
				}
				two, err := y.window(verbs.MWType2)
				if err != nil {
					return "", err
				}
				if err := y.bind(first.b, one, 0, half/2, verbs.AccessRemoteWrite); err != nil {
					return "", err
				}
				if err := y.bind(second.b, two, half/2, half/2, verbs.AccessRemoteRead); err != nil {
					return "", err
				}
				if err := y.write(first, one.RKey(), 100, length); err != nil {
					return "", err
				}
				clear(y.a.buf[:length])
				if err := post(second.a, y.through(verbs.OpRDMARead, two.RKey(), half/2, length)); err != nil {
					return "", err
				}
				if _, err := y.expect(y.a.cq, verbs.WCRDMARead); err != nil {
					return "", err
				}
				if err := same(y.a.buf[:length], y.memory[half/2:][:length]); err != nil {
					return "", err
				}
				if err := y.refused(second, y.through(verbs.OpRDMAWrite, one.RKey(), 100, 8)); err != nil {
					return "", fmt.Errorf("the second peer with the first one's key: %w", err)
				}
				if err := y.refused(first, y.through(verbs.OpRDMARead, one.RKey(), 100, 8)); err != nil {
					return "", fmt.Errorf("the first peer, reading: %w", err)
				}
				return "one may write the first half, one may read the second; everything else is refused", nil
			})
		})
	})
}

// windowInvStep has the peer invalidate a window when it needs it no more.
func windowInvStep(l *lab) (string, error) {
	return withYard(l, func(y *yard) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			mw, err := y.window(verbs.MWType2)
			if err != nil {
				return "", err
			}
			if err := y.bind(p.b, mw, 0, length, verbs.AccessRemoteWrite); err != nil {
				return "", err
			}
			if err := y.write(p, mw.RKey(), 0, length); err != nil {
				return "", err
			}
			wc, err := y.receive(p, y.b.mr.SGE(half, 16), verbs.SendWR{Op: verbs.OpSendInv, InvalidateKey: mw.RKey()}, verbs.WCSend, verbs.WCRecv)
			if err != nil {
				return "", err
			}
			if wc.Flags&verbs.WCWithInv == 0 || wc.InvalidatedKey != mw.RKey() {
				return "", fmt.Errorf("the receive does not tell of the key: %+v", wc)
			}
			if err := y.refused(p, y.through(verbs.OpRDMAWrite, mw.RKey(), 0, 8)); err != nil {
				return "", fmt.Errorf("after that: %w", err)
			}
			return "written, then given back by the peer's SEND; after that it is refused", nil
		})
	})
}

// revokeStep invalidates a window while the peer writes through it as fast as it can, and
// checks that the memory does not change from then on.
func revokeStep(l *lab) (string, error) {
	return withYard(l, func(y *yard) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			mw, err := y.window(verbs.MWType2)
			if err != nil {
				return "", err
			}
			if err := y.bind(p.b, mw, 0, half, verbs.AccessRemoteWrite); err != nil {
				return "", err
			}
			key := mw.RKey()
			var writes int
			var peer error
			var wg sync.WaitGroup
			wg.Go(func() { writes, peer = y.writeUntilRefused(p, key) })
			time.Sleep(20 * time.Millisecond)
			start := time.Now()
			err = post(p.b, verbs.SendWR{Op: verbs.OpLocalInv, InvalidateKey: key})
			if err == nil {
				_, err = y.expect(y.b.cq, verbs.WCLocalInv)
			}
			took := time.Since(start)
			after := bytes.Clone(y.memory)
			time.Sleep(5 * time.Millisecond)
			changed := same(y.memory, after)
			wg.Wait()
			if err := errors.Join(err, peer, changed, same(y.memory, after)); err != nil {
				return "", err
			}
			return fmt.Sprintf("in %v, after %d WRITEs of %d KiB; not a byte changes afterwards", took.Round(time.Microsecond), writes, half>>10), nil
		})
	})
}

// writeUntilRefused writes with a key until a write is refused, with other data every
// time, and returns how many writes succeeded.
func (y *yard) writeUntilRefused(p *pair, key uint32) (done int, err error) {
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); done++ {
		y.a.buf[0]++
		if err := post(p.a, y.through(verbs.OpRDMAWrite, key, 0, half)); err != nil {
			return done, err
		}
		wc, err := y.next(y.a.cq)
		if err != nil {
			return done, err
		}
		switch wc.Status {
		case verbs.WCSuccess:
		case verbs.WCRemAccessErr:
			return done, nil
		default:
			return done, wc.Err()
		}
	}
	return done, errors.New("the peer still writes")
}

// reregStep changes the memory and the rights of a region in place.
func reregStep(l *lab) (string, error) {
	first, second := make([]byte, length), make([]byte, length)
	mr, err := l.b.pd.RegMR(first, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	if err != nil {
		return "", err
	}
	detail, err := l.withPair(verbs.RC, func(p *pair) (string, error) {
		write := func(rkey uint32, dst []byte) error {
			src := l.source(l.a, length)
			if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RemoteAddr: mr.Addr(), RKey: rkey}); err != nil {
				return err
			}
			if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
				return err
			}
			return same(dst, src)
		}
		old := mr.RKey()
		if err := write(old, first); err != nil {
			return "", err
		}
		was := bytes.Clone(first)
		rights := verbs.AccessLocalWrite | verbs.AccessRemote
		if err := mr.Rereg(verbs.MRChange{Buf: second, Access: &rights}); err != nil {
			return "", err
		}
		if err := errors.Join(write(mr.RKey(), second), same(first, was)); err != nil {
			return "", err
		}
		if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, 8)}, RemoteAddr: mr.Addr(), RKey: old}); err != nil {
			return "", err
		}
		if err := l.expectStatus(l.a.cq, verbs.WCRemAccessErr); err != nil {
			return "", fmt.Errorf("the old key: %w", err)
		}
		return "other memory and other rights in place; the old key is refused", nil
	})
	return detail, errors.Join(err, mr.Close())
}

// allocStep has the library allocate memory, and opens it a second time.
func allocStep(l *lab) (string, error) {
	mr, err := l.b.pd.AllocMR(half, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	if err != nil {
		return "", err
	}
	detail, err := l.withPair(verbs.RC, func(p *pair) (string, error) {
		src := l.source(l.a, length)
		if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}); err != nil {
			return "", err
		}
		if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
			return "", err
		}
		if err := same(mr.Bytes()[:length], src); err != nil {
			return "", err
		}
		handle, err := mr.Share()
		if errors.Is(err, syscall.EOPNOTSUPP) { // on the loop link no other process finds the device
			return "memory of the library's, written by the peer", nil
		}
		if err != nil {
			return "", err
		}
		second, err := l.a.pd.OpenSharedMR(handle, verbs.AccessRemoteRead)
		if err != nil {
			return "", err
		}
		return "memory of the library's, written by the peer, and opened again by its handle",
			errors.Join(same(second.Bytes(), mr.Bytes()), second.Close())
	})
	return detail, errors.Join(err, mr.Close())
}
