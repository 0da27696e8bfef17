package ib

import (
	"net/netip"
	"syscall"
)

// GID is a RoCE v2 global identifier: an IPv6 address, or an IPv4 address in
// its IPv6-mapped form (::ffff:a.b.c.d).
type GID [16]byte

// GIDFromAddr returns the GID of an IP address. The zone, if any, is dropped.
func GIDFromAddr(a netip.Addr) GID { return a.As16() }

// Addr returns the IP address that the GID stands for, IPv4 unmapped.
func (g GID) Addr() netip.Addr { return netip.AddrFrom16(g).Unmap() }

// IsZero reports whether the GID is unset.
func (g GID) IsZero() bool { return g == GID{} }

// IsMulticast reports whether the GID is that of a multicast group: an IPv4 or IPv6
// multicast address, as RoCE v2 has them.
func (g GID) IsMulticast() bool { return g.Addr().IsMulticast() }

// MulticastQPN is the RemoteQPN of a message to a multicast group.
const MulticastQPN = 0xffffff

// String formats the GID as an IPv6 address, as ibv_devinfo does.
func (g GID) String() string { return netip.AddrFrom16(g).String() }

// MarshalText formats the GID as String does, for JSON among others.
func (g GID) MarshalText() ([]byte, error) { return []byte(g.String()), nil }

// UnmarshalText parses an IPv6 or IPv4 address.
func (g *GID) UnmarshalText(b []byte) error {
	a, err := netip.ParseAddr(string(b))
	if err != nil {
		return err
	}
	*g = GIDFromAddr(a)
	return nil
}

// AHAttr is the address of a peer: what an address handle is made of, and the
// primary path of a connected queue pair.
type AHAttr struct {
	DGID         GID    // the peer's GID
	SGIDIndex    int    // which of the local GIDs to send from
	FlowLabel    uint32 // 20 bits; spreads flows over equal-cost paths
	HopLimit     uint8  // 0 means 64
	TrafficClass uint8  // DSCP and ECN bits
	SL           uint8  // service level; carried, without effect on RoCE
	PortNum      uint8  // the local port; 0 means 1
}

// AH is an address handle: a peer that UD requests can be sent to. Providers
// make it with [NewAH]; it is immutable and may be used by any number of
// requests until it is closed.
type AH struct {
	attr  AHAttr
	impl  any
	close func() error
}

// NewAH makes an address handle, for providers. impl is the provider's own object.
// Close calls close, which must be idempotent.
func NewAH(attr AHAttr, impl any, close func() error) *AH {
	return &AH{attr: attr, impl: impl, close: close}
}

// Attr returns the address that the handle was made of.
func (a *AH) Attr() AHAttr { return a.attr }

// Impl returns the provider's own object.
func (a *AH) Impl() any { return a.impl }

// Close destroys the handle. Requests already posted with it still go out.
func (a *AH) Close() error {
	if a == nil || a.close == nil {
		return Errorf("destroy_ah", syscall.EINVAL, "nil address handle")
	}
	return a.close()
}
