package main

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/verbs"
)

func atomics() (rows []*testCase) {
	rows = append(rows, everyWay(testCase{name: "rc/fadd", short: true}, (*scene).fetchAdd)...)
	rows = append(rows, everyWay(testCase{name: "rc/cas", short: true}, (*scene).compareSwap)...)
	return rows
}

// word reads a word that atomics change. It is in the machine's byte order: both devices do
// atomics with the processor's instructions.
func word(p party, r *region, off int) (uint64, error) {
	b, err := p.peek(r, off, 8)
	if err != nil {
		return 0, err
	}
	return binary.NativeEndian.Uint64(b), nil
}

func setWord(p party, r *region, off int, v uint64) error {
	return p.poke(r, off, binary.NativeEndian.AppendUint64(nil, v))
}

func (s *scene) fetchAdd() error {
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	result, target, err := buffers(i, t, 64)
	if err != nil {
		return err
	}
	sum := uint64(0xfffffffffffffff0) // it wraps on the way
	if err := setWord(t, target, 8, sum); err != nil {
		return err
	}
	for n := range uint64(20) {
		_, err := i.do(verbs.SendWR{ID: n, Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{result.sge(16, 8)},
			RemoteAddr: target.addr + 8, RKey: target.rkey, CompareAdd: n})
		if err != nil {
			return err
		}
		if got, err := word(i, result, 16); err != nil || got != sum {
			return errors.Join(fmt.Errorf("%s: fetch-and-add returned %#x, want %#x", i.who(), got, sum), err)
		}
		sum += n
	}
	if got, err := word(t, target, 8); err != nil || got != sum {
		return errors.Join(fmt.Errorf("%s: the word is %#x, want %#x", t.who(), got, sum), err)
	}
	return nil
}

func (s *scene) compareSwap() error {
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	result, target, err := buffers(i, t, 64)
	if err != nil {
		return err
	}
	const a, b, c = 0x1122334455667788, 0x99aabbccddeeff00, 1
	if err := setWord(t, target, 0, a); err != nil {
		return err
	}
	for n, step := range []struct{ compare, swap, found, left uint64 }{{b, c, a, a}, {a, b, a, b}, {a, c, b, b}, {b, c, b, c}, {c, c, c, c}} {
		_, err := i.do(verbs.SendWR{ID: uint64(n), Op: verbs.OpAtomicCmpSwap, SGL: []verbs.SGE{result.sge(0, 8)},
			RemoteAddr: target.addr, RKey: target.rkey, CompareAdd: step.compare, Swap: step.swap})
		if err != nil {
			return err
		}
		found, err := word(i, result, 0)
		if err != nil || found != step.found {
			return errors.Join(fmt.Errorf("%s: swap %d returned %#x, want %#x", i.who(), n, found, step.found), err)
		}
		left, err := word(t, target, 0)
		if err != nil || left != step.left {
			return errors.Join(fmt.Errorf("%s: after swap %d the word is %#x, want %#x", t.who(), n, left, step.left), err)
		}
	}
	return nil
}
