// NVSHMEM between two processes: put, get, barrier and put with signal, posted by the host on a stream; with
// -DKERNELS also put with signal, posted by a kernel. NVSHMEM's proxy thread hands all of them to its transport. A signal
// is an addition there; its transport ibrc has atomics that fetch only with GDRCopy.
//
//   nvshmem RANK RANKS IDFILE
//
// Rank 0 writes the unique id into IDFILE, which the others wait for.

#include <cuda_runtime.h>
#include <errno.h>
#include <nvshmem.h>
#include <nvshmemx.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ranks.h"

#include <vector>

enum { BYTES = 4 << 20, TURNS = 20 };

static int rank, ranks;
static cudaStream_t stream;

static void give_up(const char *what, const char *why)
{
	printf("FAIL %s, rank %d: %s\n", what, rank, why);
	fflush(stdout);
	_exit(1);
}

static void cuda_ok(cudaError_t e, const char *what)
{
	if (e != cudaSuccess)
		give_up(what, cudaGetErrorString(e));
}

static void passed(const char *what)
{
	printf("PASS %s, rank %d\n", what, rank);
	fflush(stdout);
}

static unsigned char byte_of(int sender, int turn, size_t i) { return (unsigned char)(sender * 101 + turn * 31 + i % 251); }

static void wait_stream(const char *what) { cuda_ok(cudaStreamSynchronize(stream), what); }

// barrier returns when all ranks have come, and what they have put is there.
static void barrier(void)
{
	nvshmemx_barrier_all_on_stream(stream);
	wait_stream("barrier");
}

static void fill(void *p, int turn)
{
	std::vector<unsigned char> b(BYTES);
	for (size_t i = 0; i < BYTES; i++)
		b[i] = byte_of(rank, turn, i);
	cuda_ok(cudaMemcpy(p, b.data(), BYTES, cudaMemcpyHostToDevice), "filling a buffer");
	cuda_ok(cudaDeviceSynchronize(), "filling a buffer"); // a copy from pageable memory may be under way when it returns
}

static void compare(const void *p, int sender, int turn, const char *what)
{
	std::vector<unsigned char> b(BYTES);
	cuda_ok(cudaMemcpy(b.data(), p, BYTES, cudaMemcpyDeviceToHost), "reading a buffer");
	for (size_t i = 0; i < BYTES; i++)
		if (b[i] != byte_of(sender, turn, i)) {
			char why[64];
			snprintf(why, sizeof why, "byte %zu of turn %d is wrong", i, turn);
			give_up(what, why);
		}
}

static void exchange_id(const char *path, nvshmemx_uniqueid_t *id)
{
	if (rank == 0 && nvshmemx_get_uniqueid(id) != 0)
		give_up("nvshmemx_get_uniqueid", "it fails");
	const char *why = rank == 0 ? write_id(path, id, sizeof *id) : read_id(path, id, sizeof *id, 30);
	if (why)
		give_up(path, why);
}

#ifdef KERNELS
__global__ static void put_signal(void *to, const void *from, size_t n, uint64_t *signal, int peer)
{
	nvshmem_putmem_signal(to, from, n, signal, 1, NVSHMEM_SIGNAL_ADD, peer);
	nvshmem_quiet();
}

static void from_kernels(unsigned char *from, unsigned char *to, uint64_t *signals, int peer)
{
	cuda_ok(cudaMemset(signals, 0, 16), "cudaMemset");
	cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	barrier();
	for (int turn = 0; turn < TURNS; turn++) {
		fill(from, 300 + turn);
		barrier();
		put_signal<<<1, 1, 0, stream>>>(to, from, BYTES, signals + 1, peer);
		nvshmemx_signal_wait_until_on_stream(signals + 1, NVSHMEM_CMP_GE, turn + 1, stream);
		wait_stream("put with signal of a kernel");
		compare(to, peer, 300 + turn, "put with signal of a kernel");
	}
	passed("put with signal of a kernel");
}
#endif

int main(int argc, char **argv)
{
	nvshmemx_init_attr_t attr = NVSHMEMX_INIT_ATTR_INITIALIZER;
	nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;

	if (argc < 4) {
		fprintf(stderr, "usage: nvshmem RANK RANKS IDFILE\n");
		return 2;
	}
	rank = atoi(argv[1]);
	ranks = atoi(argv[2]);
	cuda_ok(cudaSetDevice(0), "cudaSetDevice");
	exchange_id(argv[3], &id);
	nvshmemx_set_attr_uniqueid_args(rank, ranks, &id, &attr);
#ifdef KERNELS
	int status = nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attr);
#else
	int status = nvshmemx_hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attr);
#endif
	if (status != 0)
		give_up("nvshmemx_init_attr", "it fails");
	cuda_ok(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");

	int peer = (rank + 1) % ranks;
	unsigned char *from = (unsigned char *)nvshmem_malloc(BYTES), *to = (unsigned char *)nvshmem_malloc(BYTES);
	uint64_t *signals = (uint64_t *)nvshmem_malloc(16);
	if (!from || !to || !signals)
		give_up("nvshmem_malloc", "it fails");
	// A peer's memory that is mapped here would be written by the GPU itself, and nothing of ours be tested.
	if (nvshmem_ptr(to, peer) != NULL)
		give_up("nvshmem_ptr", "the peer's memory is mapped: NVSHMEM_DISABLE_P2P is not heeded");
	cuda_ok(cudaMemset(to, 0, BYTES), "cudaMemset");
	cuda_ok(cudaMemset(signals, 0, 16), "cudaMemset");
	cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
	barrier();
	passed("barrier");

	for (int turn = 0; turn < TURNS; turn++) {
		fill(from, turn);
		barrier(); // the peer has looked at the last turn's
		nvshmemx_putmem_on_stream(to, from, BYTES, peer, stream);
		barrier();
		compare(to, peer, turn, "put");
	}
	passed("put");
	for (int turn = 100; turn < 100 + TURNS; turn++) {
		fill(from, turn);
		barrier();
		nvshmemx_getmem_on_stream(to, from, BYTES, peer, stream);
		wait_stream("get");
		compare(to, peer, turn, "get");
		barrier();
	}
	passed("get");
	for (int turn = 0; turn < TURNS; turn++) {
		fill(from, 200 + turn);
		barrier();
		nvshmemx_putmem_signal_on_stream(to, from, BYTES, signals, 1, NVSHMEM_SIGNAL_ADD, peer, stream);
		nvshmemx_signal_wait_until_on_stream(signals, NVSHMEM_CMP_GE, turn + 1, stream);
		wait_stream("put with signal");
		compare(to, peer, 200 + turn, "put with signal");
	}
	barrier();
	passed("put with signal");
#ifdef KERNELS
	from_kernels(from, to, signals, peer);
#endif
	nvshmem_free(signals);
	nvshmem_free(to);
	nvshmem_free(from);
#ifdef KERNELS
	nvshmem_finalize();
#else
	nvshmemx_hostlib_finalize();
#endif
	passed("finalize");
	return 0;
}
