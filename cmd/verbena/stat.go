package main

// How counters get to the screen, top-down: Run asks all processes, once or with --watch
// again and again (looks); each snapshot goes to the screen (stat_print.go), to
// encoding/json, or into files (stat_files.go).

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/verbs"
)

type statCmd struct {
	Device string    `arg:"" optional:"" help:"Only the device with this address or name."`
	PID    int       `name:"pid" placeholder:"PID" help:"Only this process."`
	MR     bool      `name:"mr" short:"m" help:"The counters of each on-demand memory region and of each dma-buf, instead of each device's."`
	All    bool      `short:"a" help:"The device's other counters too, those that are not zero."`
	JSON   bool      `name:"json" help:"Print a JSON array of devices; with --watch an object for each interval, on a line of its own."`
	Watch  watchFlag `short:"w" placeholder:"INTERVAL" help:"Look again and again, every second or --watch=INTERVAL, and show how fast counters grow."`
	Count  int       `short:"c" placeholder:"N" help:"With --watch: end after N looks. Default: when interrupted."`
	Files  optFlag   `placeholder:"DIR" help:"Write the counters into files, as the kernel's sysfs and debugfs have them, under --files=DIR. Default: the runtime directory, see below."`
}

// Help is shown below the flags.
func (statCmd) Help() string {
	return `Shows what on-demand paging has done in the processes of this user that have a device open, in this network namespace. The names are those of the kernel's sysfs (num_page_faults, …), of its debugfs (num_odp_mrs, …) and, with --mr, of "rdma statistic show mr". A memory region goes by a number (mrn), not by its key: keys are rights.

A region of a dma-buf has the same counters: a fault is an access that found the buffer moved, and mapped it again; an invalidation is a mapping that the exporter has taken away; all its pages are present, or none. With --all, a device's counters of dma-bufs are dmabuf_regions, dmabuf_mappings, dmabuf_faults, dmabuf_invalidations and dmabuf_pins, and copied_bytes_…_to_dmabuf and copied_bytes_dmabuf_to_… count bytes. A PeerDirect client NAME of a process has peer_NAME_num_alloc_mrs, peer_NAME_num_reg_bytes and so on, as the files in /sys/kernel/mm/memory_peers/NAME.

Changes that the kernel reports are counted exactly. Those that it does not report (mprotect, truncation, reclaim) are counted once, when the device finds them.

On a terminal --watch draws over what it drew before; elsewhere it prints one block after the other.

With --files a tree like that under /sys is written instead: class/infiniband_verbs/uverbsN/ and kernel/debug/verbena/ADDRESS/odp_stats/, a number in each file, summed over the processes of a device. Every file is replaced as a whole, so a reader sees one value or the other. The values are as old as the last look: with --watch at most the interval, and then they never fall while the device is open, whichever of its processes end. A --watch that ends removes the tree; one that was killed leaves it, and the next one begins anew. The default directory is $VERBENA_RUNTIME_DIR, or verbena in $XDG_RUNTIME_DIR, or verbena-UID in the directory for temporary files, which must be this user's alone.

Examples:

    verbena stat
    verbena stat --mr 127.77.0.1
    verbena stat --watch=500ms --pid 4711
    verbena stat --json
    verbena stat --files --watch &
    cat $XDG_RUNTIME_DIR/verbena/class/infiniband_verbs/uverbs0/num_page_faults`
}

func (c *statCmd) Run(ctx context.Context) error {
	switch {
	case c.Count < 0:
		return usagef("--count %d: want at least 1", c.Count)
	case c.Count > 0 && c.Watch == 0:
		return usagef("--count: without --watch there is one look anyway")
	case c.Files.on && (c.JSON || c.MR || c.All || c.Device != "" || c.PID != 0):
		return usagef("--files: goes with --watch and --count alone, files are for all devices")
	case c.Files.on:
		return c.writeFiles(ctx)
	}
	show := c.printer()
	return c.looks(ctx, func(s *snapshot) error {
		if s.devices = c.choose(s.devices); len(s.devices) == 0 && (c.Device != "" || c.PID != 0) && c.Watch == 0 {
			return fmt.Errorf("no process of this user has %s", c.wanted())
		}
		return show(s)
	})
}

