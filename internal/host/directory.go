package host

import (
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// MaxProcesses is how many processes can share a device.
const MaxProcesses = 256

// Numbers of queue pairs and shared receive queues are leased in ranges of slots: a slot becomes
// a number by the permutation that hides it. A range is for queue pairs or for shared receive
// queues, so no two objects have the same number.
const (
	RangeBits = mem.RangeBits
	NumRanges = mem.NumRanges
)

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

// States of an entry.
const (
	processFree = iota
	processAlive
)

// findQP returns the process that a queue pair belongs to.
func (d *directory) findQP(qpn uint32) (process int, ok bool) {
	if qpn>>24 != 0 {
		return 0, false
	}
	return d.find(d.perm.Slot(qpn))
}

// find returns the process that holds a slot of the queue pair numbers.
func (d *directory) find(slot uint32) (process int, ok bool) {
	r := slot >> RangeBits
	if r >= NumRanges {
		return 0, false
	}
	p := int(d.lease[r].Load()) - 1
	if p < 0 || p >= MaxProcesses || d.process[p].state.Load() != processAlive {
		return 0, false
	}
	return p, true
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

// claim takes a free entry for a process: the next one after the last taken, so that an entry
// is not soon used again. Only the owner calls it.
func (d *directory) claim(pid int, nonce uint64) (slot int, ok bool) {
	last := int(d.claimed.Load())
	for k := range d.process {
		i := (last + 1 + k) % MaxProcesses
		e := &d.process[i]
		if e.state.Load() == processAlive {
			continue
		}
		e.packets.Store(0)
		for o := range e.count {
			e.count[o].Store(0)
		}
		for k := range e.domains {
			e.domains[k].used.Store(0)
		}
		e.pid.Store(uint32(pid))
		e.nonce.Store(nonce)
		e.state.Store(processAlive)
		d.claimed.Store(uint32(i))
		return i, true
	}
	return 0, false
}

// release frees the entry and the ranges of a process that is gone. Only the
// owner calls it.
func (d *directory) release(slot int) {
	d.process[slot].state.Store(processFree)
	for r := range d.lease {
		if d.lease[r].Load() == uint32(slot)+1 {
			d.lease[r].Store(0)
		}
	}
}

// grant leases a range to a process: the next free one after the last leased, so that numbers
// are not soon used again. Only the owner calls it.
func (d *directory) grant(slot int) (r uint32, ok bool) {
	last := d.granted.Load() % NumRanges
	for i := range uint32(NumRanges) {
		r = (last + 1 + i) % NumRanges
		if d.lease[r].Load() == 0 {
			d.lease[r].Store(uint32(slot) + 1)
			d.granted.Store(r)
			return r, true
		}
	}
	return 0, false
}

// total adds up what all living processes have.
func (d *directory) total(o Object) (n uint64) {
	for i := range d.process {
		if e := &d.process[i]; e.state.Load() == processAlive {
			n += e.count[o].Load()
		}
	}
	return n
}
