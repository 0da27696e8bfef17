package p2p

// Stages of ReadSys: the functions that /sys/bus/pci/devices lists, each with the directory that
// its link leads to (links); the files of each directory (function); the kinds, from the top
// downwards (kinds); CPU and kernel; and what a dump has besides (extra).

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const (
	sysDevices  = "sys/bus/pci/devices"
	extraFile   = "verbena.json" // what /sys has no files for
	mostContent = 1 << 20        // of one file; /proc/cpuinfo of a large machine is longer, and its beginning is enough
)

// ReadSys reads the PCI devices of a machine from the files under root: root/sys and root/proc. The
// root "/" is this machine; another one is a dump ([Topology.Dump]).
//
// A process without privileges sees only the beginning of configuration spaces. Then the functions
// are marked as Hidden: ACS is not known.
//
// A network interface or an RDMA device can be renamed to almost any bytes. Those that cannot be printed are \xNN in the
// name here. A driver's name and the CPU's vendor are not chosen by anybody; with such bytes they are refused.
func ReadSys(root string) (*Topology, error) {
	r, err := os.OpenRoot(root)
	if err != nil {
		return nil, err
	}
	s, err := (&sysReader{root: r}).read()
	if closed := r.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", root, err)
	}
	t, err := New(*s)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", root, err)
	}
	return t, nil
}

type sysReader struct {
	root *os.Root
	spec Spec

	configs    map[Address]*config
	translated bool // an IOMMU group translates addresses
	groups     map[int]bool
}

func (r *sysReader) read() (*Spec, error) {
	r.configs, r.groups = map[Address]*config{}, map[int]bool{}
	links, err := r.links()
	if err != nil {
		return nil, err
	}
	hosts := map[string]bool{}
	for _, l := range links {
		if !hosts[l.host] {
			hosts[l.host] = true
			h, err := parseHost(l.host)
			if err != nil {
				return nil, err
			}
			r.spec.HostBridges = append(r.spec.HostBridges, h)
		}
		f, err := r.function(l)
		if err != nil {
			return nil, fmt.Errorf("%v: %w", l.address, err)
		}
		r.spec.Functions = append(r.spec.Functions, *f)
	}
	r.spec.IOMMU = r.translated
	r.kinds(links)
	r.hostNodes()
	if r.spec.CPU, err = r.cpu(); err != nil {
		return nil, err
	}
	r.spec.Kernel = r.kernel()
	return &r.spec, r.extra()
}

// link is where the files of a function are.
type link struct {
	address Address
	dir     string
	host    string // "pci0000:00"
	above   string // the directory of the bridge, or of the host bridge
}

var hostName = regexp.MustCompile(`^pci([0-9a-f]{4,8}):([0-9a-f]{2})$`)

// links returns the functions, in the order of their addresses. A machine without PCI has none.
func (r *sysReader) links() ([]link, error) {
	names, err := r.names(sysDevices)
	if err != nil {
		return nil, err
	}
	if names == nil {
		if _, err := r.root.Stat("sys"); err != nil {
			return nil, fmt.Errorf("there is no directory sys: %w", err)
		}
	}
	var all []link
	for _, name := range names {
		a, err := ParseAddress(name)
		if err != nil {
			return nil, err
		}
		target, err := r.root.Readlink(path.Join(sysDevices, name))
		if err != nil {
			return nil, err
		}
		dir := path.Join(sysDevices, target)
		if path.IsAbs(target) || !strings.HasPrefix(dir, "sys/devices/") || path.Base(dir) != name {
			return nil, fmt.Errorf("the link of %s leads to %q", name, target)
		}
		if err := checkWord(name, "the directory", dir); err != nil { // errors of files have it as it is
			return nil, err
		}
		l := link{address: a, dir: dir, above: path.Dir(dir)}
		for up := path.Dir(dir); up != "."; up = path.Dir(up) {
			if hostName.MatchString(path.Base(up)) {
				l.host = path.Base(up)
				break
			}
		}
		if l.host == "" {
			return nil, fmt.Errorf("%s is below no host bridge: %s", name, dir)
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(a, b link) int { return a.address.Compare(b.address) })
	return all, nil
}

func parseHost(name string) (HostBridgeSpec, error) {
	m := hostName.FindStringSubmatch(name)
	domain, err := strconv.ParseUint(m[1], 16, 32)
	if err != nil {
		return HostBridgeSpec{}, err
	}
	bus, err := strconv.ParseUint(m[2], 16, 8)
	return HostBridgeSpec{Domain: uint32(domain), Bus: uint8(bus)}, err
}

// names returns the entries of a directory; nil if there is no such directory.
func (r *sysReader) names(dir string) ([]string, error) {
	f, err := r.root.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	names, err := f.Readdirnames(-1)
	if closed := f.Close(); err == nil {
		err = closed
	}
	slices.Sort(names)
	return names, err
}

// file returns the beginning of a file; nil if there is none. Only plain files are read.
func (r *sysReader) file(name string) ([]byte, error) {
	info, err := r.root.Lstat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is no plain file", name)
	}
	f, err := r.root.Open(name)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, mostContent))
	if closed := f.Close(); err == nil {
		err = closed
	}
	return b, err
}

