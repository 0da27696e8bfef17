/*
 * How fast RDMA moves bytes to, from and between GPU memory, beside the GPU's own copies in the same process, and how
 * that compares to what is wanted. Two cases: "one" process, and "two" of one address.
 *
 * One line for each figure:
 *
 *   one  locked -> gpu  WRITE  64Mi x4   52.1 GB/s   copy 54.9   0.95
 *
 * and for each goal a line that begins with PASS or FAIL. With --quick, for software GPUs, the sizes are small, the times
 * short, and no goal is judged.
 */
#include "common.h"

enum { KI = 1 << 10, MI = 1 << 20 };

static bool quick;

/* How long each figure is measured, in seconds. */
static double span(void) { return quick ? 0.01 : 0.15; }

static const size_t sizes[] = {8, 4 * KI, 64 * KI, MI, 16 * MI, 64 * MI, 256 * MI};
enum { SIZES = sizeof sizes / sizeof *sizes };

static const char *text(size_t n)
{
	static char all[4][24];
	static int k;
	char *s = all[k++ % 4];
	if (n >= MI)
		snprintf(s, sizeof all[0], "%zuMi", n / MI);
	else if (n >= KI)
		snprintf(s, sizeof all[0], "%zuKi", n / KI);
	else
		snprintf(s, sizeof all[0], "%zu", n);
	return s;
}

static size_t largest(void) { return quick ? MI : sizes[SIZES - 1]; }

/* ---- the GPU's own copies ---- */

enum direction { H2D, D2H, D2D, DIRECTIONS };
static const char *const direction_names[DIRECTIONS] = {"host to device", "device to host", "device to device"};

/* Seconds for one copy, by direction and size: each is waited for. */
static struct {
	double locked[DIRECTIONS][SIZES], pageable[DIRECTIONS][SIZES];
	double queued[DIRECTIONS]; /* of 1 MiB, one behind the other */
} copies;

static void copy(enum direction d, CUdeviceptr gpu, CUdeviceptr other, void *host, size_t n)
{
	switch (d) {
	case H2D: OK(cuMemcpyHtoD(gpu, host, n)); break;
	case D2H: OK(cuMemcpyDtoH(host, gpu, n)); break;
	default:
		OK(cuMemcpyDtoDAsync(gpu, other, n, NULL));
		OK(cuStreamSynchronize(NULL));
	}
}

/* copy_time returns what one copy takes, if each is waited for. */
static double copy_time(enum direction d, CUdeviceptr gpu, CUdeviceptr other, void *host, size_t n)
{
	for (int i = 0; i < 3; i++)
		copy(d, gpu, other, host, n);
	double begin = now(), t;
	int count = 0;
	do {
		copy(d, gpu, other, host, n);
		count++;
	} while ((t = now() - begin) < span());
	return t / count;
}

/* queued_time returns what one copy of 1 MiB takes, if 64 are queued at a time. */
static double queued_time(enum direction d, CUdeviceptr gpu, CUdeviceptr other, void *host)
{
	enum { QUEUE = 64 };
	CUstream s;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	double begin = now(), t;
	int count = 0;
	do {
		for (int i = 0; i < QUEUE; i++)
			if (d == H2D)
				OK(cuMemcpyHtoDAsync(gpu, host, MI, s));
			else if (d == D2H)
				OK(cuMemcpyDtoHAsync(host, gpu, MI, s));
			else
				OK(cuMemcpyDtoDAsync(gpu, other, MI, s));
		OK(cuStreamSynchronize(s));
		count += QUEUE;
	} while ((t = now() - begin) < span());
	OK(cuStreamDestroy(s));
	return t / count;
}

