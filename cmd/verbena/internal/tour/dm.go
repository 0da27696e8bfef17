package tour

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// deviceSteps are a tour of device memory: what it is, and what it is used for.
var deviceSteps = []step{
	{"RC", "alloc_dm", allocDMStep},
	{"RC", "lock service", lockStep},
	{"RC", "sequencer", sequencerStep},
	{"RC", "staging", stagingStep},
	{"RC", "peer device staging", peerStagingStep},
	{"RC", "app-level multicast", multicastStep},
}

// withDM runs a step with device memory, all of which is one region.
func withDM(n *node, cfg verbs.DMConfig, f func(dm *verbs.DM, mr *verbs.MR) (string, error)) (string, error) {
	dm, err := n.dev.AllocDMWith(cfg)
	if err != nil {
		return "", err
	}
	mr, err := n.pd.RegDMMR(dm, 0, cfg.Length, verbs.AccessZeroBased|verbs.AccessLocalWrite|verbs.AccessRemote)
	if err != nil {
		return "", errors.Join(err, dm.Close())
	}
	detail, err := f(dm, mr)
	return detail, errors.Join(err, mr.Close(), dm.Close())
}

// allocDMStep has the peer write to device memory, copies the data from there, and tries
// calls that are refused.
func allocDMStep(l *lab) (string, error) {
	return withDM(l.b, verbs.DMConfig{Length: length, LogAlign: 6}, func(dm *verbs.DM, mr *verbs.MR) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			src := l.source(l.a, length)
			if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{l.a.mr.SGE(0, length)}, RKey: mr.RKey()}); err != nil {
				return "", err
			}
			if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
				return "", err
			}
			got := make([]byte, length)
			if _, err := dm.ReadAt(got, 0); err != nil {
				return "", err
			}
			if err := same(got, src); err != nil {
				return "", err
			}
			if _, err := l.b.pd.RegDMMR(dm, 0, 8, verbs.AccessLocalWrite); !errors.Is(err, syscall.EINVAL) {
				return "", fmt.Errorf("a region that is not zero-based: %v", err)
			}
			if _, err := dm.WriteAt(make([]byte, 2), length-1); !errors.Is(err, syscall.EFAULT) {
				return "", fmt.Errorf("writing beyond the end: %v", err)
			}
			if err := dm.Close(); !errors.Is(err, syscall.EBUSY) {
				return "", fmt.Errorf("freeing it with a region on it: %v", err)
			}
			return fmt.Sprintf("%d bytes of %d MiB; freeing with a region on it: EBUSY", length, l.b.dev.Attr().MaxDMSize>>20), nil
		})
	})
}

// client is one of several goroutines that work on the second device's memory at the same
// time, each with a connection and a completion queue of its own.
type client struct {
	lab  *lab
	cq   *verbs.CQ
	pair *pair
	word []byte
	mr   *verbs.MR
}

// withClients runs f in n clients at the same time, and returns how long it took.
func withClients(l *lab, n int, f func(c *client, i int) error) (took time.Duration, err error) {
	clients := make([]*client, n)
	defer func() {
		for _, c := range clients {
			if c != nil {
				err = errors.Join(err, c.close())
			}
		}
		err = errors.Join(err, l.nothingLeft())
	}()
	for i := range clients {
		c := &client{lab: l, word: make([]byte, 8)}
		clients[i] = c
		if c.cq, err = l.a.dev.CreateCQ(16, nil); err != nil {
			return 0, err
		}
		if c.mr, err = l.a.pd.RegMR(c.word, verbs.AccessLocalWrite); err != nil {
			return 0, err
		}
		c.pair, err = l.pairOf(&verbs.QPConfig{Type: verbs.RC, SendCQ: c.cq, RecvCQ: c.cq, Cap: caps, SignalAll: true},
			&verbs.QPConfig{Type: verbs.RC, SendCQ: l.b.cq, RecvCQ: l.b.cq, Cap: caps, SignalAll: true})
		if err != nil {
			return 0, err
		}
	}
	errs := make([]error, n)
	var wg sync.WaitGroup
	began := time.Now()
	for i, c := range clients {
		wg.Go(func() { errs[i] = f(c, i) })
	}
	wg.Wait()
	return time.Since(began), errors.Join(errs...)
}

func (c *client) close() error {
	var errs []error
	if c.pair != nil {
		errs = append(errs, c.pair.close())
	}
	if c.mr != nil {
		errs = append(errs, c.mr.Close())
	}
	if c.cq != nil {
		errs = append(errs, c.cq.Close())
	}
	return errors.Join(errs...)
}

