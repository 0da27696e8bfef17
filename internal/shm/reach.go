package shm

// Which processes may read our memory. Without the kernel's Yama module, or with
// its scope 0, every process of our user may, as it may debug us; with scope 2 and
// more, no process without privilege may, and nothing here changes that.
//
// With scope 1, the default of many distributions, a process can name one other
// process, which may then read it, as may that one's descendants. A process can
// also name all others, as message-passing libraries usually do; that would undo for
// the whole program what the administrator has set up. So:
//
//   - if there is one peer, we name it;
//   - if there are more, we name their nearest common ancestor, provided that it is
//     of our own session: the launcher of a parallel program, or the shell of a
//     terminal, but not the process that starts all programs of a user;
//   - otherwise the name stays as it is, and payload from us to the later peers goes
//     through the ring.
//
// A process has only one such name: if the program sets it too, for a debugger or a
// crash reporter, the later of the two wins.

import (
	"os"
	"slices"
	"sync"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// reach is for the whole process, as the kernel's permission is.
var reach = reachability{
	scope: sys.YamaScope,
	name:  func(pid int) { _ = sys.SetPtracer(pid) }, // EINVAL: there is no Yama
	stat:  sys.ParentAndSession,
}

type reachability struct {
	scope func() int
	name  func(pid int)
	stat  func(pid int) (parent, session int, err error)

	mu    sync.Mutex // guards peers and named
	peers map[int]*reacher
	named int
}

// reacher is a process that should be able to read our memory.
type reacher struct {
	channels int   // calls of allow less calls of deny
	line     []int // itself and its ancestors at the first allow; nil if the scope was not 1
}

const yamaRestricted = 1

// Allow permits another process to access our memory, if that can be done, until Deny.
func Allow(pid int) { reach.allow(pid) }

// Deny undoes Allow.
func Deny(pid int) { reach.deny(pid) }

// allow is Allow.
func (r *reachability) allow(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if pid <= 0 {
		return
	}
	if r.peers == nil {
		r.peers = make(map[int]*reacher)
	}
	if p := r.peers[pid]; p != nil {
		p.channels++
		return
	}
	p := &reacher{channels: 1}
	r.peers[pid] = p
	if r.scope() == yamaRestricted { // hundreds may come at once: one lineage is read for each
		p.line = r.lineage(pid)
		r.updateLocked()
	}
}

// deny undoes allow.
func (r *reachability) deny(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.peers[pid]
	if p == nil {
		return
	}
	if p.channels--; p.channels > 0 {
		return
	}
	delete(r.peers, pid)
	if p.line != nil {
		r.updateLocked()
	}
}

func (r *reachability) updateLocked() {
	pid := 0
	if len(r.peers) > 0 {
		if pid = r.commonLocked(); pid == 0 {
			return
		}
	}
	if pid != r.named {
		r.name(pid)
		r.named = pid
	}
}

// commonLocked returns the only peer, or the nearest common ancestor of all, or
// 0 if there is none that may be named.
func (r *reachability) commonLocked() int {
	var common []int // ancestors of all peers so far, nearest first
	for _, p := range r.peers {
		switch {
		case p.line == nil: // the scope was not 1 when it came
		case common == nil:
			common = p.line
		default:
			common = intersect(common, p.line)
		}
	}
	if len(common) == 0 {
		return 0
	}
	if len(r.peers) == 1 {
		return common[0]
	}
	_, ours, err := r.stat(os.Getpid())
	_, session, bad := r.stat(common[0]) // a farther ancestor would permit more processes
	if err != nil || bad != nil || session != ours {
		return 0
	}
	return common[0]
}

// lineage returns a process and its ancestors, without init.
func (r *reachability) lineage(pid int) []int {
	line := []int{pid}
	for range 64 { // more generations than there are, but bounded
		parent, _, err := r.stat(pid)
		if err != nil || parent <= 1 {
			break
		}
		line = append(line, parent)
		pid = parent
	}
	return line
}

// intersect returns what is in both, in the order of a.
func intersect(a, b []int) []int {
	both := make([]int, 0, len(a))
	for _, x := range a {
		if slices.Contains(b, x) {
			both = append(both, x)
		}
	}
	return both
}
