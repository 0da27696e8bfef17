// Package tour shows a person who has never seen Verbena what it does: every
// operation, between two devices, over each link, with the data compared; then
// how fast it is here.
//
// Top-down: Run goes through the links and their steps; lab.go makes the two
// devices and what the steps need; rc.go, shared.go, datagram.go and refused.go
// are the steps, and mw.go, umr.go, dm.go, dmabuf.go, gpu.go and p2p.go those of tours of their own; speed.go
// measures. odp.go is another tour, of on-demand paging, and unified.go one of a GPU, an adapter and a disk together.
package tour

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/verbs"
)

// Options change what a tour shows. The zero value is the full tour.
type Options struct {
	PCAP  string // capture the first device's packets of the udp part
	Quick bool   // no measurements
	Topic string // one of Topics, instead of everything; then nothing is measured
}

// topics are the tours of one thing.
var topics = map[string][]step{"mw": windowSteps, "umr": indirectSteps, "dm": deviceSteps, "dmabuf": bufferSteps, "gpu": gpuSteps, "p2p": peerSteps}

// TopicODP is the topic that RunODP shows.
const TopicODP = "odp"

// Topics returns the names of all topics.
func Topics() []string {
	return slices.Sorted(slices.Values(append(slices.Collect(maps.Keys(topics)), TopicODP, TopicUnified)))
}

// step is one operation of the tour. run executes it, compares everything that can be
// compared, and returns in a few words what happened.
type step struct {
	service string // RC, UC, UD; --: none
	name    string
	run     func(l *lab) (string, error)
}

var steps = []step{
	{"RC", "SEND", sendStep},
	{"RC", "SEND_WITH_IMM", sendImmStep},
	{"RC", "SEND_WITH_INV", sendInvStep},
	{"RC", "RDMA_WRITE", writeStep},
	{"RC", "RDMA_WRITE_WITH_IMM", writeImmStep},
	{"RC", "RDMA_READ", readStep},
	{"RC", "ATOMIC_CMP_AND_SWP", cmpSwapStep},
	{"RC", "ATOMIC_FETCH_AND_ADD", fetchAddStep},
	{"RC", "inline data", inlineStep},
	{"RC", "shared receive queue", srqStep},
	{"RC", "completion event", eventStep},
	{"UC", "SEND", ucSendStep},
	{"UC", "RDMA_WRITE", ucWriteStep},
	{"UD", "SEND", udSendStep},
	{"RC", "refused access", refusedStep},
}

// links are the two parts of the tour.
var links = []struct {
	mode  verbs.LinkMode
	title string
}{
	{verbs.LinkLoop, "loop: the peer is in this process, data is copied once, from memory to memory"},
	{verbs.LinkUDP, "udp: RoCE v2 packets through two UDP sockets, as to another host"},
}

// ErrFailed means that something was not as it should be; Run has printed what.
var ErrFailed = errors.New("not everything was as it should be")

// Run runs all steps over each link and prints what happened. It goes on after a failure.
func Run(ctx context.Context, out *term.Printer, opt Options) error {
	t := &tour{ctx: ctx, out: out, opt: opt, began: time.Now(), steps: steps}
	if opt.Topic != "" {
		t.steps, opt.Quick = topics[opt.Topic], true
	}
	t.total = len(links) * len(t.steps)
	if !opt.Quick {
		t.total += len(links) * len(sizes)
	}
	out.Printf("%s\n", out.Paint(term.Bold, "Verbena: RDMA devices in software. Two of them talk to each other in this process."))
	out.Printf("Each line is one operation; all data is compared byte by byte.\n")
	for _, link := range links {
		if err := t.visit(link.mode, link.title); err != nil {
			return err
		}
	}
	if !opt.Quick {
		if err := t.measure(); err != nil {
			return err
		}
	}
	return t.summary()
}

// tour is a tour that is under way.
type tour struct {
	ctx    context.Context
	out    *term.Printer
	opt    Options
	steps  []step
	began  time.Time
	total  int // steps and measurements, for the progress line
	at     int // steps and measurements so far
	passed int
	failed int
}

// visit runs all steps over one link. It fails only if the tour is cancelled.
func (t *tour) visit(mode verbs.LinkMode, title string) error {
	t.out.Printf("\n%s\n", t.out.Paint(term.Bold, title))
	cfg := verbs.Config{Link: mode}
	if mode == verbs.LinkUDP {
		cfg.PCAP = t.opt.PCAP // nothing makes packets on the loop link
	}
	l, err := newLab(t.ctx, cfg)
	if err != nil {
		t.at += len(t.steps)
		t.fail("", "open two devices", err)
		return context.Cause(t.ctx)
	}
	t.out.Printf("      devices at %v and %v\n", l.a.dev.Addr(), l.b.dev.Addr())
	for _, s := range t.steps {
		t.at++
		t.out.Progress("[%d/%d] %s %s …", t.at, t.total, s.service, s.name)
		detail, err := s.run(l)
		switch cause := context.Cause(t.ctx); {
		case cause != nil:
			t.out.Clear()
			return errors.Join(cause, l.close())
		case err != nil:
			t.fail(s.service, s.name, err)
		default:
			t.pass(s.service, s.name, detail)
		}
	}
	if err := l.close(); err != nil {
		t.fail("", "close the devices", err)
	}
	if cfg.PCAP != "" {
		t.out.Printf("      packets of %v, both directions, are in %s\n", l.a.dev.Addr(), cfg.PCAP)
	}
	return nil
}

func (t *tour) pass(service, name, detail string) {
	t.passed++
	t.line(t.out.Paint(term.Green, "ok  "), service, name, detail)
}

func (t *tour) fail(service, name string, err error) {
	t.failed++
	t.line(t.out.Paint(term.Red, "FAIL"), service, name, err.Error())
}

func (t *tour) line(mark, service, name, detail string) {
	t.out.Printf("%s  %-2s  %-20s  %s\n", mark, service, name, detail)
}

func (t *tour) summary() error {
	took := time.Since(t.began).Round(100 * time.Millisecond)
	if t.failed > 0 {
		t.out.Printf("\n%s of %d, in %v\n", t.out.Paint(term.Red, fmt.Sprintf("%d failed", t.failed)), t.passed+t.failed, took)
		return ErrFailed
	}
	t.out.Printf("\n%s, in %v\n", t.out.Paint(term.Green, fmt.Sprintf("all %d as they should be", t.passed)), took)
	return nil
}
