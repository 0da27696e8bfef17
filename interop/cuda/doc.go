// Package cuda judges RDMA on the memory of GPUs by programs in C, testdata/*.c, which call CUDA's driver interface and
// libibverbs. They run unchanged on a card, under "verbena exec PROGRAM", and on software GPUs, where the tests of this
// package run them:
//
//   - memory moves bytes by every operation, between memory of all kinds, registered in all ways
//   - faults has bad arguments, memory that is freed under traffic, and processes that are killed
//   - speed compares RDMA with the copies of the GPU itself
//   - order (order.cu, for nvcc) has kernels that poll the memory to which peers write; it needs a card
//
// judges has whole programs, NCCL, PyTorch and others, by small programs that use them; run.py ("make cuda-test") runs
// all of it on a machine with a card, where a case that is skipped counts as failed.
//
// On a card the programs are built so, the drop-in library being in bin/lib:
//
//	cd interop/cuda/testdata
//	cc -O2 -I ../../../clib/include -I /usr/local/cuda/include -c runner.c kinds.c node.c pattern.c memory.c
//	cc -o memory memory.o runner.o kinds.o node.o pattern.o -L ../../../bin/lib -lmlx5 -libverbs -lcuda -lpthread
//	nvcc -O2 -o order order.cu runner.o kinds.o node.o pattern.o -L ../../../bin/lib -lmlx5 -libverbs -lcuda -lpthread
package cuda
