/*
 * Order, as a kernel sees it that polls GPU memory while peers write there. In each round a peer writes data, and then a
 * flag; when the kernel sees the flag, all data must be that of the round. The kernel runs all the time: whatever waits
 * for the GPU would wait for the kernel, and the kernel for the bytes.
 *
 * The other cases capture a stream into a graph while traffic goes on.
 *
 * It needs a card, and nvcc. Two processes take turns on a card, some milliseconds each, unless they share it by MPS.
 * CUDA_TEST_ROUNDS is another number of rounds than 10,000.
 */
#include <pthread.h>

#include <cuda_runtime.h>

#include "common.h"

#define RUN(call)                                                                                                      \
	do {                                                                                                           \
		cudaError_t e_ = (call);                                                                               \
		if (e_ != cudaSuccess)                                                                                 \
			failed("%s:%d: %s is %d, %s", __FILE__, __LINE__, #call, (int)e_, cudaGetErrorString(e_));     \
	} while (0)

enum { SLOTS = 4, THREADS = 256, LONGEST = 20 /* seconds that the kernel waits for a flag */, LIMIT = 150 };

/* What the kernel tells, in memory of the host. */
struct seen {
	volatile unsigned long long ack;  /* the last round that it has compared */
	volatile unsigned long long late; /* the round whose flag did not come */
	volatile unsigned long long bad;  /* the first round with wrong data, and the first wrong word that was found */
	volatile unsigned long long where, found;
};

__device__ static unsigned long long mix(unsigned long long x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

__device__ static unsigned long long clock_ns(void)
{
	unsigned long long t;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
	return t;
}

__device__ static unsigned long long acquire(const unsigned long long *p)
{
	unsigned long long v;
	asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
	return v;
}

/* watch waits in each round until the flag is at least the number of the round, and compares the data in the round's slot.
 * Flags are flag_step bytes apart (0: one for all slots), slots slot_step bytes. */
__global__ void watch(const unsigned char *data, size_t slot_step, unsigned words, const unsigned char *flags, size_t flag_step,
		      unsigned long long rounds, unsigned long long seed_, struct seen *seen)
{
	__shared__ int stop;
	for (unsigned long long r = 1; r <= rounds; r++) {
		if (threadIdx.x == 0) {
			const unsigned long long *flag = (const unsigned long long *)(flags + r % SLOTS * flag_step);
			const unsigned long long begin = clock_ns();
			stop = 0;
			while (acquire(flag) < r)
				if (clock_ns() - begin > LONGEST * 1000000000ull) {
					stop = 1;
					break;
				}
		}
		__syncthreads();
		if (stop) {
			if (threadIdx.x == 0)
				seen->late = r;
			return;
		}
		const volatile unsigned long long *word = (const volatile unsigned long long *)(data + r % SLOTS * slot_step);
		const unsigned long long start = mix(seed_ + 0x9e3779b97f4a7c15ull * (r + 1));
		for (unsigned i = threadIdx.x; i < words; i += blockDim.x) {
			unsigned long long got = word[i];
			if (got != mix(start + 8ull * i) && !seen->bad) {
				seen->where = i;
				seen->found = got;
				seen->bad = r;
			}
		}
		__threadfence_system();
		__syncthreads();
		if (threadIdx.x == 0)
			seen->ack = r;
	}
}

__global__ void add_one(unsigned long long *n) { atomicAdd(n, 1ull); }

static uint64_t rounds_wanted(void)
{
	const char *s = getenv("CUDA_TEST_ROUNDS");
	return s && *s ? strtoull(s, NULL, 0) : 10000;
}

/* How the flag comes: a WRITE or an atomic behind the data, the last word of the data itself; and a READ behind all. */
enum shape { FLAG_WRITE, FLAG_ADD, FLAG_INSIDE, FLAG_READ };

/* The writer, node 1, and what it writes to. */
struct stage {
	struct queue q[2];
	struct region data, flag;    /* of node 0: GPU memory */
	struct region source, words; /* of node 1: the data of each slot, and the values of flags */
	struct region back;	     /* of node 1: what READs return */
	uint32_t n;		     /* bytes of data in a slot, without the flag */
	size_t step;
};

static struct request request_of(enum ibv_wr_opcode opcode, const struct region *own, size_t off, uint32_t n, const struct region *to, size_t to_off)
{
	struct request r;
	memset(&r, 0, sizeof r);
	r.opcode = opcode;
	r.piece[0].of = own;
	r.piece[0].off = off;
	r.piece[0].n = n;
	r.to = to->addr + to_off;
	r.rkey = to->rkey;
	return r;
}

/* post_round posts the requests of a round, and returns how many. */
static int post_round(struct stage *s, enum shape shape, uint64_t round)
{
	const size_t slot = round % SLOTS, at = slot * s->step;
	struct request r;
	region_fill(&s->source, at, s->n, round);
	if (shape == FLAG_INSIDE) {
		region_set(&s->source, at + s->n, round);
		r = request_of(IBV_WR_RDMA_WRITE, &s->source, at, s->n + 8, &s->data, at);
		post(&s->q[1], &r);
		return 1;
	}
	r = request_of(IBV_WR_RDMA_WRITE, &s->source, at, s->n, &s->data, at);
	post(&s->q[1], &r);
	if (shape == FLAG_ADD) {
		r = request_of(IBV_WR_ATOMIC_FETCH_AND_ADD, &s->words, slot * 8, 8, &s->flag, 0);
		r.compare = 1;
		post(&s->q[1], &r);
		return 2;
	}
	region_set(&s->words, slot * 8, round);
	r = request_of(IBV_WR_RDMA_WRITE, &s->words, slot * 8, 8, &s->flag, 0);
	post(&s->q[1], &r);
	if (shape != FLAG_READ)
		return 2;
	r = request_of(IBV_WR_RDMA_READ, &s->back, at, s->n, &s->data, at);
	post(&s->q[1], &r);
	return 3;
}

/* ack_of waits until the kernel has compared a round. */
static void ack_of(const struct seen *seen, uint64_t round)
{
	const double limit = now() + LONGEST + 5;
	while (seen->ack < round) {
		if (seen->late)
			failed("round %llu: the kernel has not seen the flag", (unsigned long long)seen->late);
		if (now() > limit)
			failed("round %llu: the kernel does not run", (unsigned long long)round);
	}
}

/* order: arg has the shape, the bytes of data in each round, and the kind of memory that they come from. */
static void order(const struct test *t)
{
	const enum shape shape = (enum shape)t->arg[0];
	const uint64_t rounds = rounds_wanted();
	struct stage s;
	struct seen *seen;
	cudaStream_t stream;
	int waiting = 0;
	memset(&s, 0, sizeof s);
	s.n = (uint32_t)t->arg[1];
	s.step = s.n + 64;
	s.data = region_open(nodes[0], GPU, BY_DMABUF, SLOTS * s.step, ALL_RIGHTS);
	s.flag = region_open(nodes[0], GPU, BY_ADDRESS, 4096, ALL_RIGHTS);
	s.source = region_open(nodes[1], (enum kind)t->arg[2], BY_ADDRESS, SLOTS * s.step, ALL_RIGHTS);
	s.words = region_open(nodes[1], PLAIN, BY_ADDRESS, 4096, ALL_RIGHTS);
	s.back = region_open(nodes[1], PLAIN, BY_ADDRESS, SLOTS * s.step, ALL_RIGHTS);
	queue_link(&s.q[0], nodes[0], &s.q[1], nodes[1], 0);
	unsigned char *data = (unsigned char *)(uintptr_t)node_memory(&s.data)->device, *flags = (unsigned char *)(uintptr_t)node_memory(&s.flag)->device;
	size_t slot_step = s.step, flag_step = 0;
	if (shape == FLAG_INSIDE) {
		flags = data + s.n;
		flag_step = s.step;
	}
	RUN(cudaMemset(data, 0, SLOTS * s.step));
	RUN(cudaMemset((void *)(uintptr_t)node_memory(&s.flag)->device, 0, 4096));
	RUN(cudaDeviceSynchronize());
	RUN(cudaHostAlloc((void **)&seen, sizeof *seen, cudaHostAllocMapped | cudaHostAllocPortable));
	memset((void *)seen, 0, sizeof *seen);
	RUN(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	unsigned words = s.n / 8;
	unsigned long long count = rounds, number = seed;
	void *args[] = {&data, &slot_step, &words, &flags, &flag_step, &count, &number, &seen};
	RUN(cudaLaunchKernel((const void *)watch, dim3(1), dim3(THREADS), args, 0, stream));
	for (uint64_t r = 1; r <= rounds; r++) {
		if (r > SLOTS)
			ack_of(seen, r - SLOTS);
		waiting += post_round(&s, shape, r);
		if (r % SLOTS && r != rounds)
			continue;
		/* Sources are free again when their requests are done. */
		struct outcome out = await(&s.q[1], waiting);
		if (out.status)
			failed("round %llu: a request ends with %s", (unsigned long long)r, ibv_wc_status_str((enum ibv_wc_status)out.status));
		waiting = 0;
		for (uint64_t k = r - (r - 1) % SLOTS; shape == FLAG_READ && k <= r; k++)
			region_check(&s.back, k % SLOTS * s.step, s.n, k);
		if (seen->bad)
			break;
	}
	if (!seen->bad)
		ack_of(seen, rounds);
	if (seen->bad)
		failed("round %llu: word %llu of %u is %#llx, not %#llx", (unsigned long long)seen->bad, (unsigned long long)seen->where, words,
		       (unsigned long long)seen->found, (unsigned long long)pattern_word(seen->bad, 8 * seen->where));
	RUN(cudaStreamSynchronize(stream));
	node_usable(nodes[0]);
}

/* ---- a graph is captured while traffic goes on ---- */

/* capture: arg says whether the thread that captures registers memory, too. */
static void capture(const struct test *t)
{
	enum { SIZE = 300000, TIMES = 100 };
	struct region data = region_open(nodes[0], GPU, BY_ADDRESS, SIZE, ALL_RIGHTS), source = region_open(nodes[1], PLAIN, BY_ADDRESS, SIZE, ALL_RIGHTS);
	struct traffic traffic;
	unsigned long long *number, end = 0;
	void *extra;
	cudaStream_t stream;
	struct queue far;
	memset(&traffic, 0, sizeof traffic);
	traffic.queues = 2;
	traffic.seconds = 8;
	traffic.what = request_of(t->arg[1] ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, &source, 0, SIZE, &data, 0);
	for (int i = 0; i < traffic.queues; i++)
		queue_link(&traffic.q[i], nodes[1], &far, nodes[0], 0);
	RUN(cudaMalloc((void **)&number, sizeof *number));
	RUN(cudaMemset(number, 0, sizeof *number));
	RUN(cudaMalloc(&extra, SIZE));
	RUN(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
	RUN(cudaDeviceSynchronize());
	begin_traffic(nodes[1], &traffic);
	usleep(100000);
	for (int i = 0; i < TIMES; i++) {
		cudaGraph_t graph;
		cudaGraphExec_t exec;
		void *args[] = {&number};
		RUN(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
		for (int k = 0; k < 5; k++) {
			RUN(cudaLaunchKernel((const void *)add_one, dim3(1), dim3(1), args, 0, stream));
			usleep(500);
			if (t->arg[0]) {
				struct ibv_mr *mr = ibv_reg_mr(node_pd(nodes[0]), extra, SIZE, ALL_RIGHTS);
				WANT(mr && !ibv_dereg_mr(mr));
			}
		}
		RUN(cudaStreamEndCapture(stream, &graph));
		RUN(cudaGraphInstantiate(&exec, graph, 0));
		RUN(cudaGraphLaunch(exec, stream));
		RUN(cudaStreamSynchronize(stream));
		RUN(cudaGraphExecDestroy(exec));
		RUN(cudaGraphDestroy(graph));
	}
	struct outcome out = finish(nodes[1]);
	if (out.status)
		failed("the traffic ends with %s", ibv_wc_status_str((enum ibv_wc_status)out.status));
	WANT(out.count > TIMES); /* it went on while the stream was captured */
	RUN(cudaMemcpy(&end, number, sizeof end, cudaMemcpyDeviceToHost));
	WANT(end == 5 * TIMES);
	node_usable(nodes[0]);
}

/* ---- the table ---- */

struct row {
	const char *name;
	void (*run)(const struct test *);
	int arg[3];
};

static const struct row cases[] = {
	{"write-write/512", order, {FLAG_WRITE, 512, PAGE_LOCKED}},
	{"write-write/70000", order, {FLAG_WRITE, 70000, PLAIN}},
	{"write-write/gpu", order, {FLAG_WRITE, 70000, GPU}},
	{"write-add/512", order, {FLAG_ADD, 512, PAGE_LOCKED}},
	{"write-add/70000", order, {FLAG_ADD, 70000, PLAIN}},
	{"inside/504", order, {FLAG_INSIDE, 504, PAGE_LOCKED}},
	{"inside/70000", order, {FLAG_INSIDE, 70000, PLAIN}},
	{"write-write-read/512", order, {FLAG_READ, 512, PAGE_LOCKED}},
	{"write-write-read/70000", order, {FLAG_READ, 70000, PLAIN}},
	{"capture/write", capture, {0, 0}},
	{"capture/read", capture, {0, 1}},
	{"capture/register", capture, {1, 0}},
};

int main(int argc, char **argv)
{
	static struct test tests[2 * COUNT(cases)];
	int n = 0;
	setenv("CUDA_MODULE_LOADING", "EAGER", 0); /* else a kernel may be loaded, and the GPU waited for, while another runs */
	for (int peers = 0; peers < 2; peers++)
		for (int i = 0; i < COUNT(cases); i++) {
			struct test *t = &tests[n++];
			t->run = cases[i].run;
			t->peers = peers;
			t->limit = LIMIT;
			memcpy(t->arg, cases[i].arg, sizeof cases[i].arg);
			snprintf(t->name, sizeof t->name, "%s/%s", cases[i].name, peers ? "two" : "one");
		}
	return run_tests(argc, argv, tests, n);
}
