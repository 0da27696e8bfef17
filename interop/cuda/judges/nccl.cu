// NCCL's collectives between processes, checked on the GPU, and their speed.
//
//   nccl RANK RANKS IDFILE COLLECTIVES SIZES [ROUNDS]
//
// COLLECTIVES are names separated by commas, SIZES bytes. As in other programs of this kind the size is that of the
// larger side, and the bus bandwidth is what each rank's link carries: of an all_reduce of n bytes among k ranks
// 2(k-1)/k n. Rank 0 writes the id of the communicator into IDFILE, which the others wait for. Each rank prints
//
//   RESULT collective bytes out|in ranks seconds bus-GB/s wrong
//
// where wrong is how many elements are not what they should be. Values are whole numbers below 2^24, which float32
// adds without rounding, and depend on the sender, the element and the round: bytes of another time or another place
// are wrong.

#include <cuda_runtime.h>
#include <errno.h>
#include <nccl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "ranks.h"

#define CHECK_CUDA(call)                                                                    \
	do {                                                                                \
		cudaError_t e_ = (call);                                                    \
		if (e_ != cudaSuccess)                                                      \
			fail(#call, cudaGetErrorString(e_));                                \
	} while (0)
#define CHECK_NCCL(call)                                                                    \
	do {                                                                                \
		ncclResult_t r_ = (call);                                                   \
		if (r_ != ncclSuccess)                                                      \
			fail(#call, ncclGetErrorString(r_));                                \
	} while (0)

enum kind { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, SEND_RECV, ALL_TO_ALL, KINDS };

static const char *const names[KINDS] = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "sendrecv", "alltoall"};

static int rank, ranks;

static void fail(const char *what, const char *why)
{
	printf("FAIL rank %d: %s: %s\n", rank, what, why);
	fflush(stdout);
	_exit(1);
}

// value is element i of what a rank sends in a round.
__host__ __device__ static inline float value(int sender, size_t i, int round)
{
	return (float)((i + 7 * (size_t)round) % 4093 * (sender + 1) + sender);
}

// expected is element i of what a rank has afterwards. part is how many elements one rank has of a buffer of all.
__host__ __device__ static inline float expected(int kind, size_t i, size_t part, int rank, int ranks, int round)
{
	float sum = 0;
	switch (kind) {
	case ALL_GATHER:
		return value((int)(i / part), i % part, round);
	case BROADCAST:
		return value(ranks - 1, i, round);
	case SEND_RECV:
		return value((rank + ranks - 1) % ranks, i, round);
	case ALL_TO_ALL:
		return value((int)(i / part), rank * part + i % part, round);
	case REDUCE_SCATTER:
		i += rank * part;
	}
	for (int r = 0; r < ranks; r++)
		sum += value(r, i, round);
	return sum;
}

__global__ static void fill(float *p, size_t n, int rank, int round)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i] = value(rank, i, round);
}

__global__ static void blank(float *p, size_t n)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		p[i] = -1;
}

__global__ static void compare(const float *p, size_t n, int kind, size_t part, int rank, int ranks, int round, unsigned long long *wrong)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
		if (p[i] != expected(kind, i, part, rank, ranks, round))
			atomicAdd(wrong, 1ull);
}

// run is one collective of one size: what is sent and received, where, and how it is checked.
struct run {
	int kind;
	bool in_place;
	size_t part, send, recv; // elements
	float *from, *to;
	float *input; // where the sender's values are written: in place it is within the other buffer
};

static float *buffers[2];
static unsigned long long *wrong_dev;
static ncclComm_t comm;
static cudaStream_t stream;

// plan lays out a collective. Sizes are rounded down to whole elements for each rank.
static struct run plan(int kind, size_t bytes, bool in_place)
{
	struct run r = {};
	size_t part = bytes / sizeof(float) / ranks;
	if (part == 0)
		part = 1;
	size_t all = part * ranks;
	r.kind = kind;
	r.in_place = in_place;
	r.part = part;
	r.send = kind == ALL_GATHER ? part : all;
	r.recv = kind == REDUCE_SCATTER ? part : all;
	r.from = buffers[0];
	r.to = buffers[1];
	if (in_place) {
		r.to = r.from;
		if (kind == ALL_GATHER)
			r.from = r.to + rank * part;
		if (kind == REDUCE_SCATTER)
			r.to = r.from + rank * part;
	}
	r.input = r.from;
	return r;
}

static void post(const struct run *r)
{
	int next = (rank + 1) % ranks, before = (rank + ranks - 1) % ranks;
	switch (r->kind) {
	case ALL_REDUCE:
		CHECK_NCCL(ncclAllReduce(r->from, r->to, r->send, ncclFloat, ncclSum, comm, stream));
		break;
	case ALL_GATHER:
		CHECK_NCCL(ncclAllGather(r->from, r->to, r->part, ncclFloat, comm, stream));
		break;
	case REDUCE_SCATTER:
		CHECK_NCCL(ncclReduceScatter(r->from, r->to, r->part, ncclFloat, ncclSum, comm, stream));
		break;
	case BROADCAST:
		CHECK_NCCL(ncclBroadcast(r->from, r->to, r->send, ncclFloat, ranks - 1, comm, stream));
		break;
	case SEND_RECV:
		CHECK_NCCL(ncclGroupStart());
		CHECK_NCCL(ncclSend(r->from, r->send, ncclFloat, next, comm, stream));
		CHECK_NCCL(ncclRecv(r->to, r->recv, ncclFloat, before, comm, stream));
		CHECK_NCCL(ncclGroupEnd());
		break;
	case ALL_TO_ALL:
		CHECK_NCCL(ncclGroupStart());
		for (int p = 0; p < ranks; p++) {
			CHECK_NCCL(ncclSend(r->from + p * r->part, r->part, ncclFloat, p, comm, stream));
			CHECK_NCCL(ncclRecv(r->to + p * r->part, r->part, ncclFloat, p, comm, stream));
		}
		CHECK_NCCL(ncclGroupEnd());
		break;
	}
}

