package interop

// Processes of one address are stopped, killed and started at random moments, while others of
// the same address are written to and read from, by rings and by packets: these do not notice.

import (
	"math/rand/v2"
	"net/netip"
	"os"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// suit is the main program of a process that others write to and read from, and that does
// nothing itself.
func (p *player) suit() (err error) {
	cfg := &verbs.Config{}
	for _, a := range p.script.Addrs {
		cfg.Addrs, p.script.Mine = append(cfg.Addrs, netip.MustParseAddr(a)), ""
	}
	if p.dev, err = verbs.Open(p.script.Mine, cfg); err != nil {
		return err
	}
	x, mine, err := newTrader(p.dev, false)
	if err != nil {
		return err
	}
	mine.QP.GID = p.dev.GIDs()[p.script.SGID]
	p.say(mine)
	if err := p.hear(&x.peer); err != nil {
		return err
	}
	if err := x.qp.Connect(x.peer.QP, &verbs.ConnectConfig{Timeout: 18, RetryCnt: 7, SGIDIndex: p.script.SGID}); err != nil {
		return err
	}
	p.say("ready")
	_ = p.hear(new(string)) // until the input ends
	p.result.Counters = map[string]uint64{}
	for _, n := range p.dev.Counters() {
		p.result.Counters[n.Name] = n.Value
	}
	return nil
}

// newPassive starts a process, and connects a trader of a device with it.
func newPassive(t *testing.T, dev *verbs.Device, s script, at place) (*resident, *trader) {
	t.Helper()
	r := &resident{actor: start(t.Context(), t, "passive", s, at)}
	t.Cleanup(func() { _ = r.stdin.Close(); _ = r.cmd.Process.Kill(); _ = r.cmd.Wait() })
	r.lines = newLines(r.stdout)
	x, mine, err := newTrader(dev, false)
	if err != nil {
		t.Fatal(err)
	}
	r.hears(t, &x.peer)
	r.tells(t, mine)
	// No retry may be needed for a minute: a busy machine is not a lost connection.
	if err := x.qp.Connect(x.peer.QP, &verbs.ConnectConfig{Timeout: 20, RetryCnt: 7}); err != nil {
		t.Fatal(err)
	}
	r.expects(t, "ready")
	return r, x
}

// The device of the processes has one address, or two.
func TestAnyMoment(t *testing.T) {
	t.Run("one address", func(t *testing.T) { anyMoment(t, "127.77.9.9") })
	t.Run("two addresses", func(t *testing.T) {
		at := loopbacks()
		anyMoment(t, "127.77.9.10", at[0].addr, "127.77.9.11")
	})
}

// anyMoment tests processes of a device with several addresses, or with the first of loopbacks;
// packets is the address of a device that sends packets to them.
func anyMoment(t *testing.T, packets string, addrs ...string) {
	rounds, kept, lots := 12, 6, 20
	if os.Getenv("VERBENA_FULL") != "" {
		rounds, kept, lots = 150, 100, 70
	}
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64)
	}
	t.Logf("VERBENA_SEED=%d repeats this", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	at := loopbacks()
	var devs []*verbs.Device
	for i, l := range []verbs.LinkMode{verbs.LinkAny, verbs.LinkUDP} {
		d, err := verbs.Open([]string{at[1].addr, packets}[i], &verbs.Config{Link: l})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		devs = append(devs, d)
	}
	bystander := func() *resident {
		r := &resident{actor: start(t.Context(), t, "passive", script{Addrs: addrs}, at[0])}
		t.Cleanup(func() { _ = r.stdin.Close(); _ = r.cmd.Process.Kill(); _ = r.cmd.Wait() })
		return r
	}
	first := bystander() // most likely it is the first at the address
	var all []*trader
	passive := func(i int) *trader { // each second one by the last address
		_, x := newPassive(t, devs[i%2], script{Addrs: addrs, SGID: i / 2 % max(1, len(addrs))}, at[0])
		return x
	}
	for i := range kept {
		x := passive(i)
		all = append(all, x)
		t.Cleanup(func() { _, _, _, _ = x.qp.Close(), x.mr.Close(), x.cq.Close(), x.pd.Close() })
	}
	others := []*resident{first}
	for range lots {
		others = append(others, bystander())
	}
	done := make([]int, kept)
	trade := func(until time.Time) {
		for time.Now().Before(until) {
			for i, x := range all {
				wc, got, err := x.trade(true)
				if err == nil && got {
					err = wc.Err()
				}
				if err != nil {
					t.Fatalf("connection %d, after %d requests: %v", i, done[i], err)
				}
				if got {
					done[i]++
					if wc.Op == verbs.WCRDMARead {
						x.check(t, 2*victimBytes+int(wc.ID), int(wc.ID))
					}
				}
			}
		}
	}
	trade(time.Now().Add(100 * time.Millisecond))
	for range rounds {
		for range 1 + rng.IntN(3) {
			i := rng.IntN(len(others))
			what := []syscall.Signal{syscall.SIGSTOP, syscall.SIGKILL, syscall.SIGCONT, syscall.SIGTERM}[rng.IntN(4)]
			_ = others[i].cmd.Process.Signal(what) // it may be dead already
		}
		if rng.IntN(2) == 0 {
			others = append(others, bystander())
		}
		trade(time.Now().Add(time.Duration(rng.IntN(50)) * time.Millisecond))
	}
	// A process that comes now, while some are stopped, is connected as any other.
	for i := range 2 * len(devs) {
		x := passive(i)
		all, done = append(all, x), append(done, 0)
		t.Cleanup(func() { _, _, _, _ = x.qp.Close(), x.mr.Close(), x.cq.Close(), x.pd.Close() })
	}
	before := append([]int(nil), done...)
	for more := true; more; {
		trade(time.Now().Add(50 * time.Millisecond))
		more = false
		for i := range done {
			more = more || done[i] < before[i]+20
		}
	}
	t.Logf("%v requests", done)
}

