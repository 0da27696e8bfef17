package main

// Indirect keys and device memory of ours, which the kernel reads and writes. It has neither
// itself, so it is always the initiator.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// indirectSize is how many bytes a key has: several packets at every MTU.
const indirectSize = 20_000

// place returns where byte i of a key lies in the region.
type place func(i int) int

// layouts are the keys that the kernel uses, each in a region of three times its size.
var layouts = []struct {
	name string
	make func(o *ours, qp int, r *region) (*verbs.MKey, place, error)
}{
	{"list", listKey}, {"strided", stridedKey}, {"nested", nestedKey},
}

func indirectKeys() (rows []*testCase) {
	for _, l := range layouts {
		for _, op := range []struct {
			name string
			op   verbs.Opcode
		}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"fadd", verbs.OpAtomicFetchAdd}} {
			row := testCase{name: fmt.Sprintf("rc/umr/%s/%s", l.name, op.name), shortV4: l.name == "strided"}
			rows = append(rows, kernelsWay(row, func(s *scene) error { return s.throughKey(l.make, op.op) })...)
		}
	}
	for _, op := range []struct {
		name string
		op   verbs.Opcode
	}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"fadd", verbs.OpAtomicFetchAdd}, {"send", verbs.OpSend}} {
		rows = append(rows, kernelsWay(testCase{name: "rc/dm/" + op.name, shortV4: op.name == "write"}, func(s *scene) error { return s.intoDM(op.op) })...)
	}
	return rows
}

// kernelsWay makes a row for each family, with the kernel as initiator.
func kernelsWay(c testCase, run func(*scene) error) (rows []*testCase) {
	for _, row := range everyWay(c, run) {
		if !row.weInitiate() {
			rows = append(rows, row)
		}
	}
	return rows
}

// mkey makes an indirect key and configures it on a queue pair.
func (o *ours) mkey(qp, pieces int, c func(k *verbs.MKey) *verbs.MKeyConfig) (*verbs.MKey, error) {
	k, err := o.pd.CreateMKey(pieces)
	if err != nil {
		return nil, err
	}
	o.keep(k)
	q := o.qps[qp]
	if _, err := q.qp.PostSend([]verbs.SendWR{{ID: 98, Op: verbs.OpConfigureMKey, Flags: verbs.SendSignaled, Configure: c(k)}}); err != nil {
		return nil, err
	}
	var wc [1]verbs.WC
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); {
		n, err := q.sent.Poll(wc[:])
		if err != nil {
			return nil, err
		}
		if n == 1 {
			return k, wc[0].Err()
		}
	}
	return nil, errors.New("no completion of an indirect key's configuration")
}

const umrRights = verbs.AccessLocalWrite | verbs.AccessRemote

// listKey makes a key of three pieces in another order, of lengths that no packet has.
func listKey(o *ours, qp int, r *region) (*verbs.MKey, place, error) {
	pieces := []struct{ off, n int }{{40_000, 7_008}, {8, 3_001}, {20_000, indirectSize - 7_008 - 3_001}}
	k, err := o.mkey(qp, len(pieces), func(k *verbs.MKey) *verbs.MKeyConfig {
		c := k.List(umrRights)
		for _, p := range pieces {
			c.List = append(c.List, r.sge(p.off, p.n))
		}
		return c
	})
	return k, func(i int) int {
		for _, p := range pieces {
			if i < p.n {
				return p.off + i
			}
			i -= p.n
		}
		panic("beyond the end")
	}, err
}

// stridedKey makes a key of 8 bytes out of every 16.
func stridedKey(o *ours, qp int, r *region) (*verbs.MKey, place, error) {
	k, err := o.mkey(qp, 1, func(k *verbs.MKey) *verbs.MKeyConfig {
		return k.Interleaved(umrRights, indirectSize/8, verbs.Stride{Addr: r.addr, Bytes: 8, Skip: 8, LKey: r.lkey})
	})
	return k, func(i int) int { return i/8*16 + i%8 }, err
}

// nestedKey makes a key of the halves of a strided key, swapped.
func nestedKey(o *ours, qp int, r *region) (*verbs.MKey, place, error) {
	below, at, err := stridedKey(o, qp, r)
	if err != nil {
		return nil, nil, err
	}
	const half = indirectSize / 2
	k, err := o.mkey(qp, 2, func(k *verbs.MKey) *verbs.MKeyConfig {
		return k.List(umrRights, verbs.SGE{Addr: half, Length: half, LKey: below.LKey()}, verbs.SGE{Length: half, LKey: below.LKey()})
	})
	return k, func(i int) int { return at((i + half) % indirectSize) }, err
}