// prepare writes new values, and blanks what is to be received.
static void prepare(const struct run *r, int round)
{
	if (!r->in_place || r->kind == ALL_GATHER)
		blank<<<512, 256, 0, stream>>>(r->to, r->recv);
	fill<<<512, 256, 0, stream>>>(r->input, r->send, rank, round);
	CHECK_CUDA(cudaGetLastError());
}

static unsigned long long check(const struct run *r, int round)
{
	unsigned long long wrong;
	CHECK_CUDA(cudaMemsetAsync(wrong_dev, 0, sizeof wrong, stream));
	compare<<<512, 256, 0, stream>>>(r->to, r->recv, r->kind, r->part, rank, ranks, round, wrong_dev);
	CHECK_CUDA(cudaGetLastError());
	CHECK_CUDA(cudaMemcpyAsync(&wrong, wrong_dev, sizeof wrong, cudaMemcpyDeviceToHost, stream));
	CHECK_CUDA(cudaStreamSynchronize(stream));
	return wrong;
}

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

// bus returns the factor from a collective's bytes to those of the bus.
static double bus(int kind)
{
	if (kind == ALL_REDUCE)
		return 2.0 * (ranks - 1) / ranks;
	return kind == BROADCAST || kind == SEND_RECV ? 1 : (double)(ranks - 1) / ranks;
}

static void measure(int kind, size_t bytes, bool in_place, int rounds)
{
	static int round;
	struct run r = plan(kind, bytes, in_place);
	unsigned long long wrong = 0;
	for (int i = 0; i < 2; i++) { // with other values the second time; and the first is for NCCL to connect
		prepare(&r, ++round);
		post(&r);
		wrong += check(&r, round);
	}
	double start = now();
	for (int i = 0; i < rounds; i++)
		post(&r);
	CHECK_CUDA(cudaStreamSynchronize(stream));
	double seconds = (now() - start) / rounds;
	if (!in_place)
		wrong += check(&r, round); // all rounds had the same input
	size_t moved = (kind == ALL_GATHER ? r.recv : r.send) * sizeof(float);
	printf("RESULT %s %zu %s %d %.9f %.3f %llu\n", names[kind], bytes, in_place ? "in" : "out", ranks, seconds,
	       moved * bus(kind) / seconds / 1e9, wrong);
	fflush(stdout);
}

static void exchange_id(const char *path, ncclUniqueId *id)
{
	if (rank == 0)
		CHECK_NCCL(ncclGetUniqueId(id));
	const char *why = rank == 0 ? write_id(path, id, sizeof *id) : read_id(path, id, sizeof *id, 60);
	if (why)
		fail(path, why);
}

static bool named(const char *list, const char *name)
{
	size_t n = strlen(name);
	for (const char *p = list; (p = strstr(p, name)) != NULL; p += n)
		if ((p == list || p[-1] == ',') && (p[n] == 0 || p[n] == ','))
			return true;
	return false;
}

int main(int argc, char **argv)
{
	if (argc < 6) {
		fprintf(stderr, "usage: nccl RANK RANKS IDFILE COLLECTIVES SIZES [ROUNDS]\n");
		return 2;
	}
	rank = atoi(argv[1]);
	ranks = atoi(argv[2]);
	int most = argc > 6 ? atoi(argv[6]) : 20;
	size_t sizes[64], largest = 0;
	int count = 0;
	for (char *s = strtok(argv[5], ","); s && count < 64; s = strtok(NULL, ",")) {
		sizes[count] = strtoull(s, NULL, 10);
		largest = sizes[count] > largest ? sizes[count] : largest;
		count++;
	}
	ncclUniqueId id;
	CHECK_CUDA(cudaSetDevice(0));
	CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	for (int i = 0; i < 2; i++)
		CHECK_CUDA(cudaMalloc((void **)&buffers[i], largest + ranks * sizeof(float)));
	CHECK_CUDA(cudaMalloc((void **)&wrong_dev, sizeof *wrong_dev));
	exchange_id(argv[3], &id);
	CHECK_NCCL(ncclCommInitRank(&comm, ranks, id, rank));
	for (int kind = 0; kind < KINDS; kind++) {
		if (!named(argv[4], names[kind]))
			continue;
		for (int i = 0; i < count; i++) {
			int rounds = sizes[i] >= 256 << 20 ? 2 : sizes[i] >= 16 << 20 ? 5 : 20;
			rounds = rounds < most ? rounds : most;
			measure(kind, sizes[i], false, rounds);
			if (kind < SEND_RECV) // the other two have no way in place
				measure(kind, sizes[i], true, rounds);
		}
	}
	CHECK_NCCL(ncclCommDestroy(comm));
	printf("DONE rank %d\n", rank);
	return 0;
}