// number returns the number in a file; ok is false if there is none.
func (r *sysReader) number(name string) (n int64, ok bool, err error) {
	b, err := r.file(name)
	if err != nil || b == nil {
		return 0, false, err
	}
	n, err = strconv.ParseInt(string(bytes.TrimSpace(b)), 0, 64)
	if err != nil {
		return 0, false, fmt.Errorf("%s: %w", path.Base(name), err)
	}
	return n, true, nil
}

// function reads a function, but for its kind.
func (r *sysReader) function(l link) (*FunctionSpec, error) {
	b, err := r.file(path.Join(l.dir, "config"))
	if err != nil {
		return nil, err
	}
	c, err := parseConfig(b)
	if err != nil {
		return nil, err
	}
	r.configs[l.address] = c
	f := &FunctionSpec{Address: l.address, ID: c.id, Class: Hex(c.class), ACS: c.acs, Hidden: c.hidden}
	if err := r.ids(l.dir, f); err != nil {
		return nil, err
	}
	if target, err := r.root.Readlink(path.Join(l.dir, "physfn")); err == nil {
		physical, err := ParseAddress(path.Base(target))
		if err != nil {
			return nil, err
		}
		f.PhysFn = &physical
	}
	if c.bridge {
		f.Secondary, f.Subordinate = c.secondary, c.subordinate
		if f.Subordinate < f.Secondary {
			f.Subordinate = f.Secondary
		}
	}
	if err := r.resources(l.dir, f, c); err != nil {
		return nil, err
	}
	if node, ok, err := r.number(path.Join(l.dir, "numa_node")); err != nil {
		return nil, err
	} else if ok && node >= 0 {
		n := int(node)
		f.NUMA = &n
	}
	if err := r.group(l.dir, f); err != nil {
		return nil, err
	}
	if target, err := r.root.Readlink(path.Join(l.dir, "driver")); err == nil {
		f.Driver = path.Base(target)
	}
	if err := r.name(l.dir, f); err != nil {
		return nil, err
	}
	return f, r.memory(l.dir, f)
}

// ids reads what the kernel says of ids and class: a virtual function has no ids in its
// configuration space.
func (r *sysReader) ids(dir string, f *FunctionSpec) error {
	for name, set := range map[string]func(int64){
		"vendor": func(n int64) { f.ID.Vendor = uint16(n) },
		"device": func(n int64) { f.ID.Device = uint16(n) },
		"class":  func(n int64) { f.Class = Hex(n & 0xffffff) },
	} {
		n, ok, err := r.number(path.Join(dir, name))
		if err != nil {
			return err
		}
		if ok {
			set(n)
		}
	}
	return nil
}

// Flags of a line of the file resource.
const (
	flagIO       = 0x100
	flagMemory   = 0x200
	flagPrefetch = 0x2000
	flag64       = 0x100000
	flagUnset    = 0x20000000
)

