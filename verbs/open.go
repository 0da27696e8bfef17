package verbs

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// This file alone chooses the provider behind Open, Devices, Resources and
// Statistics: the software device.

func openProvider(name string, cfg *provider.Config) (provider.Device, error) {
	d, err := device.Open(name, cfg)
	if err != nil {
		return nil, err // and no interface around a nil device
	}
	return d, nil
}

func listResources(brief bool) ([]ib.DeviceResources, error) { return device.Resources(brief) }

func listProviders() ([]ib.DeviceInfo, error) { return device.List() }

// Package cm finds the provider's device behind a Device by this.
func init() {
	provider.DeviceOf = func(d any) provider.Device {
		if dev, _ := d.(*Device); dev.ok() {
			return dev.p
		}
		return nil
	}
}
