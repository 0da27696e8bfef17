package mem

import (
	"testing"

	"pgregory.net/rapid"
)

// unused visits all that lies in no member's range, in few steps however large the ranges
// are.
func TestSpaceUnused(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s space
		n := rapid.IntRange(0, 12).Draw(t, "members")
		start := uintptr(rapid.IntRange(0, 1<<16).Draw(t, "from")) << 12
		end := start + uintptr(rapid.IntRange(1, 1<<18).Draw(t, "pages"))<<12
		in := map[uintptr]bool{} // units in the range of a member
		for range n {
			at := uintptr(rapid.IntRange(0, 1<<16).Draw(t, "start")) << 12
			m := &membership{start: at, end: at + uintptr(1)<<rapid.IntRange(12, 30).Draw(t, "length"), who: nobody{}}
			s.members.add(m)
			if m.end <= start || end <= m.start {
				continue // a unit that begins or ends outside is another mapping's there
			}
			for at, end := units(m.start, m.end); at < end; at += coverUnit {
				in[at/coverUnit] = true
			}
		}
		next, parts := start, 0
		used := func(upto uintptr) { // all until there are members'
			for ; next < upto; next = next&^(coverUnit-1) + coverUnit {
				if !in[next/coverUnit] {
					t.Fatalf("[%#x, %#x): nobody has %#x, and it was not visited", start, end, next)
				}
			}
		}
		s.unused(start, end, func(from, to uintptr) {
			parts++
			used(from)
			if from != next || from >= to || to > end {
				t.Fatalf("[%#x, %#x): visited %#x to %#x after %#x", start, end, from, to, next)
			}
			for next = from; next < to; next = next&^(coverUnit-1) + coverUnit {
				if in[next/coverUnit] {
					t.Fatalf("[%#x, %#x): %#x is somebody's, and was visited", start, end, next)
				}
			}
			next = to
		})
		used(end)
		if parts > n+1 {
			t.Fatalf("%d parts between %d members", parts, n)
		}
	})
}
