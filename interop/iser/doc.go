// Package iser has programs of the distribution use disks over iSER, iSCSI over RDMA, on the drop-in libibverbs: the target
// tgtd, the initiators of libiscsi and a small one of our own (testdata/disk.c), and, in a virtual machine, the Linux
// kernel's initiator.
//
// VERBENA_FULL=1 runs all cases, not only the short ones.
package iser
