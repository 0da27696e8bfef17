package verbs_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/peermem/peertest"
	"github.com/verbena-rdma/verbena/verbs"
)

func newPeer(t *testing.T, cfg peertest.Config) *peertest.Device {
	t.Helper()
	d, err := peertest.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(context.Background()); err != nil || len(d.Wrong()) > 0 {
			t.Error(err, d.Wrong())
		}
	})
	return d
}

const peerRights = verbs.AccessLocalWrite | verbs.AccessRemote

// SEND, WRITE, READ and atomics reach memory of a PeerDirect client that the CPU cannot load from, in
// both directions, on every link.
func TestPeerTraffic(t *testing.T) {
	for _, link := range []verbs.LinkMode{verbs.LinkLoop, verbs.LinkUDP} {
		t.Run(string(link), func(t *testing.T) {
			d := newPeer(t, peertest.Config{Pages: 3, PageSize: 8192})
			alice := openSide(verbs.RC, &verbs.Config{Link: link})
			bob := alice.beside(t)
			check(alice.qp.Connect(bob.qp.Endpoint(), nil))
			check(bob.qp.Connect(alice.qp.Endpoint(), nil))
			const n = 20000
			mine := make([]byte, n)
			plain := alice.register(mine)
			mr, err := bob.pd.RegMRAddr(d.Addr()+8, n, peerRights)
			check(err)
			seen := make([]byte, n)
			post := func(by *side, wr verbs.SendWR) {
				t.Helper()
				wr.Flags = verbs.SendSignaled
				_, err := by.qp.PostSend([]verbs.SendWR{wr})
				check(err)
				if wc := by.wait(); wc.Status != verbs.WCSuccess {
					t.Fatalf("%v: %v", wr.Op, wc.Status)
				}
			}
			fill := func(v byte) {
				for i := range mine {
					mine[i] = byte(i)*v + v
				}
			}
			expect := func(what string) {
				t.Helper()
				if d.ReadAt(seen, 8); !bytes.Equal(seen, mine) {
					t.Errorf("%s has left other bytes", what)
				}
			}
			fill(3)
			post(alice, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{plain.SGE(0, n)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()})
			expect("WRITE")
			clear(mine)
			post(alice, verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{plain.SGE(0, n)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()})
			expect("READ")
			fill(7)
			_, err = bob.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, n)}}})
			check(err)
			post(alice, verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{plain.SGE(0, n)}})
			bob.wait()
			expect("SEND")
			clear(mine)
			post(bob, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{mr.SGE(0, n)}, RemoteAddr: plain.Addr(), RKey: plain.RKey()})
			expect("WRITE out of it")
			before := binary.NativeEndian.Uint64(seen[16:])
			post(alice, verbs.SendWR{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{plain.SGE(0, 8)}, CompareAdd: 5, RemoteAddr: mr.Addr() + 16, RKey: mr.RKey()})
			d.ReadAt(seen, 8)
			if got := binary.NativeEndian.Uint64(seen[16:]); got != before+5 || binary.NativeEndian.Uint64(mine) != before {
				t.Errorf("%#x plus 5 is %#x", before, got)
			}
			post(alice, verbs.SendWR{Op: verbs.OpAtomicCmpSwap, SGL: []verbs.SGE{plain.SGE(0, 8)}, CompareAdd: before + 5, Swap: 1, RemoteAddr: mr.Addr() + 16, RKey: mr.RKey()})
			d.ReadAt(seen, 8)
			if got := binary.NativeEndian.Uint64(seen[16:]); got != 1 {
				t.Errorf("compare and swap has left %#x", got)
			}
			counted := map[string]uint64{}
			for _, c := range bob.dev.Counters() {
				counted[c.Name] = c.Value
			}
			if counted["peer_peertest_num_alloc_mrs"] != 1 || counted["peer_peertest_num_reg_bytes"] != n || counted["peer_peertest_num_reg_pages"] != 3 {
				t.Errorf("counted %v", counted)
			}
			bob.leave()
			alice.close(plain, mr)
		})
	}
}

// beside makes a second queue pair on the same device, with queues of its own.
func (s *side) beside(t *testing.T) *side {
	t.Helper()
	other := &side{dev: s.dev, pd: s.pd}
	var err error
	other.cq, err = s.dev.CreateCQ(64, nil)
	check(err)
	other.qp, err = s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: other.cq, RecvCQ: other.cq, Cap: verbs.QPCap{MaxSendWR: 16, MaxRecvWR: 16, MaxSendSGE: 1, MaxRecvSGE: 1}})
	check(err)
	return other
}

// leave closes what beside has made.
func (s *side) leave() {
	check(s.qp.Close())
	check(s.cq.Close())
}

