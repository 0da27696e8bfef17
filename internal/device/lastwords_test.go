package device

import (
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Last words are repeated, since networks lose packets, until the process that says them closes the device.
func TestLastWordsRepeated(t *testing.T) {
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("192.0.2.2")}
	peer := netip.MustParseAddr("192.0.2.7")
	all := lastMADs(addrs, []host.LastWords{
		{State: uint8(cm.Established), Addr: 1, Peer: peer, Local: 1, Remote: 2, QPN: 3},
		{State: uint8(cm.ReqSent), Peer: peer, Local: 1},
		{State: uint8(cm.Established), Addr: 2, Peer: peer}, // the device has no such address
		{State: uint8(cm.TimeWait), Peer: peer},             // nothing is to be said
		{State: 255, Peer: peer},
	})
	if len(all) != 2 || all[0].From != addrs[1] || all[1].From != addrs[0] || all[0].To != peer {
		t.Fatalf("%+v", all)
	}
	for i, want := range []cm.Attr{cm.AttrDREQ, cm.AttrREJ} {
		if attr, _, _, ok := cm.Classify(all[i].Bytes); !ok || attr != want {
			t.Errorf("message %#x, want %#x", attr, want)
		}
	}
	for _, stopped := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			var at []time.Duration
			stop := make(chan struct{})
			if stopped {
				time.AfterFunc(time.Second, func() { close(stop) })
			}
			repeatLast(all[:1], func(*provider.MAD) error { at = append(at, time.Since(start)); return nil }, stop)
			want := []time.Duration{100 * time.Millisecond, 1100 * time.Millisecond, 4100 * time.Millisecond}
			if stopped {
				want = want[:1]
			}
			if !slices.Equal(at, want) {
				t.Errorf("said again after %v, want %v", at, want)
			}
		})
	}
}
