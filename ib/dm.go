package ib

// DMClass is a class of device memory.
type DMClass uint8

const (
	// DMPlain: the program only copies to it and from it.
	DMPlain DMClass = iota
	// DMCoherent: the program also accesses it with loads, stores and atomic
	// instructions; these and the device's atomics are atomic towards each other.
	DMCoherent
)

var dmClassNames = [...]string{DMPlain: "plain", DMCoherent: "coherent"}

// String returns the class's name.
func (c DMClass) String() string { return nameOf(dmClassNames[:], int(c), "DMClass") }