// Processes of an address start and end, one after the other, more of them than there were ranges
// of numbers; each is written to and read from. Two that stay are written to and read from all the
// time, by packets: the kernel brings each packet to its process, so none is passed on.
func TestManyInTurn(t *testing.T) {
	turns := 70
	if os.Getenv("VERBENA_FULL") != "" {
		turns = 300
	}
	at := loopbacks()
	dev, err := verbs.Open(at[1].addr, &verbs.Config{Link: verbs.LinkUDP})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = dev.Close() }()
	closeAll := func(x *trader) { _, _, _, _ = x.qp.Close(), x.mr.Close(), x.cq.Close(), x.pd.Close() }
	var stay [2]*resident
	var all [2]*trader
	for i := range stay {
		stay[i], all[i] = newPassive(t, dev, script{}, at[0])
		defer closeAll(all[i])
	}
	// trade waits until each of some traders has completed requests.
	trade := func(n int, xs ...*trader) {
		t.Helper()
		for _, x := range xs {
			for done := 0; done < n || x.out > 0; {
				wc, got, err := x.trade(done+x.out < n)
				if err == nil && got {
					err = wc.Err()
				}
				if err != nil {
					t.Fatal(err)
				}
				if got {
					done++
					if wc.Op == verbs.WCRDMARead {
						x.check(t, 2*victimBytes+int(wc.ID), int(wc.ID))
					}
				}
			}
		}
	}
	numbers := map[uint32]bool{}
	for i := range turns {
		r, x := newPassive(t, dev, script{}, at[0])
		if numbers[x.peer.QP.QPN] {
			t.Errorf("number %#x comes back", x.peer.QP.QPN)
		}
		numbers[x.peer.QP.QPN] = true
		trade(4, x, all[0], all[1])
		if i%2 == 0 {
			r.kill(t)
		} else {
			_ = r.stdin.Close()
		}
		_ = r.cmd.Wait()
		trade(4, all[0], all[1])
		closeAll(x)
	}
	for i, r := range stay {
		_ = r.stdin.Close()
		r.read(t)
		wantSound(t, r.result)
		if n, in := r.result.Counters["local_forwarded_packets"], r.result.Counters["rx_packets"]; n != 0 || in == 0 {
			t.Errorf("process %d has passed on %d packets of %d", i, n, in)
		}
	}
}
