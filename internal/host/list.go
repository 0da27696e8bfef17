package host

// A listing of the devices that are open on this host, and of their processes.

import (
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Listing is one device of this user and its processes.
type Listing struct {
	Addr      netip.Addr
	Processes []Process
}

// Process is one process of a device. Status is what the process itself returned, nil if it
// did not answer.
type Process struct {
	Slot   int
	PID    int
	Status json.RawMessage

	name string // of its socket; empty if the socket is gone
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
	for _, f := range lookAll(all) {
		switch {
		case errors.Is(f.err, os.ErrDeadlineExceeded):
			if p := silent(f.addr, all); len(p) > 0 {
				list = append(list, Listing{f.addr, p})
			}
			continue
		case f.err != nil:
			continue // another user's, or just gone
		}
		if !slices.Contains(seen, f.dir.id) {
			seen = append(seen, f.dir.id)
			list = append(list, Listing{f.addr, f.dir.processes(all)})
		}
		if err := f.dir.close(); err != nil {
			return nil, err
		}
	}
	askAll(list, brief)
	return list, nil
}

// listTime is how long List waits for a process of each device to answer, and then for all
// processes together: a process that is stopped does not answer.
const listTime = 2 * time.Second

// finding is the directory of the device at an address, or why there is none.
type finding struct {
	addr netip.Addr
	dir  *directory
	err  error
}

// lookAll looks, in parallel, for the devices at all addresses that have names.
func lookAll(names []string) []finding {
	var all []finding
	for _, n := range slices.Compact(slices.Sorted(slices.Values(names))) {
		if a, err := netip.ParseAddr(strings.TrimPrefix(n, namePrefix)); err == nil { // a door's name
			all = append(all, finding{addr: a})
		}
	}
	var wg sync.WaitGroup
	places := make(chan struct{}, 64) // descriptors are few
	for i := range all {
		wg.Go(func() {
			places <- struct{}{}
			defer func() { <-places }()
			all[i].dir, all[i].err = lookWithin(all[i].addr, listTime)
		})
	}
	wg.Wait()
	return all
}

// silent lists the processes of a device of which none answers, by the names of their sockets
// alone.
func silent(a netip.Addr, names []string) (list []Process) {
	for _, n := range names {
		rest, ok := strings.CutPrefix(n, doorName(a)+"/")
		pid, _, _ := strings.Cut(rest, "-")
		number, err := strconv.Atoi(pid)
		if ok && err == nil && !slices.ContainsFunc(list, func(p Process) bool { return p.name == n }) {
			list = append(list, Process{PID: number, name: n})
		}
	}
	return list
}

// askAll asks all processes, in parallel, for their status, and only for totals if brief is
// set.
func askAll(list []Listing, brief bool) {
	deadline := time.Now().Add(listTime)
	var wg sync.WaitGroup
	places := make(chan struct{}, 64) // descriptors are few
	for i := range list {
		for k := range list[i].Processes {
			p := &list[i].Processes[k]
			if p.name == "" {
				continue
			}
			wg.Go(func() {
				places <- struct{}{}
				defer func() { <-places }()
				p.Status, _ = status(p.name, brief, deadline) // the process may have gone meanwhile
			})
		}
	}
	wg.Wait()
}

// processes lists the processes of a device, and finds the socket of each among names.
func (d *directory) processes(names []string) []Process {
	var list []Process
	for i := range d.process {
		id := d.who(i)
		if id == 0 {
			continue
		}
		p := Process{Slot: i, PID: id.pid()}
		suffix := processSuffix(id)
		if k := slices.IndexFunc(names, func(n string) bool { return strings.HasSuffix(n, suffix) }); k >= 0 { // else it has ended
			p.name = names[k]
			list = append(list, p)
		}
	}
	return list
}

func status(name string, brief bool, deadline time.Time) (json.RawMessage, error) {
	c, err := dial(name)
	if err != nil {
		return nil, err
	}
	defer c.Close() //nolint:errcheck // nothing is lost with it
	if err := send(c, &request{Op: opStatus, Protocol: protocol, Brief: brief}); err != nil {
		return nil, err
	}
	return receiveLong(c, deadline)
}
