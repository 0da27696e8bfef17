package p2p

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Address is the address of a PCI function, as in "0000:01:00.0".
type Address struct {
	Domain   uint32
	Bus      uint8
	Device   uint8 // 0 to 31
	Function uint8 // 0 to 7
}

// ParseAddress reads "0000:01:00.0". The domain may have up to eight digits, and may be left out.
func ParseAddress(s string) (Address, error) {
	var a Address
	rest := s
	if strings.Count(s, ":") == 2 {
		domain, after, _ := strings.Cut(s, ":")
		if len(domain) < 4 || len(domain) > 8 {
			return Address{}, fmt.Errorf("PCI address %q: the domain has 4 to 8 digits", s)
		}
		d, err := strconv.ParseUint(domain, 16, 32)
		if err != nil {
			return Address{}, fmt.Errorf("PCI address %q: the domain is no hexadecimal number", s)
		}
		a.Domain, rest = uint32(d), after
	}
	if len(rest) != len("00:00.0") || rest[2] != ':' || rest[5] != '.' {
		return Address{}, fmt.Errorf("PCI address %q: want domain:bus:device.function, as in 0000:01:00.0", s)
	}
	bus, err1 := strconv.ParseUint(rest[:2], 16, 8)
	device, err2 := strconv.ParseUint(rest[3:5], 16, 5)
	function, err3 := strconv.ParseUint(rest[6:], 16, 3)
	if err1 != nil || err2 != nil || err3 != nil {
		return Address{}, fmt.Errorf("PCI address %q: a bus is 00 to ff, a device 00 to 1f, a function 0 to 7", s)
	}
	a.Bus, a.Device, a.Function = uint8(bus), uint8(device), uint8(function)
	return a, nil
}

// String returns the address as the kernel writes it.
func (a Address) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.%x", a.Domain, a.Bus, a.Device, a.Function)
}

// Compare orders addresses by domain, bus, device and function.
func (a Address) Compare(b Address) int {
	return cmp.Or(cmp.Compare(a.Domain, b.Domain), cmp.Compare(a.Bus, b.Bus), cmp.Compare(a.devfn(), b.devfn()))
}

// devfn returns device and function in one byte, as the kernel numbers the functions of a bus.
func (a Address) devfn() uint8 { return a.Device<<3 | a.Function }

// SameDevice reports whether two functions are of one device.
func (a Address) SameDevice(b Address) bool {
	return a.Domain == b.Domain && a.Bus == b.Bus && a.Device == b.Device
}

// MarshalText writes the address, for JSON.
func (a Address) MarshalText() ([]byte, error) { return []byte(a.String()), nil }

// UnmarshalText reads it.
func (a *Address) UnmarshalText(b []byte) error {
	parsed, err := ParseAddress(string(b))
	if err != nil {
		return err
	}
	*a = parsed
	return nil
}

// ID is what kind of function it is: the vendor's number and the vendor's number of the device.
type ID struct{ Vendor, Device uint16 }

// String returns the numbers as lspci does: "8086:2030".
func (id ID) String() string { return fmt.Sprintf("%04x:%04x", id.Vendor, id.Device) }

// MarshalText writes the numbers, for JSON.
func (id ID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads them.
func (id *ID) UnmarshalText(b []byte) error {
	vendor, device, ok := strings.Cut(string(b), ":")
	v, err1 := strconv.ParseUint(vendor, 16, 16)
	d, err2 := strconv.ParseUint(device, 16, 16)
	if !ok || err1 != nil || err2 != nil {
		return fmt.Errorf("PCI ids %q: want vendor:device, as in 8086:2030", b)
	}
	*id = ID{uint16(v), uint16(d)}
	return nil
}

// Hex is a number that JSON has as a string, in hexadecimal: readers of JSON cut numbers that are
// longer than 53 bits.
type Hex uint64

// String returns the number with 0x before it.
func (h Hex) String() string { return "0x" + strconv.FormatUint(uint64(h), 16) }

// MarshalText writes the number, for JSON.
func (h Hex) MarshalText() ([]byte, error) { return []byte(h.String()), nil }

// UnmarshalText reads it: hexadecimal with 0x before it, decimal without.
func (h *Hex) UnmarshalText(b []byte) error {
	n, err := strconv.ParseUint(string(b), 0, 64)
	if err != nil {
		return fmt.Errorf("number %q: want 64 bits, as in 0x380000000000", b)
	}
	*h = Hex(n)
	return nil
}
