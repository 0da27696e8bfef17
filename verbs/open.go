package verbs

import (
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// The provider that stands behind Open and Devices is chosen here and nowhere
// else: the software device.

func openProvider(name string, cfg *provider.Config) (provider.Device, error) {
	d, err := device.Open(name, cfg)
	if err != nil {
		return nil, err // and no interface around a nil device
	}
	return d, nil
}

func listResources(brief bool) ([]ib.DeviceResources, error) { return device.Resources(brief) }

func listProviders() ([]ib.DeviceInfo, error) { return device.List() }
