package verbs_test

// What the documentation of this package promises, tried on the software
// device: errnos (TestErrnos), what is in use (TestBusy), who waits for what
// (TestWaits), how long memory lives (TestMemoryLives), and that the fast path
// allocates nothing and may be used by all at once.

import (
	"context"
	"errors"
	"math"
	"net/netip"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// ok returns v, and fails the test if there is an error.
func ok[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func errOf[T any](_ T, err error) error { return err }

func closeAll(t testing.TB, objects ...interface{ Close() error }) {
	t.Helper()
	for _, o := range objects {
		if err := o.Close(); err != nil {
			t.Errorf("closing %T: %v", o, err)
		}
	}
}

func wantErrno(t testing.TB, what string, err error, want syscall.Errno) {
	t.Helper()
	var op *verbs.OpError
	if !errors.As(err, &op) || op.Errno != want {
		t.Errorf("%s: %v, want an OpError with errno %d (%v)", what, err, int(want), want)
	}
}

func TestErrnos(t *testing.T) {
	open := func(cfg *verbs.Config) *verbs.Device { return ok[*verbs.Device](t)(verbs.Open("", cfg)) }
	small := open(&verbs.Config{Limits: verbs.Limits{QPs: 1, CQs: 1, MRs: 1, PDs: 1, AHs: 1, SRQs: 1, QPWR: 4, CQE: 4, SRQWR: 4}})
	other := open(&verbs.Config{Link: verbs.LinkLoop})
	closed := open(nil)
	closeAll(t, closed)

	pd, cq := ok[*verbs.PD](t)(small.AllocPD()), ok[*verbs.CQ](t)(small.CreateCQ(4, nil))
	ch := ok[*verbs.Channel](t)(small.CreateChannel())
	buf := make([]byte, 64)
	mr := ok[*verbs.MR](t)(pd.RegMR(buf, 0))
	srq := ok[*verbs.SRQ](t)(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4, MaxSGE: 1}))
	peer := verbs.AHAttr{DGID: other.GIDs()[0]}
	ah := ok[*verbs.AH](t)(pd.CreateAH(peer))
	cap4 := verbs.QPCap{MaxSendWR: 4, MaxRecvWR: 4, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 16}
	qp := ok[*verbs.QP](t)(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: cap4}))

	opd, ocq := ok[*verbs.PD](t)(other.AllocPD()), ok[*verbs.CQ](t)(other.CreateCQ(64, nil))
	och := ok[*verbs.Channel](t)(other.CreateChannel())
	osrq := ok[*verbs.SRQ](t)(opd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4, MaxSGE: 1}))
	newQP := func(typ verbs.QPType) *verbs.QP {
		return ok[*verbs.QP](t)(opd.CreateQP(&verbs.QPConfig{Type: typ, SendCQ: ocq, RecvCQ: ocq, Cap: cap4}))
	}
	rc, uc, ud := newQP(verbs.RC), newQP(verbs.UC), newQP(verbs.UD)
	for _, q := range []*verbs.QP{rc, uc, ud} { // connected to itself
		if err := q.Connect(q.Endpoint(), nil); err != nil {
			t.Fatal(err)
		}
	}
	onSRQ := ok[*verbs.QP](t)(opd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: ocq, RecvCQ: ocq, SRQ: osrq}))
	gone := newQP(verbs.RC)
	closeAll(t, gone)
	gonePD := ok[*verbs.PD](t)(other.AllocPD())
	goneCQ := ok[*verbs.CQ](t)(other.CreateCQ(1, nil))
	closeAll(t, gonePD, goneCQ)

	qpc := func(change func(*verbs.QPConfig)) error {
		cfg := verbs.QPConfig{Type: verbs.RC, SendCQ: ocq, RecvCQ: ocq, Cap: cap4}
		change(&cfg)
		return errOf(opd.CreateQP(&cfg))
	}
	ahc := func(change func(*verbs.AHAttr)) error {
		a := verbs.AHAttr{DGID: other.GIDs()[0]}
		change(&a)
		return errOf(opd.CreateAH(a))
	}
	post := func(q *verbs.QP, wr verbs.SendWR) error {
		n, err := q.PostSend([]verbs.SendWR{wr})
		if n != 0 {
			t.Errorf("%+v was accepted", wr)
		}
		return err
	}
	connect := func(change func(*verbs.Endpoint, *verbs.ConnectConfig)) error {
		q := newQP(verbs.RC)
		defer closeAll(t, q)
		ep, cfg := other2endpoint(q, other), verbs.ConnectConfig{}
		change(&ep, &cfg)
		return q.Connect(ep, &cfg)
	}
	sge := []verbs.SGE{mr.SGE(0, 8)}
	addr := func(s string) netip.Addr { return netip.MustParseAddr(s) }

	for _, c := range []struct {
		what string
		err  error
		want syscall.Errno
	}{
		{"Open unknown name", errOf(verbs.Open("no-such-device", nil)), syscall.ENODEV},
		{"Open unknown link", errOf(verbs.Open("", &verbs.Config{Link: "shm"})), syscall.EINVAL},
		{"Open foreign address", errOf(verbs.Open("192.0.2.7", nil)), syscall.EADDRNOTAVAIL},
		{"Open multicast address", errOf(verbs.Open("224.0.0.1", nil)), syscall.EINVAL},
		{"Open unspecified address", errOf(verbs.Open("::", nil)), syscall.EINVAL},
		{"Open address twice", errOf(verbs.Open(small.Addr().String(), nil)), syscall.EADDRINUSE},
		{"Open bad capture", errOf(verbs.Open("", &verbs.Config{PCAP: filepath.Join(t.TempDir(), "no", "such", "folder")})), syscall.ENOENT},
		{"Port 0", errOf(small.Port(0)), syscall.EINVAL},
		{"Port 2", errOf(small.Port(2)), syscall.EINVAL},

		{"AllocPD full", errOf(small.AllocPD()), syscall.ENOMEM},
		{"CreateCQ full", errOf(small.CreateCQ(1, nil)), syscall.ENOMEM},
		{"CreateChannel full", errOf(small.CreateChannel()), syscall.ENOMEM},
		{"RegMR full", errOf(pd.RegMR(buf, 0)), syscall.ENOMEM},
		{"CreateSRQ full", errOf(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1})), syscall.ENOMEM},
		{"CreateAH full", errOf(pd.CreateAH(peer)), syscall.ENOMEM},
		{"CreateQP full", errOf(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq})), syscall.ENOMEM},

		{"AllocPD closed device", errOf(closed.AllocPD()), syscall.ENODEV},
		{"CreateCQ closed device", errOf(closed.CreateCQ(1, nil)), syscall.ENODEV},
		{"CreateChannel closed device", errOf(closed.CreateChannel()), syscall.ENODEV},
		{"NextEvent closed device", errOf(closed.NextEvent(t.Context())), syscall.ENODEV},

		{"CreateCQ 0", errOf(other.CreateCQ(0, nil)), syscall.EINVAL},
		{"CreateCQ -1", errOf(other.CreateCQ(-1, nil)), syscall.EINVAL},
		{"CreateCQ too large", errOf(other.CreateCQ(other.Attr().MaxCQE+1, nil)), syscall.EINVAL},
		{"CreateCQ foreign channel", errOf(other.CreateCQ(1, ch)), syscall.EINVAL},
		{"RequestNotify no channel", ocq.RequestNotify(false), syscall.EINVAL},
		{"CQ.Resize 0", ocq.Resize(0), syscall.EINVAL},
		{"CQ.Resize too large", ocq.Resize(other.Attr().MaxCQE + 1), syscall.EINVAL},

		{"RegMR nil", errOf(opd.RegMR(nil, 0)), syscall.EINVAL},
		{"RegMR empty", errOf(opd.RegMR(buf[:0], 0)), syscall.EINVAL},
		{"RegMR unknown right", errOf(opd.RegMR(buf, 1<<31)), syscall.EINVAL},
		{"RegMR remote without local write", errOf(opd.RegMR(buf, verbs.AccessRemoteWrite)), syscall.EINVAL},
		{"RegMR atomic without local write", errOf(opd.RegMR(buf, verbs.AccessRemoteAtomic)), syscall.EINVAL},
		{"RegMR on demand, empty", errOf(opd.RegMR(buf[:0], verbs.AccessOnDemand)), syscall.EINVAL},
		{"RegMR on demand, persistent", errOf(opd.RegMR(buf, verbs.AccessOnDemand|verbs.AccessFlushPersistent)), syscall.EINVAL},
		{"RegMR on demand, remote without local write", errOf(opd.RegMR(buf, verbs.AccessOnDemand|verbs.AccessRemoteWrite)), syscall.EINVAL},
		{"RegMRAddr on demand, wraps", errOf(opd.RegMRAddr(math.MaxUint64-8, 64, verbs.AccessOnDemand)), syscall.EFAULT},
		{"RegMRAddr on demand, Go heap", errOf(opd.RegMRAddr(uintptr(mr.Addr()), 64, verbs.AccessOnDemand)), syscall.EINVAL},
		{"RegImplicitMR pinned", errOf(opd.RegImplicitMR(verbs.AccessLocalWrite)), syscall.EINVAL},
		{"AdviseMR nothing", opd.AdviseMR(verbs.AdvisePrefetch, 0), syscall.EINVAL},
		{"AdviseMR unknown advice", opd.AdviseMR(3, 0, mr.SGE(0, 1)), syscall.EOPNOTSUPP},
		{"AdviseMR unknown flag", opd.AdviseMR(verbs.AdvisePrefetch, 4, mr.SGE(0, 1)), syscall.EINVAL},
		{"AdviseMR unknown key", opd.AdviseMR(verbs.AdvisePrefetch, 0, verbs.SGE{Length: 1, LKey: 0}), syscall.ENOENT},
		{"AdviseMR closed domain", gonePD.AdviseMR(verbs.AdvisePrefetch, 0, verbs.SGE{Length: 1}), syscall.EINVAL},
		{"RegMR closed domain", errOf(gonePD.RegMR(buf, 0)), syscall.EINVAL},
		{"RegMRAddr unmapped", errOf(opd.RegMRAddr(4096, 64, 0)), syscall.EFAULT},
		{"RegMRAddr no bytes", errOf(opd.RegMRAddr(4096, 0, 0)), syscall.EINVAL},
		{"RegMRAddr wraps", errOf(opd.RegMRAddr(math.MaxUint64-8, 64, 0)), syscall.EFAULT},
		{"RegMRAddr Go heap", errOf(opd.RegMRAddr(uintptr(mr.Addr()), 64, 0)), syscall.EINVAL},

		{"CreateSRQ 0", errOf(opd.CreateSRQ(&verbs.SRQConfig{})), syscall.EINVAL},
		{"CreateSRQ limit", errOf(opd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, Limit: 2})), syscall.EINVAL},
		{"CreateSRQ sges", errOf(opd.CreateSRQ(&verbs.SRQConfig{MaxWR: 1, MaxSGE: other.Attr().MaxSRQSGE + 1})), syscall.EINVAL},
		{"SRQ.Resize 0", osrq.Resize(0), syscall.EINVAL},
		{"SRQ.Resize too large", osrq.Resize(other.Attr().MaxSRQWR + 1), syscall.EINVAL},
		{"SRQ.SetLimit too large", osrq.SetLimit(5), syscall.EINVAL},

		{"CreateAH no DGID", ahc(func(a *verbs.AHAttr) { a.DGID = verbs.GID{} }), syscall.EINVAL},
		{"CreateAH SGIDIndex", ahc(func(a *verbs.AHAttr) { a.SGIDIndex = 1 }), syscall.EINVAL},
		{"CreateAH negative SGIDIndex", ahc(func(a *verbs.AHAttr) { a.SGIDIndex = -1 }), syscall.EINVAL},
		{"CreateAH port", ahc(func(a *verbs.AHAttr) { a.PortNum = 2 }), syscall.EINVAL},
		{"CreateAH family", ahc(func(a *verbs.AHAttr) { a.DGID = verbs.GIDFromAddr(addr("::1")) }), syscall.EINVAL},
		{"CreateAH unreachable", ahc(func(a *verbs.AHAttr) { a.DGID = verbs.GIDFromAddr(addr("127.9.9.9")) }), syscall.EHOSTUNREACH},

		{"CreateQP type 0", qpc(func(c *verbs.QPConfig) { c.Type = 0 }), syscall.EINVAL},
		{"CreateQP unknown type", qpc(func(c *verbs.QPConfig) { c.Type = 9 }), syscall.EINVAL},
		{"CreateQP foreign CQ", qpc(func(c *verbs.QPConfig) { c.SendCQ = cq }), syscall.EINVAL},
		{"CreateQP foreign SRQ", qpc(func(c *verbs.QPConfig) { c.SRQ = srq }), syscall.EINVAL},
		{"CreateQP closed CQ", qpc(func(c *verbs.QPConfig) { c.RecvCQ = goneCQ }), syscall.EINVAL},
		{"CreateQP sends", qpc(func(c *verbs.QPConfig) { c.Cap.MaxSendWR = other.Attr().MaxQPWR + 1 }), syscall.EINVAL},
		{"CreateQP receives", qpc(func(c *verbs.QPConfig) { c.Cap.MaxRecvWR = -1 }), syscall.EINVAL},
		{"CreateQP sges", qpc(func(c *verbs.QPConfig) { c.Cap.MaxSendSGE = other.Attr().MaxSGE + 1 }), syscall.EINVAL},
		{"CreateQP inline", qpc(func(c *verbs.QPConfig) { c.Cap.MaxInlineData = other.Attr().MaxInlineData + 1 }), syscall.EINVAL},
		{"CreateQP closed domain", errOf(gonePD.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: ocq, RecvCQ: ocq})), syscall.EINVAL},

		{"PostSend in RESET", post(qp, verbs.SendWR{Op: verbs.OpSend}), syscall.EINVAL},
		{"PostRecv in RESET", errOf(qp.PostRecv(make([]verbs.RecvWR, 1))), syscall.EINVAL},
		{"PostRecv with SRQ", errOf(onSRQ.PostRecv(make([]verbs.RecvWR, 1))), syscall.EINVAL},
		{"PostRecv sges", errOf(rc.PostRecv([]verbs.RecvWR{{SGL: make([]verbs.SGE, 2)}})), syscall.EINVAL},
		{"PostRecv full", errOf(rc.PostRecv(make([]verbs.RecvWR, 5))), syscall.ENOMEM},
		{"SRQ.PostRecv sges", errOf(osrq.PostRecv([]verbs.RecvWR{{SGL: make([]verbs.SGE, 2)}})), syscall.EINVAL},
		{"SRQ.PostRecv full", errOf(osrq.PostRecv(make([]verbs.RecvWR, 5))), syscall.ENOMEM},
		{"SRQ.Resize below content", osrq.Resize(3), syscall.EINVAL},
		{"PostSend op 0", post(rc, verbs.SendWR{}), syscall.EINVAL},
		{"PostSend unknown op", post(rc, verbs.SendWR{Op: 200}), syscall.EINVAL},
		{"PostSend READ on UC", post(uc, verbs.SendWR{Op: verbs.OpRDMARead}), syscall.EINVAL},
		{"PostSend atomic on UC", post(uc, verbs.SendWR{Op: verbs.OpAtomicFetchAdd, SGL: sge}), syscall.EINVAL},
		{"PostSend invalidate on UC", post(uc, verbs.SendWR{Op: verbs.OpSendInv}), syscall.EINVAL},
		{"PostSend WRITE on UD", post(ud, verbs.SendWR{Op: verbs.OpRDMAWrite}), syscall.EINVAL},
		{"PostSend UD without AH", post(ud, verbs.SendWR{Op: verbs.OpSend}), syscall.EINVAL},
		{"PostSend sges", post(rc, verbs.SendWR{Op: verbs.OpSend, SGL: make([]verbs.SGE, 2)}), syscall.EINVAL},
		{"PostSend inline too long", post(rc, verbs.SendWR{Op: verbs.OpSend, Inline: make([]byte, 17)}), syscall.EINVAL},
		{"PostSend inline and SGL", post(rc, verbs.SendWR{Op: verbs.OpSend, Inline: []byte{1}, SGL: sge}), syscall.EINVAL},
		{"PostSend inline READ", post(rc, verbs.SendWR{Op: verbs.OpRDMARead, Inline: []byte{1}}), syscall.EINVAL},
		{"PostSend atomic of 4", post(rc, verbs.SendWR{Op: verbs.OpAtomicCmpSwap, SGL: []verbs.SGE{mr.SGE(0, 4)}}), syscall.EINVAL},
		{"PostSend too long", post(rc, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{mr.SGE(0, -1)}}), syscall.EINVAL},
		{"PostSend closed", post(gone, verbs.SendWR{Op: verbs.OpSend}), syscall.EINVAL},
		{"PostRecv closed", errOf(gone.PostRecv(make([]verbs.RecvWR, 1))), syscall.EINVAL},
		{"Query closed", errOf(gone.Query()), syscall.EINVAL},
		{"Modify closed", gone.Modify(&verbs.QPAttr{State: verbs.QPErr}, verbs.QPMaskState), syscall.EINVAL},

		{"Modify RESET to RTS", qp.Modify(&verbs.QPAttr{State: verbs.QPRTS}, verbs.QPMaskState), syscall.EINVAL},
		{"Modify to INIT without port", qp.Modify(&verbs.QPAttr{State: verbs.QPInit}, verbs.QPMaskState), syscall.EINVAL},
		{"Modify CurState", rc.Modify(&verbs.QPAttr{State: verbs.QPRTS, CurState: verbs.QPInit}, verbs.QPMaskState|verbs.QPMaskCurState), syscall.EINVAL},
		{"Modify Cap", rc.Modify(&verbs.QPAttr{}, verbs.QPMaskCap), syscall.EINVAL},
		{"Modify AltPath", rc.Modify(&verbs.QPAttr{}, verbs.QPMaskAltPath), syscall.EINVAL},
		{"Modify to SQE", rc.Modify(&verbs.QPAttr{State: verbs.QPSQE}, verbs.QPMaskState), syscall.EINVAL},
		{"ToInit port", qp.ToInit(&verbs.QPAttr{Port: 2}), syscall.EINVAL},
		{"Connect twice", rc.Connect(rc.Endpoint(), nil), syscall.EINVAL},
		{"Connect unset GID", connect(func(e *verbs.Endpoint, _ *verbs.ConnectConfig) { e.GID = verbs.GID{} }), syscall.EINVAL},
		{"Connect QPN", connect(func(e *verbs.Endpoint, _ *verbs.ConnectConfig) { e.QPN = 1 << 24 }), syscall.EINVAL},
		{"Connect PSN", connect(func(e *verbs.Endpoint, _ *verbs.ConnectConfig) { e.PSN = 1 << 24 }), syscall.EINVAL},
		{"Connect MTU", connect(func(_ *verbs.Endpoint, c *verbs.ConnectConfig) { c.MTU = 9 }), syscall.EINVAL},
		{"Connect timeout", connect(func(_ *verbs.Endpoint, c *verbs.ConnectConfig) { c.Timeout = 32 }), syscall.EINVAL},
		{"Connect retries", connect(func(_ *verbs.Endpoint, c *verbs.ConnectConfig) { c.RetryCnt = 8 }), syscall.EINVAL},
		{"Connect READs", connect(func(_ *verbs.Endpoint, c *verbs.ConnectConfig) { c.MaxRDAtomic = 255 }), syscall.EINVAL},
		{"Connect SGIDIndex", connect(func(_ *verbs.Endpoint, c *verbs.ConnectConfig) { c.SGIDIndex = 7 }), syscall.EINVAL},
		{"Connect unreachable", connect(func(e *verbs.Endpoint, _ *verbs.ConnectConfig) {
			e.GID = verbs.GIDFromAddr(addr("127.9.9.9"))
		}), syscall.EHOSTUNREACH},
	} {
		wantErrno(t, c.what, c.err, c.want)
	}

	// A full send queue: SQD keeps what is posted.
	if err := rc.Modify(&verbs.QPAttr{State: verbs.QPSQD}, verbs.QPMaskState); err != nil {
		t.Fatal(err)
	}
	n, err := rc.PostSend([]verbs.SendWR{{Op: verbs.OpSend}, {Op: verbs.OpSend}, {Op: verbs.OpSend}, {Op: verbs.OpSend}, {Op: verbs.OpSend}})
	if n != 4 {
		t.Errorf("a queue of 4 took %d", n)
	}
	wantErrno(t, "PostSend full", err, syscall.ENOMEM)

	closeAll(t, rc, uc, ud, onSRQ, qp, osrq, srq, ah, mr, cq, ch, ocq, och, pd, opd, small, other)
}

