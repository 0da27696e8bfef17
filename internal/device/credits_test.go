package device

// Credits (path.go): what queue pairs to one peer share, and which of them goes on when.

import (
	"net/netip"
	"testing"
	"testing/synctest"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// uses returns how many queue pairs use the peers of a device, by address.
func (d *Device) uses() map[netip.Addr]int {
	d.peers.mu.Lock()
	defer d.peers.mu.Unlock()
	n := map[netip.Addr]int{}
	for k, p := range d.peers.byAddr {
		n[k.addr] = p.users
	}
	return n
}

// waitsForCredits reports whether the end is in its peer's line.
func (e *end) waitsForCredits() bool {
	u := e.qp.(*QP).peer.Load()
	if u == nil {
		return false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.waits
}

// hog takes all credits of a device's peer, which receives nothing until the function that
// it returns is called.
func hog(t *testing.T, from, to *Device) (ends []*end, release func()) {
	t.Helper()
	to.first.rx.Lock()
	for range peerWindows {
		a, _ := connected(t, from, to, ib.RC, 64, nil)
		a.recv(ib.RecvWR{})
		ends = append(ends, a)
	}
	for _, e := range ends {
		e.post(ib.SendWR{Op: ib.OpRDMAWrite, RemoteAddr: 0, RKey: 0})
	}
	return ends, to.first.rx.Unlock
}

// A queue pair that waits for the credits of one peer, and is connected to another one, is
// woken there.
func TestCreditsReconnected(t *testing.T) {
	_, devs := simulated(t, 3, link.FaultyConfig{}, &provider.Config{Window: 1})
	x, y, z := devs[0], devs[1], devs[2]
	a, _ := connected(t, x, y, ib.RC, 64, nil)
	b := newEnd(t, z, ib.RC, 64)
	t.Cleanup(b.close)
	before, releaseY := hog(t, x, y)
	defer releaseY()
	a.post(ib.SendWR{Op: ib.OpRDMAWrite})
	eventually(t, "it waits for credits of the first peer", a.waitsForCredits)

	a.modify(ib.QPAttr{State: ib.QPReset}, 0)
	if n := x.uses()[y.addrs[0]]; n != peerWindows {
		t.Errorf("%d queue pairs use the first peer", n)
	}
	a.connect(b)
	b.connect(a)
	hogs, releaseZ := hog(t, x, z)
	a.post(ib.SendWR{Op: ib.OpRDMAWrite})
	eventually(t, "it waits for credits of the second peer", a.waitsForCredits)
	releaseZ()
	a.ok()
	for _, e := range before {
		if e.cq.(*CQ).Len() != 0 {
			t.Fatal("the first peer's credits have come back, and may have woken it")
		}
	}
	for _, e := range hogs {
		e.ok()
	}
	if n := x.uses()[z.addrs[0]]; n != peerWindows+1 {
		t.Errorf("%d queue pairs use the second peer", n)
	}
}

// A queue pair that is reset, or closed, gives its place in the line up, and its credits go
// to others.
func TestCreditsLeft(t *testing.T) {
	for name, leave := range map[string]func(e *end){
		"reset": func(e *end) { e.modify(ib.QPAttr{State: ib.QPReset}, 0) },
		"close": func(e *end) { closeAll(t, e.qp) },
	} {
		t.Run(name, func(t *testing.T) {
			_, devs := simulated(t, 2, link.FaultyConfig{}, &provider.Config{Window: 1})
			x, y := devs[0], devs[1]
			a, _ := connected(t, x, y, ib.RC, 64, nil)
			b, _ := connected(t, x, y, ib.RC, 64, nil)
			hogs, release := hog(t, x, y)
			for _, e := range []*end{a, b} {
				e.post(ib.SendWR{Op: ib.OpRDMAWrite})
				eventually(t, "it waits for credits", e.waitsForCredits)
			}
			leave(a)
			if a.waitsForCredits() {
				t.Error("it still waits")
			}
			leave(hogs[0]) // its credits are b's now
			if b.waitsForCredits() {
				t.Error("the other one was not woken")
			}
			release()
			b.ok()
		})
	}
}

// The table of peers holds those that queue pairs have a path to, no others.
func TestPeersForgotten(t *testing.T) {
	_, devs := simulated(t, 1, link.FaultyConfig{}, nil)
	d := devs[0]
	e := newEnd(t, d, ib.RC, 64)
	t.Cleanup(e.close)
	for i := range 100 {
		e.connectTo(netip.AddrFrom4([4]byte{10, 77, 1, byte(i)}), 99, 0, 1)
		if n := len(d.uses()); n != 1 {
			t.Fatalf("%d peers, of a queue pair that has one", n)
		}
		// What fails changes nothing.
		bad := ib.QPAttr{State: ib.QPRTR, AV: ib.AHAttr{DGID: ib.GIDFromAddr(d.addrs[0])}}
		if e.qp.Modify(&bad, ib.QPMaskState|ib.QPMaskAV) == nil || len(d.uses()) != 1 {
			t.Fatalf("%v after a Modify that fails", d.uses())
		}
		e.modify(ib.QPAttr{State: ib.QPReset}, 0)
		if n := len(d.uses()); n != 0 {
			t.Fatalf("%d peers, of a queue pair that has none", n)
		}
	}
	e.connectTo(netip.AddrFrom4([4]byte{10, 77, 2, 1}), 99, 0, 1)
	closeAll(t, e.qp)
	if n := len(d.uses()); n != 0 {
		t.Errorf("%d peers, of a queue pair that is closed", n)
	}
}

// bufferLink is a link whose window is as many packets as fit a buffer: peerWindows of them are what
// a controller begins with.
type bufferLink struct{ link.Link }

func (bufferLink) Window(mtu int) int { return 4 * 4096 / mtu }

// Queue pairs of different MTUs share a peer. Whichever came first, those of one MTU may have
// peerWindows windows under way together, which is what the peer's socket buffer is good
// for: no more, and no less.
func TestCreditsMTUs(t *testing.T) {
	for _, mtus := range [][2]ib.MTU{{ib.MTU4096, ib.MTU256}, {ib.MTU256, ib.MTU4096}} {
		synctest.Test(t, func(t *testing.T) { // no time passes: nothing is sent again
			f := link.NewFabric(link.FaultyConfig{})
			var devs [2]*Device
			for i := range devs {
				devs[i] = openOn("test", bufferLink{f.Attach(netip.AddrFrom4([4]byte{10, 78, 0, byte(1 + i)}))}, nil)
				t.Cleanup(func() { closeAll(t, devs[i]) })
			}
			x, y := devs[0], devs[1]
			connected(t, x, y, ib.RC, 64, func(e *end) { e.mtu = mtus[0] })
			window := x.link.Window(mtus[1].Bytes())
			y.first.rx.Lock()
			var ends []*end
			for range 2 * peerWindows {
				a, _ := connected(t, x, y, ib.RC, window*mtus[1].Bytes(), func(e *end) { e.mtu = mtus[1] })
				ends = append(ends, a)
			}
			packets := 0
			for _, e := range ends {
				e.post(ib.SendWR{Op: ib.OpRDMAWrite, SGL: e.sge(0, len(e.buf)), RemoteAddr: 1})
				packets += int(e.counted()[qp.CntTxPackets])
			}
			if packets != peerWindows*window {
				t.Errorf("MTU %v after %v: %d packets are under way, %d windows are %d", mtus[1], mtus[0], packets, peerWindows, peerWindows*window)
			}
			y.first.rx.Unlock()
		})
	}
}
