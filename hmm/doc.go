// Package hmm is one address space for the CPU and devices: pages of the process move to the memory of a software GPU
// (package gpu) and back, and every pointer stays good.
//
//	space, err := hmm.Open(nil)
//	dev, err := space.AddGPU("soft:0", nil)
//	b, err := space.Alloc(1 << 20)
//	b[0] = 1                         // ordinary memory
//	n, err := space.Migrate(b, dev)  // its pages are in VRAM now
//	b[0]++                           // a page fault brings the page home
//
// # Where a page is
//
//	          Migrate, Prefetch, access counters
//	home  ──────────────────────────────────────▶  device-private   the CPU faults, and the page comes home
//	 ▲ │  ──────────────────────────────────────▶  device-coherent  the CPU reads and writes it there
//	 │ └────────────────────────────────────────▶  exclusive        devices alone, until the CPU touches it
//	 └── a touch of the CPU, Migrate(b, nil), a fork, Close
//
// Home is what the kernel has: the package remembers nothing about such a page.
//
// # Devices
//
// A [Mirror] is a range of the space as a device sees it. It reads and writes pages where they lie, faults them in, and has a
// sequence number that changes before a page does, as the kernel's hmm_range_fault and interval notifiers have it. A
// mirror is memory for streams of package gpu (gpu.InUnified) and for RDMA (verbs.PD.RegGPU).
//
// # Rules
//
//   - Memory of the Go heap does not leave. [Space.Alloc] gives memory outside it, which only Close and Unmap free.
//   - Threads in C serve all faults, and wait for nothing in Go: a goroutine that faults cannot be stopped, and a
//     collection waits for it.
//   - Everything else is ordinary memory: mprotect, mremap, munmap, madvise and fork do what they always do.
//
// The document docs/hmm.md has the limits.
package hmm
