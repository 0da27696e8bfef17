package verbs

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// The provider that stands behind Open and Devices is chosen here and nowhere
// else.

func openProvider(name string, cfg *provider.Config) (provider.Device, error) {
	return nil, ib.Errorf("open_device", syscall.ENODEV, "no provider")
}

func listProviders() ([]ib.DeviceInfo, error) { return nil, nil }
