package p2p

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
)

// machine is a generated machine: arguments of the emulator.
type machine struct {
	args   []string
	disks  int
	ports  int
	random *rand.Rand
	dir    string // for the disks
	second bool   // there is a second host bridge
	err    error
}

const (
	mostDisks = 6
	diskSize  = 16 << 20
)

func newMachine(dir, cpu string) *machine {
	return &machine{args: []string{"-cpu", cpu}, dir: dir}
}

func (m *machine) device(format string, args ...any) {
	m.args = append(m.args, "-device", fmt.Sprintf(format, args...))
}

// rootPort adds a root port, and returns the name of its bus.
func (m *machine) rootPort(bus string, acs bool) string {
	m.ports++
	name := "port" + strconv.Itoa(m.ports)
	off := "on"
	if acs {
		off = "off"
	}
	m.device("pcie-root-port,id=%s,bus=%s,chassis=%d,slot=%d,disable-acs=%s", name, bus, m.ports, m.ports, off)
	return name
}

// switches adds a switch, and returns the names of the buses below it.
func (m *machine) switches(bus string, ports int) (below []string) {
	m.ports++
	up := "up" + strconv.Itoa(m.ports)
	m.device("x3130-upstream,id=%s,bus=%s", up, bus)
	for range ports {
		m.ports++
		down := "down" + strconv.Itoa(m.ports)
		m.device("xio3130-downstream,id=%s,bus=%s,chassis=%d,slot=%d", down, up, m.ports, m.ports)
		below = append(below, down)
	}
	return below
}

// disk adds an NVMe controller with so many MiB of memory; more has further properties.
func (m *machine) disk(bus string, memory int, more string) {
	name := filepath.Join(m.dir, fmt.Sprintf("disk%d.img", m.disks))
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		m.err = err
	} else if err := os.Truncate(name, diskSize); err != nil {
		m.err = err
	}
	m.args = append(m.args, "-blockdev", fmt.Sprintf("driver=file,node-name=f%d,filename=%s", m.disks, name))
	cmb := ""
	if memory > 0 {
		cmb = fmt.Sprintf(",cmb_size_mb=%d", memory)
	}
	m.device("nvme,drive=f%d,serial=s%d,bus=%s%s%s", m.disks, m.disks, bus, cmb, more)
	m.disks++
}

// known is the machine that was looked at first: two disks behind a switch, and two on root ports.
func known(dir, cpu string) *machine {
	m := newMachine(dir, cpu)
	below := m.switches(m.rootPort("pcie.0", true), 2)
	second, third := m.rootPort("pcie.0", true), m.rootPort("pcie.0", false)
	m.disk(below[0], 64, "")
	m.disk(below[1], 0, "")
	m.disk(second, 16, "")
	m.disk(third, 0, "")
	return m
}

// byChance is a machine of a seed.
func byChance(dir, cpu string, seed uint64) *machine {
	m := newMachine(dir, cpu)
	m.random = rand.New(rand.NewPCG(seed, 0))
	roots := []string{"pcie.0"}
	if m.random.IntN(2) == 0 {
		m.device("pxb-pcie,id=second,bus_nr=64,bus=pcie.0")
		roots = append(roots, "second")
		m.second = true
	}
	m.disk(m.rootPort("pcie.0", true), 16, "") // one provider there always is
	for m.disks < 3 {
		for _, root := range roots {
			for range 1 + m.random.IntN(2) {
				m.fill(m.rootPort(root, m.random.IntN(4) > 0), 0)
			}
		}
	}
	return m
}

// someMemory is how much memory a controller has, by chance.
func (m *machine) someMemory() int { return []int{0, 0, 4, 16, 64}[m.random.IntN(5)] }

// fill puts something below a port.
func (m *machine) fill(bus string, depth int) {
	room := mostDisks - m.disks
	switch n := m.random.IntN(6); {
	case room == 0 || n == 0:
	case n < 3 && depth < 2:
		for _, down := range m.switches(bus, 1+m.random.IntN(3)) {
			m.fill(down, depth+1)
		}
	case n == 3 && room > 1:
		m.disk(bus, m.someMemory(), ",addr=0.0,multifunction=on")
		m.disk(bus, m.someMemory(), ",addr=0.1")
	default:
		m.disk(bus, m.someMemory(), "")
	}
}
