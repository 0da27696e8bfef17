// Package migrate has QEMU migrate a running guest over RDMA: two QEMU processes of the distribution, unmodified, on the
// drop-in libibverbs.
//
// The guest (guest.go) is a small program that writes to its memory all the time, and finds out if a page is lost, late
// or changed. The test also reads the guest's memory from outside, at the destination.
//
// VERBENA_FULL=1 runs all cases, not only the short ones.
package migrate