// other2endpoint is an endpoint on a device that nobody need serve: a queue
// pair's own number, seen from outside.
func other2endpoint(q *verbs.QP, d *verbs.Device) verbs.Endpoint {
	ep := q.Endpoint()
	ep.GID = d.GIDs()[0]
	return ep
}

// A queue pair may wait in INIT, with receives posted, and be connected from
// there.
func TestConnectFromInit(t *testing.T) {
	for _, typ := range []verbs.QPType{verbs.RC, verbs.UC} {
		alice, bob := newSide(typ), newSide(typ)
		in := make([]byte, 8)
		mr := bob.register(in)
		check(bob.qp.ToInit(&verbs.QPAttr{}))
		ok[int](t)(bob.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, 8)}}}))
		check(bob.qp.Connect(alice.qp.Endpoint(), nil))
		check(alice.qp.Connect(bob.qp.Endpoint(), nil))
		ok[int](t)(alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("x")}}))
		check(bob.wait().Err())
		check(alice.wait().Err())
		closeAll(t, mr)
		alice.close()
		bob.close()
	}
}

// What a peer may do is what the connection and the region both grant.
func TestConnectAccess(t *testing.T) {
	for _, c := range []struct {
		access verbs.Access
		op     verbs.Opcode
		want   verbs.WCStatus
	}{
		{0, verbs.OpRDMAWrite, verbs.WCSuccess},
		{0, verbs.OpRDMARead, verbs.WCSuccess},
		{verbs.AccessLocalWrite, verbs.OpRDMAWrite, verbs.WCRemInvReqErr},
		{verbs.AccessRemoteWrite, verbs.OpRDMARead, verbs.WCRemInvReqErr},
		{verbs.AccessRemoteRead, verbs.OpRDMARead, verbs.WCSuccess},
	} {
		alice, bob := newSide(verbs.RC), newSide(verbs.RC)
		local, remote := alice.register(make([]byte, 8)), bob.register(make([]byte, 8))
		check(alice.qp.Connect(bob.qp.Endpoint(), nil))
		check(bob.qp.Connect(alice.qp.Endpoint(), &verbs.ConnectConfig{Access: c.access}))
		ok[int](t)(alice.qp.PostSend([]verbs.SendWR{{Op: c.op, Flags: verbs.SendSignaled,
			SGL: []verbs.SGE{local.SGE(0, 8)}, RemoteAddr: remote.Addr(), RKey: remote.RKey()}}))
		if wc := alice.wait(); wc.Status != c.want {
			t.Errorf("%v with rights %v: %v, want %v", c.op, c.access, wc.Status, c.want)
		}
		alice.close(local)
		bob.close(remote)
	}
}