// resources reads BARs and windows. The lines are: six BARs, the ROM, six BARs of virtual functions
// where the kernel has those, and four windows of a bridge.
func (r *sysReader) resources(dir string, f *FunctionSpec, c *config) error {
	b, err := r.file(path.Join(dir, "resource"))
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	windows := len(lines)
	if c.bridge && len(lines) > 7 {
		windows = len(lines) - mostWindows
	}
	for i, line := range lines {
		if strings.TrimSpace(line) == "" {
			continue
		}
		var first, last, flags uint64
		if _, err := fmt.Sscanf(line, "%v %v %v", &first, &last, &flags); err != nil {
			return fmt.Errorf("resource: line %d: %w", i+1, err)
		}
		if flags&(flagIO|flagMemory) == 0 || last < first {
			continue
		}
		io, prefetchable := flags&flagIO != 0, flags&flagPrefetch != 0
		switch {
		case i >= windows:
			if flags&flagUnset == 0 && (first != 0 || last != 0) {
				f.Windows = append(f.Windows, Window{First: Hex(first), Last: Hex(last), IO: io, Prefetchable: prefetchable})
			}
		case i < 6 && !(c.bridge && i >= 2):
			f.BARs = append(f.BARs, r.bar(f, c, i, first, last, flags))
		}
	}
	return nil
}

func (r *sysReader) bar(f *FunctionSpec, c *config, i int, first, last, flags uint64) BAR {
	bar := BAR{
		Index: i, Address: Hex(first), Size: Hex(last - first + 1),
		IO: flags&flagIO != 0, Prefetchable: flags&flagPrefetch != 0, Is64: flags&flag64 != 0,
	}
	if flags&flagUnset != 0 {
		bar.Address = 0
		return bar
	}
	if on := Hex(c.busAddress(i, bar.Is64, bar.IO)); f.PhysFn == nil && on != bar.Address && on != 0 {
		bar.Bus = &on
	}
	return bar
}

// group reads the IOMMU group, and whether addresses are translated in it.
func (r *sysReader) group(dir string, f *FunctionSpec) error {
	target, err := r.root.Readlink(path.Join(dir, "iommu_group"))
	if err != nil {
		return nil //nolint:nilerr // a function without a group has no such link
	}
	n, err := strconv.Atoi(path.Base(target))
	if err != nil {
		return fmt.Errorf("iommu_group: %w", err)
	}
	f.IOMMUGroup = &n
	if r.groups[n] {
		return nil
	}
	r.groups[n] = true
	b, err := r.file(path.Join("sys/kernel/iommu_groups", strconv.Itoa(n), "type"))
	if err != nil {
		return err
	}
	if kind := strings.TrimSpace(string(b)); kind != "identity" {
		r.translated = true
	}
	return nil
}

// nameDirs are the directories below a function in which its driver has a directory with a name
// that people know.
var nameDirs = []string{"nvme", "infiniband", "drm", "net"}

// name reads the name, and escapes what cannot be printed.
func (r *sysReader) name(dir string, f *FunctionSpec) error {
	for _, d := range nameDirs {
		names, err := r.names(path.Join(dir, d))
		if err != nil {
			return err
		}
		if len(names) > 0 {
			f.Name = escaped(names[0])
			return nil
		}
	}
	names, err := r.names(dir)
	for _, n := range names {
		if strings.HasPrefix(n, "virtio") {
			f.Name = escaped(n)
		}
	}
	return err
}

// memory reads what peer-to-peer memory the driver has added. Where in the BARs it lies is known of
// NVMe controllers; for others it is the smallest BAR that is large enough.
func (r *sysReader) memory(dir string, f *FunctionSpec) error {
	size, ok, err := r.number(path.Join(dir, "p2pmem/size"))
	if err != nil || !ok || size == 0 {
		return err
	}
	free, _, err := r.number(path.Join(dir, "p2pmem/available"))
	if err != nil {
		return err
	}
	published, _, err := r.number(path.Join(dir, "p2pmem/published"))
	if err != nil {
		return err
	}
	m := &P2PMem{BAR: -1, Size: Hex(size), Available: Hex(free), Published: published != 0}
	f.P2PMem = m
	loc, ok, err := r.number(path.Join(dir, "nvme", f.Name, "cmbloc"))
	if err != nil {
		return err
	}
	if ok {
		sz, _, err := r.number(path.Join(dir, "nvme", f.Name, "cmbsz"))
		if err != nil {
			return err
		}
		m.BAR, m.Offset = int(loc&7), Hex(uint64(loc)>>12&0xfffff)*cmbUnit(uint64(sz))
		return nil
	}
	for i := range f.BARs {
		b := &f.BARs[i]
		if best := f.bar(m.BAR); !b.IO && b.Size >= m.Size && (best == nil || b.Size < best.Size) {
			m.BAR = b.Index
		}
	}
	if m.BAR < 0 {
		return refuse("%v bytes of peer-to-peer memory are in no BAR", m.Size)
	}
	return nil
}

