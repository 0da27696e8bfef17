package interop

// An XRC domain that several processes have open. Each has a shared receive queue, one of
// them also the target queue pair. The test itself is the initiator.

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/verbs"
)

// quarter is what a process with a queue tells the test.
type quarter struct {
	SRQ  uint32
	Addr uint64
	RKey uint32
	QP   verbs.Endpoint // of the target, if it has one
}

const (
	letterBytes = 32 << 10 // a message and its receive
	receives    = 16
	freeAt      = receives * letterBytes // memory behind the receives
)

// serveQueue is the main program of a process with a queue; in the role "target" it also has
// the target queue pair. It receives until its standard input is closed, and then reports
// what it has received.
func (p *player) serveQueue() error {
	dev, err := verbs.Open(p.script.Mine, &verbs.Config{Link: verbs.LinkMode(p.script.Link)})
	if err != nil {
		return err
	}
	file, err := os.Open(p.script.File)
	if err != nil {
		return err
	}
	xrcd, err := dev.OpenXRCD(&verbs.XRCDConfig{File: file, Create: true})
	if err != nil {
		return err
	}
	pd, err := dev.AllocPD()
	if err != nil {
		return err
	}
	cq, err := dev.CreateCQ(4*receives, nil)
	if err != nil {
		return err
	}
	srq, err := pd.CreateSRQ(&verbs.SRQConfig{MaxWR: receives, MaxSGE: 1, XRCD: xrcd, CQ: cq})
	if err != nil {
		return err
	}
	buf := make([]byte, freeAt+1<<20)
	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead|verbs.AccessRemoteAtomic)
	if err != nil {
		return err
	}
	post := func(slot uint64) error {
		_, err := srq.PostRecv([]verbs.RecvWR{{ID: slot, SGL: []verbs.SGE{mr.SGE(int(slot)*letterBytes, letterBytes)}}})
		return err
	}
	for i := range uint64(receives) {
		if err := post(i); err != nil {
			return err
		}
	}
	mine := quarter{SRQ: srq.Number(), Addr: mr.Addr(), RKey: mr.RKey()}
	commands := make(chan verbs.Endpoint)
	go func() {
		defer close(commands)
		for p.in.Scan() {
			var peer verbs.Endpoint
			if json.Unmarshal(p.in.Bytes(), &peer) == nil {
				commands <- peer
			}
		}
	}()
	var target *verbs.QP
	newTarget := func() error {
		if target, err = xrcd.CreateQP(); err == nil {
			mine.QP = target.Endpoint()
		}
		return err
	}
	if p.role == "target" {
		if err := newTarget(); err != nil {
			return err
		}
	}
	say := func(v any) {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err)
		}
		p.write(envelope{To: "test", Body: b})
	}
	say(mine)
	var wcs [8]verbs.WC
	for ended := false; ; {
		select {
		case peer, more := <-commands:
			if !more {
				ended, commands = true, nil
				break
			}
			if err := target.Connect(peer, &verbs.ConnectConfig{Timeout: 17, RetryCnt: 7}); err != nil {
				return err
			}
			if err := newTarget(); err != nil { // for the next initiator
				return err
			}
			say(mine)
		default:
		}
		n, err := cq.Poll(wcs[:])
		if err != nil {
			return err
		}
		for _, wc := range wcs[:n] {
			if wc.Err() != nil {
				return wc.Err()
			}
			b := buf[int(wc.ID)*letterBytes:][:wc.ByteLen]
			if err := matches(b, uint64(wc.Imm)); err != nil {
				p.fail("message %d: %v", wc.Imm, err)
			}
			p.result.Heard = append(p.result.Heard, wc.Imm)
			if err := post(wc.ID); err != nil {
				return err
			}
		}
		if n == 0 && ended { // all that was acknowledged has been polled
			p.result.Counters = map[string]uint64{}
			for _, n := range dev.Counters() {
				p.result.Counters[n.Name] = n.Value
			}
			return nil // the process ends, and everything with it
		}
		if n == 0 {
			time.Sleep(20 * time.Microsecond) // there are more processes than cores
		}
	}
}

// resident is a process with a queue, as the test sees it.
type resident struct {
	*actor
	quarter
	lines *bufio.Scanner
	sent  []uint32
}

