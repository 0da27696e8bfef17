/*
 * What goes wrong with GPU memory: bad descriptors, missing rights, memory that is freed or whose context is destroyed
 * while peers use it, processes that are killed or stopped. Requests fail with the status of an adapter, nothing is
 * written where it must not be, and CUDA goes on working in the process.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "common.h"

enum { SIZE = 200000, PAGE = 4096 };

static void link_to(struct queue q[2], struct node *to) { queue_link(&q[0], nodes[0], &q[1], to, 0); }

static struct region host(struct node *at, size_t size) { return region_open(at, PLAIN, BY_ADDRESS, size, ALL_RIGHTS); }

/* works checks that a new connection moves bytes between GPU memory of two nodes. */
static void works(struct node *from, struct node *to, uint64_t round)
{
	struct queue a, b;
	struct region x = region_open(from, GPU, BY_ADDRESS, SIZE, ALL_RIGHTS), y = region_open(to, GPU, BY_DMABUF, SIZE, ALL_RIGHTS);
	queue_link(&a, from, &b, to, 0);
	region_fill(&x, 1, SIZE - 1, round);
	struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&x, 1, SIZE - 1}}, .to = y.addr + 1, .rkey = y.rkey};
	must(&a, &r);
	region_check(&y, 1, SIZE - 1, round);
	r.opcode = IBV_WR_RDMA_READ;
	region_fill(&y, 1, SIZE - 1, round + 1);
	must(&a, &r);
	region_check(&x, 1, SIZE - 1, round + 1);
	queue_close(&a);
	queue_close(&b);
	region_close(&x);
	region_close(&y);
}

/* ---- bad input ---- */

/* refused registers a dma-buf, which must be refused with an errno. */
static void refused(const char *what, uint64_t off, size_t n, uint64_t iova, int fd, int access, int want)
{
	errno = 0;
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(node_pd(nodes[0]), off, n, iova, fd, access);
	if (mr)
		failed("%s is registered", what);
	if (errno != want)
		failed("%s: errno is %d (%s), not %d", what, errno, strerror(errno), want);
}

static void descriptors(const struct test *t)
{
	enum { N = 1 << 20 };
	CUdeviceptr d;
	int pipes[2], mem, file;
	(void)t;
	OK(cuMemAlloc(&d, N));
	int fd = export_range(d, N), part = export_range(d + PAGE, 65536), closed = export_range(d, N);
	WANT(!pipe(pipes) && (mem = memfd_create("plain", MFD_CLOEXEC)) >= 0 && !ftruncate(mem, N));
	WANT((file = open("/proc/self/exe", O_RDONLY | O_CLOEXEC)) >= 0 && !close(closed));
	refused("no descriptor", 0, 0, 0, -1, 0, EBADF); /* by which NCCL asks whether there are dma-bufs */
	refused("no descriptor", 0, N, d, -1, ALL_RIGHTS, EBADF);
	refused("a closed descriptor", 0, N, d, closed, ALL_RIGHTS, EBADF);
	refused("a pipe", 0, N, d, pipes[0], ALL_RIGHTS, EINVAL);
	refused("a file", 0, N, d, file, ALL_RIGHTS, EINVAL);
	refused("a memfd with the GPU's address", 0, N, d, mem, ALL_RIGHTS, EINVAL);
	refused("a memfd with another address", 0, N, 0x100000, mem, ALL_RIGHTS, EINVAL);
	refused("a byte beyond the buffer", 0, N + 1, d, fd, ALL_RIGHTS, EINVAL);
	refused("a page beyond the buffer", PAGE, N, d + PAGE, fd, ALL_RIGHTS, EINVAL);
	refused("a byte beyond a part", 0, 65537, d + PAGE, part, ALL_RIGHTS, EINVAL);
	refused("an offset beyond the buffer", N, PAGE, d, fd, ALL_RIGHTS, EINVAL);
	refused("an offset that wraps around", -(uint64_t)PAGE, 2 * PAGE, d, fd, ALL_RIGHTS, EINVAL);
	refused("an offset within a page, unlike the address", 100, PAGE, d, fd, ALL_RIGHTS, EINVAL);
	refused("no bytes", 0, 0, d, fd, ALL_RIGHTS, EINVAL);
	refused("remote without local write", 0, N, d, fd, IBV_ACCESS_REMOTE_WRITE, EINVAL);
	/* The descriptors are good, still. */
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(node_pd(nodes[0]), 0, N, d, fd, ALL_RIGHTS);
	WANT(mr && !ibv_dereg_mr(mr));
	WANT((mr = ibv_reg_dmabuf_mr(node_pd(nodes[0]), PAGE, 65536 - PAGE, d + 2 * PAGE, part, ALL_RIGHTS)) && !ibv_dereg_mr(mr));
	/* Freed memory is no longer to be had. */
	OK(cuMemFree(d));
	errno = 0;
	mr = ibv_reg_dmabuf_mr(node_pd(nodes[0]), 0, N, d, fd, ALL_RIGHTS);
	WANT(!mr && errno);
	works(nodes[0], nodes[1], 40);
}