// wanted returns what the command line asks for, for an error message.
func (c *statCmd) wanted() string {
	what := "a device open"
	if c.Device != "" {
		what = fmt.Sprintf("the device %s open", c.Device)
	}
	if c.PID != 0 {
		what += fmt.Sprintf(" and the process id %d", c.PID)
	}
	return what
}

// snapshot is what all processes answered at about one time.
type snapshot struct {
	at      time.Time
	devices []verbs.DeviceResources
	before  *snapshot // the look before; nil for the first
}

// looks asks all processes for their counters and calls pass with the answers, once or at
// each interval of --watch. An interrupt ends it without an error.
func (c *statCmd) looks(ctx context.Context, pass func(*snapshot) error) error {
	ask := verbs.Statistics
	if c.MR {
		ask = verbs.Resources
	}
	var last *snapshot
	var tick <-chan time.Time
	if c.Watch > 0 {
		t := time.NewTicker(time.Duration(c.Watch))
		defer t.Stop()
		tick = t.C
	}
	for n := 1; ; n++ {
		devices, err := ask()
		if err != nil {
			return err
		}
		s := &snapshot{time.Now(), devices, last}
		if err := pass(s); err != nil {
			return err
		}
		if c.Watch == 0 || n == c.Count {
			return nil
		}
		s.before = nil // or all of them would be kept
		last = s
		select {
		case <-ctx.Done():
			return nil
		case <-tick:
		}
	}
}

// choose returns the devices and processes that were asked for.
func (c *statCmd) choose(all []verbs.DeviceResources) []verbs.DeviceResources {
	wanted, err := netip.ParseAddr(c.Device)
	byAddr := err == nil
	chosen := []verbs.DeviceResources{}
	for _, d := range all {
		d.Processes = slices.DeleteFunc(slices.Clone(d.Processes), func(p verbs.ProcessResources) bool {
			device := c.Device == "" || p.Device == c.Device || byAddr && d.Addr == wanted
			return !device || c.PID != 0 && p.PID != c.PID
		})
		if len(d.Processes) > 0 {
			chosen = append(chosen, d)
		}
	}
	return chosen
}

// counter is a counter or a gauge of a process or a region.
type counter struct {
	name  string
	value uint64
	now   bool // a gauge: how much there is now, rather than how often something happened
}

// deviceCounters returns the counters of a process, in the order of the screen.
func deviceCounters(p *verbs.ProcessResources, all bool) []counter {
	var list []counter
	for _, group := range [][]verbs.PagingCounter{p.Paging.Counters(), p.Paging.TriggerCounters(), p.Paging.DebugCounters()} {
		for _, c := range group {
			list = append(list, counter{c.Name, c.Value, gauges[c.Name]})
		}
	}
	if all {
		for _, name := range slices.Sorted(maps.Keys(p.Counters)) {
			list = append(list, counter{name: name, value: p.Counters[name]})
		}
	}
	return list
}

// gauges are the counters that can also fall.
var gauges = map[string]bool{"num_odp_mrs": true, "num_odp_mr_pages": true}

// regionCounters returns the counters of a region: those of "rdma statistic", by their
// names there, and some that it does not have.
func regionCounters(m *verbs.MRResource) []counter {
	var list []counter
	for _, c := range m.Paging.RegionCounters() {
		list = append(list, counter{name: c.Name, value: c.Value})
	}
	return append(list,
		counter{name: "prefetches_handled", value: m.Paging.Prefetches},
		counter{name: "contentions", value: m.Paging.Contentions},
		counter{name: "failed_resolutions", value: m.Paging.FailedResolutions},
		counter{name: "local_faults", value: m.Paging.LocalFaults},
		counter{name: "remote_faults", value: m.Paging.RemoteFaults})
}

// rates compares two looks.
type rates struct {
	was     map[string]uint64 // by device, process, region and counter
	seconds float64           // between the looks; 0: there was none before
}

func (s *snapshot) rates(all bool) *rates {
	r := &rates{}
	if s.before == nil {
		return r
	}
	r.was, r.seconds = make(map[string]uint64), s.at.Sub(s.before.at).Seconds()
	for _, d := range s.before.devices {
		for i := range d.Processes {
			p := &d.Processes[i]
			for _, c := range deviceCounters(p, all) {
				r.was[figureKey(d.Addr, p, -1, c.name)] = c.value
			}
			for k := range p.MRs {
				if m := &p.MRs[k]; m.Paging != nil {
					for _, c := range regionCounters(m) {
						r.was[figureKey(d.Addr, p, int(m.Number), c.name)] = c.value
					}
				}
			}
		}
	}
	return r
}

