package main

// On-demand memory: ours, which the kernel's device accesses, and that of the newest kernels'
// device, with ours at the other side. Pages are absent at first, and are discarded and
// mapped again between operations, and during them.

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys/remap"
	"github.com/verbena-rdma/verbena/verbs"
)

const lazySize = 256 << 10

// lazy is memory of ours on demand.
type lazy struct {
	*region
	*remap.Memory
}

// lazily makes memory on demand, with a region of its own or an implicit one.
func (o *ours) lazily(implicit bool) (*lazy, error) {
	m, err := remap.New(lazySize)
	if err != nil {
		return nil, err
	}
	o.keep(m)
	l := &lazy{&region{addr: uint64(m.Addr()), size: lazySize, buf: m.Bytes}, m}
	const rights = allRights | verbs.AccessOnDemand
	if implicit {
		l.mr, err = o.pd.RegImplicitMR(rights)
	} else {
		l.mr, err = o.pd.RegMRAddr(m.Addr(), lazySize, rights)
	}
	if err != nil {
		return nil, err
	}
	o.keep(l.mr)
	l.lkey, l.rkey = l.mr.LKey(), l.mr.RKey()
	return l, nil
}

func onDemand() (rows []*testCase) {
	ops := []struct {
		name string
		op   verbs.Opcode
	}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"send", verbs.OpSend}, {"fadd", verbs.OpAtomicFetchAdd}}
	for _, kind := range []struct {
		name     string
		implicit bool
	}{{"odp", false}, {"implicit", true}} {
		for _, op := range ops {
			rows = append(rows, everyWay(testCase{name: fmt.Sprintf("rc/%s/remap/%s", kind.name, op.name), shortV4: op.op == verbs.OpRDMARead},
				func(s *scene) error { return s.remapped(op.op, kind.implicit) })...)
		}
		rows = append(rows, everyWay(testCase{name: "rc/" + kind.name + "/storm", shortV4: true},
			func(s *scene) error { return s.remappedMeanwhile(kind.implicit) })...)
		rows = append(rows, everyWay(testCase{name: "rc/" + kind.name + "/forbidden", shortV4: kind.implicit},
			func(s *scene) error { return s.forbidden(kind.implicit) })...)
	}
	for _, op := range ops {
		rows = append(rows, everyWay(testCase{name: "rc/kernelodp/" + op.name, shortV4: true}, func(s *scene) error { return s.kernelPages(op.op) })...)
	}
	return rows
}

// exchange does one operation between two regions and checks what it did.
func (s *scene) exchange(i, t *end, local, remote *region, op verbs.Opcode, n int, seed uint64) error {
	wr := verbs.SendWR{ID: seed, Op: op, SGL: []verbs.SGE{local.sge(0, n)}, RemoteAddr: remote.addr, RKey: remote.rkey}
	from, to, src, dst := i.party, t.party, local, remote
	switch op {
	case verbs.OpRDMARead:
		from, to, src, dst = t.party, i.party, remote, local
	case verbs.OpSend:
		if err := t.receive(seed, remote.sge(0, n)); err != nil {
			return err
		}
	case verbs.OpAtomicFetchAdd:
		wr.SGL, wr.CompareAdd = []verbs.SGE{local.sge(0, 8)}, seed
		before, err := word(t, remote, 0)
		if err != nil {
			return err
		}
		if _, err := i.do(wr); err != nil {
			return err
		}
		found, err1 := word(i, local, 0)
		after, err2 := word(t, remote, 0)
		if found != before || after != before+seed {
			return errors.Join(err1, err2, fmt.Errorf("%s: fetch-and-add of %d found %d and left %d of %d", i.who(), seed, found, after, before))
		}
		return errors.Join(err1, err2)
	}
	if err := from.fill(src, 0, n, seed); err != nil {
		return err
	}
	if _, err := i.do(wr); err != nil {
		return err
	}
	if op == verbs.OpSend {
		if err := t.wantReceived(verbs.WC{ID: seed, Op: verbs.WCRecv, ByteLen: uint32(n)}); err != nil {
			return err
		}
	}
	return to.check(dst, 0, n, seed)
}