static void addresses(const struct test *t)
{
	enum { N = 1 << 20 };
	CUdeviceptr d;
	struct ibv_mr *mr;
	(void)t;
	OK(cuMemAlloc(&d, N));
	errno = 0;
	WANT(!ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)d, (size_t)1 << 40, ALL_RIGHTS) && errno);
	errno = 0;
	WANT(!ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)d, -(size_t)PAGE, ALL_RIGHTS) && errno);
	errno = 0;
	WANT(!ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)d, N, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	WANT((mr = ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)(d + 5), N - 5, ALL_RIGHTS)) && !ibv_dereg_mr(mr));
	OK(cuMemFree(d));
	errno = 0;
	WANT(!ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)d, N, ALL_RIGHTS) && errno);
	node_usable(nodes[0]);
	works(nodes[0], nodes[1], 50);
}

/* ---- rights ---- */

static void rights(const struct test *t)
{
	const enum way way = (enum way)t->arg[0];
	static const struct {
		enum ibv_wr_opcode opcode;
		int access;
		bool allowed;
	} cases[] = {
		{IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC, false},
		{IBV_WR_RDMA_READ, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC, false},
		{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, false},
		{IBV_WR_RDMA_WRITE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, true},
		{IBV_WR_RDMA_READ, IBV_ACCESS_REMOTE_READ, true},
		{IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_ATOMIC, true},
	};
	struct region a = host(nodes[0], SIZE);
	for (int i = 0; i < COUNT(cases); i++) {
		struct queue q[2];
		struct region b = region_open(nodes[1], GPU, way, SIZE, cases[i].access);
		struct request r = {.opcode = cases[i].opcode, .piece = {{&a, 8, i % 3 == 2 ? 8 : 70000}}, .to = b.addr + 8, .rkey = b.rkey, .compare = 1};
		link_to(q, nodes[1]);
		region_fill(&a, 0, SIZE, 60);
		region_fill(&b, 0, SIZE, 61);
		int status = request_on(&q[0], &r).status, want = cases[i].allowed ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR;
		if (status != want)
			failed("opcode %d with rights %#x ends with %s", cases[i].opcode, cases[i].access, ibv_wc_status_str((enum ibv_wc_status)status));
		bool same = region_has(&b, 0, SIZE, 61);
		if (same != (!cases[i].allowed || cases[i].opcode == IBV_WR_RDMA_READ))
			failed("opcode %d with rights %#x: the bytes %s changed", cases[i].opcode, cases[i].access, same ? "were not" : "were");
		if (!cases[i].allowed)
			region_check(&a, 0, SIZE, 60);
		region_close(&b);
	}
	/* A receive needs the right to write, here. */
	struct queue q[2];
	struct region b = region_open(nodes[1], GPU, way, SIZE, IBV_ACCESS_REMOTE_READ);
	struct piece into[MAX_SGE] = {{&b, 0, 100}};
	struct request r = {.opcode = IBV_WR_SEND, .piece = {{&a, 0, 100}}};
	link_to(q, nodes[1]);
	region_fill(&b, 0, SIZE, 62);
	post_receive(&q[1], into);
	post(&q[0], &r);
	WANT(await_receive(&q[1]).status == IBV_WC_LOC_PROT_ERR);
	WANT(await(&q[0], 1).status == IBV_WC_REM_OP_ERR);
	region_check(&b, 0, SIZE, 62);
	/* A request beyond the end of the region, and a key that is none. */
	b = region_open(nodes[1], GPU, way, SIZE, ALL_RIGHTS);
	region_fill(&b, 0, SIZE, 63);
	link_to(q, nodes[1]);
	r = (struct request){.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 0, 100}}, .to = b.addr + SIZE - 99, .rkey = b.rkey};
	WANT(request_on(&q[0], &r).status == IBV_WC_REM_ACCESS_ERR);
	link_to(q, nodes[1]);
	r.to = b.addr;
	r.rkey ^= 0x5a00;
	WANT(request_on(&q[0], &r).status == IBV_WC_REM_ACCESS_ERR);
	region_check(&b, 0, SIZE, 63);
}

