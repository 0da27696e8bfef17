package p2p

// Stages of a verdict: the nearest common bridge (common), ACS redirects on the way to it, and if
// the way leads up to the host bridges, whether the kernel trusts those (throughHosts). A decision
// is small and cached; the words are made when Verdict is called.

import (
	"fmt"
	"math/rand/v2"
	"strings"
)

// MapType is how a client reaches a provider's memory.
type MapType uint8

const (
	NotSupported      MapType = iota
	BusAddress                // by its address on the bus, below a common bridge
	ThroughHostBridge         // by an address that the host bridges forward
)

var mapTypeNames = [...]string{"not supported", "bus address", "through host bridge"}

// String names the type.
func (m MapType) String() string {
	if int(m) < len(mapTypeNames) {
		return mapTypeNames[m]
	}
	return fmt.Sprintf("MapType(%d)", uint8(m))
}

// MarshalText writes the name, for JSON.
func (m MapType) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// Verdict is what the kernel decides about a provider and a client.
type Verdict struct {
	Provider Address `json:"provider"`
	Client   Address `json:"client"`
	Map      MapType `json:"map"`
	// Distance is the number of steps between the two; -1 if there is no way.
	Distance int `json:"distance"`
	// Redirects are the functions on the way that have ACS redirect set.
	Redirects []Address `json:"acs_redirects,omitempty"`
	// Reason names what decided.
	Reason string `json:"reason"`
}

type pair struct{ provider, client int }

// why is what has decided.
type why uint8

const (
	sameFunction  why = iota
	commonBridge      // nothing redirects below it
	cpuForwards       // the host bridges are trusted because of the CPU
	hostsListed       // ... because they are on the list
	hostNotListed     // decider is the host bridge
	hostSameOnly
	hostNameless
)

// decision is a verdict without words.
type decision struct {
	mapType  MapType
	why      why
	redirect bool // ACS sends the traffic upwards
	steps    int32
	common   *node // nil: there is none
	decider  *host // the host bridge that is not trusted
}

// common returns the nearest bridge, or function, that two functions have above them or are; nil if
// there is none.
func common(a, b *node) *node {
	for a.depth > b.depth {
		a = a.parent
	}
	for b.depth > a.depth {
		b = b.parent
	}
	for a != b {
		if a.parent == nil {
			return nil // both are on root buses
		}
		a, b = a.parent, b.parent
	}
	return a
}

// decide computes a decision. The distance is as the kernel counts it: the steps from each of the
// two up to the common bridge; without one, up to and out of the root bus.
func (t *Topology) decide(provider, client *node) decision {
	c := common(provider, client)
	if c == nil {
		d := decision{steps: int32(provider.depth + 1 + client.depth + 1)}
		t.throughHosts(&d, provider, client)
		return d
	}
	d := decision{common: c, steps: int32(provider.depth - c.depth + client.depth - c.depth)}
	// The common bridge counts, too. A function that is its own peer counts as the common bridge.
	above := c.redirects
	if c.redirected() {
		above--
	}
	if provider.redirects+client.redirects-above-c.redirects > 0 {
		d.redirect = true
		t.throughHosts(&d, provider, client)
		return d
	}
	d.mapType, d.why = BusAddress, commonBridge
	if provider == client {
		d.why = sameFunction
	}
	return d
}

// throughHosts decides about traffic that goes up to the host bridges.
func (t *Topology) throughHosts(d *decision, provider, client *node) {
	if t.spec.CPU.forwards() {
		d.mapType, d.why = ThroughHostBridge, cpuForwards
		return
	}
	same := provider.host == client.host
	for _, h := range [...]*host{provider.host, client.host} {
		switch {
		case h.entry == listed || h.entry == sameOnly && same:
			continue
		case h.entry == sameOnly:
			d.why = hostSameOnly
		case h.entry == nameless:
			d.why = hostNameless
		default:
			d.why = hostNotListed
		}
		d.mapType, d.decider = NotSupported, h
		return
	}
	d.mapType, d.why = ThroughHostBridge, hostsListed
}

