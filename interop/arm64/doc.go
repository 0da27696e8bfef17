// Package arm64 tests the drop-in libibverbs on arm64, with Debian's programs and their librdmacm.
//
// The library, the command and the tests of interop/programs are built for arm64 on the host, and run in an
// emulated machine with Debian's arm64 kernel. What passes there on amd64 must pass here. An emulator of
// user programs alone (qemu-user) does not do: it lacks SO_ATTACH_REUSEPORT_CBPF, by which the kernel
// tells apart the processes of one address, and userfaultfd.
//
// VERBENA_ARM64 names other tests than the usual ones: of interop/programs by a regular expression, or
// packages.
//
//	VERBENA_FULL=1 VERBENA_ARM64='^TestRDMACM$/^rstream' go test -v -run 'TestArm64$' ./interop/arm64
//	VERBENA_FULL=1 VERBENA_ARM64='internal/qp' go test -v -run TestArm64Packages ./interop/arm64
package arm64