// Parents outlive their children, and Close may be called again.
func TestBusy(t *testing.T) {
	dev := ok[*verbs.Device](t)(verbs.Open("", nil))
	pd := ok[*verbs.PD](t)(dev.AllocPD())
	ch := ok[*verbs.Channel](t)(dev.CreateChannel())
	cq := ok[*verbs.CQ](t)(dev.CreateCQ(4, ch))
	srq := ok[*verbs.SRQ](t)(pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4}))
	qp := ok[*verbs.QP](t)(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, SRQ: srq}))
	busy := func(what string, o interface{ Close() error }) {
		t.Helper()
		wantErrno(t, what, o.Close(), syscall.EBUSY)
	}
	busy("device", dev)
	busy("domain", pd)
	busy("channel", ch)
	busy("completion queue", cq)
	busy("shared receive queue", srq)
	closeAll(t, qp, qp)
	busy("domain with an SRQ", pd)
	closeAll(t, srq, srq)
	busy("channel with a queue", ch)
	closeAll(t, cq, cq, ch, ch)
	mr := ok[*verbs.MR](t)(pd.RegMR(make([]byte, 8), 0))
	busy("domain with a region", pd)
	closeAll(t, mr, mr)
	ah := ok[*verbs.AH](t)(pd.CreateAH(verbs.AHAttr{DGID: dev.GIDs()[0]}))
	busy("domain with an address handle", pd)
	closeAll(t, ah, ah, pd, pd)
	closeAll(t, dev, dev)
}

