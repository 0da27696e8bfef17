package interop

// Processes of one address are stopped, killed and started at random moments, while others of
// the same address are written to and read from, by rings and by packets: these do not notice.

import (
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// suit is the main program of a process that others write to and read from, and that does
// nothing itself.
func (p *player) suit() (err error) {
	if p.dev, err = verbs.Open(p.script.Mine, nil); err != nil {
		return err
	}
	x, mine, err := newTrader(p.dev, false)
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
	_ = p.hear(new(string)) // until the input ends
	return nil
}

// newPassive starts a process, and connects a trader of a device with it.
func newPassive(t *testing.T, dev *verbs.Device, at place) (*resident, *trader) {
	t.Helper()
	r := &resident{actor: start(t.Context(), t, "passive", script{}, at)}
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

func TestAnyMoment(t *testing.T) {
	rounds, kept, lots := 12, 6, 20
	if os.Getenv("VERBENA_FULL") != "" {
		rounds, kept, lots = 150, 30, 70
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	at := loopbacks()
	var devs []*verbs.Device
	for i, l := range []verbs.LinkMode{verbs.LinkAny, verbs.LinkUDP} {
		d, err := verbs.Open([]string{at[1].addr, "127.77.9.9"}[i], &verbs.Config{Link: l})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = d.Close() })
		devs = append(devs, d)
	}
	bystander := func() *resident {
		r := &resident{actor: start(t.Context(), t, "passive", script{}, at[0])}
		t.Cleanup(func() { _ = r.stdin.Close(); _ = r.cmd.Process.Kill(); _ = r.cmd.Wait() })
		return r
	}
	first := bystander() // most likely it is the first at the address
	var all []*trader
	for i := range kept {
		_, x := newPassive(t, devs[i%2], at[0])
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
	for i := range devs {
		_, x := newPassive(t, devs[i], at[0])
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
