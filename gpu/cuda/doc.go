// Package cuda is memory of NVIDIA's GPUs for Go programs: to allocate, to fill and read, to share with other
// processes, and to register for RDMA. It needs NVIDIA's driver (libcuda.so.1), which it loads when it is first
// used, and neither cgo nor the CUDA toolkit. The software GPUs of package gpu need no hardware.
//
//	dev, err := cuda.Open(0)
//	buf, err := dev.Alloc(64 << 20)
//	mr, err := pd.RegGPU(buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite) // a *verbs.PD
//
// # Where memory comes from
//
//	Device.Alloc           cuMemAlloc; other processes open it by an IPCHandle
//	Device.AllocShareable  cuMemCreate; other processes open it by a descriptor
//	Device.OpenIPC, Import what another process has allocated
//	Device.Adopt           what something else in this process has allocated: a library in C, cgo
//
// Bytes between memory of one GPU stay there, also between processes. Bytes to and from the host go by the GPU's
// copy engines, in place if the memory was allocated by PD.AllocMR of package verbs or is a device's own.
//
// # When memory is freed
//
// [Buffer.Free] first ends the device's accesses: a peer's later requests end in access errors, and
// nothing goes wrong on the GPU. The owner of memory that was adopted frees it. Call Free of the adopted Buffer
// before that: it ends the accesses, and frees nothing. Without it each request still compares the number that the driver gives an
// allocation, and fails if it has changed, but a copy that is under way at that moment may fail in the driver, which ends
// the context's usefulness.
package cuda
