package verbs

import (
	"context"
	"net/netip"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Device is an open device: the root of everything else. See ibv_open_device(3).
type Device struct {
	p provider.Device
}

// Counter is one named number of a device or a queue pair. Counters only grow.
type Counter struct {
	Name  string
	Value uint64
}

// Devices lists the devices that can be opened: one for each network interface
// that is up and has an address, loopback included. The order, and with it the
// names, follow the interfaces' indexes, except that loopback comes last. See
// ibv_get_device_list(3).
//
// Errors: the system's errno, such as EMFILE, if the interfaces cannot be read; EIO
// if the system returns none.
func Devices() ([]DeviceInfo, error) { return listProviders() }

// Open opens a device. The name is one of
//
//   - "": the first of 127.77.0.1 to 127.77.0.254 that is free. Every program on
//     a Linux host may use these loopback addresses without setting anything up,
//     so this always works, for peers on the same host;
//   - an IP address of this host, as "192.0.2.7" or "2001:db8::7";
//   - the name of a device that [Devices] lists, as "verbena0";
//   - the name of a network interface, as "eth0".
//
// Several devices may be open in one process, each on an address of its own.
// Processes of one user that open the same addresses share the device, as they would
// share an adapter; the name "" always opens a device that no other process has.
// A nil cfg means defaults.
//
// Errors:
//
//   - EINVAL if the Link is unknown, a limit or the window is negative, or a device
//     cannot have the address (unspecified, multicast, IPv6 link-local, given twice);
//   - ENODEV if no device or interface of that name is up and has an address;
//   - EADDRNOTAVAIL if an address is not one of this host;
//   - EADDRINUSE if this process has a device on the address already, another user
//     or another program has taken the address, or a process has it in a device with
//     other addresses; for "" if all 254 are taken;
//   - EUSERS if as many processes as possible share the device;
//   - EPROTONOSUPPORT if a process that shares it runs another version of Verbena;
//   - EMSGSIZE if the interface's MTU is too small for the smallest packets;
//   - ENOENT, EACCES and the like if the PCAP file cannot be made;
//   - EMFILE and ENFILE if there is no descriptor left for the sockets.
func Open(name string, cfg *Config) (*Device, error) {
	p, err := openProvider(name, cfg.provider())
	if err != nil {
		return nil, err
	}
	return &Device{p: p}, nil
}

func (d *Device) ok() bool { return d != nil && d.p != nil }

// invalid returns the error of a call on, or with, an object that is nil.
func invalid(op, what string) error { return ib.Errorf(op, syscall.EINVAL, "%s", what) }

// Name returns the device's name: that of [DeviceInfo] if it was opened by the name
// of a device or interface, otherwise one that Open has made of its address.
func (d *Device) Name() string { return d.p.Attr().Name }

// Attr returns the device's identity, capabilities and limits. See
// ibv_query_device(3).
func (d *Device) Attr() DeviceAttr { return d.p.Attr() }

// Port returns the attributes of a port. Ports are numbered from 1; a software
// device has one. See ibv_query_port(3).
//
// Errors: EINVAL if there is no such port.
func (d *Device) Port(port int) (PortAttr, error) {
	if !d.ok() {
		return PortAttr{}, invalid("query_port", "nil device")
	}
	return d.p.Port(port)
}

// GIDs returns the device's addresses as GIDs, in the order of their indexes:
// an SGIDIndex is an index of this slice, which is the caller's to keep. See
// ibv_query_gid(3).
func (d *Device) GIDs() []GID { return d.p.GIDs() }

// Addr returns the device's first address.
func (d *Device) Addr() netip.Addr {
	gids := d.p.GIDs()
	if len(gids) == 0 {
		return netip.Addr{}
	}
	return gids[0].Addr()
}

// Counters returns the device's counters, in an order that does not change.
func (d *Device) Counters() []Counter { return counters(d.p.Counters()) }

func counters(from []provider.Counter) []Counter {
	to := make([]Counter, len(from))
	for i, c := range from {
		to[i] = Counter(c)
	}
	return to
}

// NextEvent waits for the next asynchronous event: something that happened
// outside any work request, see [EventType]. Events name the queue pair or
// queue by its number. Each event is returned once, to one caller; unlike in
// ibv_get_async_event(3) there is nothing to acknowledge, and an event may name
// something that was closed meanwhile.
//
// Errors: the context's error when ctx is done; ENODEV when the device is
// closed; EINVAL for a nil device.
func (d *Device) NextEvent(ctx context.Context) (AsyncEvent, error) {
	if !d.ok() {
		return AsyncEvent{}, invalid("get_async_event", "nil device")
	}
	return d.p.NextEvent(ctx)
}

// AllocPD makes a protection domain. See ibv_alloc_pd(3).
//
// Errors: ENOMEM if the device has no more domains (MaxPD in [DeviceAttr]);
// ENODEV if the device is closed; EINVAL for a nil device.
func (d *Device) AllocPD() (*PD, error) {
	if !d.ok() {
		return nil, invalid("alloc_pd", "nil device")
	}
	p, err := d.p.AllocPD()
	if err != nil {
		return nil, err
	}
	return &PD{p: p, dev: d}, nil
}

// CreateChannel makes a completion channel, on which completion queues report
// that something has completed. See ibv_create_comp_channel(3).
//
// Errors: ENOMEM if the device has as many channels as it may have completion
// queues (MaxCQ in [DeviceAttr]); ENODEV if the device is closed; EINVAL for a nil device.
func (d *Device) CreateChannel() (*Channel, error) {
	if !d.ok() {
		return nil, invalid("create_comp_channel", "nil device")
	}
	p, err := d.p.CreateChannel()
	if err != nil {
		return nil, err
	}
	return &Channel{p: p, cqs: make(map[provider.CQ]*CQ)}, nil
}

// CreateCQ makes a completion queue of at least the given number of entries;
// [CQ.Cap] returns how many it has. With a channel the queue can raise events
// there; ch may be nil for a queue that is only polled. See ibv_create_cq(3).
//
// A queue must have room for all completions that are not polled yet. It never
// overflows if the program has no more requests outstanding than the queue has
// entries, counting a request until its completion is polled. A queue that
// overflows is lost: it raises [EventCQErr], and its queue pairs fail.
//
// Errors: EINVAL if entries is less than 1 or more than MaxCQE in [DeviceAttr],
// or the channel belongs to another device or is closed; ENOMEM if the device
// has no more completion queues (MaxCQ); ENODEV if the device is closed; EINVAL
// for a nil device.
func (d *Device) CreateCQ(entries int, ch *Channel) (*CQ, error) {
	if !d.ok() {
		return nil, invalid("create_cq", "nil device")
	}
	if ch == nil {
		p, err := d.p.CreateCQ(entries, nil)
		if err != nil {
			return nil, err
		}
		return &CQ{p: p}, nil
	}
	if !ch.ok() {
		return nil, invalid("create_cq", "channel was not made by CreateChannel")
	}
	p, err := d.p.CreateCQ(entries, ch.p)
	if err != nil {
		return nil, err
	}
	cq := &CQ{p: p, ch: ch}
	ch.add(cq)
	return cq, nil
}

// Close closes the device. If storage is executing a peer's FLUSH, Close waits for
// it. It is idempotent. See ibv_close_device(3).
//
// Errors: EBUSY while an object of the device is open; the device then stays open.
// EINVAL for a nil device. ENOSPC, EIO and the like if the packet capture is not
// complete; the device is closed then.
func (d *Device) Close() error {
	if !d.ok() {
		return invalid("close_device", "nil device")
	}
	return d.p.Close()
}