// decision returns the decision about a pair, from the cache if it was asked for before.
func (t *Topology) decision(provider, client *node) decision {
	key := pair{provider.index, client.index}
	t.mu.RLock()
	d, ok := t.cache[key]
	t.mu.RUnlock()
	if ok {
		return d
	}
	d = t.decide(provider, client)
	t.mu.Lock()
	t.cache[key] = d
	t.mu.Unlock()
	return d
}

// distance returns the distance that the kernel's callers see.
func (d *decision) distance() int {
	if d.mapType == NotSupported {
		return -1
	}
	return int(d.steps)
}

// Verdict decides about a provider's memory and a client. A function that the topology does not
// have is not supported, as a client that is no PCI device is not.
func (t *Topology) Verdict(provider, client Address) Verdict {
	v := Verdict{Provider: provider, Client: client, Distance: -1}
	p, c := t.byAddress[provider], t.byAddress[client]
	switch {
	case p == nil:
		v.Reason = fmt.Sprintf("the provider, %v, is no PCI function of this machine", provider)
		return v
	case c == nil:
		v.Reason = fmt.Sprintf("the client, %v, is no PCI function of this machine", client)
		return v
	}
	d := t.decision(p, c)
	v.Map, v.Distance, v.Reason = d.mapType, d.distance(), t.reason(&d, p, c)
	if d.redirect {
		for _, n := range way(&d, p, c) {
			if n.redirected() {
				v.Redirects = append(v.Redirects, n.Address)
			}
		}
	}
	return v
}

// way returns the functions between two that have a common one: from the provider up to it, and
// from the client up to below it.
func way(d *decision, provider, client *node) []*node {
	var all []*node
	for n := provider; n != d.common; n = n.parent {
		all = append(all, n)
	}
	all = append(all, d.common)
	for n := client; n != d.common; n = n.parent {
		all = append(all, n)
	}
	return all
}

// reason puts a decision into words.
func (t *Topology) reason(d *decision, provider, client *node) string {
	var s strings.Builder
	switch {
	case d.redirect:
		var ports []string
		for _, n := range way(d, provider, client) {
			if n.redirected() {
				ports = append(ports, fmt.Sprintf("%s %v (%s)", n.Kind, n.Address, strings.Join((n.ACS.Control&redirects).Names(), ", ")))
			}
		}
		fmt.Fprintf(&s, "ACS redirect at %s sends it up to the host bridge", strings.Join(ports, " and "))
	case d.why == sameFunction:
		return "the client is the provider itself"
	case d.why == commonBridge:
		return t.commonReason(d, provider, client)
	default:
		s.WriteString("no common bridge")
	}
	h := d.decider
	switch d.why {
	case cpuForwards:
		fmt.Fprintf(&s, "; %s: the CPU, AMD family %#x, forwards peer-to-peer traffic", hostNames(provider.host, client.host), t.spec.CPU.Family)
	case hostsListed:
		s.WriteString("; " + hostNames(provider.host, client.host) + ", on the kernel's list: ")
		s.WriteString(standsFor(provider.host))
		if client.host != provider.host {
			s.WriteString(" and " + standsFor(client.host))
		}
	case hostSameOnly:
		fmt.Fprintf(&s, "; host bridge %v, %s, is on the kernel's list for devices below the same host bridge only", h, standsFor(h))
	case hostNameless:
		fmt.Fprintf(&s, "; host bridge %v is not on the kernel's list: its root bus begins neither with device 00.0 nor with a root port", h)
	default:
		fmt.Fprintf(&s, "; host bridge %v, %s, is not on the kernel's list, and the CPU is no AMD of family 0x17 or later", h, standsFor(h))
	}
	return s.String()
}

