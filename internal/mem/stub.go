package mem

// Table is the key table of a device.
type Table struct{}

// String describes the fault.
func (f Fault) String() string { return "fault" }
