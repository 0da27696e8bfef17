package main

// Counters as files, in the places where the kernel has them:
//
//  1. writeFiles locks the directory, so that there is one writer at a time, and removes
//     what an earlier writer has left.
//  2. At each look, update adds up the counters of each device's processes, with those of
//     processes that have ended since, and writes the files whose values have changed.
//  3. When --watch ends, writeFiles removes what it has written.

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// Where the files are, under the directory that stands for /sys. (The kernel's
// debugfs is mounted on /sys/kernel/debug, and has a directory for each driver.)
const (
	verbsClass  = "class/infiniband_verbs"
	debugDriver = "kernel/debug/verbena"
)

func (c *statCmd) writeFiles(ctx context.Context) (err error) {
	dir, err := c.directory()
	if err != nil {
		return err
	}
	t, err := openTree(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.close()) }()
	if c.Watch > 0 {
		fmt.Fprintf(os.Stderr, "verbena stat: writing to %s every %v\n", dir, time.Duration(c.Watch))
		defer func() { err = errors.Join(err, t.clear()) }()
		return c.looks(ctx, func(s *snapshot) error { return t.update(s.devices) })
	}
	if err := c.looks(ctx, func(s *snapshot) error { return t.update(s.devices) }); err != nil {
		return err
	}
	_, err = fmt.Println(dir)
	return err
}

// directory returns where the files go, and makes the default directory. It refuses a
// default directory that another user can write to: in a directory for temporary files,
// any user may have made it.
func (c *statCmd) directory() (string, error) {
	if c.Files.value != "" {
		return c.Files.value, os.MkdirAll(c.Files.value, 0o755)
	}
	dir := os.Getenv("VERBENA_RUNTIME_DIR")
	if dir == "" {
		if run := os.Getenv("XDG_RUNTIME_DIR"); filepath.IsAbs(run) {
			dir = filepath.Join(run, "verbena")
		} else {
			dir = filepath.Join(os.TempDir(), "verbena-"+strconv.Itoa(os.Getuid()))
		}
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return "", err
	}
	if err := sys.OwnDirectory(dir); err != nil {
		return "", fmt.Errorf("runtime directory %s: %w", dir, err)
	}
	return dir, nil
}

// tree is the directory that stands for /sys.
type tree struct {
	root    *os.Root
	lock    *os.File
	devices map[netip.Addr]*treeDevice
	values  map[string]string // what each file holds
}

// treeDevice is a device in a tree.
type treeDevice struct {
	number int                          // of uverbsN
	gone   verbs.PagingStats            // the sum of processes that have ended
	last   map[member]verbs.PagingStats // the last answers of the others
}

// member is one opening of a device by a process, which may close it and open it again.
type member struct{ slot, pid int }

// openTree locks a directory, and removes what an earlier writer has left.
func openTree(dir string) (_ *tree, err error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	t := &tree{root: root, devices: make(map[netip.Addr]*treeDevice), values: make(map[string]string)}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.close())
		}
	}()
	if t.lock, err = root.OpenFile(".lock", os.O_RDWR|os.O_CREATE, 0o644); err != nil {
		return nil, err
	}
	if err = sys.TryLock(t.lock); err != nil {
		return nil, fmt.Errorf("%s: another verbena stat --files writes there (%w)", dir, err)
	}
	return t, t.clear()
}

// close unlocks the directory.
func (t *tree) close() error {
	err := t.root.Close()
	if t.lock != nil {
		err = errors.Join(err, t.lock.Close())
	}
	return err
}

// clear removes all devices.
func (t *tree) clear() error {
	clear(t.devices)
	clear(t.values)
	return errors.Join(t.root.RemoveAll(verbsClass), t.root.RemoveAll(debugDriver))
}

