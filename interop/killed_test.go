package interop

// Processes that are killed at random moments, while data goes both ways between
// them and this one by shared memory.

import (
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

const (
	victimBytes = 512 << 10 // of each of the three parts of a buffer, see trade
	chunkBytes  = 64 << 10
	victimDepth = 4
	victimToken = 77 // the number of the pattern in the first part
)

// stall is what a trader tells its peer.
type stall struct {
	QP   verbs.Endpoint
	Addr uint64
	RKey uint32
}

// trader writes to and reads from its peer, all the time.
type trader struct {
	pd   *verbs.PD
	cq   *verbs.CQ
	qp   *verbs.QP
	mr   *verbs.MR
	buf  []byte
	peer stall
	n    int // requests posted
	out  int // under way

	reads int // one of so many requests is a READ
}

// newTrader makes one. With shared memory it does little but write, so that the victim is
// most likely killed during a WRITE.
func newTrader(dev *verbs.Device, shared bool) (x *trader, mine stall, err error) {
	x = &trader{reads: 2}
	if x.pd, err = dev.AllocPD(); err != nil {
		return x, mine, err
	}
	if x.cq, err = dev.CreateCQ(64, nil); err != nil {
		return x, mine, err
	}
	const access = verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessRemoteRead
	if shared {
		x.reads = 16
		x.mr, err = x.pd.AllocMR(3*victimBytes, access)
	} else {
		x.buf = make([]byte, 3*victimBytes)
		x.mr, err = x.pd.RegMR(x.buf, access)
	}
	if err != nil {
		return x, mine, err
	}
	if shared {
		x.buf = x.mr.Bytes()
	}
	pattern(x.buf[:victimBytes], victimToken)
	if x.qp, err = x.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: x.cq, RecvCQ: x.cq, Cap: verbs.QPCap{MaxSendWR: victimDepth, MaxSendSGE: 1}}); err != nil {
		return x, mine, err
	}
	return x, stall{x.qp.Endpoint(), x.mr.Addr(), x.mr.RKey()}, nil
}

// trade posts requests while there is room, and returns a completion if there is one. The
// requests are WRITEs of the first part into the peer's second, and READs of the peer's
// first part into the third.
func (x *trader) trade(post bool) (wc verbs.WC, done bool, err error) {
	for post && x.out < victimDepth {
		at := x.n % (victimBytes / chunkBytes) * chunkBytes
		wr := verbs.SendWR{ID: uint64(at), Flags: verbs.SendSignaled, RKey: x.peer.RKey}
		if x.n%x.reads != x.reads-1 {
			wr.Op, wr.SGL, wr.RemoteAddr = verbs.OpRDMAWrite, []verbs.SGE{x.mr.SGE(at, chunkBytes)}, x.peer.Addr+uint64(victimBytes+at)
		} else {
			wr.Op, wr.SGL, wr.RemoteAddr = verbs.OpRDMARead, []verbs.SGE{x.mr.SGE(2*victimBytes+at, chunkBytes)}, x.peer.Addr+uint64(at)
		}
		if _, err := x.qp.PostSend([]verbs.SendWR{wr}); err != nil {
			return wc, false, err
		}
		x.n++
		x.out++
	}
	var wcs [1]verbs.WC
	n, err := x.cq.Poll(wcs[:])
	if n == 1 {
		x.out--
	}
	return wcs[0], n == 1, err
}

// suffer is the main program of a process that is killed.
func (p *player) suffer() (err error) {
	if p.dev, err = verbs.Open(p.script.Mine, nil); err != nil {
		return err
	}
	x, mine, err := newTrader(p.dev, p.script.Shared)
	if err != nil {
		return err
	}
	p.say(mine)
	if err := p.hear(&x.peer); err != nil {
		return err
	}
	if err := x.qp.Connect(x.peer.QP, &verbs.ConnectConfig{Timeout: 18, RetryCnt: 7}); err != nil {
		return err
	}
	p.say("ready")
	for {
		if wc, done, err := x.trade(true); err != nil || done && wc.Err() != nil {
			return err
		}
	}
}

