package cm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/cma"
)

var (
	// ErrClosed is the error of calls on a listener or connection that this program has closed.
	ErrClosed = net.ErrClosed

	// ErrRefused is what every [*RejectError] is: the peer has answered, with a refusal.
	ErrRefused = errors.New("connection refused")

	// ErrDisconnected is what [Conn.Err] returns when the peer has ended the connection.
	ErrDisconnected = errors.New("the peer has disconnected")
)

// Reason is why a request was refused: a reason of IBA 12.6.7.2.
type Reason uint16

const (
	ReasonNoQP             Reason = 1  // the peer has no queue pair left
	ReasonNoResources      Reason = 3  // the peer has no memory left
	ReasonTimeout          Reason = 4  // the peer has given up waiting
	ReasonUnsupported      Reason = 5  // the peer does not know such requests
	ReasonNoListener       Reason = 8  // nobody listens there
	ReasonInvalidTransport Reason = 9  // the peer wants another type of queue pair
	ReasonStale            Reason = 10 // the queue pair is part of a connection already
	ReasonInvalidMTU       Reason = 26 // the peer cannot have this path MTU
	ReasonProgram          Reason = 28 // the program there refuses; the private data is its own
)

var reasons = map[Reason]string{
	ReasonNoQP:             "no queue pair left",
	ReasonNoResources:      "no memory left",
	ReasonTimeout:          "the peer has given up waiting",
	ReasonUnsupported:      "the peer does not know such requests",
	ReasonNoListener:       "nobody listens there",
	ReasonInvalidTransport: "the peer wants another type of queue pair",
	ReasonStale:            "the queue pair is part of a connection already",
	ReasonInvalidMTU:       "the peer cannot have this path MTU",
	ReasonProgram:          "the program refuses",
}

// String returns the reason in words.
func (r Reason) String() string {
	if s, ok := reasons[r]; ok {
		return s
	}
	return fmt.Sprintf("reason %d", uint16(r))
}

// RejectError is the error of a request that the peer has refused. errors.Is knows it as [ErrRefused]
// and as syscall.ECONNREFUSED.
type RejectError struct {
	Reason  Reason
	Private []byte // the peer's data, padded with zeros to the room that the message has
}

// Error implements error.
func (e *RejectError) Error() string { return ErrRefused.Error() + ": " + e.Reason.String() }

// Is reports whether target is ErrRefused or ECONNREFUSED.
func (e *RejectError) Is(target error) bool {
	return target == ErrRefused || target == error(syscall.ECONNREFUSED)
}

// Statuses of answers about datagram services (IBA 12.11.2.3), as reasons.
var sidrReasons = map[int]Reason{1: ReasonNoListener, 2: ReasonProgram, 3: ReasonNoQP}

// failure returns the error that an event reports, nil if it reports none.
func failure(e *cma.Event) error {
	switch e.Type {
	case cma.Rejected:
		return &RejectError{Reason: Reason(e.Status), Private: e.Conn.Private}
	case cma.Unreachable, cma.AddrError, cma.RouteError, cma.ConnectError:
		if e.Status < 0 {
			return syscall.Errno(-e.Status)
		}
		if r, ok := sidrReasons[e.Status]; ok {
			return &RejectError{Reason: r, Private: e.UD.Private}
		}
		return &RejectError{Reason: ReasonUnsupported, Private: e.UD.Private}
	case cma.Disconnected:
		return ErrDisconnected
	}
	return nil
}

// addr is an address in a *net.OpError.
type addr netip.AddrPort

func (a addr) Network() string { return "rdma" }
func (a addr) String() string  { return netip.AddrPort(a).String() }

// opError wraps an error of dialing, listening and the like, as package net does.
func opError(op string, at netip.AddrPort, err error) error {
	if err == nil {
		return nil
	}
	e := &net.OpError{Op: op, Net: "rdma", Err: err}
	if at.IsValid() {
		e.Addr = addr(at)
	}
	return e
}

func invalid(op, format string, args ...any) error {
	return ib.Errorf(op, syscall.EINVAL, format, args...)
}

func tooLong(op string, n, room int) error {
	return invalid(op, "%d bytes of private data: there is room for %d", n, room)
}

// lookup returns the addresses that an address stands for. An empty host is the unspecified address.
func lookup(ctx context.Context, address string) ([]netip.AddrPort, error) {
	host, service, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	port, err := net.DefaultResolver.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, err
	}
	if host == "" {
		return []netip.AddrPort{netip.AddrPortFrom(netip.IPv6Unspecified(), uint16(port))}, nil
	}
	ips := make([]netip.Addr, 1)
	// The resolver is not asked for what is an address.
	if ips[0], err = netip.ParseAddr(strings.TrimSuffix(host, ".")); err != nil {
		if ips, err = net.DefaultResolver.LookupNetIP(ctx, "ip", host); err != nil {
			return nil, err
		}
	}
	all := make([]netip.AddrPort, 0, len(ips))
	for _, v4 := range []bool{true, false} { // IPv4 first, as package net listens
		for _, ip := range ips {
			if ip = ip.Unmap(); ip.Is4() == v4 {
				all = append(all, netip.AddrPortFrom(ip, uint16(port)))
			}
		}
	}
	return all, nil
}
