// Package interop holds tests between processes: Verbena against itself on two
// loopback addresses and in two network namespaces, with losses made by the
// kernel and peers that die.
//
// There is no code in it but tests. A test starts its own program again, twice;
// each copy plays one side of a scenario. What the sides tell each other, as
// programs would over a socket of their own, passes through the test by way of
// their standard input and output.
//
// Packages below it test Verbena against others: programs against programs that were
// built for libibverbs, systems against Open MPI, MPICH, OpenSHMEM and uDAPL, migrate
// against QEMU, iser against tgtd and libiscsi, rxe against the Linux kernel's device, in a
// virtual machine that package vm boots, hmmtests against Linux's own tests of HMM.
//
// The tests in namespaces need root and iproute2. Where that is missing they are
// skipped and say so; with CI=true they fail instead.
package interop
