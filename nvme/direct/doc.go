// Package direct moves data between an NVMe disk and memory of other devices: the disk reads and writes a GPU's memory
// itself, and no byte passes through system memory, if the machine has a way for that.
//
//	disk, err := direct.New(direct.Config{Storage: storage, Bus: bus, DMA: host, Topology: t, Places: places, At: nvme0})
//	mem, err := disk.AttachRegion(buffer, direct.AttachConfig{Owner: &gpu0})    // buffer is a *gpu.Buffer
//	err = disk.Read(ctx, mem, 0, 1<<20, 0)                                      // 1 MiB from the start of the disk
//	err = disk.Start(ctx, direct.Transfer{Memory: mem, Length: 1 << 20, Done: fence})
//
// # The way
//
// Attach asks the topology whether the disk reaches the memory (p2p.Topology.Verdict).
//
//   - If it does, the disk is an importer of the memory's dma-buf. Each command has the buffer mapped, at addresses of the
//     bus that are one range, as an IOMMU makes them. The buffer may move between two commands: the next one finds it
//     where it is, in the device's memory or in system memory. While a command is under way a fence in the buffer's
//     reservation keeps it there. With AttachConfig.Pin it stays where it is.
//   - If it does not, Attach fails with EREMOTEIO and the reason; or, if the disk may (Config.Fallback), data goes through
//     system memory, and the owner of the memory copies it.
//
// [Disk.Stats] counts bytes by the way that they went.
//
// # Order
//
// As regions of package verbs, transfers wait for the Kernel fences of a buffer only. Everything else is put in order by
// the program: a [Transfer] begins when a fence is signalled, and signals another one when its data is there.
//
// # When a call returns
//
// Then the disk uses no memory of the call any more, whatever the error is. So a context that ends keeps further commands
// from beginning, and the one under way is waited for; driver.Storage ends those of a controller that hangs, by a reset.
// After an error, some of the data may have been moved.
package direct