/* ---- memory that goes away ---- */

enum { REMOTE, LOCAL };

/* gone frees memory, or destroys its context, under the traffic of a peer, or of its owner. arg: opcode, kind, way, and
 * which side of the traffic it is. */
static void gone(const struct test *t)
{
	const enum kind kind = (enum kind)(t->arg[1] & 0xff);
	const bool context = t->arg[1] & 0x100;
	const int side = t->arg[3];
	struct node *owner = nodes[side == REMOTE];
	const enum ibv_wr_opcode opcode = (enum ibv_wr_opcode)t->arg[0];
	struct traffic traffic = {.queues = 2};
	struct queue far;
	if (context)
		node_context(owner);
	struct region victim = region_open(owner, kind, (enum way)t->arg[2], SIZE, ALL_RIGHTS);
	struct region other = host(nodes[side != REMOTE], SIZE);
	const struct region *a = side == REMOTE ? &other : &victim, *b = side == REMOTE ? &victim : &other;
	for (int i = 0; i < traffic.queues; i++)
		queue_link(&traffic.q[i], nodes[0], &far, nodes[1], 0);
	traffic.what = (struct request){.opcode = opcode, .piece = {{a, 8, opcode == IBV_WR_ATOMIC_FETCH_AND_ADD ? 8 : SIZE - 8}},
					.to = b->addr + 8, .rkey = b->rkey, .compare = 1};
	begin_traffic(nodes[0], &traffic);
	usleep(300000);
	if (context)
		node_destroy(owner);
	else
		region_free(&victim);
	struct outcome out = finish(nodes[0]);
	int want = side == REMOTE ? IBV_WC_REM_ACCESS_ERR : IBV_WC_LOC_PROT_ERR;
	if (out.status != want)
		failed("the traffic ends with %s, not %s", ibv_wc_status_str((enum ibv_wc_status)out.status), ibv_wc_status_str((enum ibv_wc_status)want));
	WANT(out.count > 0);
	node_usable(owner);
	region_close(&victim); /* the key of memory that is gone */
	node_usable(owner);
	works(nodes[0], nodes[1], 70);
}

