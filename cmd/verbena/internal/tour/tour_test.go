package tour

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// runTour runs a tour and returns what it wrote.
func runTour(t *testing.T, ctx context.Context) (string, error) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = Run(ctx, term.New(f), Options{Quick: true})
	b, readErr := os.ReadFile(f.Name())
	if readErr != nil {
		t.Fatal(readErr)
	}
	return string(b), err
}

func TestTour(t *testing.T) {
	out, err := runTour(t, t.Context())
	if err != nil || strings.Contains(out, "FAIL") || strings.Count(out, "\nok  ") != 2*len(steps) {
		t.Errorf("error %v:\n%s", err, out)
	}
}

// Every topic goes well too, and has nothing but its steps.
func TestTopics(t *testing.T) {
	for _, topic := range Topics() {
		f, err := os.CreateTemp(t.TempDir(), "out")
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		err = Run(t.Context(), term.New(f), Options{Topic: topic})
		out, readErr := os.ReadFile(f.Name())
		if readErr != nil {
			t.Fatal(readErr)
		}
		if err != nil || strings.Contains(string(out), "FAIL") || strings.Count(string(out), "\nok  ") != 2*len(topics[topic]) {
			t.Errorf("%s: error %v:\n%s", topic, err, out)
		}
	}
}

// A failing step is reported, the tour goes on, and fails as a whole.
func TestTourFails(t *testing.T) {
	saved := steps
	defer func() { steps = saved }()
	steps = []step{
		{"RC", "broken", func(l *lab) (string, error) { return "", errors.New("the data differs") }},
		{"RC", "SEND", sendStep},
	}
	out, err := runTour(t, t.Context())
	if !errors.Is(err, ErrFailed) {
		t.Errorf("error %v", err)
	}
	for _, want := range []string{"FAIL  RC  broken", "the data differs", "ok    RC  SEND", "2 failed of 4"} {
		if !strings.Contains(out, want) {
			t.Errorf("no %q in\n%s", want, out)
		}
	}
}

func TestTourCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := runTour(t, ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

func TestSame(t *testing.T) {
	for _, tt := range []struct{ got, want, err string }{
		{"", "", ""}, {"abc", "abc", ""},
		{"abd", "abc", "from byte 2 of 3"}, {"ab", "abc", "from byte 2 of 3"}, {"abcd", "abc", "4 bytes where 3"},
	} {
		err := same([]byte(tt.got), []byte(tt.want))
		if tt.err == "" && err != nil || tt.err != "" && (err == nil || !strings.Contains(err.Error(), tt.err)) {
			t.Errorf("same(%q, %q) = %v, want %q", tt.got, tt.want, err, tt.err)
		}
	}
}

func TestRouting(t *testing.T) {
	v4 := make([]byte, 40)
	v4[20] = 0x45
	copy(v4[32:], []byte{127, 77, 0, 1, 127, 77, 0, 2})
	from, to, err := routing(v4)
	if err != nil || from != netip.MustParseAddr("127.77.0.1") || to != netip.MustParseAddr("127.77.0.2") {
		t.Errorf("IPv4: %v to %v, %v", from, to, err)
	}
	v6 := make([]byte, 40)
	v6[0], v6[23], v6[39] = 0x60, 1, 2
	from, to, err = routing(v6)
	if err != nil || from != netip.MustParseAddr("::1") || to != netip.MustParseAddr("::2") {
		t.Errorf("IPv6: %v to %v, %v", from, to, err)
	}
	if _, _, err := routing(make([]byte, 40)); err == nil {
		t.Error("an empty header is accepted")
	}
}
