package p2p

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
)

// Dump writes the files of /sys and /proc from which [ReadSys] makes the same topology: for tests,
// and to show a machine elsewhere. It has neither serial numbers nor network addresses. dir
// is made, and must be empty if it is there.
func (t *Topology) Dump(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if old, err := os.ReadDir(dir); err != nil {
		return err
	} else if len(old) > 0 {
		return fmt.Errorf("%s is not empty", dir)
	}
	d := &dumper{dir: dir, t: t}
	d.mkdir("sys/bus/pci/devices")
	for _, h := range t.hosts {
		d.mkdir(path.Join("sys/devices", h.String()))
	}
	for _, n := range t.nodes {
		d.function(n)
	}
	d.file("proc/cpuinfo", cpuinfo(&t.spec.CPU))
	d.file("proc/sys/kernel/osrelease", string(t.spec.Kernel)+".0\n")
	d.extra()
	return d.err
}

// dumper keeps the first error.
type dumper struct {
	dir string
	t   *Topology
	err error
}

func (d *dumper) do(f func() error) {
	if d.err == nil {
		d.err = f()
	}
}

func (d *dumper) path(name string) string { return filepath.Join(d.dir, filepath.FromSlash(name)) }

func (d *dumper) mkdir(name string) {
	d.do(func() error { return os.MkdirAll(d.path(name), 0o755) })
}

func (d *dumper) file(name, content string) {
	d.mkdir(path.Dir(name))
	d.do(func() error { return os.WriteFile(d.path(name), []byte(content), 0o644) })
}

// link makes a symbolic link to another file of the dump.
func (d *dumper) link(name, target string) {
	d.mkdir(path.Dir(name))
	d.do(func() error {
		to, err := filepath.Rel(d.path(path.Dir(name)), d.path(target))
		if err != nil {
			return err
		}
		return os.Symlink(to, d.path(name))
	})
}

// place returns the directory of a function.
func (n *node) place() string {
	if n.parent == nil {
		return path.Join("sys/devices", n.host.String(), n.Address.String())
	}
	return path.Join(n.parent.place(), n.Address.String())
}

func (d *dumper) function(n *node) {
	dir := n.place()
	d.file(path.Join(dir, "config"), string(appendConfig(nil, n.FunctionSpec, d.multi(n))))
	d.file(path.Join(dir, "vendor"), fmt.Sprintf("0x%04x\n", n.ID.Vendor))
	d.file(path.Join(dir, "device"), fmt.Sprintf("0x%04x\n", n.ID.Device))
	d.file(path.Join(dir, "class"), fmt.Sprintf("0x%06x\n", uint64(n.Class)))
	d.file(path.Join(dir, "resource"), resourceLines(n.FunctionSpec))
	numa := -1
	if n.NUMA != nil {
		numa = *n.NUMA
	}
	d.file(path.Join(dir, "numa_node"), strconv.Itoa(numa)+"\n")
	d.link(path.Join(sysDevices, n.Address.String()), dir)
	if n.PhysFn != nil {
		d.link(path.Join(dir, "physfn"), d.t.byAddress[*n.PhysFn].place())
	}
	if n.IOMMUGroup != nil {
		d.group(n, dir)
	}
	if n.Driver != "" {
		driver := path.Join("sys/bus/pci/drivers", n.Driver)
		d.mkdir(driver)
		d.link(path.Join(dir, "driver"), driver)
	}
	d.names(n.FunctionSpec, dir)
	if m := n.P2PMem; m != nil {
		published := "0\n"
		if m.Published {
			published = "1\n"
		}
		d.file(path.Join(dir, "p2pmem/size"), fmt.Sprintf("%d\n", uint64(m.Size)))
		d.file(path.Join(dir, "p2pmem/available"), fmt.Sprintf("%d\n", uint64(m.Available)))
		d.file(path.Join(dir, "p2pmem/published"), published)
	}
}