// figureKey returns the key of a counter in rates.was; mrn is -1 for counters of a
// process.
func figureKey(addr netip.Addr, p *verbs.ProcessResources, mrn int, name string) string {
	return fmt.Sprintf("%v/%d/%d/%d/%s", addr, p.Slot, p.PID, mrn, name)
}

// of returns how fast a counter grew. If it is smaller than it was, it is the counter of
// another process or region that has got the same number.
func (r *rates) of(addr netip.Addr, p *verbs.ProcessResources, mrn int, c counter) (perSecond float64, ok bool) {
	if r.seconds <= 0 || c.now {
		return 0, false
	}
	was := r.was[figureKey(addr, p, mrn, c.name)]
	if was > c.value {
		was = 0
	}
	return float64(c.value-was) / r.seconds, true
}

// statDevice, statProcess and statRegion are the JSON objects.
type statDevice struct {
	Addr      netip.Addr    `json:"addr"`
	Processes []statProcess `json:"processes"`
}

type statProcess struct {
	PID      int                `json:"pid"`
	Program  string             `json:"program"`
	Device   string             `json:"device"`
	Answered bool               `json:"answered"`
	Counters map[string]uint64  `json:"counters,omitempty"`
	Rates    map[string]float64 `json:"per_second,omitempty"`
	MRs      []statRegion       `json:"mrs,omitempty"`
}

type statRegion struct {
	MRN      uint32             `json:"mrn"`
	Kind     string             `json:"kind"`
	Addr     uint64             `json:"addr"`
	Length   uint64             `json:"length"`
	Present  uint64             `json:"present_pages"`
	Counters map[string]uint64  `json:"counters"`
	Rates    map[string]float64 `json:"per_second,omitempty"`
}

// statInterval is what --watch --json prints.
type statInterval struct {
	Time    time.Time    `json:"time"`
	Devices []statDevice `json:"devices"`
}

// describe makes the JSON objects of a snapshot.
func (c *statCmd) describe(s *snapshot) []statDevice {
	r := s.rates(c.All)
	list := []statDevice{}
	for _, d := range s.devices {
		out := statDevice{Addr: d.Addr}
		for i := range d.Processes {
			p := &d.Processes[i]
			q := statProcess{PID: p.PID, Program: p.Program, Device: p.Device, Answered: p.Answered}
			if p.Answered {
				q.Counters, q.Rates = r.maps(d.Addr, p, -1, deviceCounters(p, c.All))
			}
			for k := range p.MRs {
				if m := &p.MRs[k]; m.Paging != nil {
					region := statRegion{MRN: m.Number, Kind: m.Kind, Addr: m.Addr, Length: m.Length, Present: m.Present}
					region.Counters, region.Rates = r.maps(d.Addr, p, int(m.Number), regionCounters(m))
					q.MRs = append(q.MRs, region)
				}
			}
			out.Processes = append(out.Processes, q)
		}
		list = append(list, out)
	}
	return list
}

// maps returns counters by name, and how fast they grew.
func (r *rates) maps(addr netip.Addr, p *verbs.ProcessResources, mrn int, list []counter) (values map[string]uint64, perSecond map[string]float64) {
	values = make(map[string]uint64)
	for _, c := range list {
		values[c.name] = c.value
		if v, ok := r.of(addr, p, mrn, c); ok {
			if perSecond == nil {
				perSecond = make(map[string]float64)
			}
			perSecond[c.name] = v
		}
	}
	return values, perSecond
}

// printer returns the function that prints a snapshot.
func (c *statCmd) printer() func(*snapshot) error {
	if c.JSON {
		enc := json.NewEncoder(os.Stdout)
		if c.Watch > 0 {
			return func(s *snapshot) error { return enc.Encode(statInterval{s.at, c.describe(s)}) }
		}
		enc.SetIndent("", "  ")
		return func(s *snapshot) error { return enc.Encode(c.describe(s)) }
	}
	out := term.New(os.Stdout)
	return func(s *snapshot) error { return c.print(out, s) }
}
