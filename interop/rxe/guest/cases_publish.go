package main

// ATOMIC WRITE and FLUSH (IBA annex A19), by which a program publishes what it has written.
// Kernels before 6.2 have neither, and their device does not report them.

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/verbs"
)

func publications() (rows []*testCase) {
	rows = append(rows, everyWay(testCase{name: "rc/atomic_write", short: true}, (*scene).atomicWrite)...)
	for _, f := range []struct {
		name  string
		level verbs.FlushLevel
	}{{"range", verbs.FlushRange}, {"region", verbs.FlushMR}} {
		rows = append(rows, everyWay(testCase{name: "rc/flush/global/" + f.name, shortV4: true}, func(s *scene) error { return s.flushGlobal(f.level) })...)
	}
	rows = append(rows, everyWay(testCase{name: "rc/publish"}, (*scene).publish)...)
	for _, row := range everyWay(testCase{name: "rc/loss5/atomic_write", netem: "loss 5%"}, (*scene).lossyAtomicWrite) {
		if row.weInitiate() { // the kernel repeats an ATOMIC WRITE with the address 0: docs/interop.md
			rows = append(rows, row)
		}
	}
	rows = append(rows, everyWay(testCase{name: "rc/refused/flush/memory"}, (*scene).volatile)...)
	return rows
}

// needs checks that the kernel's device has capabilities that not every kernel has, and makes
// the queue pairs of the case fit for them.
func (s *scene) needs(caps uint64) error {
	switch missing := caps &^ s.kernel.caps; {
	case caps == 0:
		return nil
	case missing&kernelAtomicWrite != 0:
		return skipError("its device has no ATOMIC WRITE")
	case missing != 0:
		return skipError("its device has no FLUSH")
	}
	s.kernel.extended = true
	return nil
}

// atomicWrite stores words between others, which must not change.
func (s *scene) atomicWrite() error {
	if err := s.needs(kernelAtomicWrite); err != nil {
		return err
	}
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	source, target, err := buffers(i, t, 64)
	if err != nil {
		return err
	}
	want := make([]uint64, 8)
	for k := range want {
		want[k] = patternWord(1, uint64(k))
		if err := setWord(t, target, 8*k, want[k]); err != nil {
			return err
		}
	}
	for n := range uint64(20) {
		at, value := int(n*3%8), patternWord(2, n)
		if err := setWord(i, source, 16, value); err != nil {
			return err
		}
		if _, err := i.do(verbs.SendWR{ID: n, Op: verbs.OpAtomicWrite, SGL: []verbs.SGE{source.sge(16, 8)},
			RemoteAddr: target.addr + uint64(8*at), RKey: target.rkey}); err != nil {
			return err
		}
		want[at] = value
		for k := range want {
			if got, err := word(t, target, 8*k); err != nil || got != want[k] {
				return errors.Join(fmt.Errorf("%s: after store %d of word %d word %d is %#x, want %#x", t.who(), n, at, k, got, want[k]), err)
			}
		}
	}
	return nil
}

// flushGlobal writes, and flushes what it has written: a few ranges, or the whole region.
func (s *scene) flushGlobal(level verbs.FlushLevel) error {
	const size, seed = 20_000, 11
	if err := s.needs(kernelFlushGlobal); err != nil {
		return err
	}
	i, t, err := s.connect(connection{access: verbs.AccessRemote | verbs.AccessFlush})
	if err != nil {
		return err
	}
	local, err := i.alloc(size, allRights)
	if err != nil {
		return err
	}
	remote, err := t.alloc(size, allRights|verbs.AccessFlushGlobal)
	if err != nil {
		return err
	}
	for n, r := range []struct{ off, len int }{{0, size}, {0, 1}, {4095, 2}, {size - 1, 1}, {777, 8192}} {
		if err := i.fill(local, 0, size, seed+uint64(n)); err != nil {
			return err
		}
		if err := i.post(verbs.SendWR{ID: 1, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr, RKey: remote.rkey}); err != nil {
			return err
		}
		flush := verbs.SendWR{ID: 2, Op: verbs.OpFlush, RKey: remote.rkey, FlushType: verbs.FlushGlobal, FlushLevel: level}
		if level == verbs.FlushRange {
			flush.RemoteAddr, flush.RemoteLength = remote.addr+uint64(r.off), uint32(r.len)
		}
		if err := i.post(flush); err != nil {
			return err
		}
		for _, want := range []verbs.WC{{ID: 1, Op: verbs.WCRDMAWrite}, {ID: 2, Op: verbs.WCFlush}} {
			wc, err := i.sent(i.qp, patience)
			if err := errors.Join(wantStatus(i.who(), wc, err, verbs.WCSuccess), wantID(i, wc, want.ID)); err != nil {
				return err
			}
			if wc.Op != want.Op {
				return fmt.Errorf("%s: request %d completed as %v, want %v", i.who(), want.ID, wc.Op, want.Op)
			}
		}
		if err := t.check(remote, 0, size, seed+uint64(n)); err != nil {
			return err
		}
	}
	return nil
}

