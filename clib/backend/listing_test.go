package main

import (
	"net/netip"
	"slices"
	"testing"
)

func device0(name, iface string, addrs ...string) listed {
	d := listed{name: name, iface: iface}
	for _, a := range addrs {
		d.config.Addrs = append(d.config.Addrs, netip.MustParseAddr(a))
	}
	return d
}

// Interfaces and addresses come and go. What the program knows by a name stays what it is.
func TestListing(t *testing.T) {
	var l listing
	list := func(now ...listed) []listed { return l.withoutLoopback(l.update(now)) }
	want := func(what string, got []listed, want ...listed) {
		t.Helper()
		if !slices.EqualFunc(got, want, func(a, b listed) bool {
			return a.name == b.name && a.iface == b.iface && slices.Equal(a.config.Addrs, b.config.Addrs)
		}) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	lo := device0("verbena0", "lo", "127.0.0.1", "::1")
	want("only the loopback interface", list(lo), lo)

	// The host lists the loopback interface last, with another number.
	hostLo := device0("verbena1", "lo", "127.0.0.1", "::1")
	eth := device0("verbena0", "eth0", "192.0.2.1")
	eth1 := device0("verbena1", "eth0", "192.0.2.1")
	want("an interface appears", list(eth, hostLo), lo, eth1)
	want("again", list(eth, hostLo), lo, eth1)

	more := device0("verbena0", "eth0", "192.0.2.1", "192.0.2.2")
	moreAs1 := device0("verbena1", "eth0", "192.0.2.1", "192.0.2.2")
	want("an address appears on a device that is closed", list(more, hostLo), lo, moreAs1)
	want("and goes", list(eth, hostLo), lo, eth1)
	l.opened("verbena1", eth.config.Addrs)
	second := device0("verbena2", "eth0", "192.0.2.2")
	want("an address appears on a device that is open", list(more, hostLo), lo, eth1, second)
	l.opened("verbena2", second.config.Addrs)
	third := device0("verbena0", "eth0", "192.0.2.1", "192.0.2.2", "fd00::1")
	want("another one", list(third, hostLo), lo, eth1, second, device0("verbena3", "eth0", "fd00::1"))
	want("the interface goes", list(hostLo), lo, eth1, second)
	want("it comes back", list(more, hostLo), lo, eth1, second)
	l.closed("verbena1")
	want("a device is closed", list(more, hostLo), lo, eth1, second)
	l.closed("verbena2")
	want("both are closed", list(more, hostLo), lo, moreAs1)

	var other listing
	if got := other.withoutLoopback(other.update([]listed{eth, hostLo})); len(got) != 1 || got[0].iface != "eth0" {
		t.Errorf("two interfaces: %v", got)
	}
}
