// Package programs runs programs on the drop-in libibverbs: Debian's ibverbs-utils,
// perftest and UCX, rdma-core's own tests, and C programs of our own (testdata/*.c) for
// what no tool does. The tests build the library first.
//
// VERBENA_FULL=1 runs all cases, not only the short ones.
package programs
