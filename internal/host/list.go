package host

// What is open on this host, for those who want to look at it.

import (
	"encoding/json"
	"net/netip"
	"slices"
	"strings"
)

// Listing is one device: its processes, those of this user alone.
type Listing struct {
	Addr      netip.Addr
	Processes []Process
}

// Process is one process of a device. Status is what it says itself, nil if it
// did not answer.
type Process struct {
	Slot   int
	PID    int
	Owner  bool // packets from outside come to it
	Status json.RawMessage
}

// List returns the devices of this user that are open in this network namespace,
// by address. A device with several addresses is listed by the first. Processes
// are asked for totals alone if brief is set.
func List(brief bool) ([]Listing, error) {
	all, err := names()
	if err != nil {
		return nil, err
	}
	var list []Listing
	var seen [][2]uint64
	for _, n := range slices.Compact(slices.Sorted(slices.Values(all))) {
		a, err := netip.ParseAddr(strings.TrimPrefix(n, namePrefix))
		if err != nil {
			continue // a process's name
		}
		d, err := look(a)
		if err != nil {
			continue // another user's, or just gone
		}
		if !slices.Contains(seen, d.id) {
			seen = append(seen, d.id)
			list = append(list, Listing{a, d.processes(all, brief)})
		}
		if err := d.close(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// processes asks all processes what they are doing. Their names tell the address
// that the device is known by.
func (d *directory) processes(names []string, brief bool) []Process {
	var list []Process
	for i := range d.process {
		e := &d.process[i]
		if e.state.Load() != processAlive {
			continue
		}
		p := Process{Slot: i, PID: int(e.pid.Load()), Owner: int(d.owner.Load()) == i}
		suffix := processSuffix(e.pid.Load(), e.nonce.Load())
		if k := slices.IndexFunc(names, func(n string) bool { return strings.HasSuffix(n, suffix) }); k >= 0 {
			p.Status, _ = status(names[k], brief) // it may have gone meanwhile
		}
		list = append(list, p)
	}
	return list
}

func status(name string, brief bool) (json.RawMessage, error) {
	c, err := dial(name)
	if err != nil {
		return nil, err
	}
	defer c.Close() //nolint:errcheck // nothing is lost with it
	if err := send(c, &request{Op: opStatus, Protocol: protocol, Brief: brief}, -1); err != nil {
		return nil, err
	}
	return receiveLong(c)
}
