// Package programs runs other people's programs on the drop-in libibverbs: those of
// Debian's ibverbs-utils and perftest, rdma-core's own tests, and a few C programs
// of ours (testdata/*.c) for what no tool does. The tests build the library first.
//
// VERBENA_FULL=1 runs all cases, not only the short form.
package programs