static void measure_copies(void)
{
	const size_t most = largest();
	CUdeviceptr a, b;
	void *locked, *plain = malloc(most);
	WANT(plain);
	memset(plain, 1, most);
	OK(cuMemAlloc(&a, most));
	OK(cuMemAlloc(&b, most));
	OK(cuMemHostAlloc(&locked, most, CU_MEMHOSTALLOC_PORTABLE));
	for (int d = 0; d < DIRECTIONS; d++) {
		for (int i = 0; i < SIZES && sizes[i] <= most; i++) {
			const size_t n = sizes[i];
			copies.locked[d][i] = copy_time((enum direction)d, a, b, locked, n);
			copies.pageable[d][i] = d == D2D ? 0 : copy_time((enum direction)d, a, b, plain, n);
			printf("copy %-16s %6s   %9.2f us %8.2f GB/s", direction_names[d], text(n), copies.locked[d][i] * 1e6,
			       (double)n / copies.locked[d][i] * 1e-9);
			if (d != D2D)
				printf("   pageable %9.2f us %8.2f GB/s", copies.pageable[d][i] * 1e6,
				       (double)n / copies.pageable[d][i] * 1e-9);
			putchar('\n');
		}
		copies.queued[d] = queued_time((enum direction)d, a, b, locked);
		printf("copy %-16s %6s   %9.2f us %8.2f GB/s   queued\n", direction_names[d], text(MI), copies.queued[d] * 1e6,
		       MI / copies.queued[d] * 1e-9);
	}
	/* The library cuts the last word off a message: what does a copy cost that is not a round number of bytes? */
	for (int i = 3; i < SIZES && sizes[i] <= most; i++) {
		const double less = copy_time(D2D, a, b, locked, sizes[i] - 8);
		printf("copy %-16s %6s less 8 bytes   %9.2f us %8.2f GB/s   %.2f of all\n", direction_names[D2D], text(sizes[i]), less * 1e6,
		       (double)sizes[i] / less * 1e-9, copies.locked[D2D][i] / less);
	}
	OK(cuMemFree(a));
	OK(cuMemFree(b));
	OK(cuMemFreeHost(locked));
	free(plain);
	fflush(stdout);
}

/* ---- RDMA ---- */

static void complete(struct ibv_cq *cq, double limit)
{
	struct ibv_wc wc;
	int k;
	for (unsigned i = 1; !(k = ibv_poll_cq(cq, 1, &wc)); i++)
		if (i % 4096 == 0 && now() > limit)
			failed("no completion in %d s", WAIT_LIMIT);
	WANT(k == 1);
	if (wc.status)
		failed("a request ends with %s", ibv_wc_status_str(wc.status));
}

/* rdma_time returns what one request takes, if so many are under way. */
static double rdma_time(const struct queue *q, enum ibv_wr_opcode opcode, const struct region *a, const struct region *b, size_t n, int depth)
{
	struct ibv_qp *qp = node_qp(q);
	struct ibv_cq *cq = node_cq(q);
	const size_t places = a->size / n < (size_t)depth ? 1 : (size_t)depth;
	struct ibv_sge sge = {.length = (uint32_t)n, .lkey = a->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED}, *bad;
	double begin = 0, t = 0;
	long posted = 0, done = 0, counted = 0;
	wr.wr.rdma.rkey = b->rkey;
	for (bool warm = false; !warm || t < span();) {
		while (posted - done < depth) {
			const size_t off = (size_t)posted % places * n;
			sge.addr = a->addr + off;
			wr.wr.rdma.remote_addr = b->addr + off;
			WANT(!ibv_post_send(qp, &wr, &bad));
			posted++;
		}
		complete(cq, now() + WAIT_LIMIT);
		done++;
		if (!warm && done >= 2 * depth) { /* the first ones open and pin what is used later */
			warm = true;
			begin = now();
			counted = done;
		}
		if (warm)
			t = now() - begin;
	}
	counted = done - counted;
	for (; done < posted; done++)
		complete(cq, now() + WAIT_LIMIT);
	return t / (double)counted;
}

/* What is wanted: a figure of RDMA beside one of the copies. */
enum goal { NONE, OF_COPY, OF_PAGEABLE, OF_QUEUED, MORE_TIME };

static const struct {
	enum goal goal;
	double want;
	const char *words;
} goals[] = {
	[NONE] = {NONE, 0, ""},
	[OF_COPY] = {OF_COPY, 0.9, "of cuMemcpy"},
	[OF_PAGEABLE] = {OF_PAGEABLE, 2, "times cuMemcpy from pageable memory"},
	[OF_QUEUED] = {OF_QUEUED, 0.7, "of queued copies"},
	[MORE_TIME] = {MORE_TIME, 2, "us more than a synchronous copy"},
};

static int missed; /* goals */

/* goal_of returns what is wanted of a figure. */
static enum goal goal_of(enum kind kind, size_t n, int processes)
{
	const bool locked = kind == PAGE_LOCKED || kind == ALLOCATED_MR || kind == DEVICE_MEMORY;
	if (kind == GPU)
		return n == 256 * MI && processes == 2 ? OF_COPY : NONE;
	if (n == 8)
		return locked ? MORE_TIME : NONE;
	if (n == MI)
		return locked ? OF_QUEUED : NONE;
	if (n == 64 * MI)
		return locked ? OF_COPY : OF_PAGEABLE;
	return NONE;
}

