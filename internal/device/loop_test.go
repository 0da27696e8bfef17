package device

// The loop link: queue pairs of one process, of one device or of several.

import (
	"bytes"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// A queue pair that is connected to itself does everything that others do.
func TestLoopSelf(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP, ""} {
		t.Run("link="+mode, func(t *testing.T) {
			d := openDevice(t, provider.Config{Link: mode})
			e := newEnd(t, d, ib.RC, 3<<20)
			t.Cleanup(e.close)
			e.connect(e)
			const half = 3 << 19
			for i, size := range []int{0, 1, 1023, 1024, 1025, 64 << 10, half} {
				fill(e.buf[:size], byte(i+1))
				clear(e.buf[half:])
				e.recv(ib.RecvWR{ID: 77, SGL: e.sge(half, size)})
				e.post(ib.SendWR{ID: 1, Op: ib.OpSend, SGL: e.sge(0, size)})
				ids := map[uint64]ib.WC{}
				for range 2 {
					wc := e.ok()
					ids[wc.ID] = wc
				}
				if int(ids[77].ByteLen) != size || ids[1].Op != ib.WCSend {
					t.Fatalf("%+v", ids)
				}
				if k := firstDifference(e.buf[:size], e.buf[half:][:size]); k >= 0 {
					t.Fatalf("SEND of %d bytes: wrong from byte %d on", size, k)
				}
				for _, op := range []ib.Opcode{ib.OpRDMAWrite, ib.OpRDMARead} {
					fill(e.buf[:size], byte(i+100))
					fill(e.buf[half:][:size], byte(i+200))
					e.post(ib.SendWR{ID: 2, Op: op, SGL: e.sge(0, size), RemoteAddr: e.mr.Addr() + half, RKey: e.mr.RKey()})
					e.ok()
					if k := firstDifference(e.buf[:size], e.buf[half:][:size]); k >= 0 {
						t.Fatalf("%v of %d bytes: wrong from byte %d on", op, size, k)
					}
				}
			}
			e.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: e.sge(0, 8), RemoteAddr: e.mr.Addr() + 64, RKey: e.mr.RKey(), CompareAdd: 5})
			e.ok()
			if c := countsOf(d); mode != linkUDP && c["retransmitted_packets"] != 0 {
				t.Errorf("packets were sent again: %v", c)
			}
		})
	}
}

// One device's queue pairs talk to each other, over UC and UD too.
func TestLoopOneDevice(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	a, b := connected(t, d, d, ib.UC, 64<<10, nil)
	fill(a.buf, 1)
	b.recv(ib.RecvWR{ID: 3, SGL: b.sge(0, 64<<10)})
	a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 50000)})
	a.ok()
	if wc := b.ok(); wc.ID != 3 || wc.ByteLen != 50000 || !bytes.Equal(a.buf[:50000], b.buf[:50000]) {
		t.Errorf("%+v", wc)
	}
	x, y := newEnd(t, d, ib.UD, 8192), newEnd(t, d, ib.UD, 8192)
	t.Cleanup(x.close)
	t.Cleanup(y.close)
	x.openDatagrams(1)
	y.openDatagrams(2)
	ah := must[*ib.AH](t)(x.pd.CreateAH(ib.AHAttr{DGID: d.GIDs()[0]}))
	t.Cleanup(func() { closeAll(t, ah) })
	fill(x.buf, 9)
	y.recv(ib.RecvWR{ID: 4, SGL: y.sge(0, 8192)})
	x.post(ib.SendWR{Op: ib.OpSend, SGL: x.sge(0, 4096), AH: ah, RemoteQPN: y.qp.Number(), RemoteQKey: 2})
	x.ok()
	if wc := y.ok(); wc.ID != 4 || wc.ByteLen != 4096+ib.GRHLength || wc.SrcQP != x.qp.Number() ||
		!bytes.Equal(x.buf[:4096], y.buf[ib.GRHLength:][:4096]) {
		t.Errorf("%+v", wc)
	}
}

