// Package peermem is PeerDirect: the way by which memory of other devices was registered before
// there were dma-bufs. A driver of such a device is a client ([Client]). A program registers an
// address of that memory like any other (verbs.PD.RegMRAddr, ibv_reg_mr). The address is no
// memory of the process, so registration would fail; then the clients are asked, one by one,
// whether the address is theirs.
//
//	Acquire ─► GetPages ─► DMAMap ─► (accesses) ─► DMAUnmap ─► PutPages ─► Release
//	                                     │             ▲
//	                                     └─ Invalidate ┘  the memory is freed while it is registered
//
// What a client claims becomes a buffer of package dmabuf ([Find]), whose exporter is the client,
// and the region is an importer that pins it. [Register] makes a client known, to the whole
// process.
//
// Restrictions, which are those of vendors' kernels: such regions are not on demand, cannot be
// registered again, and have no memory windows.
package peermem
