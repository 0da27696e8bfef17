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
	// MWResource is a memory window.
	MWResource = ib.MWResource
	// DMResource is a buffer of device memory.
	DMResource = ib.DMResource
	// XRCDResource is an XRC domain.
	XRCDResource = ib.XRCDResource
)

// Resources returns what every process of this user on this host, in this
// network namespace, has of the devices that it has open: queue pairs, regions,
// windows, device memory, XRC domains, traffic. It asks the processes, so it shows a moment of each, not the same one.
// Devices that were opened with LinkLoop are their process's own and not listed.
func Resources() ([]DeviceResources, error) { return listResources(false) }

// Statistics is Resources without the lists of queue pairs, regions and so on: what
// counters say, for each process. It costs little, however many objects a process
// has, so it can be asked for again and again.
func Statistics() ([]DeviceResources, error) { return listResources(true) }