// update makes the files show what the processes have counted.
func (t *tree) update(devices []verbs.DeviceResources) error {
	open := make(map[netip.Addr]bool)
	for i := range devices {
		open[devices[i].Addr] = true
	}
	var errs []error
	for addr, d := range t.devices {
		if !open[addr] {
			delete(t.devices, addr)
			for _, dir := range []string{uverbs(d.number), path.Dir(odpStats(addr))} {
				errs = append(errs, t.remove(dir))
			}
		}
	}
	for i := range devices {
		errs = append(errs, t.updateDevice(&devices[i]))
	}
	return errors.Join(errs...)
}

func uverbs(n int) string { return path.Join(verbsClass, "uverbs"+strconv.Itoa(n)) }

func odpStats(a netip.Addr) string { return path.Join(debugDriver, a.String(), "odp_stats") }

// remove removes a directory of files.
func (t *tree) remove(dir string) error {
	for file := range t.values {
		if strings.HasPrefix(file, dir+"/") {
			delete(t.values, file)
		}
	}
	return t.root.RemoveAll(dir)
}

func (t *tree) updateDevice(d *verbs.DeviceResources) error {
	in := t.devices[d.Addr]
	if in == nil {
		in = &treeDevice{number: t.freeNumber(), last: make(map[member]verbs.PagingStats)}
		t.devices[d.Addr] = in
	}
	sum := in.sum(d.Processes)
	errs := []error{
		t.write(uverbs(in.number), "ibdev", nameOf(d)),
		// Devices at several addresses of an interface have one name.
		t.write(path.Dir(odpStats(d.Addr)), "uverbs", path.Base(uverbs(in.number))),
	}
	for _, c := range sum.Counters() {
		errs = append(errs, t.write(uverbs(in.number), c.Name, strconv.FormatUint(c.Value, 10)))
	}
	for _, c := range sum.DebugCounters() {
		errs = append(errs, t.write(odpStats(d.Addr), c.Name, strconv.FormatUint(c.Value, 10)))
	}
	return errors.Join(errs...)
}

// freeNumber returns the smallest number that no device has.
func (t *tree) freeNumber() int {
	used := make(map[int]bool)
	for _, d := range t.devices {
		used[d.number] = true
	}
	n := 0
	for used[n] {
		n++
	}
	return n
}

// nameOf returns the name by which the processes have the device open.
func nameOf(d *verbs.DeviceResources) string {
	for i := range d.Processes {
		if p := &d.Processes[i]; p.Answered && p.Device != "" {
			return p.Device
		}
	}
	return d.Addr.String()
}

// sum adds up the counters of a device's processes, also of those that have ended since
// the tree was opened. For a process that does not answer, its last answer counts.
func (d *treeDevice) sum(processes []verbs.ProcessResources) verbs.PagingStats {
	now := make(map[member]verbs.PagingStats)
	for i := range processes {
		p := &processes[i]
		who := member{p.Slot, p.PID}
		last := d.last[who]
		switch {
		case !p.Answered:
			now[who] = last
		case p.Paging.PageFaults < last.PageFaults: // another process with the same numbers
			d.gone = afterwards(d.gone, last)
			now[who] = p.Paging
		default:
			now[who] = p.Paging
		}
	}
	for who, last := range d.last {
		if _, there := now[who]; !there {
			d.gone = afterwards(d.gone, last)
		}
	}
	d.last = now
	total := d.gone
	for _, s := range now {
		total = total.Plus(s)
	}
	return total
}

// afterwards adds the counters of a process that has ended. It has no regions any more.
func afterwards(total, s verbs.PagingStats) verbs.PagingStats {
	s.MRs, s.MRPages = 0, 0
	return total.Plus(s)
}

// write makes a file hold a line, if it does not yet. A reader sees the old line or the
// new one, never a part.
func (t *tree) write(dir, name, line string) error {
	file := path.Join(dir, name)
	if had, ok := t.values[file]; ok && had == line {
		return nil
	}
	if err := t.root.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp := path.Join(dir, ".new")
	if err := t.root.WriteFile(temp, []byte(line+"\n"), 0o644); err != nil {
		return err
	}
	if err := t.root.Rename(temp, file); err != nil {
		return err
	}
	t.values[file] = line
	return nil
}