// multi reports whether a device has several functions, which the header of each says.
func (d *dumper) multi(n *node) bool {
	other := n.Address
	for other.Function = range uint8(8) {
		if other != n.Address && d.t.byAddress[other] != nil {
			return true
		}
	}
	return false
}

func (d *dumper) group(n *node, dir string) {
	group := path.Join("sys/kernel/iommu_groups", strconv.Itoa(*n.IOMMUGroup))
	kind := "identity\n"
	if d.t.spec.IOMMU {
		kind = "DMA-FQ\n"
	}
	d.file(path.Join(group, "type"), kind)
	d.link(path.Join(dir, "iommu_group"), group)
}

// names makes the directory that a driver has for the device's name, and the files of a controller
// memory buffer.
func (d *dumper) names(f *FunctionSpec, dir string) {
	if f.Name == "" {
		return
	}
	below := map[Hex]string{0x0108: "nvme", 0x0207: "infiniband", 0x0300: "drm", 0x0302: "drm", 0x0380: "drm", 0x0200: "net"}[f.Class>>8]
	if below == "" && !strings.HasPrefix(f.Name, "virtio") {
		return // /sys has no place for it
	}
	dir = path.Join(dir, below, f.Name)
	d.mkdir(dir)
	d.file(path.Join(dir, "uevent"), "") // so that the directory is there in archives that have files only
	if m := f.P2PMem; m != nil && below == "nvme" {
		step := uint64(0)
		for step < 6 && (m.Size|m.Offset)%cmbUnit((step+1)<<8) == 0 {
			step++
		}
		unit := cmbUnit(step << 8)
		d.file(path.Join(dir, "cmbloc"), fmt.Sprintf("%d\n", uint64(m.Offset/unit)<<12|uint64(m.BAR)))
		d.file(path.Join(dir, "cmbsz"), fmt.Sprintf("%d\n", uint64(m.Size/unit)<<12|step<<8|0x1d))
	}
}

// resourceLines returns the file resource.
func resourceLines(f *FunctionSpec) string {
	var s strings.Builder
	line := func(first, last, flags uint64) { fmt.Fprintf(&s, "0x%016x 0x%016x 0x%016x\n", first, last, flags) }
	for i := range 13 { // BARs, the ROM, and BARs of virtual functions
		b := f.bar(i)
		if b == nil {
			line(0, 0, 0)
			continue
		}
		flags := uint64(flagMemory | 0x40000)
		if b.IO {
			flags = flagIO | 0x40001
		}
		if b.Prefetchable {
			flags |= flagPrefetch | 8
		}
		if b.Is64 {
			flags |= flag64 | 4
		}
		if b.Address == 0 {
			flags |= flagUnset
		}
		line(uint64(b.Address), uint64(b.Address)+uint64(b.Size)-1, flags)
	}
	if !f.Kind.bridges() {
		return s.String()
	}
	for i := range mostWindows {
		if i >= len(f.Windows) {
			line(0, 0, 0)
			continue
		}
		w := f.Windows[i]
		flags := uint64(flagMemory)
		if w.IO {
			flags = flagIO
		}
		if w.Prefetchable {
			flags |= flagPrefetch | flag64 | 1
		}
		line(uint64(w.First), uint64(w.Last), flags)
	}
	return s.String()
}

func cpuinfo(c *CPU) string {
	if *c == (CPU{}) {
		return ""
	}
	return fmt.Sprintf("processor\t: 0\nvendor_id\t: %s\ncpu family\t: %d\nmodel\t\t: %d\n\n", c.Vendor, c.Family, c.Model)
}

func (d *dumper) extra() {
	s := &d.t.spec
	x := extraSpec{IOMMU: s.IOMMU, Links: s.Links, HostBridges: s.HostBridges}
	d.do(func() error {
		b, err := json.MarshalIndent(x, "", "  ")
		if err != nil {
			return err
		}
		return os.WriteFile(d.path(extraFile), append(b, '\n'), 0o644)
	})
}
