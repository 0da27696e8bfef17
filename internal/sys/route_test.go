package sys

import (
	"errors"
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

// SourceTo says what a connection of package net does.
func TestSourceTo(t *testing.T) {
	all := []string{"127.0.0.1", "127.0.0.9", "::1"}
	interfaces, err := net.Interfaces()
	if err != nil {
		t.Fatal(err)
	}
	for i := range interfaces {
		addrs, err := interfaces[i].Addrs()
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range addrs {
			ip := netip.MustParsePrefix(a.String()).Addr()
			if ip.IsLinkLocalUnicast() && ip.Is6() {
				ip = ip.WithZone(interfaces[i].Name)
			}
			all = append(all, ip.String())
		}
	}
	asked := 0
	for _, s := range all {
		to := netip.AddrPortFrom(netip.MustParseAddr(s), 4791)
		c, want := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(to))
		got, err := SourceTo(to)
		if want != nil {
			if err == nil {
				t.Errorf("%v: %v, want %v", to, got, want)
			}
			continue
		}
		asked++
		if own := c.LocalAddr().(*net.UDPAddr).AddrPort().Addr(); err != nil || got != own {
			t.Errorf("%v: %v, %v, want %v", to, got, err, own)
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	if asked == 0 {
		t.Error("there is nothing to ask for")
	}
	if got, err := SourceTo(netip.MustParseAddrPort("255.255.255.255:4791")); !errors.Is(err, unix.EACCES) {
		t.Errorf("broadcast: %v, %v", got, err)
	}
	if got, err := SourceTo(netip.MustParseAddrPort("[fe80::1%nowhere]:4791")); err == nil {
		t.Errorf("no such interface: %v", got)
	}
}
