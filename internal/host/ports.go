package host

// Ports of the connection manager: which process has bound which, at which addresses of the device.
//
// The directory has a word for each port, of each port space, at each address. It is free (0), or
// names the process that has the port. Words change by compare-and-swap alone, so no process waits
// for another, and what a dead process has bound, anybody takes.

import (
	"syscall"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// PortSpace is one of the spaces that ports belong to.
type PortSpace int

const (
	PortsTCP PortSpace = iota
	PortsUDP
	PortsIB
	NumPortSpaces
)

// portWord is a process that has a port: the lower bits of its identity, and flags; 0 is nobody.
type portWord uint64

const (
	portTaken  portWord = 1 << 63
	portReuse  portWord = 1 << 62 // others may bind the port, too
	portListen portWord = 1 << 61 // requests to the port go to the process

	portWho = 1<<(nonceBits+slotBits) - 1 // an identity without its process id
)

func (d *directory) portHolder(w portWord) identity {
	id := d.who(int(w % MaxProcesses))
	if w == 0 || uint64(id)&portWho != uint64(w)&portWho {
		return 0
	}
	return id
}

// Ports are ports of one number at some of the device's addresses, which this process has bound.
type Ports struct {
	m     *Member
	space PortSpace
	port  uint16
	addrs []int
	reuse bool
}

// ErrPortTaken means that another process has the port.
var ErrPortTaken = refuse(syscall.EADDRINUSE, "another process has the port")

// BindPort binds a port at addresses of the device, by their indexes. With reuse it may be bound
// already, by processes that allow the same. A process binds a port of an address once.
func (m *Member) BindPort(space PortSpace, port uint16, addrs []int, reuse bool) (*Ports, error) {
	p := &Ports{m: m, space: space, port: port, reuse: reuse}
	for _, a := range addrs {
		if a < 0 || a >= maxAddrs { // of further addresses there are no words
			continue
		}
		if !p.bind(a) {
			p.Free()
			return nil, ErrPortTaken
		}
		p.addrs = append(p.addrs, a)
	}
	return p, nil
}

func (p *Ports) own() portWord {
	w := portTaken | portWord(uint64(p.m.self)&portWho)
	if p.reuse {
		w |= portReuse
	}
	return w
}

// bind binds the port at one address, and reports whether it has, or shares it.
func (p *Ports) bind(addr int) bool {
	word := &p.m.dir.ports[p.space][addr][p.port]
	for {
		w := portWord(word.Load())
		switch {
		case p.free(w):
			if word.CompareAndSwap(uint64(w), uint64(p.own())) {
				return true
			}
		case p.reuse && w&portReuse != 0:
			return true // Listen takes the word, if nobody listens
		default:
			return false
		}
	}
}

// free reports whether no living process has a word.
func (p *Ports) free(w portWord) bool {
	d := p.m.dir
	id := d.portHolder(w)
	if id == 0 {
		return true
	}
	if id != p.m.self && !d.alive(id) && d.alive(p.m.self) {
		p.m.bury(id)
		return true
	}
	return false
}

// Listen makes requests to the port go to this process. It fails if requests go to another one.
func (p *Ports) Listen() error {
	for i, a := range p.addrs {
		if !p.listen(a) {
			for _, b := range p.addrs[:i] {
				p.m.dir.ports[p.space][b][p.port].CompareAndSwap(uint64(p.own()|portListen), uint64(p.own()))
			}
			return ErrPortTaken
		}
	}
	return nil
}

func (p *Ports) listen(addr int) bool {
	word := &p.m.dir.ports[p.space][addr][p.port]
	for {
		w := portWord(word.Load())
		own := w&^portListen == p.own()
		if !own && !p.free(w) && (w&portListen != 0 || w&portReuse == 0 || !p.reuse) {
			return false
		}
		if word.CompareAndSwap(uint64(w), uint64(p.own()|portListen)) {
			return true
		}
	}
}

// Free gives the ports back. It is idempotent.
func (p *Ports) Free() {
	for _, a := range p.addrs {
		word := &p.m.dir.ports[p.space][a][p.port]
		for _, w := range []portWord{p.own(), p.own() | portListen} {
			word.CompareAndSwap(uint64(w), 0)
		}
	}
	p.addrs = nil
}

// Listener returns the process that requests to a port of an address go to.
func (m *Member) Listener(space PortSpace, port uint16, addr int) (process int, ok bool) {
	if space < 0 || space >= NumPortSpaces || addr < 0 || addr >= maxAddrs {
		return 0, false
	}
	w := portWord(m.dir.ports[space][addr][port].Load())
	id := m.dir.portHolder(w)
	return id.slot(), id != 0 && w&portListen != 0
}

// Listeners returns the processes that listen on ports, besides this one.
func (m *Member) Listeners() (all []int) {
	for i := range m.dir.process {
		if id := m.dir.who(i); id != 0 && id != m.self && m.dir.process[i].listens.Load() != 0 {
			all = append(all, i)
		}
	}
	return all
}

// SetListening publishes whether this process listens on ports.
func (m *Member) SetListening(on bool) {
	v := uint32(0)
	if on {
		v = 1
	}
	m.dir.process[m.Slot()].listens.Store(v)
}

// PlaceOf returns a place of a process, by which its socket is found.
func (m *Member) PlaceOf(process int) (place int, ok bool) {
	id := m.dir.who(process)
	if id == 0 {
		return 0, false
	}
	for p := range m.dir.place {
		if m.dir.place[p].holder.Load() == uint64(id) {
			return p, true
		}
	}
	return 0, false
}

// PlaceHolder returns the process that has a place.
func (m *Member) PlaceHolder(place int) (process int, ok bool) {
	if place < 0 || place >= sys.NumPlaces {
		return 0, false
	}
	return m.dir.holder(identity(m.dir.place[place].holder.Load()))
}

// NewCommID returns a communication id that no other process of the device has: it has a place of
// this process in its upper 8 bits (sys.CommonPlace says why), and a number that cannot be guessed
// below. A number comes back after all others of the place.
func (m *Member) NewCommID() uint32 {
	n := m.dir.place[m.first].comms.Add(1) % (1 << 24)
	return uint32(m.first)<<24 | m.dir.perm.Index(n)
}
