// Package pci is an NVMe controller as a PCI function has it, in software: registers, queues and doorbells, PRP lists
// and SGLs, a controller memory buffer (CMB). Commands are executed by package nvme.
//
//	driver ──registers, doorbells──▶ Controller ──▶ nvme.Controller ──▶ namespaces
//	   │                              │     ▲
//	   └──▶ memory on the Bus ◀───────┘     │ interrupts: Config.Interrupt
//	        queues, PRP lists, data ────────┘
//
// A [Bus] finds the bytes at bus addresses: the host's memory, or a peer's BAR. [Space] is one made of regions. The
// addresses of the controller's own CMB do not reach the bus.
//
// # Time
//
// The controller has one goroutine for each submission queue and one for its registers. It works beside the caller, as
// hardware does: a write of CC or of a doorbell returns at once. Close ends all of them.
//
// # What a driver does wrong
//
//   - A doorbell of no queue, or a value that is not possible: an async event, and nothing else happens.
//   - PRPs, SGLs and uses of the CMB that are not allowed: the status that the specification names.
//   - Data at an address where nothing is: StatusDataTransferError.
//   - Queues at such an address: they are refused; if the memory goes later, CSTS.CFS is set, and the queue stops.
//
// A subsystem reset (NSSR) resets this function alone.
package pci
