package verbs

import "github.com/verbena-rdma/verbena/ib"

// What processes have of devices: see Resources.
type (
	// DeviceResources is a device, by its first address.
	DeviceResources = ib.DeviceResources
	// ProcessResources is what one process has of it.
	ProcessResources = ib.ProcessResources
	// QPResource is a queue pair and its traffic.
	QPResource = ib.QPResource
	// MRResource is a memory region.
	MRResource = ib.MRResource
)

// Resources returns what every process of this user on this host, in this
// network namespace, has of the devices that it has open: queue pairs, regions,
// traffic. It asks the processes, so it shows a moment of each, not the same one.
// Devices that were opened with LinkLoop are their process's own and not listed.
func Resources() ([]DeviceResources, error) { return listResources() }
