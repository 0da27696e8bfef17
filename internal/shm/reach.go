package shm

// Who may read our memory. Without the kernel's Yama module, or with its scope
// 0, every process of our user may, as it may debug us; with scope 2 and more,
// nobody without privilege may, and nothing here changes that.
//
// With scope 1, the default of many distributions, a process can name one
// other that may, which lets in that one's descendants too. Naming everybody is
// possible, and what message-passing libraries usually do; it would undo for
// the whole program what the administrator has set up. So:
//
//   - with one peer, it is named;
//   - with more, their nearest common ancestor is, provided that it is of our
//     own session: the launcher of a job, or the shell of a terminal, but not
//     what starts everything that a user has running;
//   - otherwise things stay as they are, and payload from us to the later peers
//     takes the way through the ring.
//
// There is only one such name in a process: if the program sets it too, for a
// debugger or a crash reporter, the later of the two wins.

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

// reacher is a process that should reach us.
type reacher struct {
	channels int
	line     []int // itself and its ancestors, when it came
}

const yamaRestricted = 1

// Allow lets another process access our memory, if that can be done, until Deny.
func Allow(pid int) { reach.allow(pid) }

// Deny undoes Allow.
func Deny(pid int) { reach.deny(pid) }

// allow lets a process read our memory, if that can be done.
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
	if r.scope() == yamaRestricted { // hundreds of peers may come at once: each is looked at once
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
		case p.line == nil: // it came when nobody had to be named
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
	_, session, bad := r.stat(common[0]) // farther ancestors would let in more
	if err != nil || bad != nil || session != ours {
		return 0
	}
	return common[0]
}

// lineage returns a process and its ancestors, without init.
func (r *reachability) lineage(pid int) []int {
	line := []int{pid}
	for range 64 { // more generations than anybody has
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