// cmbUnit returns the unit of a controller memory buffer's size and offset: 4 KiB times 16 for each
// step of CMBSZ.SZU.
func cmbUnit(cmbsz uint64) Hex { return 4096 << (4 * min(cmbsz>>8&0xf, 6)) }

// kinds fills in what each function is: from the top downwards, since what is hidden is guessed
// from the bridge above.
func (r *sysReader) kinds(links []link) {
	order := make([]int, len(links))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(len(links[a].dir), len(links[b].dir)) })
	known := map[string]Kind{}
	for _, i := range order {
		f := &r.spec.Functions[i]
		f.Kind = r.configs[f.Address].kind(known[links[i].above])
		known[links[i].dir] = f.Kind
		if f.Kind == Conventional {
			f.ACS = nil
		}
	}
}

// hostNodes gives a host bridge the NUMA node that all functions below it have.
func (r *sysReader) hostNodes() {
	for i := range r.spec.HostBridges {
		h := &r.spec.HostBridges[i]
		var nodes []int
		for _, f := range r.spec.Functions {
			if f.Address.Domain != h.Domain || f.Address.Bus != h.Bus {
				continue
			}
			if f.NUMA == nil {
				nodes = nil
				break
			}
			nodes = append(nodes, *f.NUMA)
		}
		if slices.Sort(nodes); len(nodes) > 0 && nodes[0] == nodes[len(nodes)-1] {
			h.NUMA = &nodes[0]
		}
	}
}

// cpu reads the first CPU. Machines that are no PCs have no such lines.
func (r *sysReader) cpu() (CPU, error) {
	b, err := r.file("proc/cpuinfo")
	if err != nil {
		return CPU{}, err
	}
	var c CPU
	for line := range strings.SplitSeq(string(b), "\n") {
		key, value, ok := strings.Cut(line, ":")
		if !ok {
			if c != (CPU{}) {
				break // the next CPU
			}
			continue
		}
		value = strings.TrimSpace(value)
		switch strings.TrimSpace(key) {
		case "vendor_id":
			c.Vendor = value
		case "cpu family":
			c.Family, _ = strconv.Atoi(value)
		case "model":
			c.Model, _ = strconv.Atoi(value)
		}
	}
	return c, nil
}

// kernel returns whose rules the kernel has: the older ones, if it is older than 7.2.
func (r *sysReader) kernel() Kernel {
	b, err := r.file("proc/sys/kernel/osrelease")
	var major, minor int
	if _, bad := fmt.Sscanf(string(b), "%d.%d", &major, &minor); err != nil || bad != nil {
		return Linux72
	}
	if major < 7 || major == 7 && minor < 2 {
		return Linux612
	}
	return Linux72
}

// extraSpec is what /sys has no files for.
type extraSpec struct {
	IOMMU       bool             `json:"iommu,omitempty"` // it is on, and no function is in a group
	Links       []Link           `json:"links,omitempty"`
	HostBridges []HostBridgeSpec `json:"host_bridges,omitempty"`
}

// extra reads what a dump has besides the files of a machine.
func (r *sysReader) extra() error {
	b, err := r.file(extraFile)
	if err != nil || b == nil {
		return err
	}
	var x extraSpec
	if err := json.Unmarshal(b, &x); err != nil {
		return fmt.Errorf("%s: %w", extraFile, err)
	}
	r.spec.Links, r.spec.IOMMU = x.Links, r.spec.IOMMU || x.IOMMU
	for _, h := range x.HostBridges {
		i := slices.IndexFunc(r.spec.HostBridges, func(known HostBridgeSpec) bool {
			return known.Domain == h.Domain && known.Bus == h.Bus
		})
		if i < 0 {
			r.spec.HostBridges = append(r.spec.HostBridges, h)
			continue
		}
		r.spec.HostBridges[i] = h
	}
	return nil
}
