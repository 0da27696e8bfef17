package cm

import (
	"math"
	"net/netip"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

// How much private data a message has room for. The receiver gets all of that room: what the sender
// has put there, then zeros.
const (
	MaxDialPrivate    = 56  // from Dial to the listener
	MaxAcceptPrivate  = 196 // from the listener back
	MaxRejectPrivate  = 148 // with a refusal
	MaxResolvePrivate = 180 // from Resolve to the listener
	MaxAnswerPrivate  = 136 // from there back
)

// Config is how connections are made. A nil *Config, and the zero value of each field, mean the
// default. The package does not change a Config, and keeps copies.
type Config struct {
	// Device is the device that the connection is made from. Nil: the package opens the one that has
	// the local address, shares it among its users, and closes it with the last of them. A program
	// that has opened that device itself names it here: a process opens a device once.
	Device *verbs.Device

	// Local is the local address of Dial, Resolve and Join; port 0: any. Zero: the one from which the
	// destination is reached; for Join the device's first.
	Local netip.AddrPort

	// PD is the protection domain of the queue pair. Nil: the connection makes one of its own. A
	// domain needs the Device that it is of.
	PD *verbs.PD

	// SendCQ and RecvCQ are the completion queues. Nil: the connection makes one, for whichever is
	// missing, with room for all requests that the queue pair can have.
	SendCQ, RecvCQ *verbs.CQ

	// Notify gives the completion queue that the connection makes a channel, [Conn.Channel], for programs that wait for
	// completions instead of polling.
	Notify bool

	// SRQ is where receives are taken from; it needs a RecvCQ. Nil: the queue pair's own queue.
	SRQ *verbs.SRQ

	// Type is the type of the queue pair: RC or UC. Zero: RC.
	Type verbs.QPType

	// Cap are the sizes of the queue pair. All zero: 64 sends and 64 receives of 4 pieces each, and 64
	// bytes of inline data.
	Cap verbs.QPCap

	// SignalAll makes every send request produce a completion.
	SignalAll bool

	// Setup is called when the queue pair takes receives and the peer cannot send yet: the place to
	// post the first ones, and for [Conn.SetPrivate]. An error of it refuses the connection. Dial may
	// call it again, with another queue pair, if the peer refuses the first for [ReasonStale]. Nil:
	// nothing is done.
	Setup func(*Conn) error

	// Private is what the peer is told: at most MaxDialPrivate bytes in Dial, MaxAcceptPrivate in
	// Accept, MaxResolvePrivate in Resolve, MaxAnswerPrivate in Announce.
	Private []byte

	// Access is what the peer may do to regions that allow it too. Zero: all that the type can do, as
	// in [verbs.ConnectConfig]. READs and atomics also need ResponderResources.
	Access verbs.Access

	// ResponderResources is how many READs and atomics of the peer are served at a time, and
	// InitiatorDepth how many are issued to it. Zero: 16, or the device's limit if that is lower;
	// negative: none. The two sides agree on the lower of what each can do.
	ResponderResources, InitiatorDepth int

	// RetryCount is how often requests are sent again when no acknowledgement comes: Dial decides, for
	// both sides. RNRRetry is how often the peer sends again when this side has no receive posted; 7
	// is for ever. Zero: 7; negative: never.
	RetryCount, RNRRetry int

	// MinRNRTimer is how long the peer is to wait before it sends again, when this side has no receive
	// posted: a code of IBA table 45. Zero: 12, 0.64 ms.
	MinRNRTimer uint8

	// AckTimeout is how long to wait for an acknowledgement, 4.096 µs × 2^AckTimeout. Zero: what the
	// two devices say of themselves.
	AckTimeout uint8

	// TOS is the traffic class of the packets: DSCP and ECN bits.
	TOS uint8

	// Backlog is how many requests wait in a listener at a time. One more takes the place of a random
	// one, or is dropped; the peers repeat them. Zero: 1024, which is the most.
	Backlog int

	// Answer is asked what Announce tells a peer that resolves the service: private data, or false to
	// refuse. It is called by one goroutine, one call at a time. Nil: Private, to all.
	Answer func(from netip.AddrPort, private []byte) (answer []byte, ok bool)
}

// The defaults of Config.
const (
	defaultRDAtomic    = 16
	defaultRetries     = 7
	defaultMinRNRTimer = 12
)

var defaultCap = verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4, MaxInlineData: 64}

// filled returns a copy with the defaults that need no device, or an error for what cannot be.
func (c *Config) filled(op string, room int) (Config, error) {
	var f Config
	if c != nil {
		f = *c
	}
	if f.Type == 0 {
		f.Type = verbs.RC
	}
	if f.Cap == (verbs.QPCap{}) {
		f.Cap = defaultCap
		if f.SRQ != nil {
			f.Cap.MaxRecvWR, f.Cap.MaxRecvSGE = 0, 0
		}
	}
	if f.MinRNRTimer == 0 {
		f.MinRNRTimer = defaultMinRNRTimer
	}
	if f.Access == 0 {
		f.Access = verbs.AccessRemote | verbs.AccessFlush
		if f.Type == verbs.UC {
			f.Access = verbs.AccessRemoteWrite
		}
	}
	switch {
	case f.Type != verbs.RC && f.Type != verbs.UC:
		return f, invalid(op, "a connection of type %v", f.Type)
	case len(f.Private) > room:
		return f, tooLong(op, len(f.Private), room)
	case f.Device == nil && (f.PD != nil || f.SendCQ != nil || f.RecvCQ != nil || f.SRQ != nil):
		return f, invalid(op, "Config has objects of a device, but no Device")
	case f.SRQ != nil && f.RecvCQ == nil:
		return f, invalid(op, "an SRQ needs a RecvCQ")
	case f.MinRNRTimer > 31 || f.AckTimeout > 31:
		return f, invalid(op, "MinRNRTimer %d, AckTimeout %d: both have 5 bits", f.MinRNRTimer, f.AckTimeout)
	}
	f.Private = append([]byte(nil), f.Private...)
	return f, nil
}

// count returns a number of Config as the peer is told: 0 stands for the default, less for none.
func count(n, byDefault, most int) uint8 {
	switch {
	case n == 0:
		n = byDefault
	case n < 0:
		n = 0
	}
	return uint8(max(0, min(n, most, math.MaxUint8)))
}

// params returns what this side asks for.
func (c *Config) params(a *verbs.DeviceAttr) cma.ConnParam {
	p := cma.ConnParam{Private: c.Private, SRQ: c.SRQ != nil, FlowControl: true,
		RetryCount: count(c.RetryCount, defaultRetries, 7), RNRRetry: count(c.RNRRetry, defaultRetries, 7)}
	if c.Type == verbs.RC {
		p.ResponderResources = count(c.ResponderResources, defaultRDAtomic, a.MaxQPRDAtom)
		p.InitiatorDepth = count(c.InitiatorDepth, defaultRDAtomic, a.MaxQPInitRDAtom)
	}
	return p
}

// options sets the options of an id.
func (c *Config) options(id *cma.ID) error {
	if err := id.SetOption(cma.OptionTOS, int(c.TOS)); err != nil || c.AckTimeout == 0 || c.Type != verbs.RC {
		return err
	}
	return id.SetOption(cma.OptionACKTimeout, int(c.AckTimeout))
}
