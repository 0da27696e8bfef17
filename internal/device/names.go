package device

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

// List names the devices that can be opened: one for each network interface
// that is up and has an address. The loopback interface comes last: most programs take
// the first.
func List() ([]ib.DeviceInfo, error) {
	ifs, err := net.Interfaces()
	if err != nil {
		return nil, opError("get_device_list", err)
	}
	slices.SortStableFunc(ifs, func(a, b net.Interface) int { return int(a.Flags&net.FlagLoopback) - int(b.Flags&net.FlagLoopback) })
	var list []ib.DeviceInfo
	for _, i := range ifs {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := interfaceAddrs(i)
		if err != nil {
			return nil, opError("get_device_list", err)
		}
		if len(addrs) > 0 {
			list = append(list, ib.DeviceInfo{Name: fmt.Sprintf("verbena%d", len(list)), Interface: i.Name, Addrs: addrs})
		}
	}
	return list, nil
}

// interfaceAddrs returns an interface's addresses, IPv4 first. IPv6 link-local
// ones are left out: a GID has no zone.
func interfaceAddrs(i net.Interface) ([]netip.Addr, error) {
	all, err := i.Addrs() // none, if the interface went away
	if err != nil {
		return nil, err
	}
	var v4, v6 []netip.Addr
	for _, a := range all {
		n, ok := a.(*net.IPNet)
		if !ok {
			continue
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		if ip = ip.Unmap(); !ok || ip.IsLinkLocalUnicast() && ip.Is6() {
			continue
		}
		if ip.Is4() {
			v4 = append(v4, ip)
		} else {
			v6 = append(v6, ip)
		}
	}
	return append(v4, v6...), nil
}

// resolve returns the addresses that a name stands for, as a list of lists to try one after
// the other, and the name of the device if it has one. Explicit addresses take precedence; the
// empty name is the first free one of 127.77.0.1 to 127.77.0.254, which work wherever there is
// a loopback interface, without any set-up.
func resolve(name string, addrs []netip.Addr) (string, [][]netip.Addr, error) {
	if len(addrs) > 0 {
		for i, a := range addrs {
			if a = a.Unmap(); !a.IsValid() || a.IsUnspecified() || a.IsMulticast() {
				return "", nil, ib.Errorf("open_device", syscall.EINVAL, "%v is not an address that a device can have", a)
			}
			addrs[i] = addrs[i].Unmap()
		}
		return name, [][]netip.Addr{addrs}, nil
	}
	if name == "" {
		var tries [][]netip.Addr
		for i := byte(1); i < 255; i++ {
			tries = append(tries, []netip.Addr{netip.AddrFrom4([4]byte{127, 77, 0, i})})
		}
		return "", tries, nil
	}
	if a, err := netip.ParseAddr(name); err == nil {
		return resolve("", []netip.Addr{a})
	}
	list, err := List()
	if err != nil {
		return "", nil, err
	}
	for _, d := range list {
		if name == d.Name || name == d.Interface {
			return d.Name, [][]netip.Addr{d.Addrs}, nil
		}
	}
	return "", nil, ib.Errorf("open_device", syscall.ENODEV, "no device, interface or address is called %q", name)
}

// interfaceOf returns the name of the interface that an address belongs to.
func interfaceOf(a netip.Addr) string {
	list, err := List()
	if err != nil {
		return ""
	}
	for _, d := range list {
		for _, b := range d.Addrs {
			if a == b || a.IsLoopback() && b.IsLoopback() {
				return d.Interface
			}
		}
	}
	return ""
}

func isInUse(err error) bool { return errors.Is(err, syscall.EADDRINUSE) }

// opened are the open devices of this process, as a list that never changes: it is
// replaced, under the registry's lock.
var opened atomic.Pointer[[]*Device]

func openDevices() []*Device {
	if all := opened.Load(); all != nil {
		return *all
	}
	return nil
}

// registry is the open devices of this process by address: the loop link reaches their queue
// pairs.
var registry = struct {
	mu     sync.Mutex // guards byAddr
	byAddr map[netip.Addr]*Device
}{byAddr: make(map[netip.Addr]*Device)}

func register(d *Device) error {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	for _, a := range d.addrs {
		if registry.byAddr[a] != nil {
			return ib.Errorf("open_device", syscall.EADDRINUSE, "this process has a device at %v already", a)
		}
	}
	for _, a := range d.addrs {
		registry.byAddr[a] = d
	}
	all := append(slices.Clone(openDevices()), d)
	opened.Store(&all)
	return nil
}

func unregister(d *Device) {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(openDevices()), func(o *Device) bool { return o == d })
	opened.Store(&all)
	for _, a := range d.addrs {
		if registry.byAddr[a] == d {
			delete(registry.byAddr, a)
		}
	}
}

func lookupDevice(a netip.Addr) *Device {
	registry.mu.Lock()
	defer registry.mu.Unlock()
	return registry.byAddr[a]
}
