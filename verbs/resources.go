package verbs

import "github.com/verbena-rdma/verbena/ib"

// The objects that processes have on devices: see Resources.
type (
	// DeviceResources is a device, by its first address, and its processes.
	DeviceResources = ib.DeviceResources
	// ProcessResources is what one process has on a device.
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

// Resources returns, for every process of this user on this host and in this network
// namespace, what it has on the devices that it has open: queue pairs, regions,
// windows, device memory, XRC domains, counters. It asks each process, so the answers
// are not of the same moment; a process that is stopped delays it by a few seconds.
// Devices that were opened with LinkLoop are not listed: no other process finds them.
func Resources() ([]DeviceResources, error) { return listResources(false) }

// Statistics is Resources without the lists of queue pairs, regions and so on: only
// the counters of each process. It costs little, however many objects a process has,
// so it can be called again and again.
func Statistics() ([]DeviceResources, error) { return listResources(true) }