// Close of a completion queue waits for acknowledgement; Close of a channel and
// of a device ends the waiting of others.
func TestWaits(t *testing.T) {
	s, dev := newSide(verbs.RC), ok[*verbs.Device](t)(verbs.Open("", nil))
	pd := ok[*verbs.PD](t)(dev.AllocPD())
	ch := ok[*verbs.Channel](t)(dev.CreateChannel())
	cq := ok[*verbs.CQ](t)(dev.CreateCQ(4, ch))
	qp := ok[*verbs.QP](t)(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: verbs.QPCap{MaxRecvWR: 4}}))
	check(qp.Connect(s.qp.Endpoint(), nil))
	check(s.qp.Connect(qp.Endpoint(), nil))

	events := make(chan *verbs.Event, 1)
	go func() { events <- ok[*verbs.Event](t)(ch.Next(t.Context())) }()
	check(cq.RequestNotify(true)) // solicited only
	ok[int](t)(qp.PostRecv(make([]verbs.RecvWR, 2)))
	ok[int](t)(s.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled}}))
	check(s.wait().Err())
	select {
	case <-events:
		t.Fatal("a message that was not solicited raised an event")
	case <-time.After(20 * time.Millisecond):
	}
	ok[int](t)(s.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled | verbs.SendSolicited}}))
	check(s.wait().Err())
	ev := <-events
	if ev.CQ != cq {
		t.Error("the event names another queue")
	}

	closeAll(t, qp)
	var acked atomic.Bool
	closing := make(chan error, 1)
	go func() {
		err := cq.Close()
		if !acked.Load() {
			t.Error("Close did not wait for Ack")
		}
		closing <- err
	}()
	time.Sleep(20 * time.Millisecond)
	acked.Store(true)
	ev.Ack()
	if err := <-closing; err != nil {
		t.Error(err)
	}
	ev.Ack() // once more, after the queue is gone

	next := make(chan error, 2)
	go func() { next <- errOf(ch.Next(context.Background())) }()
	go func() { next <- errOf(ch.Next(context.Background())) }()
	time.Sleep(5 * time.Millisecond)
	closeAll(t, ch)
	wantErrno(t, "Next of a closed channel", <-next, syscall.EBADF)
	wantErrno(t, "Next of a closed channel", <-next, syscall.EBADF)

	closeAll(t, pd)
	go func() { next <- errOf(dev.NextEvent(context.Background())) }()
	time.Sleep(5 * time.Millisecond)
	closeAll(t, dev)
	wantErrno(t, "NextEvent of a closed device", <-next, syscall.ENODEV)
	s.close()
}