// Two devices of one process reach each other without packets, unless one of
// them is configured to use the network.
func TestLoopBetweenDevices(t *testing.T) {
	for _, tt := range []struct {
		x, y  string
		loops bool
	}{{"", "", true}, {linkLoop, "", true}, {"", linkUDP, false}, {linkUDP, linkUDP, false}} {
		t.Run(tt.x+"-"+tt.y, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: tt.x}), openDevice(t, provider.Config{Link: tt.y})
			a, b := connected(t, x, y, ib.RC, 4096, nil)
			fill(a.buf, 6)
			a.post(a.write(b, 0, 4096))
			a.ok()
			if k := firstDifference(a.buf, b.buf); k >= 0 {
				t.Errorf("wrong from byte %d on", k)
			}
			if loops := a.qp.(*QP).peer.Load() == nil; loops != tt.loops {
				t.Errorf("connected by the loop link: %v", loops)
			}
		})
	}
	// A loop device cannot reach one that only has the network.
	x, y := openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkUDP})
	pd := must[provider.PD](t)(x.AllocPD())
	_, err := pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]})
	wantErrno(t, "from loop to udp", err, syscall.EHOSTUNREACH)
	closeAll(t, pd)
}

// The peer's device is closed and another one opened at its address. The old
// connection fails, it does not reach the new device; a new connection works.
func TestLoopPeerReopened(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			x := openDevice(t, provider.Config{Link: mode})
			cfg := provider.Config{Link: mode, Addrs: []netip.Addr{nextAddr()}}
			y := openDevice(t, cfg)
			a := newEnd(t, x, ib.RC, 4096)
			t.Cleanup(a.close)
			hurry(a)
			b := newEnd(t, y, ib.RC, 4096)
			a.connect(b)
			b.connect(a)
			a.post(a.write(b, 0, 8))
			a.ok()
			b.close()
			closeAll(t, y)
			y = openDevice(t, cfg)
			c, d := connected(t, x, y, ib.RC, 4096, nil)
			before := bytes.Clone(d.buf)
			a.post(a.write(b, 0, 4096))
			a.status(ib.WCRetryExcErr)
			if !bytes.Equal(d.buf, before) {
				t.Error("the old connection has written to the new device")
			}
			fill(c.buf, 2)
			c.post(c.write(d, 0, 4096))
			c.ok()
			if k := firstDifference(c.buf, d.buf); k >= 0 {
				t.Errorf("wrong from byte %d on", k)
			}
		})
	}
}

// An address handle names an address, not a device: it is good for whatever
// device stands there.
func TestAddressHandleOutlivesPeer(t *testing.T) {
	for _, mode := range []string{linkLoop, linkUDP} {
		t.Run(mode, func(t *testing.T) {
			x := openDevice(t, provider.Config{Link: mode})
			cfg := provider.Config{Link: mode, Addrs: []netip.Addr{nextAddr()}}
			a := newEnd(t, x, ib.UD, 4096)
			t.Cleanup(a.close)
			a.openDatagrams(7)
			var ah *ib.AH
			for range 3 {
				y := openDevice(t, cfg)
				b := newEnd(t, y, ib.UD, 4096)
				b.openDatagrams(7)
				b.recv(ib.RecvWR{ID: 1, SGL: b.sge(0, 4096)})
				if ah == nil {
					ah = must[*ib.AH](t)(a.pd.CreateAH(ib.AHAttr{DGID: y.GIDs()[0]}))
					t.Cleanup(func() { closeAll(t, ah) })
				}
				a.post(ib.SendWR{Op: ib.OpSend, SGL: a.sge(0, 8), AH: ah, RemoteQPN: b.qp.Number(), RemoteQKey: 7})
				a.ok()
				eventuallySpin(t, func() bool {
					n, _ := b.cq.Poll(make([]ib.WC, 1))
					return n == 1
				})
				b.close()
				closeAll(t, y)
			}
		})
	}
}

// Two queue pairs of one process that send to each other at once, from two
// goroutines: neither waits for the other's lock.
func TestLoopCrossing(t *testing.T) {
	a, b := pair(t, linkLoop, ib.RC, 256<<10)
	var wg sync.WaitGroup
	until := time.Now().Add(lasting(300*time.Millisecond, 5*time.Second))
	for _, two := range [][2]*end{{a, b}, {b, a}} {
		wg.Go(func() {
			e, o := two[0], two[1]
			for i := 0; time.Now().Before(until); i++ {
				wr := e.write(o, 0, 128<<10)
				if i%2 == 1 {
					wr = e.read(o, 128<<10, 128<<10)
				}
				wr.ID, wr.Flags = uint64(i), ib.SendSignaled
				if _, err := e.qp.PostSend([]ib.SendWR{wr}); err != nil {
					t.Error(err)
					return
				}
				var wc [1]ib.WC
				for n := 0; n == 0; {
					n, _ = e.cq.Poll(wc[:])
				}
				if wc[0].Status != ib.WCSuccess || wc[0].ID != uint64(i) {
					t.Errorf("%+v", wc[0])
					return
				}
			}
		})
	}
	wg.Wait()
}
