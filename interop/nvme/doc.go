// Package nvme holds our driver of NVMe controllers, and the model that it is tested with, to a controller that others
// have made: the emulator's, in a virtual machine with an IOMMU, by vfio. Resets with commands under way are tested with
// the model alone: QEMU 7.2.22 crashed in 6 of 9 runs (drivertest.Rig.QuietResets).
//
// The guest's program (guest) puts the controller through package drivertest, and writes its results. The test compares
// how commands ended with what is recorded, and looks at the disk afterwards. The model is held to the same record in
// package driver, where each deviation has a reason. VERBENA_RECORD names a file for a new record:
//
//	VERBENA_RECORD=$PWD/nvme/driver/drivertest/recorded.txt go test -count=1 ./interop/nvme
package nvme