// lazySides connects, and makes memory on demand on our side and ordinary memory on the
// kernel's.
func (s *scene) lazySides(implicit bool) (i, t *end, local, remote *region, mine *lazy, err error) {
	if i, t, err = s.connect(connection{}); err != nil {
		return
	}
	if mine, err = s.ours.lazily(implicit); err != nil {
		return
	}
	theirs, err := s.kernel.alloc(lazySize, allRights)
	local, remote = mine.region, theirs
	if !s.weInit {
		local, remote = theirs, mine.region
	}
	return i, t, local, remote, mine, err
}

// remapped does operations; our pages are new each time.
func (s *scene) remapped(op verbs.Opcode, implicit bool) error {
	i, t, local, remote, mine, err := s.lazySides(implicit)
	if err != nil {
		return err
	}
	for round := range uint64(4) {
		n := lazySize >> (round % 3)
		if err := s.exchange(i, t, local, remote, op, n, round+1); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		change := mine.Again
		if round%2 == 1 {
			change = mine.Discard
		}
		if err := change(0, lazySize); err != nil {
			return err
		}
	}
	caps, err := s.ours.dev.QueryODPCaps()
	if err != nil {
		return err
	}
	// Where the kernel reports changes of mappings, each is counted.
	st := mine.mr.PagingStats()
	if st.PageFaults == 0 || st.FailedResolutions != 0 || caps.Notifier == "userfaultfd" && st.Invalidations != 4 {
		return fmt.Errorf("we, with %s: %+v", caps.Notifier, st)
	}
	return nil
}

// remappedMeanwhile does operations while our pages are discarded and mapped again.
func (s *scene) remappedMeanwhile(implicit bool) error {
	i, t, local, remote, mine, err := s.lazySides(implicit)
	if err != nil {
		return err
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var storm error
	changes := 0
	wg.Go(func() {
		for k := 0; !stop.Load() && storm == nil; k++ {
			off := k * 5 % 60 * 4096
			if k%2 == 0 {
				storm = mine.Discard(off, 4*4096)
			} else {
				storm = mine.Again(off, 4*4096)
			}
			changes++
			time.Sleep(100 * time.Microsecond)
		}
	})
	for round := range uint64(12) {
		op := []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead, verbs.OpSend}[round%3]
		if err = s.exchange(i, t, local, remote, op, lazySize, round+1); err != nil {
			err = fmt.Errorf("round %d: %w", round, err)
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	if st := mine.mr.PagingStats(); err == nil && (st.FailedResolutions != 0 || st.PageFaults == 0) {
		err = fmt.Errorf("we: after %d changes %+v", changes, st)
	}
	return errors.Join(err, storm)
}

// forbidden has a page of ours without rights: a local error if we initiate, otherwise a
// remote one.
func (s *scene) forbidden(implicit bool) error {
	i, t, local, remote, mine, err := s.lazySides(implicit)
	if err != nil {
		return err
	}
	if err := s.exchange(i, t, local, remote, verbs.OpRDMAWrite, lazySize, 1); err != nil {
		return err
	}
	if err := mine.Forbid(lazySize/2, 4096, true); err != nil {
		return err
	}
	want := verbs.WCRemAccessErr
	if s.weInit {
		want = verbs.WCLocProtErr
	}
	wc, err := i.try(verbs.SendWR{ID: 2, Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{local.sge(0, lazySize)}, RemoteAddr: remote.addr, RKey: remote.rkey})
	return errors.Join(wantStatus(i.who(), wc, err, want), mine.Forbid(lazySize/2, 4096, false))
}

// kernelPages has on-demand memory on both sides, and discards the kernel's pages between
// operations. The MTU is the size of a page: otherwise the kernel's device stores data for
// the middle of a page at its beginning (docs/interop.md).
func (s *scene) kernelPages(op verbs.Opcode) error {
	i, t, err := s.connect(connection{mtu: verbs.MTU4096})
	if err != nil {
		return err
	}
	mine, err := s.ours.lazily(false)
	if err != nil {
		return err
	}
	theirs, err := s.kernel.alloc(lazySize, allRights|verbs.AccessOnDemand)
	if err != nil {
		return skipError("its rxe has no on-demand memory: " + err.Error())
	}
	local, remote := mine.region, theirs
	if !s.weInit {
		local, remote = theirs, mine.region
	}
	for round := range uint64(4) {
		if err := s.exchange(i, t, local, remote, op, lazySize>>(round%3), round+1); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := errors.Join(s.kernel.discard(theirs), mine.Again(0, lazySize)); err != nil {
			return err
		}
	}
	return nil
}