// publish writes, flushes and stores a word, without waiting in between. When the target sees
// the word, all data is there.
func (s *scene) publish() error {
	const size, seed, rounds = 64 << 10, 21, 8
	if err := s.needs(kernelFlushGlobal | kernelAtomicWrite); err != nil {
		return err
	}
	i, t, err := s.connect(connection{access: verbs.AccessRemote | verbs.AccessFlush})
	if err != nil {
		return err
	}
	local, err := i.alloc(size+8, allRights)
	if err != nil {
		return err
	}
	remote, err := t.alloc(size+8, allRights|verbs.AccessFlushGlobal)
	if err != nil {
		return err
	}
	for n := uint64(1); n <= rounds; n++ {
		if err := errors.Join(i.fill(local, 0, size, seed+n), setWord(i, local, size, n)); err != nil {
			return err
		}
		for k, wr := range []verbs.SendWR{
			{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, size)}, RemoteAddr: remote.addr},
			{Op: verbs.OpFlush, RemoteAddr: remote.addr, RemoteLength: size, FlushType: verbs.FlushGlobal, FlushLevel: verbs.FlushRange},
			{Op: verbs.OpAtomicWrite, SGL: []verbs.SGE{local.sge(size, 8)}, RemoteAddr: remote.addr + size},
		} {
			wr.ID, wr.RKey = 10*n+uint64(k), remote.rkey
			if err := i.post(wr); err != nil {
				return err
			}
		}
		if err := eventually(func() error {
			if got, err := word(t, remote, size); err != nil || got != n {
				return errors.Join(fmt.Errorf("%s: the word is %d, want %d", t.who(), got, n), err)
			}
			return nil
		}); err != nil {
			return err
		}
		if err := t.check(remote, 0, size, seed+n); err != nil {
			return err
		}
		for k := range uint64(3) {
			wc, err := i.sent(i.qp, patience)
			if err := errors.Join(wantStatus(i.who(), wc, err, verbs.WCSuccess), wantID(i, wc, 10*n+k)); err != nil {
				return err
			}
		}
	}
	return nil
}

// lossyAtomicWrite stores words over a network that loses packets: an ATOMIC WRITE that is
// sent again must not undo a later one.
func (s *scene) lossyAtomicWrite() error {
	const words, rounds = 8, 40
	if err := s.needs(kernelAtomicWrite); err != nil {
		return err
	}
	i, t, err := s.connect(connection{timeout: 14})
	if err != nil {
		return err
	}
	source, target, err := buffers(i, t, 8*words)
	if err != nil {
		return err
	}
	for n := range uint64(rounds) {
		for k := range words {
			value := n<<8 | uint64(k)
			if err := setWord(i, source, 8*k, value); err != nil {
				return err
			}
			if err := i.post(verbs.SendWR{ID: value, Op: verbs.OpAtomicWrite, SGL: []verbs.SGE{source.sge(8*k, 8)},
				RemoteAddr: target.addr, RKey: target.rkey}); err != nil {
				return err
			}
		}
		for k := range words {
			wc, err := i.sent(i.qp, patience)
			if err := errors.Join(wantStatus(i.who(), wc, err, verbs.WCSuccess), wantID(i, wc, n<<8|uint64(k))); err != nil {
				return err
			}
		}
		if got, err := word(t, target, 0); err != nil || got != n<<8|(words-1) {
			return errors.Join(fmt.Errorf("%s: the word is %#x, want %#x", t.who(), got, n<<8|(words-1)), err)
		}
	}
	return nil
}

// volatile checks that ordinary memory cannot be registered as persistent.
func (s *scene) volatile() error {
	if err := s.needs(kernelFlushGlobal); err != nil {
		return err
	}
	_, t := s.sides()
	_, err := t.alloc(8192, allRights|verbs.AccessFlush)
	if !errors.Is(err, syscall.EINVAL) && (err == nil || !strings.Contains(err.Error(), "err 22 ")) {
		return fmt.Errorf("%s: ordinary memory was registered as persistent: %w, want EINVAL", t.who(), err)
	}
	return nil
}
