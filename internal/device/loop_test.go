package device

// The loop link: queue pairs of one process, of one device or of several.

import (
	"bytes"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

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
			a.timeoutSoon()
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
	for _, two := range [][2]*end{{a, b}, {b, a}} {
		wg.Go(func() {
			e, o := two[0], two[1]
			for i := range lastingOps(300, 10000) {
				wr := e.write(o, 0, 128<<10)
				if i%2 == 1 {
					wr = e.read(o, 128<<10, 128<<10)
				}
				wr.ID = uint64(i)
				e.post(wr)
				e.completed(i)
			}
		})
	}
	wg.Wait()
}