// do executes a request on 8 bytes of the second device's memory. c.word is what the
// request sends, or what came back.
func (c *client) do(wr verbs.SendWR, rkey uint32, addr uint64, op verbs.WCOpcode) (uint64, error) {
	wr.SGL, wr.RKey, wr.RemoteAddr = []verbs.SGE{c.mr.SGE(0, 8)}, rkey, addr
	if err := post(c.pair.a, wr); err != nil {
		return 0, err
	}
	_, err := c.lab.expect(c.cq, op)
	return binary.NativeEndian.Uint64(c.word), err
}

// Each client polls, so there are two: more than the machine has cores would hold each
// other up.
const (
	clients = 2
	rounds  = 60
)

// lockStep has clients take a lock in device memory, by compare-and-swap, to change
// what it guards in two steps.
func lockStep(l *lab) (string, error) {
	return withDM(l.b, verbs.DMConfig{Length: 64, LogAlign: 6}, func(dm *verbs.DM, mr *verbs.MR) (string, error) {
		const lock, guarded = 0, 8
		took, err := withClients(l, clients, func(c *client, i int) error {
			me := uint64(i + 1)
			for range rounds {
				for deadline := time.Now().Add(10 * patience); ; {
					was, err := c.do(verbs.SendWR{Op: verbs.OpAtomicCmpSwap, Swap: me}, mr.RKey(), lock, verbs.WCCompSwap)
					if err != nil {
						return err
					}
					if was == 0 {
						break
					}
					if time.Now().After(deadline) {
						return errors.New("the lock is never free")
					}
				}
				now, err := c.do(verbs.SendWR{Op: verbs.OpRDMARead}, mr.RKey(), guarded, verbs.WCRDMARead)
				if err != nil {
					return err
				}
				binary.NativeEndian.PutUint64(c.word, now+1)
				if _, err := c.do(verbs.SendWR{Op: verbs.OpRDMAWrite}, mr.RKey(), guarded, verbs.WCRDMAWrite); err != nil {
					return err
				}
				was, err := c.do(verbs.SendWR{Op: verbs.OpAtomicCmpSwap, CompareAdd: me}, mr.RKey(), lock, verbs.WCCompSwap)
				if err != nil {
					return fmt.Errorf("unlocking: %w", err)
				}
				if was != me {
					return fmt.Errorf("unlocking: the lock was %d's, not %d's", was, me)
				}
			}
			return nil
		})
		if err != nil {
			return "", err
		}
		if n, err := dmWord(dm, guarded); err != nil || n != clients*rounds {
			return "", fmt.Errorf("the guarded number is %d, should be %d, %v", n, clients*rounds, err)
		}
		return fmt.Sprintf("%d clients, %d times each, none lost; %.0f locks/s", clients, rounds, clients*rounds/took.Seconds()), nil
	})
}

func dmWord(dm *verbs.DM, off int64) (uint64, error) {
	var b [8]byte
	_, err := dm.ReadAt(b[:], off)
	return binary.NativeEndian.Uint64(b[:]), err
}

// sequencerStep has clients draw numbers by fetch-and-add: each number is drawn once.
func sequencerStep(l *lab) (string, error) {
	return withDM(l.b, verbs.DMConfig{Length: 8, LogAlign: 3}, func(_ *verbs.DM, mr *verbs.MR) (string, error) {
		var drawn [clients][]uint64
		took, err := withClients(l, clients, func(c *client, i int) error {
			for range 4 * rounds {
				n, err := c.do(verbs.SendWR{Op: verbs.OpAtomicFetchAdd, CompareAdd: 1}, mr.RKey(), 0, verbs.WCFetchAdd)
				if err != nil {
					return err
				}
				drawn[i] = append(drawn[i], n)
			}
			return nil
		})
		if err != nil {
			return "", err
		}
		all := slices.Concat(drawn[:]...)
		slices.Sort(all)
		for i, n := range all {
			if n != uint64(i) {
				return "", fmt.Errorf("number %d was drawn as %d", i, n)
			}
		}
		return fmt.Sprintf("%d numbers by %d clients, each once; %.0f/s", len(all), clients, float64(len(all))/took.Seconds()), nil
	})
}