// A region keeps its slice alive, though nobody holds either, and lets go of it
// when it is closed.
func TestMemoryLives(t *testing.T) {
	alice, bob := connected()
	const size = 1 << 16
	var freed atomic.Bool
	mr := func() *verbs.MR {
		buf := make([]byte, size)
		runtime.AddCleanup(&buf[0], func(freed *atomic.Bool) { freed.Store(true) }, &freed)
		return bob.register(buf)
	}()
	collect := func() {
		for range 4 {
			runtime.GC()
			time.Sleep(time.Millisecond)
		}
	}
	collect()
	if freed.Load() {
		t.Fatal("registered memory was collected")
	}
	back := make([]byte, 4)
	local := alice.register(back)
	ok[int](t)(alice.qp.PostSend([]verbs.SendWR{
		{Op: verbs.OpRDMAWrite, Inline: []byte("here"), RemoteAddr: mr.Addr() + size - 4, RKey: mr.RKey()},
		{Op: verbs.OpRDMARead, Flags: verbs.SendSignaled, SGL: []verbs.SGE{local.SGE(0, 4)}, RemoteAddr: mr.Addr() + size - 4, RKey: mr.RKey()},
	}))
	check(alice.wait().Err())
	if string(back) != "here" {
		t.Errorf("read back %q", back)
	}

	closeAll(t, mr)
	for deadline := time.Now().Add(10 * time.Second); !freed.Load(); collect() {
		if time.Now().After(deadline) {
			t.Fatal("the memory of a closed region is never collected")
		}
	}
	runtime.KeepAlive(mr)
	alice.close(local)
	bob.close()
}