func (r *resident) read(t testing.TB) {
	t.Helper()
	if !r.lines.Scan() {
		t.Fatalf("%s has ended: %s", r.role, r.stderr)
	}
	var e envelope
	err := json.Unmarshal(r.lines.Bytes(), &e)
	if r.result = e.Result; err == nil && e.Result == nil {
		err = json.Unmarshal(e.Body, &r.quarter)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// house starts the processes of one domain.
func house(t *testing.T, link verbs.LinkMode, at place, roles ...string) []*resident {
	t.Helper()
	file := filepath.Join(t.TempDir(), "domain")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	t.Cleanup(cancel)
	var all []*resident
	for _, role := range roles {
		r := &resident{actor: start(ctx, t, role, script{File: file, Link: string(link)}, at)}
		t.Cleanup(func() { _ = r.stdin.Close(); _ = r.cmd.Wait() })
		r.lines = newLines(r.stdout)
		r.read(t)
		all = append(all, r)
	}
	return all
}

func newLines(r io.Reader) *bufio.Scanner {
	s := bufio.NewScanner(r)
	s.Buffer(nil, 1<<20)
	return s
}

// finish ends a process and checks that it has received what was sent to it.
func (r *resident) finish(t testing.TB) {
	t.Helper()
	_ = r.stdin.Close()
	r.read(t)
	for _, e := range r.result.Errors {
		t.Errorf("%s: %s", r.role, e)
	}
	if fmt.Sprint(r.result.Heard) != fmt.Sprint(r.sent) {
		t.Errorf("%s has heard %v, want %v", r.role, r.result.Heard, r.sent)
	}
	t.Logf("%s: %d messages, %d packets in, %d duplicates, %d out of sequence", r.role, len(r.sent), r.result.Counters["rx_packets"],
		r.result.Counters["duplicate_requests"], r.result.Counters["out_of_sequence"])
}

// caller is the initiator.
type caller struct {
	t   *testing.T
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	mr  *verbs.MR
	buf []byte
	qp  *verbs.QP
	n   uint32
}

func newCaller(t *testing.T, link verbs.LinkMode, addr string) *caller {
	t.Helper()
	c := &caller{t: t, buf: make([]byte, 1<<20)}
	var err error
	check := func() {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	c.dev, err = verbs.Open(addr, &verbs.Config{Link: link})
	check()
	c.pd, err = c.dev.AllocPD()
	check()
	c.cq, err = c.dev.CreateCQ(256, nil)
	check()
	c.mr, err = c.pd.RegMR(c.buf, verbs.AccessLocalWrite)
	check()
	t.Cleanup(func() {
		for _, o := range []interface{ Close() error }{c.qp, c.mr, c.cq, c.pd, c.dev} {
			if err := o.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	return c
}

// call makes a new connection to the target of a process, which then makes a target for the
// next one.
func (c *caller) call(target *resident, cfg *verbs.ConnectConfig) {
	c.t.Helper()
	if c.qp != nil {
		if err := c.qp.Close(); err != nil {
			c.t.Fatal(err)
		}
	}
	var err error
	if c.qp, err = c.pd.CreateQP(&verbs.QPConfig{Type: verbs.XRCSend, SendCQ: c.cq, Cap: verbs.QPCap{MaxSendWR: 64, MaxSendSGE: 1, MaxInlineData: 64}}); err != nil {
		c.t.Fatal(err)
	}
	to := target.QP
	b, err := json.Marshal(c.qp.Endpoint())
	if err != nil {
		c.t.Fatal(err)
	}
	fmt.Fprintf(target.stdin, "%s\n", b)
	target.read(c.t) // it is connected
	if err := c.qp.Connect(to, cfg); err != nil {
		c.t.Fatal(err)
	}
}

// wait waits for a completion.
func (c *caller) wait() verbs.WC {
	c.t.Helper()
	var wc [1]verbs.WC
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if n, err := c.cq.Poll(wc[:]); n == 1 || err != nil {
			if err != nil {
				c.t.Fatal(err)
			}
			return wc[0]
		}
	}
	c.t.Fatal("no completion")
	return wc[0]
}

// letter posts a message to the queue of a process.
func (c *caller) letter(to *resident, size int) {
	c.t.Helper()
	at := int(c.n%16) * letterBytes
	pattern(c.buf[at:][:size], uint64(c.n))
	c.post(verbs.SendWR{Op: verbs.OpSendImm, Imm: c.n, SGL: []verbs.SGE{c.mr.SGE(at, size)}, RemoteSRQN: to.SRQ})
	to.sent = append(to.sent, c.n)
	c.n++
}

func (c *caller) post(wr verbs.SendWR) {
	c.t.Helper()
	wr.Flags |= verbs.SendSignaled
	if _, err := c.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *caller) ok(n int) {
	c.t.Helper()
	for range n {
		if wc := c.wait(); wc.Err() != nil {
			c.t.Fatal(wc.Err())
		}
	}
}

// Messages to the queues of three processes over one connection: each arrives once, in the
// right queue, complete and in order. READs, WRITEs and atomics reach the memory of the
// process whose queue they name, and no other.
func TestXRCShared(t *testing.T) {
	at := loopbacks()
	for _, tt := range []struct {
		name string
		link verbs.LinkMode
		addr string
	}{
		{"one address", verbs.LinkAny, at[0].addr},
		{"two addresses", verbs.LinkAny, at[1].addr},
		{"by packets", verbs.LinkUDP, at[1].addr},
	} {
		t.Run(tt.name, func(t *testing.T) {
			const seed = 11
			rng := rand.New(rand.NewPCG(seed, 1))
			all := house(t, tt.link, at[0], "target", "queue", "queue")
			c := newCaller(t, tt.link, tt.addr)
			c.call(all[0], &verbs.ConnectConfig{Timeout: 17, RetryCnt: 7, RNRRetry: 7})
			var sums [3]uint64
			for range 60 {
				n := 1 + rng.IntN(8)
				for range n {
					c.letter(all[rng.IntN(3)], rng.IntN(letterBytes))
				}
				c.ok(n)
				i := rng.IntN(3)
				to := all[i]
				rdma := verbs.SendWR{RemoteSRQN: to.SRQ, RemoteAddr: to.Addr + freeAt, RKey: to.RKey}
				size := 1 + rng.IntN(100_000)
				pattern(c.buf[600_000:][:size], uint64(c.n))
				write, read, add := rdma, rdma, rdma
				write.Op, write.SGL = verbs.OpRDMAWrite, []verbs.SGE{c.mr.SGE(600_000, size)}
				read.Op, read.SGL = verbs.OpRDMARead, []verbs.SGE{c.mr.SGE(800_000, size)}
				add.Op, add.SGL, add.CompareAdd = verbs.OpAtomicFetchAdd, []verbs.SGE{c.mr.SGE(1_000_000, 8)}, uint64(c.n)
				add.RemoteAddr += 1<<20 - 8
				c.post(write)
				c.post(read)
				c.post(add)
				c.ok(3)
				if err := matches(c.buf[800_000:][:size], uint64(c.n)); err != nil {
					t.Fatalf("READ of %d bytes: %v", size, err)
				}
				if got := wordAt(c.buf, 1_000_000); got != sums[i] {
					t.Fatalf("atomic: %d, want %d", got, sums[i])
				}
				sums[i] += uint64(c.n)
			}
			for _, r := range all[1:] {
				r.finish(t)
			}
			all[0].finish(t)
		})
	}
}

// The process of a queue is killed. If nothing is under way to it, the other queues still
// work, and a message that names its queue fails. If something is under way, the connection
// fails, and the next one works.
func TestXRCQueueKilled(t *testing.T) {
	at := loopbacks()
	for _, busy := range []bool{false, true} {
		t.Run(fmt.Sprint("busy ", busy), func(t *testing.T) {
			all := house(t, verbs.LinkAny, at[0], "target", "queue", "queue")
			c := newCaller(t, verbs.LinkAny, at[1].addr)
			c.call(all[0], &verbs.ConnectConfig{Timeout: 17, RetryCnt: 4, RNRRetry: 7})
			for i := range 30 {
				c.letter(all[i%3], 1000)
				c.ok(1)
			}
			victim := all[1]
			if busy {
				for range 16 {
					c.letter(victim, letterBytes)
				}
			}
			victim.kill(t)
			_ = victim.cmd.Wait()
			if !busy {
				// The other queues receive everything, both before and after the target
				// has noticed the end of the process.
				for i := range 20 {
					c.letter(all[i%2*2], 1000)
					c.ok(1)
				}
				c.letter(victim, 10)
				if wc := c.wait(); wc.Status != verbs.WCRemInvReqErr && wc.Status != verbs.WCRetryExcErr {
					t.Errorf("to a queue that is gone: %v", wc.Status)
				}
			} else {
				failed := false
				for range 16 {
					if wc := c.wait(); wc.Status != verbs.WCSuccess {
						failed = true
					}
				}
				t.Logf("failed: %v", failed) // or everything was received before
			}
			c.call(all[0], &verbs.ConnectConfig{Timeout: 17, RetryCnt: 7, RNRRetry: 7})
			for i := range 30 {
				c.letter(all[i%2*2], 1000)
				c.ok(1)
			}
			all[2].finish(t)
			all[0].finish(t)
		})
	}
}
