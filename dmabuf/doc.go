// Package dmabuf shares buffers between devices, by the rules of Linux's dma-buf: an
// exporter owns the memory, importers attach to it, map it and access it, and the
// exporter may move or take away what nobody has pinned.
//
// # An exporter's buffer
//
//	Export ─► Attach ─► Map ─► (accesses) ─► Unmap ─► Detach ─► Put ─► Release
//	                     ▲                     │
//	                     └── move: InvalidateMappings, new place
//
// [Export] makes a [Buffer] of an exporter's operations ([Ops]). [Alloc] is an exporter of
// ordinary memory, in one segment or several, that can move, be evicted and be revoked.
//
// # An importer
//
// A static importer ([Buffer.Attach]) holds the buffer in place for as long as it has mapped
// it. A dynamic importer ([Buffer.DynamicAttach]) does not: when the exporter wants to move
// the buffer it calls the importer's InvalidateMappings, and the importer stops its accesses,
// unmaps, and maps again when it needs the memory next. Memory regions of package verbs are
// dynamic importers unless they are told to pin.
//
// # Locks
//
// A buffer has one reservation lock ([Buffer.Reservation]). These rules are the kernel's:
//
//   - The importer holds it for Pin, Unpin, Map, Unmap, Vmap and Vunmap; it does not hold it
//     for Attach, Detach, Get, Put, Mmap, BeginCPUAccess and EndCPUAccess.
//   - The exporter holds it when it calls InvalidateMappings; the importers' callbacks run
//     under it, and do not lock it again.
//   - The exporter's operations run with the lock held or not in the same manner.
//
// [CheckLocks] makes each breach of a rule a panic. Tests switch it on.
//
// # Fences
//
// A [Fence] is work that has not ended yet. A reservation holds fences in four classes
// ([Usage]). Devices wait for Kernel fences before they access memory, and for no others:
// ordering between accesses is explicit, by the program.
package dmabuf
