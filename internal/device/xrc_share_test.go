package device

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/train"
	"github.com/verbena-rdma/verbena/internal/wire"
)

// A control message about a target is read as it was written, every
// field of it; a message of any other length is not read.
func TestXRCControl(t *testing.T) {
	w := controlMessage{kind: ctlHandoff, qpn: 0x123456, handoff: 0x11223344, count: 77, lost: true, failed: ib.EventQPAccessErr,
		stand:  qp.Handoff{Expected: wire.PSN(0xabcdef), Messages: 0x654321, ReadEnd: wire.PSN(0x13579b), AnyRead: true, Owes: true, NakSent: true},
		domain: host.Domain{1 << 40, 1<<63 + 5},
		attr: ib.QPAttr{Access: ib.AccessRemoteWrite | ib.AccessFlushGlobal, PathMTU: ib.MTU2048, DestQPN: 0xfedcba, MinRNRTimer: 31, MaxDestRDAtomic: 16,
			AV: ib.AHAttr{DGID: ib.GID{1, 2, 15: 9}, FlowLabel: 0xfffff, SGIDIndex: 3, TrafficClass: 0x48, HopLimit: 9}}}
	long := w.append(nil)
	var got controlMessage
	if len(long) != longControl || !got.parse(long) || got != w {
		t.Errorf("%d bytes: %+v, want %+v", len(long), got, w)
	}
	w.kind, w.domain, w.attr = ctlOffer, host.Domain{}, ib.QPAttr{}
	short := w.append(nil)
	if len(short) != shortControl || !got.parse(short) || got != w {
		t.Errorf("%d bytes: %+v, want %+v", len(short), got, w)
	}
	for n := range long {
		if n != shortControl && got.parse(long[:n]) || n < shortControl && got.parse(short[:n]) {
			t.Errorf("%d bytes were read", n)
		}
	}
	if got.parse(long[:shortControl]) || got.parse(append(short, make([]byte, longControl-shortControl)...)) {
		t.Error("control messages of the wrong length for their kind were read")
	}
}

// Nonsense from another process changes nothing and breaks nothing.
func TestXRCNonsense(t *testing.T) {
	seed := testSeed(t)
	d := openDevice(t, provider.Config{})
	file := must[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "domain")))
	defer func() { _ = file.Close() }()
	x := must[provider.XRCD](t)(d.OpenXRCD(provider.XRCDConfig{File: file, Create: true}))
	box := newInbox(t, d, x, 4)
	target := must[provider.QP](t)(x.CreateQP())
	name := host.Domain(x.(*XRCD).domain.name.Words())
	rng := rand.New(rand.NewPCG(seed, 0))
	for i := range 5000 {
		b := make([]byte, []int{shortControl, longControl, rng.IntN(200)}[i%3])
		for k := range b {
			b[k] = byte(rng.Uint32())
		}
		if len(b) > 0 {
			b[0] = byte(rng.IntN(7))
		}
		if len(b) == longControl && i%2 == 0 {
			b[0] = ctlHandoff
		}
		var tr *train.Train
		if i%5 != 0 {
			tr = &train.Train{Transport: wire.XRC, Kind: wire.KindSend, N: 1, Start: true, End: true, SRQ: box.srq.Number()}
		}
		if i%4 == 0 && len(b) == longControl { // one that a proxy could be made of
			a := ib.QPAttr{PathMTU: ib.MTU1024, DestQPN: 5, AV: ib.AHAttr{DGID: d.GIDs()[0]}}
			w := controlMessage{kind: ctlHandoff, qpn: uint32(rng.IntN(4)), handoff: rng.Uint32(), domain: name, attr: a}
			b = w.append(nil)
		}
		d.first.rx.Lock()
		d.first.rx.Control(rng.IntN(8), bytes.Clone(b), tr)
		if i%100 == 0 {
			d.first.rx.Parted(rng.IntN(8))
		}
		d.first.rx.flush()
		d.first.rx.Unlock()
	}
	if s := must[ib.QPAttr](t)(target.Query()).State; s != ib.QPReset {
		t.Errorf("the target is in %v", s)
	}
	closeAll(t, target)
	box.close()
	closeAll(t, x)
}

// A domain that another process has open need not be created, and cannot be new.
// (The other process is this one's: it writes what that would.)
func TestXRCDomainElsewhere(t *testing.T) {
	d := openDevice(t, provider.Config{})
	file := must[*os.File](t)(os.Create(filepath.Join(t.TempDir(), "domain")))
	defer func() { _ = file.Close() }()
	_, err := d.OpenXRCD(provider.XRCDConfig{File: file})
	wantErrno(t, "no process has it", err, syscall.EAGAIN)
	x := must[provider.XRCD](t)(d.OpenXRCD(provider.XRCDConfig{File: file, Create: true, Exclusive: true}))
	other := must[*host.Member](t)(host.Join(host.Config{Addrs: d.addrs, Listen: func(w *host.Sockets) (int, error) { return w.Place, nil }}))
	defer closeAll(t, other)
	name := host.Domain(x.(*XRCD).domain.name.Words())
	if !other.DomainElsewhere(name) || d.member.DomainElsewhere(name) {
		t.Error("the other process does not see it, or this one sees itself")
	}
	if !other.AddDomain(name) {
		t.Fatal("no room")
	}
	closeAll(t, x)
	_, err = d.OpenXRCD(provider.XRCDConfig{File: file, Create: true, Exclusive: true})
	wantErrno(t, "the other has it", err, syscall.EINVAL)
	y := must[provider.XRCD](t)(d.OpenXRCD(provider.XRCDConfig{File: file}))
	other.DropDomain(name)
	closeAll(t, y)
	_, err = d.OpenXRCD(provider.XRCDConfig{File: file})
	wantErrno(t, "no process has it any more", err, syscall.EAGAIN)
}
