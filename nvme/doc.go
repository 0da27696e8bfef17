// Package nvme executes NVMe commands: a subsystem has namespaces, which are memory, files or anything else that
// implements [Namespace], and controllers, through which hosts use them.
//
//	host ─▶ transport ─▶ Controller.Transfer: how much data, which way
//	             │       Controller.Execute: the command on its data ─▶ Namespace
//	             ◀────── Completion
//
// A transport brings commands to a controller and maps their data. Package nvme/pci is one: registers, queues and
// doorbells, as a PCI function has them. NVMe over RDMA is another. This package does no I/O but the namespaces',
// starts no goroutine and asks nobody for the time.
//
// # Commands
//
//   - I/O: read, write, flush, write zeroes, compare, dataset management (deallocate).
//   - Admin: identify, get and set features, get log page, async event request, abort, keep alive.
//   - Queues, and the commands of fabrics (connect, properties, disconnect), are the transport's. Their formats are here.
//
// The version is 1.4. Metadata, protection information, fused commands, reservations, and management of namespaces are
// not there: identify says so, and a command that asks for them ends in the status that the specification names.
//
// # Namespaces
//
// Logical blocks are kept whole: a read beside a write of the same block returns the old or the new one. What is
// deallocated reads as zeros.
package nvme
