package main

// Real paths: whether data arrives, and what the box can promise on any machine. Nothing here is about speed.

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
	"github.com/verbena-rdma/verbena/verbs"
)

// TestMain runs the tests or, in a process that one of them has started, one end of a path.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == peerArg {
		os.Exit(peerMain())
	}
	goleak.VerifyTestMain(m)
}

// paths skips a test where no namespaces can be made.
func paths(t *testing.T) {
	t.Helper()
	clibtest.Need(t, os.Getuid() == 0, "network namespaces need root")
	for _, name := range []string{"ip", "nft", "sysctl"} {
		_, err := exec.LookPath(name)
		clibtest.Need(t, err == nil, "%s is missing: apt-get install iproute2 nftables procps", name)
	}
	p, err := newNamespaces()
	clibtest.Need(t, err == nil, "network namespaces cannot be made here: %v", err)
	closing(t, p.close)
}

// closing closes something at the end of a test.
func closing(t *testing.T, f func() error) {
	t.Helper()
	if err := f(); err != nil {
		t.Error(err)
	}
}

// One packet of a hundred is lost, in both directions, and all data arrives by every operation.
func TestLossyPath(t *testing.T) {
	paths(t)
	for name, seg := range map[string]segmentation{"packets": single, "trains": segmented} {
		t.Run(name, func(t *testing.T) { lossyPath(t, seg) })
	}
}

func lossyPath(t *testing.T, seg segmentation) {
	p, err := newPath(9000, seg)
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, p.close)
	if err := p.lose(10); err != nil {
		clibtest.Need(t, false, "this kernel's nft cannot drop at random: %v", err)
	}
	r, err := newRig(p, spec{QPs: 2, Size: 64 << 10, Depth: 8})
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, r.stop)
	again, gaps, dropped := 0.0, 0.0, 0
	for i := 0; i < 20 && (i < 1 || again == 0 || gaps == 0); i++ { // so many packets pass that some are lost, however slow the machine is
		for _, c := range contenders {
			if c.verb == tcp {
				continue
			}
			f, err := r.verbs(c.verb, 300*time.Millisecond)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			again += f.counters["retransmitted_packets"]
			if c.verb != verbs.OpSend { // a SEND that finds no receive leaves a gap, too
				gaps += f.counters["out_of_sequence"] + f.counters["implied_nak_seq_err"]
			}
		}
		if _, dropped, err = p.lost(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d packets dropped, %.0f sent again, %.0f behind a gap", dropped, again, gaps)
	if dropped == 0 || again == 0 || gaps == 0 {
		t.Errorf("%d packets dropped, %.0f sent again, %.0f behind a gap", dropped, again, gaps)
	}
	if f, err := r.tcp(2, 200*time.Millisecond); err != nil || f.mibs <= 0 {
		t.Errorf("TCP: %.1f MiB/s, %v", f.mibs, err)
	}
}

// What comes through the box is late, slow and marked, as the box was told.
func TestBox(t *testing.T) {
	paths(t)
	l := link{rate: 50e6, delay: 20 * time.Millisecond, buffer: 1 << 20, ecn: 20_000}
	x, err := newBox(9000, l)
	if err != nil {
		clibtest.Need(t, false, "TUN interfaces cannot be made here: %v", err)
	}
	defer closing(t, x.close)
	const size = 64 << 10
	r, err := newRig(x.path, spec{QPs: 1, Size: size, Depth: 1, Traffic: ecnCapable})
	if err != nil {
		t.Fatal(err)
	}
	defer closing(t, r.stop)

	// One message at a time: each takes a round trip and the time to send it.
	sending := time.Duration(size * 8 / l.rate * float64(time.Second))
	x.reset()
	f, err := r.verbs(verbs.OpRDMAWrite, 300*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if each := time.Duration(float64(size) / mib / f.mibs * float64(time.Second)); each < 2*l.delay+sending {
		t.Errorf("a message takes %v, less than %v and a delay of %v in both directions", each, sending, l.delay)
	}
	there := x.seen(0)
	if there.packets == 0 || there.dropped > 0 {
		t.Errorf("%d packets, %d dropped", there.packets, there.dropped)
	}
	// A message leaves at once. So the packets behind the threshold are marked, 64 KiB are more than that, and the
	// marked ones arrive: their checksum is right.
	if there.marked == 0 || there.marked == there.packets {
		t.Errorf("%d of %d packets are marked", there.marked, there.packets)
	}
	t.Logf("%d packets, %d marked, mean wait %v", there.packets, there.marked, there.mean())

	// TCP never gets more than the rate, and none of it is marked.
	x.reset()
	f, err = r.tcp(1, 500*time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	if bits := f.mibs * mib * 8; bits <= 0 || bits > l.rate {
		t.Errorf("%.1f Mb/s by a box of %.1f", bits/1e6, l.rate/1e6)
	}
	if s := x.seen(0); s.marked != 0 || s.packets == 0 {
		t.Errorf("%d of %d packets are marked that are not ECN-capable", s.marked, s.packets)
	}
}

// The plot and the table come from the same figures.
func TestReport(t *testing.T) {
	tb := &table{columns: []string{"loss", "MiB/s"}, rows: [][]string{{"0 %", "1"}}, notes: []string{"A note."},
		panel: &panel{"a path", []curve{{"WRITE", []float64{1000, 100, 10, 1}}}}}
	doc := t.TempDir() + "/doc.md"
	var text strings.Builder
	for _, p := range parts {
		text.WriteString("before\n<!-- bench-net " + p.name + " -->\nold\n<!-- end -->\nbehind\n")
	}
	if err := os.WriteFile(doc, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := renew(doc, map[string]*table{"loss-packets": tb}, "On some machine."); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(doc)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(text.String(), "old\n", "| loss | MiB/s |\n|---|---|\n| 0 %  | 1     |\n\nA note.\n\nOn some machine.\n", 1)
	if string(got) != want {
		t.Errorf("the document is now\n%s", got)
	}
	svg, err := os.ReadFile(strings.TrimSuffix(doc, ".md") + ".svg")
	if err != nil {
		t.Fatal(err)
	}
	// A thousand times the rate is three quarters of the scale, and one times is its foot.
	if s := string(svg); !strings.Contains(s, "a path") || !strings.Contains(s, `points="102.8,84.0 184.2,134.0 265.8,184.0 347.2,234.0"`) {
		t.Errorf("the plot is\n%s", s)
	}
	if err := renew(doc, map[string]*table{"loss-packets": tb, "box": nil}, ""); err != nil {
		t.Error(err)
	}
	if err := os.WriteFile(doc, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := renew(doc, map[string]*table{"loss-packets": tb}, ""); err == nil {
		t.Error("a document without a place for the table was renewed")
	}
}
