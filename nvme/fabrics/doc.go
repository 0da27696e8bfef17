// Package fabrics is NVMe over RDMA: a target that serves subsystems of package nvme to hosts, and a host. Both speak to
// anybody's: Linux's nvme-rdma and nvmet-rdma are the other side in tests.
//
//	t, err := fabrics.Listen(ctx, "192.0.2.1:4420", fabrics.TargetConfig{Subsystems: []*nvme.Subsystem{disks}})
//
//	h, err := fabrics.Dial(ctx, "192.0.2.1:4420", fabrics.HostConfig{NQN: "nqn.2026-01.io.example:disks"})
//	disk, err := h.Namespace(ctx, 1)
//	n, err := disk.ReadAt(b, 0)
//
// # A command
//
// A queue of commands is a queue pair. The host sends a capsule of 64 bytes, with the data of a short write behind it. For
// other data it says where it lies in its memory, and the target moves it: by READs for a write, by WRITEs for a
// read. Then the target sends the answer, 16 bytes, and takes the host's key back if it was told to.
//
//	host                                target
//	SEND   capsule, key  ─────────────▶ a slot, with memory of the queue's
//	       data          ◀───────────── READ    (a write)
//	                                    the command is executed
//	       data          ◀───────────── WRITE   (a read)
//	       answer        ◀───────────── SEND, or SEND with invalidate
//
// The memory through which data passes is the target's own, or what [TargetConfig.Buffers] gives: that of an NVMe
// controller, so that data goes from the network to the disk without a copy in the host's memory.
package fabrics
