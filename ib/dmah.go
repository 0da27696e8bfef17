package ib

import "fmt"

// TPHMemType is the kind of memory that a steering tag is for. See ibv_alloc_dmah(3).
type TPHMemType uint8

const (
	TPHVolatile   TPHMemType = iota // ordinary memory
	TPHPersistent                   // persistent memory
)

var tphMemTypes = [...]string{"volatile memory", "persistent memory"}

// String names the kind of memory.
func (t TPHMemType) String() string {
	if int(t) < len(tphMemTypes) {
		return tphMemTypes[t]
	}
	return fmt.Sprintf("TPHMemType(%d)", uint8(t))
}

// DMAHConfig is a hint for accesses to memory: PCI Express calls it TLP processing hint.
type DMAHConfig struct {
	// PH is the processing hint, from 0 to 3: both sides use the data, the device does, the
	// processor does, the processor does at once.
	PH uint8
	// Steering says whose cache the data is for. Nil: nobody's in particular.
	Steering *Steering
}

// Steering is a processor and a kind of memory: an adapter's steering tag.
type Steering struct {
	CPU     int
	MemType TPHMemType
}
