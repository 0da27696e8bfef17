// Package gpu is a GPU: memory of its own, streams of operations that it executes beside the program, and the
// kernel's rules for sharing that memory with other devices. The software GPUs "soft:0" to "soft:63" are always there;
// they need no hardware.
//
//	dev, err := gpu.Open("soft:0", nil)
//	buf, err := dev.Alloc(1 << 20)
//	stream, err := dev.NewStream()
//	err = stream.Copy(buf.All(), gpu.Host(data))
//	err = stream.Sync(ctx)
//
// # Memory
//
//	          the GPU's addresses: Buffer.Addr, Lookup         a load of the CPU faults here
//	                       │                                   unless the Buffer is mapped
//	   ┌───────────────────┴────────────────────┐
//	VRAM: [ BAR: the CPU and peers reach it ][ only the GPU does ]     system memory
//	                │                                                        ▲
//	                └──────── evicted under pressure, comes back ────────────┘
//
// A [Buffer] has an address that stays. Where its bytes lie changes: what was not used for longest is evicted to
// system memory when VRAM runs out, unless it is pinned or in use. Its next use brings it back, or is served where
// it lies if it would only push out what is used as often.
//
// # Operations
//
// A [Stream] executes copies and simple computations in order. [Stream.Record] returns an [Event]. Streams, and the queue
// pairs of package verbs, wait for events and other fences and signal them (verbs.OpWaitFence, verbs.OpSignalFence),
// so that the program itself waits nowhere. A signal that could never come, as work waits for itself, is refused
// ([ErrDeadlock]).
//
// # Sharing
//
// [Buffer.DMABuf] exports memory, [Device.Import] imports another exporter's, and PD.RegGPU of package verbs registers
// it for RDMA. [Buffer.IPCHandle] and [Device.OpenIPC] share it between processes.
package gpu