/* compare prints a figure beside that of a copy, and whether it is what is wanted. */
static void compare(enum kind kind, enum ibv_wr_opcode opcode, int size, int depth, double seconds, int processes)
{
	const size_t n = sizes[size];
	const char *in = processes == 2 ? "two" : "one", *op = opcode == IBV_WR_RDMA_WRITE ? "WRITE" : "READ";
	const enum direction d = kind == GPU ? D2D : opcode == IBV_WR_RDMA_WRITE ? H2D : D2H;
	const enum goal g = goal_of(kind, n, processes);
	const double beside = g == OF_PAGEABLE ? copies.pageable[d][size] : n == MI && d != D2D ? copies.queued[d] : copies.locked[d][size];
	const double ratio = beside / seconds;
	printf("%s  %-7s %s gpu  %-5s %5s x%-2d  %9.2f us %8.2f GB/s   copy %9.2f us %8.2f GB/s   %.2f\n", in, kind_names[kind],
	       opcode == IBV_WR_RDMA_WRITE ? "->" : "<-", op, text(n), depth, seconds * 1e6, (double)n / seconds * 1e-9, beside * 1e6,
	       (double)n / beside * 1e-9, ratio);
	if (g == NONE || quick)
		return;
	const bool good = g == MORE_TIME ? (seconds - beside) * 1e6 <= goals[g].want : ratio >= goals[g].want;
	missed += !good;
	printf("%s goal/%s/%s/%s/%s: %.2f %s, wanted %s %.1f\n", good ? "PASS" : "FAIL", in, kind_names[kind], op, text(n),
	       g == MORE_TIME ? (seconds - beside) * 1e6 : ratio, goals[g].words, g == MORE_TIME ? "at most" : "at least", goals[g].want);
}

static int depth_for(size_t n) { return n == 8 ? 1 : n <= MI ? 16 : n <= 64 * MI ? 4 : 2; }

/* measure compares all sizes between one kind of memory here and a GPU's memory at the other node. */
static void measure(enum kind kind, int processes)
{
	size_t most = largest();
	struct region a = region_try(nodes[0], kind, BY_ADDRESS, most, ALL_RIGHTS);
	for (; !a.at && kind == DEVICE_MEMORY && most > MI; most /= 4) /* there may be less of it */
		a = region_try(nodes[0], kind, BY_ADDRESS, most / 4, ALL_RIGHTS);
	WANT(a.at);
	struct region b = region_open(nodes[1], GPU, BY_ADDRESS, most, ALL_RIGHTS);
	struct queue q[2];
	queue_link(&q[0], nodes[0], &q[1], nodes[1], 0);
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ};
	for (int k = 0; k < 2; k++)
		for (int i = 0; i < SIZES && sizes[i] <= most; i++) {
			const struct region *from = k ? &b : &a, *to = k ? &a : &b;
			const uint64_t round = (uint64_t)(kind * 100 + k * 10 + i);
			region_fill(from, 0, sizes[i], round);
			compare(kind, opcodes[k], i, depth_for(sizes[i]), rdma_time(&q[0], opcodes[k], &a, &b, sizes[i], depth_for(sizes[i])), processes);
			region_check(to, 0, sizes[i], round);
			fflush(stdout);
		}
	queue_close(&q[0]);
	queue_close(&q[1]);
	region_close(&a);
	region_close(&b);
}

static void speed(const struct test *t)
{
	static const enum kind kinds[] = {PAGE_LOCKED, ALLOCATED_MR, DEVICE_MEMORY, PLAIN, GPU};
	measure_copies();
	for (int i = 0; i < COUNT(kinds); i++)
		measure(kinds[i], t->peers + 1);
	if (missed)
		failed("%d goals are missed", missed);
}

int main(int argc, char **argv)
{
	static const struct test tests[] = {{.name = "one", .run = speed, .limit = 120}, {.name = "two", .run = speed, .peers = 1, .limit = 120}};
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], "--quick")) {
			setenv("CUDA_TEST_QUICK", "1", 1);
			memmove(argv + i, argv + i + 1, (size_t)(argc-- - i) * sizeof *argv);
		}
	quick = getenv("CUDA_TEST_QUICK") != NULL;
	return run_tests(argc, argv, tests, COUNT(tests));
}
