package ib

// DMClass is a class of device memory.
type DMClass uint8

const (
	// DMPlain: the program reaches it by copying to it and from it alone.
	DMPlain DMClass = iota
	// DMCoherent: the program also accesses it directly, with loads, stores and
	// atomic instructions, which are atomic with the device's.
	DMCoherent
)

var dmClassNames = [...]string{DMPlain: "plain", DMCoherent: "coherent"}

// String returns the class's name.
func (c DMClass) String() string { return nameOf(dmClassNames[:], int(c), "DMClass") }
