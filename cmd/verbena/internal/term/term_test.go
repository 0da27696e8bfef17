package term

import (
	"bytes"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func onTerminal(colour bool, width int) (*Printer, *bytes.Buffer) {
	var b bytes.Buffer
	return &Printer{w: &b, terminal: true, colour: colour, width: func() int { return width }}, &b
}

func TestPlainWhereThereIsNoTerminal(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	p := New(w)
	if p.Terminal() {
		t.Error("a pipe is taken for a terminal")
	}
	p.Progress("working")
	p.Printf("%s\n", p.Paint(Green, "ok"))
	p.Clear()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := b.ReadFrom(r); err != nil {
		t.Fatal(err)
	}
	if b.String() != "ok\n" {
		t.Errorf("wrote %q", b.String())
	}
}

func TestProgressIsReplaced(t *testing.T) {
	p, b := onTerminal(false, 80)
	p.Progress("1 of 2")
	p.Progress("2 of 2")
	p.Printf("done\n")
	p.Clear()
	if want := eraseLine + "1 of 2" + eraseLine + "2 of 2" + eraseLine + "done\n"; b.String() != want {
		t.Errorf("wrote %q, want %q", b.String(), want)
	}
}

func TestProgressFitsTheTerminal(t *testing.T) {
	p, b := onTerminal(false, 6)
	p.Progress("äöü4567")
	if want := eraseLine + "äöü45"; b.String() != want {
		t.Errorf("wrote %q, want %q", b.String(), want)
	}
}

func TestPaint(t *testing.T) {
	p, _ := onTerminal(true, 80)
	if got := p.Paint(Red, "x"); got != "\x1b[31mx\x1b[0m" {
		t.Errorf("painted %q", got)
	}
	p, _ = onTerminal(false, 80)
	if got := p.Paint(Red, "x"); got != "x" {
		t.Errorf("painted %q without colours", got)
	}
}

func TestTable(t *testing.T) {
	got := Table([][]string{{"size", "µs", "GB/s"}, {"8 B", "0.41", "0.1"}, {"64 KiB", "7", "19.5"}, {"none"}})
	want := []string{
		"size      µs  GB/s",
		"8 B     0.41   0.1",
		"64 KiB     7  19.5",
		"none",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