func (t *Topology) commonReason(d *decision, provider, client *node) string {
	hidden := ""
	for _, n := range way(d, provider, client) {
		if n.Hidden && n.Kind.bridges() {
			hidden = fmt.Sprintf(" (ACS of %v could not be read, and is taken as not set)", n.Address)
			break
		}
	}
	if d.common == provider || d.common == client {
		return fmt.Sprintf("%v is the bridge above the other, and no ACS redirect is on the way", d.common.Address) + hidden
	}
	if provider.Address.SameDevice(client.Address) {
		return fmt.Sprintf("functions of one device, below %s %v", d.common.Kind, d.common.Address) + hidden
	}
	return fmt.Sprintf("below the common %s %v, and no ACS redirect is on the way", d.common.Kind, d.common.Address) + hidden
}

// hostNames returns "through host bridge X" or, of two, "through host bridges X and Y".
func hostNames(a, b *host) string {
	if a == b {
		return fmt.Sprintf("through host bridge %v", a)
	}
	return fmt.Sprintf("through host bridges %v and %v", a, b)
}

// standsFor returns the function by which the kernel knows a host bridge.
func standsFor(h *host) string {
	f := h.first()
	if f == nil {
		return "without a name"
	}
	return fmt.Sprintf("[%v at %v]", f.ID, f.Address)
}

// DistanceMany returns the sum of the distances from a provider to all clients; -1 if there are
// none, or one of them has no way. why is the reason of the first that has none.
func (t *Topology) DistanceMany(provider Address, clients []Address) (sum int, why string) {
	if len(clients) == 0 {
		return -1, "there are no clients"
	}
	for _, c := range clients {
		v := t.quick(provider, c)
		if v < 0 {
			return -1, t.Verdict(provider, c).Reason
		}
		sum += v
	}
	return sum, ""
}

// quick returns the distance without the words.
func (t *Topology) quick(provider, client Address) int {
	p, c := t.byAddress[provider], t.byAddress[client]
	if p == nil || c == nil {
		return -1
	}
	d := t.decision(p, c)
	return d.distance()
}

// mostTies is how many providers of the same distance the kernel keeps: a page of pointers.
const mostTies = 4096 / 8

// FindMany returns the published provider whose distances to the clients have the smallest sum. Of
// several, the seed chooses one. ok is false if no provider reaches all clients.
func (t *Topology) FindMany(clients []Address, seed uint64) (provider Address, sum int, ok bool) {
	var published []Address
	for _, n := range t.nodes {
		if n.P2PMem != nil && n.P2PMem.Published {
			published = append(published, n.Address)
		}
	}
	return t.nearest(published, clients, rand.New(rand.NewPCG(seed, 0)))
}

// nearest chooses among providers.
func (t *Topology) nearest(providers, clients []Address, random *rand.Rand) (provider Address, sum int, ok bool) {
	var ties []Address
	for _, p := range providers {
		switch d, _ := t.DistanceMany(p, clients); {
		case d < 0 || len(ties) > 0 && d > sum:
		case len(ties) == 0 || d < sum:
			ties, sum = append(ties[:0], p), d
		case len(ties) < mostTies:
			ties = append(ties, p)
		}
	}
	if len(ties) == 0 {
		return Address{}, -1, false
	}
	return ties[random.IntN(len(ties))], sum, true
}

// Cell is a verdict of a [Topology.Matrix], without words.
type Cell struct {
	Map      MapType
	Distance int // -1 if there is no way
}

// Matrix returns the verdicts of all pairs: a row for each provider, a column for each client.
func (t *Topology) Matrix(providers, clients []Address) [][]Cell {
	columns := make([]*node, len(clients))
	for i, c := range clients {
		columns[i] = t.byAddress[c]
	}
	rows := make([][]Cell, len(providers))
	cells := make([]Cell, len(providers)*len(clients))
	for i, a := range providers {
		rows[i], cells = cells[:len(clients):len(clients)], cells[len(clients):]
		p := t.byAddress[a]
		for k, c := range columns {
			if p == nil || c == nil {
				rows[i][k] = Cell{Distance: -1}
				continue
			}
			d := t.decide(p, c) // cheaper than the cache
			rows[i][k] = Cell{d.mapType, d.distance()}
		}
	}
	return rows
}
