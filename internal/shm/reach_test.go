package shm

import (
	"errors"
	"os"
	"testing"
)

// Which process is named to the kernel, as peers come and go. Processes stand in a table: this
// process and a parallel program of two in session 10, started by 11; others elsewhere.
func TestReach(t *testing.T) {
	type proc struct{ parent, session int }
	procs := map[int]proc{
		os.Getpid(): {11, 10},
		11:          {10, 10}, // the launcher
		10:          {5, 10},  // the shell
		20:          {11, 10},
		21:          {11, 10},
		22:          {20, 10}, // started by a peer
		30:          {5, 30},  // another session
		5:           {1, 5},   // the process that starts sessions
		40:          {1, 40},  // a service
	}
	type step struct {
		pid  int // negative: process -pid goes
		want int
	}
	for _, c := range []struct {
		name  string
		scope int
		steps []step
	}{
		{"one", 1, []step{{20, 20}, {-20, 0}}},
		{"twice the same", 1, []step{{20, 20}, {20, 20}, {-20, 20}, {-20, 0}}},
		{"a job", 1, []step{{20, 20}, {21, 11}, {-20, 21}, {-21, 0}}},
		{"parent and child", 1, []step{{20, 20}, {22, 20}, {-20, 22}}},
		{"another session", 1, []step{{20, 20}, {30, 20}, {21, 20}, {-30, 11}}},
		{"another session alone", 1, []step{{30, 30}}},
		{"nothing in common", 1, []step{{20, 20}, {40, 20}, {-20, 40}}},
		{"unknown", 1, []step{{20, 20}, {99, 20}, {-99, 20}, {0, 20}, {-77, 20}}},
		{"free", 0, []step{{20, -1}, {21, -1}}},
		{"closed", 2, []step{{20, -1}, {21, -1}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			named := -1 // none was named
			r := reachability{
				scope: func() int { return c.scope },
				name:  func(pid int) { named = pid },
				stat: func(pid int) (int, int, error) {
					p, ok := procs[pid]
					if !ok {
						return 0, 0, errors.New("no such process")
					}
					return p.parent, p.session, nil
				},
			}
			for i, s := range c.steps {
				if s.pid >= 0 {
					r.allow(s.pid)
				} else {
					r.deny(-s.pid)
				}
				if named != s.want {
					t.Fatalf("step %d: %d is named, should be %d", i, named, s.want)
				}
			}
		})
	}
}

// When many peers come at once, as to a process that takes over, the lineage of each is read
// once, and not at all where no process needs to be named. The scope may change meanwhile.
func TestReachCrowd(t *testing.T) {
	const crowd, depth = 200, 3
	looks, scope, named := 0, 0, -1
	r := reachability{
		scope: func() int { return scope },
		name:  func(pid int) { named = pid },
		stat: func(pid int) (int, int, error) {
			looks++
			switch {
			case pid >= 1000:
				return 11, 10, nil
			case pid == 11:
				return 10, 10, nil
			}
			return 1, 10, nil
		},
	}
	come := func(from int) {
		for i := range crowd {
			r.allow(from + i)
		}
	}
	if come(1000); looks != 0 || named != -1 {
		t.Errorf("%d looks, %d is named", looks, named)
	}
	scope = 1
	if come(2000); looks > crowd*(depth+2) || named != 11 {
		t.Errorf("%d looks, %d is named", looks, named)
	}
	for i := range crowd {
		r.deny(2000 + i)
	}
	if len(r.peers) != crowd {
		t.Errorf("%d are left", len(r.peers))
	}
}
