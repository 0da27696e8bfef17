package verbs

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"os"
	"reflect"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

func newFake() *fakeDevice {
	return &fakeDevice{
		attr: ib.DeviceAttr{Name: "verbena7", MaxQPInitRDAtom: 128, MaxQPRDAtom: 128},
		port: ib.PortAttr{State: ib.PortActive, ActiveMTU: ib.MTU4096},
		gids: []ib.GID{ib.GIDFromAddr(netip.MustParseAddr("127.77.0.7")), ib.GIDFromAddr(netip.MustParseAddr("::1"))},
	}
}

func wantErrno(t *testing.T, what string, err error, want syscall.Errno) {
	t.Helper()
	var op *OpError
	if !errors.As(err, &op) || op.Errno != want {
		t.Errorf("%s: %v, want errno %d (%v)", what, err, int(want), want)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func TestConfig(t *testing.T) {
	if got := (*Config)(nil).provider(); !reflect.DeepEqual(got, &provider.Config{}) {
		t.Errorf("nil gives %+v", got)
	}
	// Every field gets a value of its own, and arrives under its own name.
	addrs := []netip.Addr{netip.MustParseAddr("127.0.0.9")}
	cfg := &Config{
		Addrs: addrs, Link: LinkUDP, Lock: LockStrict,
		Limits: Limits{QPs: 1, CQs: 2, MRs: 3, MWs: 11, PDs: 4, AHs: 5, SRQs: 6, QPWR: 7, CQE: 8, SRQWR: 9},
		PCAP:   "x.pcapng", Window: 10, Receivers: 13, NoGSO: true, NoGRO: true, PinDMABuf: true, DMSize: 12,
	}
	got, want := reflect.ValueOf(*cfg.provider()), reflect.ValueOf(*cfg)
	if got.NumField() != want.NumField() {
		t.Fatalf("%d fields here, %d in the provider's", want.NumField(), got.NumField())
	}
	for i := range want.NumField() {
		name := want.Type().Field(i).Name
		w, g := want.Field(i), got.FieldByName(name)
		if w.IsZero() {
			t.Errorf("the test leaves %s unset", name)
		}
		switch {
		case !g.IsValid():
			t.Errorf("the provider's has no %s", name)
		case w.Kind() == reflect.Struct:
			for j := range w.NumField() {
				n := w.Type().Field(j).Name
				if w.Field(j).IsZero() || w.Field(j).Int() != g.FieldByName(n).Int() {
					t.Errorf("%s.%s is %v, want %v", name, n, g.FieldByName(n), w.Field(j))
				}
			}
		case !reflect.DeepEqual(w.Convert(g.Type()).Interface(), g.Interface()):
			t.Errorf("%s is %v, want %v", name, g, w)
		}
	}
	pc := cfg.provider()
	addrs[0] = netip.MustParseAddr("127.0.0.10")
	if pc.Addrs[0] != netip.MustParseAddr("127.0.0.9") {
		t.Error("the provider sees later changes of the caller's slice")
	}
}

func TestDevice(t *testing.T) {
	f := newFake()
	f.event = AsyncEvent{Type: EventSRQLimitReached, SRQ: 9}
	d := &Device{p: f}
	if d.Name() != "verbena7" || d.Attr().MaxQPRDAtom != 128 || d.Addr() != netip.MustParseAddr("127.77.0.7") {
		t.Errorf("name %q, attr %+v, address %v", d.Name(), d.Attr(), d.Addr())
	}
	if !slices.Equal(d.GIDs(), f.gids) {
		t.Errorf("GIDs are %v", d.GIDs())
	}
	if got, want := d.Counters(), []Counter{{"tx_packets", 3}, {"rx_packets", 5}}; !slices.Equal(got, want) {
		t.Errorf("counters are %v", got)
	}
	qp, _ := newQP(t, f, RC)
	if got, want := qp.Counters(), []Counter{{"drop_bad_qkey", 7}}; !slices.Equal(got, want) || (*QP)(nil).Counters() != nil {
		t.Errorf("counters of a queue pair are %v", got)
	}
	if p, err := d.Port(1); err != nil || p.ActiveMTU != MTU4096 {
		t.Errorf("port 1: %+v, %v", p, err)
	}
	_, err := d.Port(2)
	wantErrno(t, "port 2", err, syscall.EINVAL)
	if ev, err := d.NextEvent(context.Background()); err != nil || ev != f.event {
		t.Errorf("event %v, %v", ev, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := d.NextEvent(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if err := d.Close(); err != nil || f.closed != 1 {
		t.Errorf("Close: %v, passed on %d times", err, f.closed)
	}
	if a := (&Device{p: &fakeDevice{}}).Addr(); a.IsValid() {
		t.Errorf("the address of a device without GIDs is %v", a)
	}
}

// The handles of this package arrive as the provider's own; a nil handle arrives
// as a nil interface, not as an interface that holds a nil pointer.
func TestHandles(t *testing.T) {
	f := newFake()
	d := &Device{p: f}
	ch := must(d.CreateChannel())
	polled := must(d.CreateCQ(10, nil))
	if f.channel != nil || f.entries != 10 {
		t.Errorf("CreateCQ passed %d, %v", f.entries, f.channel)
	}
	armed := must(d.CreateCQ(20, ch))
	if f.channel != ch.p || f.entries != 20 {
		t.Errorf("CreateCQ passed %d, %v", f.entries, f.channel)
	}
	pd := must(d.AllocPD())
	fp := pd.p.(*fakePD)
	srq := must(pd.CreateSRQ(&SRQConfig{MaxWR: 4, MaxSGE: 5, Limit: 6}))
	if want := (provider.SRQConfig{MaxWR: 4, MaxSGE: 5, Limit: 6}); fp.srqConfig != want {
		t.Errorf("CreateSRQ passed %+v", fp.srqConfig)
	}

	c := QPCap{MaxSendWR: 1, MaxRecvWR: 2, MaxSendSGE: 3, MaxRecvSGE: 4, MaxInlineData: 5}
	must(pd.CreateQP(&QPConfig{Type: UC, SendCQ: polled, RecvCQ: armed, Cap: c, SignalAll: true, NoScatterToCQE: true}))
	if want := (provider.QPConfig{Type: UC, SendCQ: polled.p, RecvCQ: armed.p, Cap: c, SignalAll: true, NoScatterToCQE: true}); fp.qpConfig != want {
		t.Errorf("CreateQP passed %+v, want %+v", fp.qpConfig, want)
	}
	if fp.qpConfig.SRQ != nil {
		t.Error("a nil SRQ arrives as something")
	}
	must(pd.CreateQP(&QPConfig{Type: RC, SendCQ: armed, RecvCQ: polled, SRQ: srq}))
	if want := (provider.QPConfig{Type: RC, SendCQ: armed.p, RecvCQ: polled.p, SRQ: srq.p}); fp.qpConfig != want {
		t.Errorf("CreateQP passed %+v, want %+v", fp.qpConfig, want)
	}

	xrcd := must(d.OpenXRCD(nil))
	if want := (provider.XRCDConfig{Create: true}); f.xrcd != want {
		t.Errorf("OpenXRCD passed %+v", f.xrcd)
	}
	must(d.OpenXRCD(&XRCDConfig{File: os.Stdin, Create: true, Exclusive: true}))
	if want := (provider.XRCDConfig{File: os.Stdin, Create: true, Exclusive: true}); f.xrcd != want {
		t.Errorf("OpenXRCD passed %+v", f.xrcd)
	}
	must(pd.CreateSRQ(&SRQConfig{MaxWR: 4, XRCD: xrcd, CQ: armed}))
	if want := (provider.SRQConfig{MaxWR: 4, XRCD: xrcd.p, CQ: armed.p}); fp.srqConfig != want {
		t.Errorf("CreateSRQ passed %+v", fp.srqConfig)
	}
	must(pd.CreateQP(&QPConfig{Type: XRCSend, SendCQ: armed}))
	if fp.qpConfig.RecvCQ != nil || fp.qpConfig.SRQ != nil {
		t.Errorf("CreateQP passed %+v", fp.qpConfig)
	}
	if target := must(xrcd.CreateQP()); target.Type() != XRCRecv || target.psn == 0 && must(xrcd.CreateQP()).psn == 0 {
		t.Errorf("a target of type %v, which begins at %#x", target.Type(), target.psn)
	}

	attr := AHAttr{DGID: f.gids[0], HopLimit: 9}
	if ah := must(pd.CreateAH(attr)); fp.ahAttr != attr || ah.Attr() != attr {
		t.Errorf("CreateAH passed %+v", fp.ahAttr)
	}
}

func TestMR(t *testing.T) {
	pd := must((&Device{p: newFake()}).AllocPD())
	fp := pd.p.(*fakePD)
	buf := make([]byte, 100)
	mr := must(pd.RegMR(buf, AccessLocalWrite|AccessRemoteRead))
	if &fp.buf[0] != &buf[0] || len(fp.buf) != 100 || fp.access != AccessLocalWrite|AccessRemoteRead {
		t.Errorf("RegMR passed %d bytes, %v", len(fp.buf), fp.access)
	}
	if mr.LKey() != 0xaa || mr.RKey() != 0xbb || mr.Addr() != 0x1000 || mr.Length() != 100 || mr.Access() != fp.access {
		t.Errorf("the region is %#x, %#x, %#x, %d, %v", mr.LKey(), mr.RKey(), mr.Addr(), mr.Length(), mr.Access())
	}
	if locked, why := mr.Locked(); locked || why != "Go heap" {
		t.Errorf("locked: %v, %q", locked, why)
	}
	for _, c := range []struct {
		off, n int
		addr   uint64
		length uint32
	}{
		{0, 100, 0x1000, 100},
		{8, 0, 0x1008, 0},
		{0, math.MaxUint32, 0x1000, math.MaxUint32},
		{0, math.MaxUint32 + 9, 0x1000, math.MaxUint32}, // not 8
		{0, -1, 0x1000, math.MaxUint32},
		{0, math.MinInt, 0x1000, math.MaxUint32}, // not 0
		{-8, 8, 0xff8, 8},                        // before the region: refused there
	} {
		if got, want := mr.SGE(c.off, c.n), (SGE{Addr: c.addr, Length: c.length, LKey: 0xaa}); got != want {
			t.Errorf("SGE(%d, %d) is %+v, want %+v", c.off, c.n, got, want)
		}
	}

	for _, c := range []struct {
		name string
		reg  func() (*MR, error)
		iova uint64
		acc  Access
	}{
		{"by address", func() (*MR, error) { return pd.RegMRAddr(0x7000, 64, AccessLocalWrite) }, 0x7000, AccessLocalWrite},
		{"zero-based", func() (*MR, error) { return pd.RegMRAddr(0x7000, 64, AccessZeroBased) }, 0, AccessZeroBased},
		{"iova", func() (*MR, error) { return pd.RegMRIOVA(0x7000, 64, 0x42, 0) }, 0x42, 0},
	} {
		if _, err := c.reg(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
		if fp.addr != 0x7000 || fp.length != 64 || fp.iova != c.iova || fp.access != c.acc {
			t.Errorf("%s passed %#x, %d, %#x, %v", c.name, fp.addr, fp.length, fp.iova, fp.access)
		}
	}
}

func TestSRQ(t *testing.T) {
	f := &fakeSRQ{accept: 1}
	s := &SRQ{p: f}
	wrs := []RecvWR{{ID: 1}, {ID: 2}}
	if n, err := s.PostRecv(wrs); n != 1 || err != nil || &f.recvd[0] != &wrs[0] {
		t.Errorf("PostRecv: %d, %v", n, err)
	}
	if s.Number() != 9 {
		t.Errorf("number %d", s.Number())
	}
	if a, err := s.Query(); err != nil || a != (SRQAttr{MaxWR: 64, MaxSGE: 4, Limit: 8}) {
		t.Errorf("Query: %+v, %v", a, err)
	}
	for _, c := range []struct {
		name         string
		do           func() error
		maxWR, limit int
	}{
		{"SetLimit", func() error { return s.SetLimit(3) }, -1, 3},
		{"SetLimit 0", func() error { return s.SetLimit(0) }, -1, 0},
		{"Resize", func() error { return s.Resize(7) }, 7, -1},
		{"both", func() error { return s.Modify(SRQAttr{MaxWR: 5, Limit: 2}, SRQMaskMaxWR|SRQMaskLimit) }, 5, 2},
		{"none", func() error { return s.Modify(SRQAttr{MaxWR: 5, Limit: 2}, 0) }, -1, -1},
	} {
		if err := c.do(); err != nil || f.maxWR != c.maxWR || f.limit != c.limit {
			t.Errorf("%s passed %d, %d: %v", c.name, f.maxWR, f.limit, err)
		}
	}
	// A negative number means "keep" to the provider and is a mistake here.
	before := f.modified
	wantErrno(t, "SetLimit(-1)", s.SetLimit(-1), syscall.EINVAL)
	wantErrno(t, "Resize(-1)", s.Resize(-1), syscall.EINVAL)
	wantErrno(t, "unknown mask", s.Modify(SRQAttr{}, 1<<7), syscall.EINVAL)
	if f.modified != before {
		t.Error("a refused Modify was passed on")
	}
}

func TestChannel(t *testing.T) {
	ctx, stop := context.WithTimeout(context.Background(), 10*time.Second)
	defer stop()
	f := newFake()
	d := &Device{p: f}
	ch := must(d.CreateChannel())
	a, b := must(d.CreateCQ(10, ch)), must(d.CreateCQ(20, ch))
	fc, fa, fb := ch.p.(*fakeChannel), a.p.(*fakeCQ), b.p.(*fakeCQ)

	if err := a.RequestNotify(true); err != nil || b.RequestNotify(false) != nil ||
		!slices.Equal(fa.asked, []bool{true}) || !slices.Equal(fb.asked, []bool{false}) {
		t.Errorf("RequestNotify passed %v, %v: %v", fa.asked, fb.asked, err)
	}
	fc.events <- fb
	fc.events <- fa
	evB, evA := must(ch.Next(ctx)), must(ch.Next(ctx))
	if evA.CQ != a || evB.CQ != b {
		t.Error("an event names another queue")
	}
	if fa.acked.Load() != 0 || fb.acked.Load() != 0 {
		t.Error("acknowledged before Ack")
	}
	evA.Ack()
	evA.Ack()
	evA.CQ = b // the program may do as it likes with the field
	evA.Ack()
	if fa.acked.Load() != 1 || fb.acked.Load() != 0 {
		t.Errorf("acknowledged %d and %d times, want 1 and 0", fa.acked.Load(), fb.acked.Load())
	}
	evB.Ack()
	if fb.acked.Load() != 1 {
		t.Errorf("acknowledged %d times, want 1", fb.acked.Load())
	}
	(*Event)(nil).Ack()
	new(Event).Ack()

	cancelled, cancel := context.WithCancel(ctx)
	cancel()
	if _, err := ch.Next(cancelled); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}

	// A queue that could not be closed still gets its events; one that was
	// closed is forgotten.
	fa.err = ib.Errorf("destroy_cq", syscall.EBUSY, "queue pairs use it")
	wantErrno(t, "Close", a.Close(), syscall.EBUSY)
	fc.events <- fa
	if ev := must(ch.Next(ctx)); ev.CQ != a {
		t.Error("the queue is gone though Close failed")
	}
	fa.err = nil
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if len(ch.cqs) != 1 {
		t.Errorf("the channel still holds %d queues, want 1", len(ch.cqs))
	}
	before := fa.acked.Load()
	fc.events <- fa
	fc.events <- fb
	if ev := must(ch.Next(ctx)); ev.CQ != b {
		t.Error("an event of a closed queue was returned")
	}
	if fa.acked.Load() != before+1 {
		t.Error("an event of a closed queue was not acknowledged")
	}
	if err := ch.Close(); err != nil || fc.closed != 1 {
		t.Errorf("Close: %v, passed on %d times", err, fc.closed)
	}
}

// An event may be acknowledged by several goroutines at once, and counts once.
func TestAckConcurrent(t *testing.T) {
	cq := &fakeCQ{}
	ev := &Event{p: cq}
	done := make(chan bool)
	for range 8 {
		go func() { ev.Ack(); done <- true }()
	}
	for range 8 {
		<-done
	}
	if n := cq.acked.Load(); n != 1 {
		t.Errorf("acknowledged %d times", n)
	}
}

// What the provider says is what the program hears, unchanged; and every call
// is passed on exactly once.
func TestErrorsPassThrough(t *testing.T) {
	busy := ib.Errorf("x", syscall.EBUSY, "in use")
	f := newFake()
	d := &Device{p: f}
	pd, cq, ch := must(d.AllocPD()), must(d.CreateCQ(1, nil)), must(d.CreateChannel())
	mr := must(pd.RegMR(make([]byte, 1), 0))
	qp := must(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq, RecvCQ: cq}))
	srq := must(pd.CreateSRQ(&SRQConfig{MaxWR: 1}))
	mw := must(pd.AllocMW(MWType1))
	f.err = busy
	fqp := qp.p.(*fakeQP)
	fqp.err, fqp.failAt, fqp.accept = busy, QPRTS, 3
	cq.p.(*fakeCQ).err, ch.p.(*fakeChannel).err = busy, busy
	mr.p.(*fakeMR).err, srq.p.(*fakeSRQ).err = busy, busy
	srq.p.(*fakeSRQ).accept = 2

	for name, err := range map[string]error{
		"Device.Close":  d.Close(),
		"PD.Close":      pd.Close(),
		"CQ.Close":      cq.Close(),
		"Channel.Close": ch.Close(),
		"QP.Close":      qp.Close(),
		"SRQ.Close":     srq.Close(),
		"MR.Close":      mr.Close(),
		"MR.Rereg":      mr.Rereg(MRChange{}),
		"MW.Close":      mw.Close(),
		"AllocMW":       second(pd.AllocMW(MWType2)),
		"AllocMR":       second(pd.AllocMR(1, 0)),
		"OpenSharedMR":  second(pd.OpenSharedMR("", 0)),
		"MR.Share":      second(mr.Share()),
		"BindMW":        second(qp.BindMW(mw, 0, 0, MWBind{})),
		"AllocPD":       second(d.AllocPD()),
		"CreateChannel": second(d.CreateChannel()),
		"CreateCQ":      second(d.CreateCQ(1, nil)),
		"CreateCQ ch":   second(d.CreateCQ(1, ch)),
		"Port":          second(d.Port(1)),
		"NextEvent":     second(d.NextEvent(context.Background())),
		"RegMR":         second(pd.RegMR(nil, 0)),
		"RegMRAddr":     second(pd.RegMRAddr(1, 1, 0)),
		"RegMRIOVA":     second(pd.RegMRIOVA(1, 1, 1, 0)),
		"CreateQP":      second(pd.CreateQP(&QPConfig{SendCQ: cq, RecvCQ: cq})),
		"CreateSRQ":     second(pd.CreateSRQ(&SRQConfig{})),
		"CreateAH":      second(pd.CreateAH(AHAttr{})),
		"RequestNotify": cq.RequestNotify(false),
		"Resize":        cq.Resize(1),
		"Modify":        qp.Modify(&QPAttr{State: QPRTS}, QPMaskState),
		"ToRTS":         qp.ToRTS(&QPAttr{}),
		"Query":         second(qp.Query()),
		"AttachMcast":   qp.AttachMcast(GID{}),
		"DetachMcast":   qp.DetachMcast(GID{}),
		"SRQ.SetLimit":  srq.SetLimit(1),
		"SRQ.Query":     second(srq.Query()),
	} {
		if err != error(busy) {
			t.Errorf("%s returned %v", name, err)
		}
	}
	if n, err := qp.PostSend(make([]SendWR, 5)); n != 3 || err != error(busy) {
		t.Errorf("PostSend: %d, %v", n, err)
	}
	if n, err := qp.PostRecv(make([]RecvWR, 5)); n != 3 || err != error(busy) {
		t.Errorf("PostRecv: %d, %v", n, err)
	}
	if n, err := srq.PostRecv(make([]RecvWR, 5)); n != 2 || err != error(busy) {
		t.Errorf("SRQ.PostRecv: %d, %v", n, err)
	}
	if n, err := cq.Poll(make([]WC, 5)); n != 0 || err != error(busy) {
		t.Errorf("Poll: %d, %v", n, err)
	}
	for name, n := range map[string]int{"device": f.closed, "PD": pd.p.(*fakePD).closed, "CQ": cq.p.(*fakeCQ).closed,
		"QP": fqp.closed, "SRQ": srq.p.(*fakeSRQ).closed, "MR": mr.p.(*fakeMR).closed} {
		if n != 1 {
			t.Errorf("Close of %s was passed on %d times", name, n)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestNil(t *testing.T) {
	ctx := context.Background()
	d := &Device{p: newFake()}
	pd, cq := must(d.AllocPD()), must(d.CreateCQ(1, nil))
	qp := must(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq, RecvCQ: cq}))

	type call struct {
		name string
		err  error
	}
	calls := []call{
		{"CreateQP(nil)", second(pd.CreateQP(nil))},
		{"CreateQP no SendCQ", second(pd.CreateQP(&QPConfig{Type: RC, RecvCQ: cq}))},
		{"CreateQP no RecvCQ", second(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq}))},
		{"CreateQP zero CQ", second(pd.CreateQP(&QPConfig{Type: RC, SendCQ: new(CQ), RecvCQ: cq}))},
		{"CreateQP zero SRQ", second(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq, RecvCQ: cq, SRQ: new(SRQ)}))},
		{"CreateQP XRC zero RecvCQ", second(pd.CreateQP(&QPConfig{Type: XRCSend, SendCQ: cq, RecvCQ: new(CQ)}))},
		{"CreateSRQ(nil)", second(pd.CreateSRQ(nil))},
		{"CreateSRQ zero XRCD", second(pd.CreateSRQ(&SRQConfig{MaxWR: 1, XRCD: new(XRCD), CQ: cq}))},
		{"CreateSRQ zero CQ", second(pd.CreateSRQ(&SRQConfig{MaxWR: 1, CQ: new(CQ)}))},
		{"CreateCQ zero channel", second(d.CreateCQ(1, new(Channel)))},
		{"Modify(nil)", qp.Modify(nil, QPMaskState)},
		{"ToInit(nil)", qp.ToInit(nil)},
		{"ToRTR(nil)", qp.ToRTR(nil)},
		{"ToRTS(nil)", qp.ToRTS(nil)},
	}
	// What is left of an error that nobody looked at: nil, or a zero struct.
	for _, d := range []*Device{nil, {}} {
		calls = append(calls, call{"Device.Port", second(d.Port(1))},
			call{"Device.NextEvent", second(d.NextEvent(ctx))}, call{"Device.AllocPD", second(d.AllocPD())},
			call{"Device.CreateChannel", second(d.CreateChannel())}, call{"Device.CreateCQ", second(d.CreateCQ(1, nil))},
			call{"Device.OpenXRCD", second(d.OpenXRCD(nil))}, call{"Device.AllocDM", second(d.AllocDM(1, 0))}, call{"Device.Close", d.Close()})
	}
	for _, k := range []*MKey{nil, {}} {
		calls = append(calls, call{"MKey.Close", k.Close()})
	}
	for _, dm := range []*DM{nil, {}} {
		_, _, err := dm.Export()
		calls = append(calls, call{"DM.WriteAt", second(dm.WriteAt(nil, 0))}, call{"DM.ReadAt", second(dm.ReadAt(nil, 0))},
			call{"DM.Bytes", second(dm.Bytes())}, call{"DM.Export", err}, call{"DM.Close", dm.Close()},
			call{"PD.RegDMMR of nothing", second(pd.RegDMMR(dm, 0, 1, 0))})
	}
	for _, x := range []*XRCD{nil, {}} {
		calls = append(calls, call{"XRCD.CreateQP", second(x.CreateQP())}, call{"XRCD.Close", x.Close()})
	}
	for _, pd := range []*PD{nil, {}} {
		calls = append(calls, call{"PD.CreateMKey", second(pd.CreateMKey(1))}, call{"PD.RegMR", second(pd.RegMR(make([]byte, 1), 0))}, call{"PD.RegDMMR", second(pd.RegDMMR(&DM{p: &fakeDM{}}, 0, 1, 0))},
			call{"PD.RegMRAddr", second(pd.RegMRAddr(1, 1, 0))}, call{"PD.RegMRIOVA", second(pd.RegMRIOVA(1, 1, 1, 0))},
			call{"PD.CreateQP", second(pd.CreateQP(&QPConfig{Type: RC, SendCQ: cq, RecvCQ: cq}))},
			call{"PD.CreateSRQ", second(pd.CreateSRQ(&SRQConfig{}))}, call{"PD.CreateAH", second(pd.CreateAH(AHAttr{}))},
			call{"PD.AllocMW", second(pd.AllocMW(MWType1))}, call{"PD.AllocMR", second(pd.AllocMR(1, 0))},
			call{"PD.OpenSharedMR", second(pd.OpenSharedMR("", 0))}, call{"PD.Close", pd.Close()})
	}
	for _, qp := range []*QP{nil, {}} {
		calls = append(calls, call{"QP.BindMW", second(qp.BindMW(must(pd.AllocMW(MWType1)), 0, 0, MWBind{}))})
	}
	for _, mw := range []*MW{nil, {}} {
		calls = append(calls, call{"MW.Close", mw.Close()}, call{"QP.BindMW", second(qp.BindMW(mw, 0, 0, MWBind{}))})
	}
	for _, mr := range []*MR{nil, {}} {
		calls = append(calls, call{"MR.Close", mr.Close()}, call{"MR.Rereg", mr.Rereg(MRChange{})}, call{"MR.Share", second(mr.Share())})
	}
	for _, cq := range []*CQ{nil, {}} {
		calls = append(calls, call{"CQ.Poll", second(cq.Poll(nil))}, call{"CQ.RequestNotify", cq.RequestNotify(false)},
			call{"CQ.Resize", cq.Resize(1)}, call{"CQ.Close", cq.Close()})
	}
	for _, ch := range []*Channel{nil, {}} {
		calls = append(calls, call{"Channel.Next", second(ch.Next(ctx))}, call{"Channel.Close", ch.Close()})
	}
	for _, qp := range []*QP{nil, {}} {
		calls = append(calls, call{"QP.PostSend", second(qp.PostSend(nil))}, call{"QP.PostRecv", second(qp.PostRecv(nil))},
			call{"QP.Modify", qp.Modify(&QPAttr{}, 0)}, call{"QP.Query", second(qp.Query())},
			call{"QP.Connect", qp.Connect(Endpoint{}, nil)}, call{"QP.ToInit", qp.ToInit(&QPAttr{})},
			call{"QP.AttachMcast", qp.AttachMcast(GID{})}, call{"QP.DetachMcast", qp.DetachMcast(GID{})}, call{"QP.Close", qp.Close()})
	}
	for _, s := range []*SRQ{nil, {}} {
		calls = append(calls, call{"SRQ.PostRecv", second(s.PostRecv(nil))}, call{"SRQ.Modify", s.Modify(SRQAttr{}, 0)},
			call{"SRQ.SetLimit", s.SetLimit(1)}, call{"SRQ.Resize", s.Resize(1)}, call{"SRQ.Query", second(s.Query())},
			call{"SRQ.Close", s.Close()})
	}
	for _, c := range calls {
		wantErrno(t, c.name, c.err, syscall.EINVAL)
	}
}

// The fast path passes the caller's slices on, as they are, and allocates
// nothing.
func TestFastPath(t *testing.T) {
	fq, fc, fs := &fakeQP{accept: 1}, &fakeCQ{wcs: []WC{{ID: 1}}}, &fakeSRQ{accept: 1}
	qp, cq, srq := &QP{p: fq}, &CQ{p: fc}, &SRQ{p: fs}
	send, recv, wcs := make([]SendWR, 2), make([]RecvWR, 2), make([]WC, 4)
	allocs := testing.AllocsPerRun(100, func() {
		qp.PostSend(send)
		qp.PostRecv(recv)
		srq.PostRecv(recv)
		cq.Poll(wcs)
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
	if &fq.sent[0] != &send[0] || &fq.recvd[0] != &recv[0] || &fs.recvd[0] != &recv[0] || wcs[0].ID != 1 {
		t.Error("a slice was converted on the way")
	}
}