func TestKilledAtRandom(t *testing.T) {
	rounds := 12
	if os.Getenv("VERBENA_FULL") != "" {
		rounds = 300
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("VERBENA_SEED=%d repeats this", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	at := loopbacks()
	dev, err := verbs.Open(at[0].addr, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}()
	statuses := map[verbs.WCStatus]int{}
	for i, p := range at {
		killOne(t, dev, p, 0, i%2 == 0, statuses) // makes what is made only once
	}
	before := ours(t)
	for round := range rounds {
		killOne(t, dev, at[round%2], time.Duration(rng.Int64N(int64(30*time.Millisecond))), round/2%2 == 1, statuses)
	}
	t.Log(statuses)
	if statuses[verbs.WCSuccess] == 0 {
		t.Error("nothing was moved")
	}
	for _, c := range dev.Counters() {
		if c.Name == "local_direct" {
			if t.Logf("%d WRITEs by grants", c.Value); c.Value == 0 {
				t.Error("memory was shared in vain")
			}
		}
	}
	// A process keeps some pipes and rings for the next pages that it pins or writes to.
	kept := 5*runtime.GOMAXPROCS(0) + 2
	more := func() bool {
		now := ours(t)
		return now[0] > before[0] || now[1] > before[1] || now[2] > before[2]+kept
	}
	for deadline := time.Now().Add(patience); more(); time.Sleep(10 * time.Millisecond) {
		runtime.GC() // frees what this process keeps about the dead devices
		if time.Now().After(deadline) {
			t.Fatalf("descriptors and mappings: %v, and %v at the beginning", ours(t), before)
		}
	}
}

// killOne trades with a process, kills it after a time, and checks the memory.
func killOne(t *testing.T, dev *verbs.Device, at place, after time.Duration, shared bool, statuses map[verbs.WCStatus]int) {
	t.Helper()
	v := &resident{actor: start(t.Context(), t, "victim", script{Shared: shared}, at)}
	v.lines = newLines(v.stdout)
	x, mine, err := newTrader(dev, shared)
	if err != nil {
		t.Fatal(err)
	}
	v.hears(t, &x.peer)
	v.tells(t, mine)
	if err := x.qp.Connect(x.peer.QP, &verbs.ConnectConfig{Timeout: 14, RetryCnt: 3}); err != nil {
		t.Fatal(err)
	}
	v.expects(t, "ready")
	failed := false
	end := time.Now().Add(after)
	for deadline := end.Add(patience); !failed || x.out > 0; {
		if !v.killed && time.Now().After(end) {
			v.kill(t)
		}
		wc, done, err := x.trade(!failed)
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("%v, %d requests are under way", err, x.out)
		}
		if !done {
			continue
		}
		statuses[wc.Status]++
		switch wc.Status {
		case verbs.WCSuccess:
			if wc.Op == verbs.WCRDMARead {
				x.check(t, 2*victimBytes+int(wc.ID), int(wc.ID))
			}
		case verbs.WCRetryExcErr, verbs.WCWRFlushErr:
			failed = true
		default:
			t.Errorf("%v", wc.Status)
			failed = true
		}
	}
	_ = v.cmd.Wait()
	// Bytes that the victim has written are right, those that it has not reached are still
	// 0, and it has not changed what it reads.
	x.check(t, 0, 0)
	want := make([]byte, victimBytes)
	pattern(want, victimToken)
	for i, b := range x.buf[victimBytes:][:victimBytes] {
		if b != 0 && b != want[i] {
			t.Errorf("byte %d is %#x, neither 0 nor what the victim writes", i, b)
			break
		}
	}
	for _, o := range []interface{ Close() error }{x.qp, x.mr, x.cq, x.pd} {
		if err := o.Close(); err != nil {
			t.Error(err)
		}
	}
}

// check compares a chunk with the chunk that it is a copy of.
func (x *trader) check(t *testing.T, at, of int) {
	t.Helper()
	want := make([]byte, victimBytes)
	pattern(want, victimToken)
	if string(x.buf[at:][:chunkBytes]) != string(want[of:][:chunkBytes]) {
		t.Errorf("the chunk at %d is wrong", at)
	}
}

// ours counts the descriptors of this process but for pipes and io_urings, its mappings that
// are Verbena's, and its pipes and io_urings.
func ours(t *testing.T) [3]int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	rings := 0
	for _, fd := range fds {
		// The one that ReadDir used is gone.
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && (strings.HasPrefix(to, "pipe:") || to == "anon_inode:[io_uring]") {
			rings++
		}
	}
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	return [3]int{len(fds) - rings, strings.Count(string(maps), "memfd:verbena-"), rings}
}
