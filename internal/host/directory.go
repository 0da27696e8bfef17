package host

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// MaxProcesses is how many processes can share a device.
const MaxProcesses = 256

// Object is a kind of thing that the device has a limited number of.
type Object int

const (
	QPs Object = iota
	CQs
	MRs
	PDs
	AHs
	SRQs
	Channels
	XRCDs
	Mcasts
	MWs
	DMBytes // of device memory
	NumObjects
)

// identity is a process of a device: the number of its entry, its process id and a random
// number. No two processes that an entry has had have the same identity, so a word that holds
// one can be changed by compare-and-swap, however late. 0 is nobody.
type identity uint64

const (
	slotBits  = 8  // MaxProcesses
	nonceBits = 34 // the remaining 22 bits are the process id, which Linux keeps below 1<<22
)

func makeIdentity(pid int, nonce uint64, slot int) identity {
	return identity(uint64(pid)<<(nonceBits+slotBits) | nonce%(1<<nonceBits)<<slotBits | uint64(slot))
}

func (i identity) slot() int     { return int(i % MaxProcesses) }
func (i identity) pid() int      { return int(i >> (nonceBits + slotBits)) }
func (i identity) nonce() uint64 { return uint64(i) >> slotBits % (1 << nonceBits) }

// holder returns the process that an identity stands for, if it still has its entry.
func (d *directory) holder(i identity) (process int, ok bool) {
	if i == 0 {
		return 0, false
	}
	return i.slot(), d.process[i.slot()].ready.Load() == uint64(i)
}

// who returns the process that has an entry; 0: none, or one that is not ready.
func (d *directory) who(slot int) identity {
	if slot < 0 || slot >= MaxProcesses {
		return 0
	}
	if id := d.ids[slot].Load(); id != 0 && d.process[slot].ready.Load() == id {
		return identity(id)
	}
	return 0
}

// findQP returns the process that a queue pair belongs to.
func (d *directory) findQP(qpn uint32) (process int, ok bool) {
	if qpn>>24 != 0 {
		return 0, false
	}
	return d.holder(identity(d.place[sys.Place(qpn)].holder.Load()))
}

// byPackets reports whether a process wants to be reached by packets alone.
func (d *directory) byPackets(process int) bool {
	return process >= 0 && process < MaxProcesses && d.process[process].packets.Load() != 0
}

// first returns the device's first address.
func (d *directory) first() netip.Addr {
	a := netip.AddrFrom16(d.addr)
	if d.v4 {
		a = a.Unmap()
	}
	return a
}

// claim takes an entry that no living process has: one with sockets that a dead process has left,
// or the next one after the last taken, so that an entry is not soon used again. It frees what a
// dead process has left there. The process has the entry as long as it holds the lock. The lock
// is nil if there is no free entry.
func (d *directory) claim(pid int, nonce uint64) (id identity, life *sys.ByteLock, err error) {
	for i := range d.process {
		if d.process[i].isBinding() {
			if id, life, err = d.claimEntry(i, pid, nonce); life != nil || err != nil {
				return id, life, err
			}
		}
	}
	last := int(d.claimed.Load())
	for k := range d.process {
		if id, life, err = d.claimEntry((last+1+k)%MaxProcesses, pid, nonce); life != nil || err != nil {
			return id, life, err
		}
	}
	return 0, nil, nil
}

// claimEntry takes an entry, unless a living process has it: then the lock is nil.
func (d *directory) claimEntry(i, pid int, nonce uint64) (identity, *sys.ByteLock, error) {
	life, err := sys.LockByte(d.fd, int64(i))
	if life == nil {
		return 0, nil, err
	}
	e := &d.process[i]
	if id := identity(d.ids[i].Load()); id != 0 {
		d.release(id)
	}
	id := makeIdentity(pid, nonce, i)
	d.ids[i].Store(uint64(id))
	e.packets.Store(0)
	e.listens.Store(0)
	e.watched.Store(0)
	for o := range e.count {
		e.count[o].Store(0)
	}
	for k := range e.domains {
		e.domains[k].used.Store(0)
	}
	e.ready.Store(uint64(id))
	d.claimed.Store(uint32(i))
	return id, life, nil
}

// isBinding reports whether sockets are being bound for the entry, or a dead process has left
// some.
func (e *entry) isBinding() bool {
	for i := range e.binding {
		if e.binding[i].Load() != 0 {
			return true
		}
	}
	return false
}

// alive reports whether a process lives: it holds the lock of its entry.
func (d *directory) alive(id identity) bool {
	locked, err := sys.ByteLocked(d.fd, int64(id.slot()))
	return err != nil || locked && d.ids[id.slot()].Load() == uint64(id)
}

// release frees the places and the entry of a process that is gone. Any number of processes may
// do so at the same time.
func (d *directory) release(id identity) {
	for p := range d.place {
		d.place[p].holder.CompareAndSwap(uint64(id), 0)
	}
	d.ids[id.slot()].CompareAndSwap(uint64(id), 0)
}

// total adds up what all processes have.
func (d *directory) total(o Object) (n uint64) {
	for i := range d.process {
		if d.who(i) != 0 {
			n += d.process[i].count[o].Load()
		}
	}
	return n
}

// lease returns the next range of slots of a place that a process holds: see mem.Slots. It goes on
// behind the last range of an earlier process, so a range comes back when all others of the place
// have been leased.
func (d *directory) lease(place int) uint32 {
	return uint32(place)*rangesOfPlace + d.place[place].next.Add(1)%rangesOfPlace
}

// rangesOfPlace is how many ranges of slots a place has.
const rangesOfPlace = 1 << (mem.PlaceSlotBits - mem.RangeBits)