// What regions of PeerDirect clients cannot have and do.
func TestPeerRestrictions(t *testing.T) {
	d := newPeer(t, peertest.Config{Pages: 2})
	s := openSide(verbs.RC, &verbs.Config{Link: verbs.LinkLoop})
	defer s.close()
	addr := d.Addr()
	for what, c := range map[string]struct {
		addr   uintptr
		n      uint64
		access verbs.Access
		want   syscall.Errno
		asked  int
	}{
		"on demand, which takes any address":    {addr, 100, peerRights | verbs.AccessOnDemand, 0, 0},
		"with windows":                          {addr, 100, peerRights | verbs.AccessMWBind, syscall.EINVAL, 1},
		"persistent":                            {addr, 100, peerRights | verbs.AccessFlushPersistent, syscall.EINVAL, 1},
		"remote writing without local writing":  {addr, 100, verbs.AccessRemoteWrite, syscall.EINVAL, 1},
		"an address of nobody":                  {addr - 4096, 100, peerRights, syscall.EFAULT, 1},
		"more than the memory":                  {addr, d.Len() + 1, peerRights, syscall.EFAULT, 1},
		"no bytes":                              {addr, 0, peerRights, syscall.EINVAL, 0},
		"bytes beyond the end of all addresses": {addr, 1 << 63, peerRights, syscall.EFAULT, 0},
	} {
		before := d.Asked()
		mr, err := s.pd.RegMRAddr(c.addr, c.n, c.access)
		switch {
		case c.want == 0 && err == nil:
			check(mr.Close())
		case c.want == 0 || !errors.Is(err, c.want):
			t.Errorf("%s: %v, want errno %v", what, err, c.want)
		}
		if asked := d.Asked() - before; asked != c.asked {
			t.Errorf("%s: the client was asked %d times, should be %d", what, asked, c.asked)
		}
	}
	mr, err := s.pd.RegMRAddr(addr, 100, peerRights)
	check(err)
	rights := verbs.AccessRemoteRead
	for what, change := range map[string]verbs.MRChange{"rights": {Access: &rights}, "memory": {Buf: make([]byte, 10)}, "domain": {PD: s.pd}} {
		var failed *verbs.ReregError
		if err := mr.Rereg(change); !errors.As(err, &failed) || failed.State != verbs.ReregOldValid || !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Errorf("other %s: %v", what, err)
		}
	}
	check(mr.Close())
	// A region of other memory does not become one of a client.
	mr = s.register(make([]byte, 10))
	if err := mr.Rereg(verbs.MRChange{Range: &verbs.MRRange{Addr: addr, Length: 100}}); !errors.Is(err, syscall.EFAULT) {
		t.Errorf("memory of a client, by Rereg: %v", err)
	}
	check(mr.Close())
	// The device's own limit holds, and what was claimed is given back.
	if d.Open() != 0 {
		t.Errorf("%d claims are open", d.Open())
	}
}

// The client frees memory while peers write to it: requests that come later end in access errors, its
// operations are called once, and nothing is written after Free has returned.
func TestPeerFreedUnderLoad(t *testing.T) {
	const regions, n = 4, 3 * 4096
	alice, bob := connected()
	check(alice.qp.Close())
	check(bob.qp.Close())
	target := make([]byte, n)
	for i := range target {
		target[i] = 0x55
	}
	plain := alice.register(target)
	var wg sync.WaitGroup
	for i := range regions {
		d := newPeer(t, peertest.Config{Name: fmt.Sprint("freed", i), Pages: 3, PageSize: 4096})
		mr, err := bob.pd.RegMRAddr(d.Addr(), n, peerRights)
		check(err)
		from, to := alice.beside(t), bob.beside(t)
		check(from.qp.Connect(to.qp.Endpoint(), nil))
		check(to.qp.Connect(from.qp.Endpoint(), nil))
		written := make(chan struct{})
		wg.Go(func() {
			for k := 0; ; k++ {
				_, err := from.qp.PostSend([]verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled, SGL: []verbs.SGE{plain.SGE(0, n)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()}})
				check(err)
				if status := from.wait().Status; status != verbs.WCSuccess {
					if status != verbs.WCRemAccessErr {
						t.Errorf("a WRITE ends with %v", status)
					}
					break
				}
				if k == 20 {
					close(written)
				}
			}
		})
		wg.Go(func() {
			<-written
			if err := d.Free(); err != nil {
				t.Error(err)
			}
			d.Fill(0xaa) // it is somebody else's now
		})
		defer func() {
			got := make([]byte, n)
			if d.ReadAt(got, 0); bytes.IndexByte(got, 0x55) >= 0 {
				t.Error("memory was written after it was freed")
			}
			key := mr.RKey()
			from.leave()
			to.leave()
			check(mr.Close())
			if key != mr.RKey() {
				t.Error("the key has changed")
			}
			if calls := d.Calls(d.Claims()[0]); !slices.Equal(calls, []string{"acquire", "get_pages", "dma_map", "dma_unmap", "put_pages", "release"}) {
				t.Errorf("calls %v", calls)
			}
		}()
	}
	wg.Wait()
	t.Cleanup(func() {
		check(plain.Close())
		for _, s := range []*side{alice, bob} {
			check(s.cq.Close())
			check(s.pd.Close())
			check(s.dev.Close())
		}
	})
}
