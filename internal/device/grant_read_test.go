package device

import (
	"bytes"
	"math/rand/v2"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// READs by grant return what is there, in order with WRITEs by grant and with requests by the
// ring; the passive side counts them without having executed them.
func TestGrantRead(t *testing.T) {
	seed := testSeed(t)
	rng := rand.New(rand.NewPCG(seed, 0))
	const size = 1 << 20
	a, b := byRings(t, ib.RC, size)
	b.shareMemory(size)
	want := bytes.Clone(b.buf)
	read, written := uint64(0), uint64(0)
	for i := range 400 {
		n := 1 + rng.IntN(100<<10)
		off, at := rng.IntN(size-n), rng.IntN(size-n)
		wr := a.read(b, off, n)
		wr.ID, wr.SGL = uint64(i), a.sge(at, n)
		switch i % 5 {
		case 1, 3:
			for j := range 8 {
				a.buf[at+rng.IntN(n)] = byte(i + j)
			}
			wr.Op = ib.OpRDMAWrite
			copy(want[off:][:n], a.buf[at:][:n])
			written += uint64(n)
		case 4:
			wr.Op, wr.CompareAdd, wr.SGL = ib.OpAtomicFetchAdd, 0, a.sge(at, 8)
			wr.RemoteAddr = b.mr.Addr() + uint64(off&^7)
			n = 8
			off &^= 7
		}
		a.post(wr)
		wc := a.ok()
		if wc.ID != uint64(i) || wr.Op == ib.OpRDMARead && wc.ByteLen != uint32(n) {
			t.Fatalf("%+v of %d bytes", wc, n)
		}
		if wr.Op == ib.OpRDMARead {
			read += uint64(n)
		}
		if !bytes.Equal(a.buf[at:][:n], want[off:][:n]) {
			t.Fatalf("request %d, %v of %d bytes: other bytes have come", i, wr.Op, n)
		}
	}
	if !bytes.Equal(b.buf, want) {
		t.Error("other bytes have been written")
	}
	if n := countsOf(a.dev)["local_direct"]; n < 200 {
		t.Errorf("%d requests went by a grant", n)
	}
	far := countsOf(b.dev)
	if far["rx_bytes"] != written || far["tx_bytes"] != read {
		t.Errorf("the passive side counts %d bytes in and %d out, there were %d and %d", far["rx_bytes"], far["tx_bytes"], written, read)
	}
	near := countsOf(a.dev)
	if near["tx_packets"] != far["rx_packets"] || near["rx_packets"] != far["tx_packets"] {
		t.Errorf("packets: %d out, %d in; at the other side %d in, %d out", near["tx_packets"], near["rx_packets"], far["rx_packets"], far["tx_packets"])
	}
	closeAll(t, b.mr)
	a.post(a.read(b, 0, 8))
	if wc := a.wait(); wc.Status != ib.WCRemAccessErr {
		t.Errorf("a READ of a closed region: %+v", wc)
	}
}

// A grant to a region that may be read from and not written to is for READs alone.
func TestGrantReadOnly(t *testing.T) {
	a, b := byRings(t, ib.RC, 4096)
	b.shareMemory(4096)
	access := ib.AccessRemoteRead
	if err := b.mr.Rereg(provider.MRChange{Access: &access}); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		b.buf[5] = byte(i)
		a.post(a.read(b, 0, 8))
		a.ok()
		if a.buf[5] != byte(i) {
			t.Fatal("other bytes have come")
		}
	}
	if n := countsOf(a.dev)["local_direct"]; n < 50 {
		t.Errorf("%d READs went by a grant", n)
	}
	a.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr(), RKey: b.mr.RKey(), Flags: ib.SendSignaled})
	if wc := a.wait(); wc.Status != ib.WCRemAccessErr {
		t.Errorf("a WRITE to it: %+v", wc)
	}
}
