package wire

import "testing"

func TestGaps(t *testing.T) {
	for _, c := range []struct {
		name  string
		pairs [][2]int
		ok    bool
	}{
		{"none", nil, false},
		{"the first is missing", [][2]int{{0, 1}, {3, 0}}, true},
		{"some have come", [][2]int{{2, 5}, {MaxGap, MaxGap}, {1, 0}}, true},
		{"nothing is known", [][2]int{{0, 0}}, true},
		{"two gaps that touch", [][2]int{{1, 1}, {0, 1}}, false},
		{"two runs that touch", [][2]int{{1, 0}, {1, 1}}, false},
	} {
		var g Gaps
		for _, p := range c.pairs {
			g = g.Append(p[0], p[1])
		}
		if g.Check() != c.ok || g.Pairs() != len(c.pairs) {
			t.Errorf("%s: %v, %d pairs", c.name, g.Check(), g.Pairs())
		}
		for i, p := range c.pairs {
			if come, missing := g.Pair(i); come != p[0] || missing != p[1] {
				t.Errorf("%s: pair %d is %d, %d", c.name, i, come, missing)
			}
		}
		if len(g) > 0 && g[:len(g)-1].Check() {
			t.Errorf("%s: half a pair is accepted", c.name)
		}
	}
}

// FuzzGaps: what Check accepts can be read and made again.
func FuzzGaps(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 0, 3, 0, 0})
	f.Add([]byte{0, 2, 0, 5, 0xff, 0xff, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		g := Gaps(b)
		if !g.Check() {
			return
		}
		var again Gaps
		for i := range g.Pairs() {
			again = again.Append(g.Pair(i))
		}
		if string(again) != string(b) || !again.Check() {
			t.Errorf("%x became %x", b, again)
		}
	})
}