// PostSend, PostRecv and Poll allocate nothing, down to the peer's memory.
func TestNoAllocs(t *testing.T) {
	alice, bob := connected()
	out, in := alice.register(make([]byte, 4096)), bob.register(make([]byte, 4096))
	send := []verbs.SendWR{
		{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{out.SGE(0, 4096)}, RemoteAddr: in.Addr(), RKey: in.RKey()},
		{Op: verbs.OpSend, Flags: verbs.SendSignaled, SGL: []verbs.SGE{out.SGE(0, 64)}},
	}
	recv := []verbs.RecvWR{{SGL: []verbs.SGE{in.SGE(0, 64)}}}
	wcs := make([]verbs.WC, 4)
	poll := func(cq *verbs.CQ) {
		for {
			n, err := cq.Poll(wcs)
			if err != nil || n > 0 && wcs[0].Status != verbs.WCSuccess {
				t.Fatal(err, wcs[0].Status)
			}
			if n > 0 {
				return
			}
			runtime.Gosched()
		}
	}
	allocs := testing.AllocsPerRun(200, func() {
		_, err1 := bob.qp.PostRecv(recv)
		_, err2 := alice.qp.PostSend(send)
		if err1 != nil || err2 != nil {
			t.Fatal(err1, err2)
		}
		poll(bob.cq)
		poll(alice.cq)
	})
	if allocs != 0 {
		t.Errorf("%v allocations for a WRITE and a SEND", allocs)
	}
	alice.close(out)
	bob.close(in)
}