// stagingStep sends updates out of device memory: the next slot is written while the
// last ones are under way.
func stagingStep(l *lab) (string, error) {
	const slots, size, messages = 4, 1024, 64
	return withDM(l.a, verbs.DMConfig{Length: slots * size, LogAlign: 6}, func(dm *verbs.DM, mr *verbs.MR) (string, error) {
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			message := func(i int) []byte {
				b := make([]byte, size)
				for k := range b {
					b[k] = byte(i*7 + k)
				}
				return b
			}
			receive := func(i int) error {
				return postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{l.b.mr.SGE(half+i%slots*size, size)}})
			}
			// The receiver is two messages behind. The sender reuses a slot when the
			// message in it has completed.
			arrived := func(i int) error {
				if i < 0 || i >= messages {
					return nil
				}
				if _, err := l.expect(l.b.cq, verbs.WCRecv); err != nil {
					return err
				}
				if err := same(l.b.buf[half+i%slots*size:][:size], message(i)); err != nil {
					return fmt.Errorf("message %d: %w", i, err)
				}
				return receive(i)
			}
			sent := func(i int) error {
				if i < 0 {
					return nil
				}
				_, err := l.expect(l.a.cq, verbs.WCSend)
				return err
			}
			for i := range slots {
				if err := receive(i); err != nil {
					return "", err
				}
			}
			began := time.Now()
			for i := range messages + slots {
				if err := errors.Join(arrived(i-2), sent(i-slots)); err != nil {
					return "", err
				}
				if i >= messages {
					continue
				}
				at := i % slots * size
				if _, err := dm.WriteAt(message(i), int64(at)); err != nil {
					return "", err
				}
				if err := post(p.a, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{mr.SGE(at, size)}}); err != nil {
					return "", err
				}
			}
			return fmt.Sprintf("%d updates through %d slots of %d bytes, in %v", messages, slots, size, time.Since(began).Round(time.Microsecond)), nil
		})
	})
}

// peerStagingStep plays another device that puts data into an exported buffer, by its
// file, and sends the data from there.
func peerStagingStep(l *lab) (string, error) {
	return withDM(l.a, verbs.DMConfig{Length: length, Export: true}, func(dm *verbs.DM, mr *verbs.MR) (_ string, err error) {
		f, off, err := dm.Export()
		if err != nil {
			return "", err
		}
		defer func() { err = errors.Join(err, f.Close()) }()
		return l.withPair(verbs.RC, func(p *pair) (string, error) {
			block := make([]byte, length)
			for i := range block {
				block[i] = byte(l.rand.Uint32())
			}
			if _, err := f.WriteAt(block, off); err != nil { // as a disk or an accelerator would
				return "", err
			}
			sink, at := l.b.sink(length)
			addr, rkey := l.b.remote(at)
			if err := post(p.a, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{mr.SGE(0, length)}, RemoteAddr: addr, RKey: rkey}); err != nil {
				return "", err
			}
			if _, err := l.expect(l.a.cq, verbs.WCRDMAWrite); err != nil {
				return "", err
			}
			return fmt.Sprintf("%d bytes, put there by another device and sent on, never in this program's memory", length), same(sink, block)
		})
	})
}

// multicastStep writes a message once, and sends it to several queue pairs.
func multicastStep(l *lab) (string, error) {
	const destinations, size = 4, 8000
	return withDM(l.a, verbs.DMConfig{Length: size}, func(dm *verbs.DM, mr *verbs.MR) (_ string, err error) {
		message := l.source(l.a, size)
		if _, err := dm.WriteAt(message, 0); err != nil {
			return "", err
		}
		var pairs []*pair
		defer func() {
			for _, p := range pairs {
				err = errors.Join(err, p.close())
			}
		}()
		for i := range destinations {
			p, e := l.pair(verbs.RC)
			if e != nil {
				return "", e
			}
			pairs = append(pairs, p)
			if e := postRecv(p.b, verbs.RecvWR{SGL: []verbs.SGE{l.b.mr.SGE(half+i*size, size)}}); e != nil {
				return "", e
			}
		}
		l.b.sink(destinations * size)
		began := time.Now()
		for _, p := range pairs {
			if err := post(p.a, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{mr.SGE(0, size)}}); err != nil {
				return "", err
			}
		}
		for range pairs {
			if _, err := l.expect(l.a.cq, verbs.WCSend); err != nil {
				return "", err
			}
			if _, err := l.expect(l.b.cq, verbs.WCRecv); err != nil {
				return "", err
			}
		}
		took := time.Since(began)
		for i := range destinations {
			if err := same(l.b.buf[half+i*size:][:size], message); err != nil {
				return "", fmt.Errorf("destination %d: %w", i, err)
			}
		}
		return fmt.Sprintf("%d bytes written once, sent to %d queue pairs in %v", size, destinations, took.Round(time.Microsecond)), nil
	})
}