/* Memory is freed and allocated until its address comes again: the old key still fails, and the new memory is whole. */
static void reused(const struct test *t)
{
	enum { TRIES = 64 };
	struct region old = region_open(nodes[0], GPU, (enum way)t->arg[0], SIZE, ALL_RIGHTS), a = host(nodes[1], SIZE);
	CUdeviceptr was = node_memory(&old)->base, got[TRIES];
	struct queue q[2];
	int n = 0;
	region_free(&old);
	do
		OK(cuMemAlloc(&got[n++], (SIZE + PAGE - 1) & -(size_t)PAGE));
	while (n < TRIES && got[n - 1] != was);
	if (got[n - 1] != was)
		skipped("no memory with the old address in %d tries", TRIES);
	unsigned char *bytes = (unsigned char *)malloc(SIZE);
	pattern_fill(bytes, SIZE, 80);
	OK(cuMemcpyHtoD(was, bytes, SIZE));
	static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD};
	region_fill(&a, 0, SIZE, 81);
	for (int i = 0; i < COUNT(opcodes); i++) {
		struct request r = {.opcode = opcodes[i], .piece = {{&a, 0, 8}}, .to = old.addr, .rkey = old.rkey, .compare = 1};
		queue_link(&q[0], nodes[1], &q[1], nodes[0], 0);
		WANT(request_on(&q[0], &r).status == IBV_WC_REM_ACCESS_ERR);
	}
	region_check(&a, 0, SIZE, 81);
	OK(cuMemcpyDtoH(bytes, was, SIZE));
	WANT(pattern_check(bytes, SIZE, 80) < 0);
	/* The new memory gets a key of its own. */
	struct ibv_mr *mr = ibv_reg_mr(node_pd(nodes[0]), (void *)(uintptr_t)was, SIZE, ALL_RIGHTS);
	WANT(mr && mr->rkey != old.rkey);
	struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 0, SIZE}}, .to = was, .rkey = mr->rkey};
	queue_link(&q[0], nodes[1], &q[1], nodes[0], 0);
	must(&q[0], &r);
	OK(cuMemcpyDtoH(bytes, was, SIZE));
	WANT(pattern_check(bytes, SIZE, 81) < 0);
	WANT(!ibv_dereg_mr(mr));
	region_close(&old);
	for (int i = 0; i < n; i++)
		OK(cuMemFree(got[i]));
	free(bytes);
	node_usable(nodes[0]);
}

/* Registered memory is freed without traffic, many times: nothing is left behind. */
static void churn(const struct test *t)
{
	struct queue q[2];
	struct region a = host(nodes[0], SIZE);
	link_to(q, nodes[1]);
	for (int i = 0; i < 20; i++) {
		struct region b = region_open(nodes[1], GPU, (enum way)t->arg[0], SIZE, ALL_RIGHTS);
		struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 0, SIZE}}, .to = b.addr, .rkey = b.rkey};
		region_fill(&a, 0, SIZE, 90 + (uint64_t)i);
		must(&q[0], &r);
		region_check(&b, 0, SIZE, 90 + (uint64_t)i);
		if (i & 1)
			region_free(&b);
		region_close(&b);
	}
	node_usable(nodes[1]);
}

/* ---- processes that go away ---- */

/* A peer is killed in the middle of traffic; arg: which node's requests they are. */
static void killed(const struct test *t)
{
	struct traffic traffic = {.queues = 2};
	struct region a = region_open(nodes[0], GPU, BY_ADDRESS, SIZE, ALL_RIGHTS), b = region_open(nodes[1], GPU, (enum way)t->arg[1], SIZE, ALL_RIGHTS);
	struct node *from = nodes[t->arg[0]], *to = nodes[!t->arg[0]];
	const struct region *own = t->arg[0] ? &b : &a, *far = t->arg[0] ? &a : &b;
	for (int i = 0; i < traffic.queues; i++) {
		struct queue other;
		queue_link(&traffic.q[i], from, &other, to, 0);
	}
	traffic.what = (struct request){.opcode = (enum ibv_wr_opcode)t->arg[2], .piece = {{own, 0, SIZE}}, .to = far->addr, .rkey = far->rkey};
	begin_traffic(from, &traffic);
	usleep(100000);
	node_signal(nodes[1], SIGKILL);
	node_gone(nodes[1]);
	if (from == nodes[0]) {
		struct outcome out = finish(from);
		if (out.status != IBV_WC_RETRY_EXC_ERR && out.status != IBV_WC_REM_ACCESS_ERR && out.status != IBV_WC_REM_OP_ERR)
			failed("the traffic ends with %s", ibv_wc_status_str((enum ibv_wc_status)out.status));
	}
	node_usable(nodes[0]);
	works(nodes[0], nodes[2], 100);
	works(nodes[2], nodes[0], 110);
	region_close(&a);
}