// Everybody posts and polls at once: each request completes once.
func TestConcurrentUse(t *testing.T) {
	alice, bob := connected()
	target := bob.register(make([]byte, 8))
	const posters, pollers, each = 3, 2, 500
	var seen [posters * each]atomic.Int32
	var total atomic.Int32
	room := make(chan bool, 16) // requests posted and not yet polled: what the queue pair takes
	var wg sync.WaitGroup
	for p := range posters {
		wg.Go(func() {
			for i := range each {
				room <- true
				n, err := alice.qp.PostSend([]verbs.SendWR{{ID: uint64(p*each + i), Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled,
					Inline: []byte{byte(i)}, RemoteAddr: target.Addr(), RKey: target.RKey()}})
				if n != 1 || err != nil {
					t.Errorf("PostSend: %d, %v", n, err)
					return
				}
			}
		})
	}
	for range pollers {
		wg.Go(func() {
			wcs := make([]verbs.WC, 7)
			for total.Load() < posters*each {
				n, err := alice.cq.Poll(wcs)
				if err != nil {
					t.Error(err)
					return
				}
				for _, wc := range wcs[:n] {
					if err := wc.Err(); err != nil {
						t.Error(err)
					}
					seen[wc.ID].Add(1)
					<-room
				}
				total.Add(int32(n))
				runtime.Gosched()
			}
		})
	}
	wg.Wait()
	for id := range seen {
		if n := seen[id].Load(); n != 1 {
			t.Fatalf("request %d completed %d times", id, n)
		}
	}
	alice.close()
	bob.close(target)
}

// Devices lists what Open takes.
func TestDevices(t *testing.T) {
	list := ok[[]verbs.DeviceInfo](t)(verbs.Devices())
	if len(list) == 0 {
		t.Fatal("no device, not even on the loopback interface")
	}
	found := false
	for _, info := range list {
		if info.Name == "" || info.Interface == "" || len(info.Addrs) == 0 {
			t.Errorf("%+v lacks something", info)
		}
		if info.Addrs[0].IsLoopback() {
			found = true
			dev := ok[*verbs.Device](t)(verbs.Open(info.Name, &verbs.Config{Link: verbs.LinkLoop}))
			if dev.Name() != info.Name || dev.Addr() != info.Addrs[0] || len(dev.GIDs()) != len(info.Addrs) {
				t.Errorf("%+v opens as %s at %v", info, dev.Name(), dev.Addr())
			}
			closeAll(t, dev)
		}
	}
	if !found {
		t.Error("the loopback interface is missing")
	}
}