// throughKey has the kernel use an indirect key of ours, and compares every byte of
// both sides.
func (s *scene) throughKey(layout func(*ours, int, *region) (*verbs.MKey, place, error), op verbs.Opcode) error {
	const seed, old = 21, 22
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	o := t.party.(*ours)
	local, err := i.alloc(indirectSize, allRights)
	if err != nil {
		return err
	}
	remote, err := t.alloc(3*indirectSize, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	if err := errors.Join(i.fill(local, 0, indirectSize, seed), t.fill(remote, 0, remote.size, old)); err != nil {
		return err
	}
	key, at, err := layout(o, t.qp, remote)
	if err != nil {
		return err
	}
	before, err := i.peek(local, 0, indirectSize)
	if err != nil {
		return err
	}
	there := bytes.Clone(remote.buf)
	wr := verbs.SendWR{ID: 1, Op: op, SGL: []verbs.SGE{local.sge(0, indirectSize)}, RKey: key.RKey(), CompareAdd: 5}
	here := bytes.Clone(before)
	switch op {
	case verbs.OpRDMAWrite:
		for k := range before {
			there[at(k)] = before[k]
		}
	case verbs.OpRDMARead:
		for k := range here {
			here[k] = there[at(k)]
		}
	case verbs.OpAtomicFetchAdd:
		wr.SGL[0].Length = 8
		word := there[at(0):][:8]
		copy(here, word)
		binary.NativeEndian.PutUint64(word, binary.NativeEndian.Uint64(word)+5)
	}
	wc, err := i.try(wr)
	if err := wantStatus(i.who(), wc, err, verbs.WCSuccess); err != nil {
		return err
	}
	return s.compareBoth(i, local, here, remote.buf, there)
}

// compareBoth compares both sides with what they must be.
func (s *scene) compareBoth(i *end, local *region, here, got, there []byte) error {
	now, err := i.peek(local, 0, len(here))
	if err != nil {
		return err
	}
	for _, c := range []struct {
		who       string
		got, want []byte
	}{{i.who(), now, here}, {"we", got, there}} {
		for k := range c.want {
			if c.got[k] != c.want[k] {
				return fmt.Errorf("%s: byte %d of %d is %#x, want %#x", c.who, k, len(c.want), c.got[k], c.want[k])
			}
		}
	}
	return nil
}

// intoDM has the kernel use device memory of ours.
func (s *scene) intoDM(op verbs.Opcode) error {
	const seed, old = 23, 24
	i, t, err := s.connect(connection{})
	if err != nil {
		return err
	}
	o := t.party.(*ours)
	local, err := i.alloc(indirectSize, allRights)
	if err != nil {
		return err
	}
	if err := i.fill(local, 0, indirectSize, seed); err != nil {
		return err
	}
	dm, err := o.dev.AllocDM(indirectSize, 3)
	if err != nil {
		return err
	}
	o.keep(dm)
	mr, err := o.pd.RegDMMR(dm, 0, indirectSize, umrRights|verbs.AccessZeroBased)
	if err != nil {
		return err
	}
	o.keep(mr)
	there := make([]byte, indirectSize)
	pattern(indirectSize, old, func(i int, v byte) bool { there[i] = v; return true })
	if _, err := dm.WriteAt(there, 0); err != nil {
		return err
	}
	here, err := i.peek(local, 0, indirectSize)
	if err != nil {
		return err
	}
	wr := verbs.SendWR{ID: 1, Op: op, SGL: []verbs.SGE{local.sge(0, indirectSize)}, RKey: mr.RKey(), CompareAdd: 5}
	switch op {
	case verbs.OpRDMAWrite:
		copy(there, here)
	case verbs.OpSend:
		wr.RKey = 0
		if _, err := o.qps[t.qp].qp.PostRecv([]verbs.RecvWR{{ID: 2, SGL: []verbs.SGE{mr.SGE(0, indirectSize)}}}); err != nil {
			return err
		}
		copy(there, here)
	case verbs.OpRDMARead:
		copy(here, there)
	case verbs.OpAtomicFetchAdd:
		wr.SGL[0].Length = 8
		copy(here, there[:8])
		binary.NativeEndian.PutUint64(there, binary.NativeEndian.Uint64(there)+5)
	}
	wc, err := i.try(wr)
	if err := wantStatus(i.who(), wc, err, verbs.WCSuccess); err != nil {
		return err
	}
	got := make([]byte, indirectSize)
	if _, err := dm.ReadAt(got, 0); err != nil {
		return err
	}
	return s.compareBoth(i, local, here, got, there)
}
