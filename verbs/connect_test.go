package verbs

import (
	"encoding/json"
	"net/netip"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

func newQP(t *testing.T, f *fakeDevice, typ QPType) (*QP, *fakeQP) {
	t.Helper()
	d := &Device{p: f}
	cq, pd := must(d.CreateCQ(1, nil)), must(d.AllocPD())
	qp := must(pd.CreateQP(&QPConfig{Type: typ, SendCQ: cq, RecvCQ: cq}))
	return qp, qp.p.(*fakeQP)
}

var remote = Endpoint{GID: ib.GIDFromAddr(netip.MustParseAddr("127.77.0.9")), QPN: 0x456, PSN: 0xabcdef, QKey: 0x77}

// What ibv_modify_qp(3) lists for each transition, written out once more.
func TestConnectMasks(t *testing.T) {
	initRC := QPMaskState | QPMaskPKeyIndex | QPMaskPort | QPMaskAccess
	for _, c := range []struct {
		typ   QPType
		masks [3]QPAttrMask
	}{
		{RC, [3]QPAttrMask{
			initRC,
			QPMaskState | QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN | QPMaskMaxDestRDAtomic | QPMaskMinRNRTimer,
			QPMaskState | QPMaskSQPSN | QPMaskMaxRDAtomic | QPMaskRetryCnt | QPMaskRNRRetry | QPMaskTimeout,
		}},
		{UC, [3]QPAttrMask{
			initRC,
			QPMaskState | QPMaskAV | QPMaskPathMTU | QPMaskDestQPN | QPMaskRQPSN,
			QPMaskState | QPMaskSQPSN,
		}},
		{UD, [3]QPAttrMask{
			QPMaskState | QPMaskPKeyIndex | QPMaskPort | QPMaskQKey,
			QPMaskState,
			QPMaskState | QPMaskSQPSN,
		}},
	} {
		t.Run(c.typ.String(), func(t *testing.T) {
			qp, f := newQP(t, newFake(), c.typ)
			if err := qp.Connect(remote, nil); err != nil {
				t.Fatal(err)
			}
			if len(f.modifys) != 3 {
				t.Fatalf("%d steps, want 3", len(f.modifys))
			}
			for i, state := range []QPState{QPInit, QPRTR, QPRTS} {
				m := f.modifys[i]
				if m.attr.State != state || m.mask != c.masks[i] {
					t.Errorf("step %d: to %v with %v,\nwant to %v with %v", i, m.attr.State, m.mask, state, c.masks[i])
				}
			}
		})
	}
}

func TestConnectDefaults(t *testing.T) {
	for _, c := range []struct {
		typ    QPType
		access Access
	}{{RC, AccessRemote | AccessFlush}, {UC, AccessRemoteWrite}} {
		qp, f := newQP(t, newFake(), c.typ)
		if err := qp.Connect(remote, nil); err != nil {
			t.Fatal(err)
		}
		want := QPAttr{
			State: QPRTS, Access: c.access, Port: 1, AV: AHAttr{DGID: remote.GID, PortNum: 1}, PathMTU: MTU4096,
			Timeout: 16, RetryCnt: 7, RNRRetry: 7, RQPSN: remote.PSN, MaxRDAtomic: 16, MinRNRTimer: 12,
			SQPSN: qp.Endpoint().PSN, MaxDestRDAtomic: 16, DestQPN: remote.QPN,
		}
		if got := f.modifys[2].attr; got != want {
			t.Errorf("%v: %+v,\nwant %+v", c.typ, got, want)
		}
	}

	qp, f := newQP(t, newFake(), UD)
	if err := qp.Connect(Endpoint{}, nil); err != nil {
		t.Fatal(err)
	}
	if got := f.modifys[0].attr.QKey; got == 0 || got != qp.Endpoint().QKey {
		t.Errorf("UD: Q_Key %#x, the endpoint says %#x", got, qp.Endpoint().QKey)
	}

	// Defaults give way to a device that can do less.
	d := newFake()
	d.attr.MaxQPInitRDAtom, d.attr.MaxQPRDAtom, d.port.ActiveMTU = 3, 5, MTU1024
	qp, f = newQP(t, d, RC)
	if err := qp.Connect(remote, &ConnectConfig{}); err != nil {
		t.Fatal(err)
	}
	if a := f.modifys[2].attr; a.MaxRDAtomic != 3 || a.MaxDestRDAtomic != 5 || a.PathMTU != MTU1024 {
		t.Errorf("MaxRDAtomic %d, MaxDestRDAtomic %d, MTU %v", a.MaxRDAtomic, a.MaxDestRDAtomic, a.PathMTU)
	}
}

func TestConnectConfig(t *testing.T) {
	qp, f := newQP(t, newFake(), RC)
	cfg := ConnectConfig{MTU: MTU512, Access: AccessRemoteRead, Timeout: 1, RetryCnt: 2, RNRRetry: 3, MinRNRTimer: 4,
		MaxRDAtomic: 5, MaxDestRDAtomic: 6, SGIDIndex: 1, TrafficClass: 8, HopLimit: 9}
	before := cfg
	if err := qp.Connect(remote, &cfg); err != nil {
		t.Fatal(err)
	}
	if cfg != before {
		t.Error("Connect changed the caller's config")
	}
	want := QPAttr{
		State: QPRTS, Access: AccessRemoteRead, Port: 1,
		AV:      AHAttr{DGID: remote.GID, SGIDIndex: 1, TrafficClass: 8, HopLimit: 9, PortNum: 1},
		PathMTU: MTU512, Timeout: 1, RetryCnt: 2, RNRRetry: 3, RQPSN: remote.PSN, MaxRDAtomic: 5, MinRNRTimer: 4,
		SQPSN: qp.Endpoint().PSN, MaxDestRDAtomic: 6, DestQPN: remote.QPN,
	}
	if got := f.modifys[2].attr; got != want {
		t.Errorf("%+v,\nwant %+v", got, want)
	}
}

// Connect stops at the step that fails and says why.
func TestConnectFails(t *testing.T) {
	for i, state := range []QPState{QPInit, QPRTR, QPRTS} {
		qp, f := newQP(t, newFake(), RC)
		f.failAt, f.err = state, ib.Errorf("modify_qp", syscall.EINVAL, "to %v", state)
		if err := qp.Connect(remote, nil); err != f.err {
			t.Errorf("%v: %v", state, err)
		}
		if len(f.modifys) != i+1 {
			t.Errorf("%v: %d steps, want %d", state, len(f.modifys), i+1)
		}
	}
	d := newFake()
	qp, f := newQP(t, d, RC)
	d.err = ib.Errorf("query_port", syscall.ENODEV, "closed")
	wantErrno(t, "no port", qp.Connect(remote, nil), syscall.ENODEV)
	if len(f.modifys) != 0 {
		t.Error("the queue pair was modified all the same")
	}
	if err := qp.Connect(remote, &ConnectConfig{MTU: MTU256}); err != nil {
		t.Errorf("the port was asked for an MTU that was given: %v", err)
	}
}

// The helpers fill in the state, and the port of INIT, and leave attr alone.
func TestTransitions(t *testing.T) {
	qp, f := newQP(t, newFake(), RC)
	attr := QPAttr{State: QPErr, SQPSN: 5}
	for _, step := range []func(*QPAttr) error{qp.ToInit, qp.ToRTR, qp.ToRTS} {
		if err := step(&attr); err != nil {
			t.Fatal(err)
		}
	}
	if attr != (QPAttr{State: QPErr, SQPSN: 5}) {
		t.Errorf("the caller's attributes are %+v", attr)
	}
	if f.modifys[0].attr.Port != 1 || f.modifys[1].attr.Port != 0 {
		t.Errorf("ports %d, %d", f.modifys[0].attr.Port, f.modifys[1].attr.Port)
	}
	attr.Port = 2
	if err := qp.ToInit(&attr); err != nil || f.modifys[3].attr.Port != 2 {
		t.Errorf("port %d, %v", f.modifys[3].attr.Port, err)
	}
}

func TestEndpoint(t *testing.T) {
	f := newFake()
	psns := map[uint32]bool{}
	for range 64 {
		qp, _ := newQP(t, f, RC)
		ep := qp.Endpoint()
		if ep.GID != f.gids[0] || ep.QPN != 0x123 || ep.QKey != 0 || ep.PSN >= 1<<24 || ep != qp.Endpoint() {
			t.Fatalf("endpoint %+v, then %+v", ep, qp.Endpoint())
		}
		psns[ep.PSN] = true

		ud, _ := newQP(t, f, UD)
		if k := ud.Endpoint().QKey; k == 0 || k >= 1<<31 {
			t.Fatalf("UD: Q_Key %#x", k)
		}
	}
	// 64 of 2^24: two equal ones happen once in 8,000 runs, five never.
	if len(psns) < 60 {
		t.Errorf("64 queue pairs start at %d different PSNs", len(psns))
	}

	b, err := json.Marshal(remote)
	if want := `{"gid":"::ffff:127.77.0.9","qpn":1110,"psn":11259375,"qkey":119}`; err != nil || string(b) != want {
		t.Errorf("marshals to %s, %v", b, err)
	}
	var back Endpoint
	if err := json.Unmarshal(b, &back); err != nil || back != remote {
		t.Errorf("comes back as %+v, %v", back, err)
	}

	qp, _ := newQP(t, &fakeDevice{}, RC)
	if !qp.Endpoint().GID.IsZero() {
		t.Error("a device without GIDs has one")
	}
}
