package main

import (
	"net/netip"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/verbs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Names are unique, since results refer to cases by name, and their last parts agree with the
// rows.
func TestTable(t *testing.T) {
	seen := map[string]bool{}
	short, ways := 0, map[string]int{}
	for _, c := range table() {
		parts := strings.Split(c.name, "/")
		way, family := parts[len(parts)-1], parts[len(parts)-2]
		switch {
		case seen[c.name]:
			t.Errorf("%s is there twice", c.name)
		case c.run == nil:
			t.Errorf("%s does nothing", c.name)
		case family != c.family || families[family].ours == (netip.Addr{}):
			t.Errorf("%s is of family %q", c.name, c.family)
		case way != "we" && way != "kernel" || c.weInitiate() != (way == "we"):
			t.Errorf("%s: the name does not say who initiates", c.name)
		}
		seen[c.name] = true
		ways[way]++
		if c.short {
			short++
		}
	}
	if short < 100 || short > 400 {
		t.Errorf("the short form has %d cases", short)
	}
	if ways["we"] < 800 || ways["kernel"] < 800 {
		t.Errorf("we initiate %d cases, the kernel %d", ways["we"], ways["kernel"])
	}
	for _, name := range []string{"rc/write/4194304/mtu4096/v4/we", "rc/read/0/mtu256/v6/kernel", "rc/write/1073741824/mtu4096/v4/we",
		"ud/send/1/v6/kernel", "tools/ib_atomic_bw/v4/we"} {
		if !seen[name] {
			t.Errorf("%s is missing", name)
		}
	}
}

func TestChoose(t *testing.T) {
	for _, tt := range []struct {
		order result.Order
		want  int // -1: an error; 0: any number
	}{
		{result.Order{Run: "^rc/cas/"}, 4},
		{result.Order{Run: "^rc/write/1073741824/"}, -1}, // only with Soak
		{result.Order{Run: "^rc/write/1073741824/", Soak: true}, 2},
		{result.Order{Run: "^rc/p2pmem/disk/"}, -1}, // only with Peers
		{result.Order{Run: "^rc/p2pmem/disk/", Peers: true}, 2},
		{result.Order{Run: "nothing"}, -1},
		{result.Order{Run: "("}, -1},
		{result.Order{Short: true}, 0},
	} {
		got, err := choose(&tt.order)
		if (err != nil) != (tt.want < 0) || tt.want > 0 && len(got) != tt.want {
			t.Errorf("%+v: %d cases, %v", tt.order, len(got), err)
		}
	}
}

// The pieces of a scattered message do not overlap, lie in the region, and add up.
func TestCut(t *testing.T) {
	for pieces := 1; pieces <= 8; pieces++ {
		offs, lens, size := cut(10_001, pieces)
		sum, end := 0, 0
		for k := range offs {
			if offs[k] < end || lens[k] < 0 {
				t.Errorf("%d pieces: piece %d at %d, %d bytes, behind one that ends at %d", pieces, k, offs[k], lens[k], end)
			}
			sum, end = sum+lens[k], offs[k]+lens[k]
		}
		if sum != 10_001 || end > size || len(offs) != pieces {
			t.Errorf("%d pieces: %d of them, %d bytes, up to %d of %d", pieces, len(offs), sum, end, size)
		}
	}
}

func TestHeader(t *testing.T) {
	src, dst := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2")
	good := make([]byte, 40)
	copy(good[20:], []byte{0x45, 0, 0, 20 + 8 + 12 + 8 + 4 + 4, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2})
	if err := checkHeader(good, src, dst, verbs.OpSend, 1); err != nil {
		t.Error(err)
	}
	for at, what := range map[int]string{20: "version", 23: "length", 29: "protocol", 35: "source", 39: "destination"} {
		bad := append([]byte(nil), good...)
		bad[at]++
		if checkHeader(bad, src, dst, verbs.OpSend, 1) == nil {
			t.Errorf("a wrong %s passes", what)
		}
	}
}
