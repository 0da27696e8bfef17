// Package sys holds the system calls of the device, each behind a function that takes
// and returns Go values. Groups of files:
//
//   - The udp link: udp.go and group.go (sockets, multicast), mmsg_unsafe.go (batches of
//     datagrams), poll.go and ppoll_unsafe.go (waiting for them), netif.go (interfaces),
//     steer.go and shelf.go (sockets of several processes at one port).
//   - Processes that share memory and messages: memfd.go, bytelock.go, event.go, scm.go,
//     watch.go, ptrace.go, process_vm_unsafe.go, procmem.go.
//   - Descriptors for buffers: handle*.go (a descriptor that stands for an object of this
//     process), dmabuf_unsafe.go and vgem_unsafe.go (the kernel's dma-bufs).
//   - Pinned memory: mlock.go (locking), procmap.go (what is mapped), file.go (mapped
//     files, and writing them back), sysv_unsafe.go; uring_*.go holds pages.
//   - Memory of the library: alloc_unsafe.go, devmem.go.
//   - On-demand paging: notifier_*.go with userfault_unsafe.go (changes of mappings),
//     pagemap_unsafe.go (present pages), mapping_*.go (mappings), mayblock.go with
//     memfs.go (pages that lie on a device), populate.go and touch_unsafe.go (bringing
//     pages in), paging.go (what this machine offers).
//   - vfio_unsafe.go: PCI devices that belong to this process.
//   - poller*.go: the Go runtime's poller, for the backend of the C library.
//
// The subdirectories are for tests.
package sys
