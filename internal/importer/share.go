package importer

// Buffers whose memory other processes can map (dmabuf.Table.Place): a peer process that has a
// direct-access grant to the region copies there by itself (device/grant.go). All regions on one
// place of a buffer share its segments, so that a peer maps it once.
//
//  1. Segment makes a segment of the place that the buffer is at, when a peer may have a grant.
//  2. drop closes it when the buffer moves or is revoked, after the grants were taken away.
//     peersLeave waits a moment for the peers that are still inside. A peer that is stopped there is
//     not waited for: the place is given up, so that what it writes there later is lost; it does
//     not count such a copy, and repeats the request. The exporter is told, because the peer may
//     go on while the bytes are copied (dmabuf.Attachment.StillWritten).

import (
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// peerPatience is how long a move waits for peers amid a copy: some copies of the longest
// message that a grant takes.
const peerPatience = 500 * time.Microsecond

// placeKey is a place of a buffer, and whether peers may write to it. Peers that may only read a
// region cannot map the segment of those that may write.
type placeKey struct {
	first *byte
	write bool
}

// placeSegment is a segment that the regions of a place share.
type placeSegment struct {
	key     placeKey
	segment *mem.Segment
	uses    int // guarded by the places' lock
}

var places struct {
	mu   sync.Mutex // guards what follows
	open map[placeKey]*placeSegment
}

// shareIn returns the segment of a place, and counts a use of it.
func shareIn(file []byte, fd int, write bool) *placeSegment {
	k := placeKey{&file[0], write}
	places.mu.Lock()
	defer places.mu.Unlock()
	p := places.open[k]
	if p == nil {
		if places.open == nil {
			places.open = make(map[placeKey]*placeSegment)
		}
		p = &placeSegment{key: k, segment: mem.AddSegment(file, fd)}
		places.open[k] = p
	}
	p.uses++
	return p
}

// close ends a use. The last one closes the segment.
func (p *placeSegment) close() {
	places.mu.Lock()
	p.uses--
	last := p.uses == 0
	if last {
		delete(places.open, p.key)
	}
	places.mu.Unlock()
	if last {
		p.segment.Close() // without the lock: it tells other processes
	}
}

// Segment implements mem.Placed.
func (i *Backing) Segment(b []byte, write bool) (id, off uint64) {
	t := i.table.Load() // drop waits for the caller's section
	if t == nil {
		return 0, 0
	}
	file, fd, ok := t.Place()
	if !ok {
		return 0, 0
	}
	i.shareMu.Lock()
	defer i.shareMu.Unlock()
	if i.shared != nil && i.shared.key.write != write { // the rights have changed
		i.shared.close()
		i.shared = nil
	}
	if i.shared == nil {
		i.shared = shareIn(file, fd, write)
	}
	return i.shared.segment.Of(b)
}

// unshare closes the segment. The caller gives the mapping up after that.
func (i *Backing) unshare() {
	i.shareMu.Lock()
	s := i.shared
	i.shared = nil
	i.shareMu.Unlock()
	if s != nil {
		s.close()
	}
}

// peersLeave waits a moment until no peer process accesses the memory by itself, after accesses
// were kept out of the region. The exporter learns of a peer that is still there.
func (i *Backing) peersLeave(a *dmabuf.Attachment, r *mem.Region) {
	if !r.PeersLeave(peerPatience) {
		a.StillWritten()
	}
}
