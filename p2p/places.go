package p2p

import (
	"reflect"
	"sync"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Places says where in a topology the devices of a program are. An exporter of dma-bufs that is given
// its Distance function lets only those importers access its memory in place that reach it.
type Places struct {
	t  *Topology
	mu sync.Mutex // guards at
	at map[any]Address
}

// NewPlaces makes places of a topology.
func NewPlaces(t *Topology) *Places { return &Places{t: t, at: map[any]Address{}} }

// Set says where a device is: a *verbs.Device, a *gpu.Device, or whatever else an importer has as its
// device, if it can be compared.
//
// Errors: ENODEV if the topology has no such function; EINVAL for a device that is nil or cannot be compared.
func (p *Places) Set(device any, at Address) error {
	const op = "p2p_place"
	if p.t.byAddress[at] == nil {
		return ib.Errorf(op, syscall.ENODEV, "%v is no PCI function of this machine", at)
	}
	k := key(device)
	if k == nil || !reflect.TypeOf(k).Comparable() {
		return ib.Errorf(op, syscall.EINVAL, "a device that is nil, or that cannot be compared")
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.at[k] = at
	return nil
}

// key returns what a device is known by. An importer of package verbs is a protection domain or a
// region, and what counts is its device.
func key(device any) any {
	if d, ok := device.(interface{ DMADevice() any }); ok {
		return d.DMADevice()
	}
	if provider.DeviceOf != nil && device != nil {
		if d := provider.DeviceOf(device); d != nil {
			return d
		}
	}
	return device
}

// Of returns where a device is; ok is false if nobody has said it.
func (p *Places) Of(device any) (at Address, ok bool) {
	if own, is := device.(*Provider); is {
		return own.at, own.t == p.t
	}
	k := key(device)
	if k == nil || !reflect.TypeOf(k).Comparable() {
		return Address{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at, ok = p.at[k]
	return at, ok
}

// DistanceFunc returns the Distance function of an exporter, for gpu.Config: the distance from the
// exporter to the device of an importer. A device without a place has no way, as one that is no PCI
// device.
func (p *Places) DistanceFunc(exporter Address) func(device any) int {
	return func(device any) int {
		at, ok := p.Of(device)
		if !ok {
			return -1
		}
		return p.t.quick(exporter, at)
	}
}

// DistanceFunc returns a Distance function for gpu.Config if all importers are at one place.
func (t *Topology) DistanceFunc(exporter, importer Address) func(device any) int {
	return func(any) int { return t.quick(exporter, importer) }
}
