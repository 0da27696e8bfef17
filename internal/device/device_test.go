package device

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Every operation with every size at which packets begin and end, on every link, between two
// devices and from a queue pair to itself.
func TestOperations(t *testing.T) {
	const most = 1<<20 + 5
	for _, tt := range []struct {
		name string
		make func(t *testing.T) (a, b *end)
	}{
		{linkLoop, func(t *testing.T) (a, b *end) { return pair(t, linkLoop, ib.RC, 2*most) }},
		{linkRings, func(t *testing.T) (a, b *end) { return byRings(t, ib.RC, 2*most) }},
		{linkUDP, func(t *testing.T) (a, b *end) { return pair(t, linkUDP, ib.RC, 2*most) }},
		{"itself by loop", func(t *testing.T) (a, b *end) { return toItself(t, linkLoop, 2*most) }},
		{"itself by udp", func(t *testing.T) (a, b *end) { return toItself(t, linkUDP, 2*most) }},
		{"itself by default", func(t *testing.T) (a, b *end) { return toItself(t, "", 2*most) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a, b := tt.make(t)
			for i, size := range []int{0, 1, 8, 1023, 1024, 1025, 65536, most} {
				local, remote := a.buf[:size], b.buf[most:][:size]
				op := func(op ib.Opcode) (sent, received ib.WC) {
					t.Helper()
					copy(local, noise[i:])
					copy(remote, noise[i+1:])
					receives := op != ib.OpRDMAWrite && op != ib.OpRDMARead
					if receives {
						b.recv(ib.RecvWR{ID: 7, SGL: b.sge(most, size)})
					}
					wr := ib.SendWR{ID: 1, Op: op, Imm: 0x1234, SGL: a.sge(0, size)}
					if op != ib.OpSend && op != ib.OpSendImm {
						wr.RemoteAddr, wr.RKey = b.mr.Addr()+most, b.mr.RKey()
					}
					a.post(wr)
					ends := []*end{a, b}
					if !receives {
						ends = ends[:1]
					}
					for _, e := range ends {
						if wc := e.ok(); wc.ID == 7 { // a and b may have one completion queue
							received = wc
						} else {
							sent = wc
						}
					}
					if k := firstDifference(local, remote); k >= 0 {
						t.Fatalf("%v of %d bytes: wrong from byte %d on", op, size, k)
					}
					if sent.ID != 1 || sent.Op != wcOps[op] || receives != (received.ID == 7) {
						t.Fatalf("%v of %d bytes: %+v, %+v", op, size, sent, received)
					}
					return sent, received
				}
				op(ib.OpRDMAWrite)
				if wc, _ := op(ib.OpRDMARead); int(wc.ByteLen) != size {
					t.Fatalf("READ of %d bytes: %+v", size, wc)
				}
				for kind, want := range map[ib.Opcode]ib.WC{
					ib.OpSend:         {Op: ib.WCRecv},
					ib.OpSendImm:      {Op: ib.WCRecv, Flags: ib.WCWithImm, Imm: 0x1234},
					ib.OpRDMAWriteImm: {Op: ib.WCRecvRDMAWithImm, Flags: ib.WCWithImm, Imm: 0x1234},
				} {
					want.ID, want.QPN, want.ByteLen = 7, b.qp.Number(), uint32(size)
					if _, wc := op(kind); wc != want {
						t.Fatalf("%v of %d bytes: %+v, want %+v", kind, size, wc, want)
					}
				}
			}
			clear(b.buf[most+3:][:16]) // most is odd
			a.post(ib.SendWR{Op: ib.OpAtomicFetchAdd, SGL: a.sge(0, 8), RemoteAddr: b.mr.Addr() + most + 3, RKey: b.mr.RKey(), CompareAdd: 5})
			a.ok()
			if got := wordOf(b.buf[most+3:]); got != 5 {
				t.Errorf("fetch-and-add has made %d", got)
			}
		})
	}
}

// toItself makes a queue pair that is connected to itself.
func toItself(t *testing.T, mode string, size int) (a, b *end) {
	t.Helper()
	e := newEnd(t, openDevice(t, provider.Config{Link: mode}), ib.RC, size)
	t.Cleanup(e.close)
	if mode != linkUDP {
		e.timeout = 0 // nothing is lost, so nothing need be sent again
	}
	e.connect(e)
	return e, e
}

// TestCaptureFull: a capture that cannot be written does not delay traffic; the packets that
// are not in it are counted, and Close reports them, and closes the device all the same.
func TestCaptureFull(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkUDP, PCAP: "/dev/full"})
	a, b := connected(t, d, d, ib.RC, 4096, nil)
	for range 20 {
		a.post(a.write(b, 0, 4096))
		a.ok()
	}
	if n := countsOf(d)["capture_lost_packets"]; n < 20 {
		t.Errorf("%d packets counted as lost, of more than 20", n)
	}
	closeAll(t, a.qp, b.qp, a.mr, b.mr, a.cq, b.cq, a.pd, b.pd)
	if err := d.Close(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "packets are missing from /dev/full") {
		t.Errorf("Close returns %v, want %v", err, syscall.ENOSPC)
	}
	d = openDevice(t, provider.Config{Link: linkUDP, Addrs: d.addrs}) // its address is free
	if _, ok := countsOf(d)["capture_lost_packets"]; ok {
		t.Error("a device without a capture counts its packets")
	}
}
