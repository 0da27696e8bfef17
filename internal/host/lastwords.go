package host

// Last words: what the peers of a dead process must hear. The kernel's connection manager tells the
// peers of a process that has died. Here one of the other processes of the device does it, by the
// directory, where each process records its connections.
//
// Records are in chunks, each of which one process has. Whoever finds that this process is dead
// takes the chunk over, by compare-and-swap, and frees it when it has told the peers.

import (
	"encoding/binary"
	"net/netip"
	"sync"
)

const (
	maxChunks    = 512
	chunkRecords = 128
)

// LastWords are a connection of a process, as its peer must hear of it when the process dies.
type LastWords struct {
	State  uint8 // of the connection, or of one in the making, not 0: see package cm
	Addr   int   // the index of the device's address
	Peer   netip.Addr
	Local  uint32 // communication ids
	Remote uint32
	QPN    uint32 // the peer's queue pair; see Last of package cm
}

// records are the chunks of this process, and their free records.
type records struct {
	mu   sync.Mutex // guards free
	free []*record
}

// Record is a connection that this process has recorded. A nil Record records nothing.
type Record struct {
	m *Member
	r *record
}

// NewRecord returns room to record a connection; nil if there is none: then the peer does not hear
// of this process's death.
func (m *Member) NewRecord() *Record {
	m.wantWatch()
	m.records.mu.Lock()
	defer m.records.mu.Unlock()
	if len(m.records.free) == 0 {
		for c := range m.dir.chunkHolder {
			if m.dir.chunkHolder[c].CompareAndSwap(0, uint64(m.self)) {
				for i := range m.dir.chunk[c] {
					m.records.free = append(m.records.free, &m.dir.chunk[c][i])
				}
				break
			}
		}
	}
	n := len(m.records.free)
	if n == 0 {
		return nil
	}
	r := m.records.free[n-1]
	m.records.free = m.records.free[:n-1]
	return &Record{m, r}
}

// Set records the connection, or what has changed of it.
func (r *Record) Set(w *LastWords) {
	if r == nil || r.r == nil {
		return
	}
	r.r.state.Store(0) // a process that dies now has no last words for this connection
	a := w.Peer.As16()
	r.r.ids.Store(uint64(w.Local)<<32 | uint64(w.Remote))
	r.r.peer[0].Store(binary.BigEndian.Uint64(a[:]))
	r.r.peer[1].Store(binary.BigEndian.Uint64(a[8:]))
	r.r.state.Store(uint64(w.State) | uint64(w.Addr)<<8 | uint64(w.QPN)<<32)
}

// Free forgets the connection. It is idempotent.
func (r *Record) Free() {
	if r == nil || r.r == nil {
		return
	}
	r.r.state.Store(0)
	r.m.records.mu.Lock()
	r.m.records.free = append(r.m.records.free, r.r)
	r.m.records.mu.Unlock()
	r.r = nil
}

func (r *record) words() (w LastWords, ok bool) {
	s := r.state.Load()
	if s == 0 {
		return w, false
	}
	var a [16]byte
	binary.BigEndian.PutUint64(a[:], r.peer[0].Load())
	binary.BigEndian.PutUint64(a[8:], r.peer[1].Load())
	ids := r.ids.Load()
	return LastWords{State: uint8(s), Addr: int(s >> 8 & 0xff), QPN: uint32(s >> 32), Peer: netip.AddrFrom16(a).Unmap(),
		Local: uint32(ids >> 32), Remote: uint32(ids)}, true
}

// mourn calls Config.Died for the connections of dead processes.
func (m *Member) mourn() { m.dir.mourn(m.self, m.cfg.Died) }

// mourn calls f for the connections of processes that have no entry any more, those of each chunk
// together, and frees the chunks. taker has the chunks meanwhile.
func (d *directory) mourn(taker identity, f func([]LastWords)) {
	for c := range d.chunkHolder {
		h := d.chunkHolder[c].Load()
		if h == 0 || h == uint64(taker) || uint64(d.who(identity(h).slot())) == h || !d.chunkHolder[c].CompareAndSwap(h, uint64(taker)) {
			continue
		}
		var words []LastWords
		for i := range d.chunk[c] {
			if w, ok := d.chunk[c][i].words(); ok {
				words = append(words, w)
			}
		}
		if len(words) > 0 && f != nil {
			f(words)
		}
		for i := range d.chunk[c] { // not before: if this process dies meanwhile, another one says them
			d.chunk[c][i].state.Store(0)
		}
		d.chunkHolder[c].Store(0)
	}
}