/* A peer is stopped for a while in the middle of traffic, and continues: no request fails. */
static void stopped(const struct test *t)
{
	struct traffic traffic = {.queues = 2, .seconds = 1.5};
	struct region a = region_open(nodes[0], GPU, BY_ADDRESS, SIZE, ALL_RIGHTS), b = region_open(nodes[1], GPU, BY_ADDRESS, SIZE, ALL_RIGHTS);
	for (int i = 0; i < traffic.queues; i++) {
		struct queue far;
		queue_link(&traffic.q[i], nodes[0], &far, nodes[1], 0);
	}
	region_fill(&a, 0, SIZE, 120);
	region_fill(&b, 0, SIZE, 121);
	traffic.what = (struct request){.opcode = (enum ibv_wr_opcode)t->arg[0], .piece = {{&a, 0, 70001}}, .to = b.addr, .rkey = b.rkey};
	begin_traffic(nodes[0], &traffic);
	for (int i = 0; i < 3; i++) {
		usleep(50000);
		node_signal(nodes[1], SIGSTOP);
		usleep(300000);
		node_signal(nodes[1], SIGCONT);
	}
	struct outcome out = finish(nodes[0]);
	if (out.status)
		failed("the traffic ends with %s", ibv_wc_status_str((enum ibv_wc_status)out.status));
	WANT(out.count > 0);
	/* A pattern of other length ends otherwise: what was moved is its first bytes. */
	unsigned char *bytes = (unsigned char *)malloc(SIZE);
	pattern_fill(bytes, SIZE, t->arg[0] == IBV_WR_RDMA_READ ? 121 : 120);
	struct region look = host(nodes[0], SIZE);
	struct queue q[2];
	link_to(q, nodes[1]);
	struct request r = {.opcode = IBV_WR_RDMA_READ, .piece = {{&look, 0, 70001}}, .to = b.addr, .rkey = b.rkey};
	must(&q[0], &r);
	WANT(!memcmp(node_memory(&look)->host, bytes, 70001));
	if (t->arg[0] == IBV_WR_RDMA_READ) {
		memory_get(node_memory(&a), 0, node_memory(&look)->host, 70001);
		WANT(!memcmp(node_memory(&look)->host, bytes, 70001));
	}
	works(nodes[0], nodes[1], 130);
}

/* ---- fork ---- */

/* A child of a process that uses CUDA has no CUDA, but verbs on memory of the host. Its parent goes on. */
static void forked(const struct test *t)
{
	(void)t;
	works(nodes[0], nodes[1], 140);
	struct region mine = region_open(nodes[0], GPU, BY_ADDRESS, SIZE, ALL_RIGHTS);
	int status;
	pid_t pid = fork();
	WANT(pid >= 0);
	if (!pid) {
		alarm(WAIT_LIMIT);
		struct node *x = local_node(), *y = local_node(); /* in the parent's context */
		struct region from = host(x, SIZE), to = host(y, SIZE);
		struct queue q[2];
		queue_link(&q[0], x, &q[1], y, 0);
		region_fill(&from, 3, SIZE - 3, 145);
		struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&from, 3, SIZE - 3}}, .to = to.addr + 3, .rkey = to.rkey};
		must(&q[0], &r);
		region_check(&to, 3, SIZE - 3, 145);
		region_close(&from);
		region_close(&to);
		_exit(0);
	}
	WANT(waitpid(pid, &status, 0) == pid);
	if (status)
		failed("the child ended with %#x", status);
	region_fill(&mine, 0, SIZE, 150);
	region_check(&mine, 0, SIZE, 150);
	node_usable(nodes[0]);
	works(nodes[0], nodes[1], 160);
	region_close(&mine);
}

/* ---- the table ---- */

enum { ONE = 1, TWO = 2, THREE = 4 }; /* in how many processes a case is run */

static const struct {
	const char *name;
	void (*run)(const struct test *);
	int processes;
	int arg[4];
} cases[] = {
	{"descriptors", descriptors, ONE, {0}},
	{"addresses", addresses, ONE, {0}},
	{"rights/address", rights, ONE | TWO, {BY_ADDRESS}},
	{"rights/dmabuf", rights, ONE | TWO, {BY_DMABUF}},
	{"freed/write/address", gone, ONE | TWO, {IBV_WR_RDMA_WRITE, GPU, BY_ADDRESS, REMOTE}},
	{"freed/write/dmabuf", gone, ONE | TWO, {IBV_WR_RDMA_WRITE, GPU, BY_DMABUF, REMOTE}},
	{"freed/read/address", gone, ONE | TWO, {IBV_WR_RDMA_READ, GPU, BY_ADDRESS, REMOTE}},
	{"freed/read/iova", gone, ONE | TWO, {IBV_WR_RDMA_READ, GPU, BY_IOVA, REMOTE}},
	{"freed/add/address", gone, ONE | TWO, {IBV_WR_ATOMIC_FETCH_AND_ADD, GPU, BY_ADDRESS, REMOTE}},
	{"freed/write/local-address", gone, ONE | TWO, {IBV_WR_RDMA_WRITE, GPU, BY_ADDRESS, LOCAL}},
	{"freed/read/local-dmabuf", gone, ONE | TWO, {IBV_WR_RDMA_READ, GPU, BY_DMABUF, LOCAL}},
	{"unmapped/write/address", gone, ONE | TWO, {IBV_WR_RDMA_WRITE, VMM, BY_ADDRESS, REMOTE}},
	{"unmapped/read/dmabuf", gone, ONE | TWO, {IBV_WR_RDMA_READ, VMM_FD, BY_DMABUF, REMOTE}},
	{"context/write/address", gone, ONE | TWO, {IBV_WR_RDMA_WRITE, GPU | 0x100, BY_ADDRESS, REMOTE}},
	{"context/read/dmabuf", gone, ONE | TWO, {IBV_WR_RDMA_READ, GPU | 0x100, BY_DMABUF, REMOTE}},
	{"reused/address", reused, ONE | TWO, {BY_ADDRESS}},
	{"reused/dmabuf", reused, ONE | TWO, {BY_DMABUF}},
	{"churn/address", churn, ONE | TWO, {BY_ADDRESS}},
	{"churn/part", churn, ONE | TWO, {BY_PART}},
	{"killed/target/write", killed, THREE, {0, BY_ADDRESS, IBV_WR_RDMA_WRITE}},
	{"killed/target/read", killed, THREE, {0, BY_DMABUF, IBV_WR_RDMA_READ}},
	{"killed/requester/write", killed, THREE, {1, BY_ADDRESS, IBV_WR_RDMA_WRITE}},
	{"killed/requester/read", killed, THREE, {1, BY_DMABUF, IBV_WR_RDMA_READ}},
	{"stopped/write", stopped, TWO, {IBV_WR_RDMA_WRITE}},
	{"stopped/read", stopped, TWO, {IBV_WR_RDMA_READ}},
	{"forked", forked, ONE | TWO, {0}},
};

int main(int argc, char **argv)
{
	static struct test tests[3 * COUNT(cases)];
	static const char *const counts[] = {"one", "two", "three"};
	int n = 0;
	for (int i = 0; i < COUNT(cases); i++)
		for (int peers = 0; peers < 3; peers++) {
			if (!(cases[i].processes >> peers & 1))
				continue;
			struct test *t = &tests[n++];
			*t = (struct test){.run = cases[i].run, .peers = peers};
			memcpy(t->arg, cases[i].arg, sizeof cases[i].arg);
			snprintf(t->name, sizeof t->name, "%s/%s", cases[i].name, counts[peers]);
		}
	return run_tests(argc, argv, tests, n);
}
