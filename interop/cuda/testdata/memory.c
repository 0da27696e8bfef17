/*
 * RDMA between memory of all kinds, and above all of a GPU: every operation, in one process and between two, whichever
 * way the memory is registered. All bytes that are moved are compared, and those beside them.
 *
 *   move/PROCESSES/KIND-WAY/KIND-WAY   all sizes by WRITE, WRITE with immediate, READ and SEND, from both sides
 *   others                             one function each, see the table at the end
 */
#include <infiniband/verbs.h>

#include "common.h"

enum { LARGEST = (16 << 20) + 5, EDGE = 64, FRONT = 4096, ROOM = FRONT + 8192 + LARGEST + EDGE, GRH = 40 };

static uint64_t rounds = 1; /* each message has a number, and the bytes of it */

/* link01 connects a queue pair of each node to one of the other. */
static void link01(struct queue q[2]) { queue_link(&q[0], nodes[0], &q[1], nodes[1], 0); }

static struct region gpu(struct node *at, size_t size) { return region_open(at, GPU, BY_ADDRESS, size, ALL_RIGHTS); }
static struct region host(struct node *at, size_t size) { return region_open(at, PLAIN, BY_ADDRESS, size, ALL_RIGHTS); }

/* ---- moving ---- */

static const struct {
	uint32_t n, from, to; /* a length, and two offsets */
} sizes[] = {
	{1, 0, 1},     {1, 4095, 7},   {8, 0, 0},	   {8, 5, 3},	       {4096, 0, 0},
	{4096, 1, 4095}, {65539, 7, 13}, {1 << 20, 0, 0}, {1 << 20, 511, 1}, {LARGEST, 9, 4097},
};

static const enum ibv_wr_opcode opcodes[] = {IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_RDMA_READ, IBV_WR_SEND};

/* move_one moves one message by a request of q[0]; READ moves it the other way. */
static void move_one(const struct queue q[2], const struct region *own, const struct region *far, enum ibv_wr_opcode opcode,
		     uint32_t n, size_t at, size_t to)
{
	const bool reads = opcode == IBV_WR_RDMA_READ;
	const struct region *source = reads ? far : own, *target = reads ? own : far;
	const size_t source_off = reads ? to : at, target_off = reads ? at : to;
	const uint64_t round = rounds++;
	region_fill(source, source_off, n, round);
	region_fill(target, target_off - EDGE, EDGE, ~round);
	region_fill(target, target_off + n, EDGE, ~round);
	struct request r = {.opcode = opcode, .piece = {{own, at, n}}, .to = far->addr + to, .rkey = far->rkey, .imm = (uint32_t)round};
	struct piece into[MAX_SGE] = {{far, to, n}};
	if (opcode == IBV_WR_SEND)
		post_receive(&q[1], into);
	else if (opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
		post_receive(&q[1], NULL);
	must(&q[0], &r);
	if (opcode == IBV_WR_SEND || opcode == IBV_WR_RDMA_WRITE_WITH_IMM) {
		struct outcome out = await_receive(&q[1]);
		WANT(out.status == IBV_WC_SUCCESS && out.bytes == n);
		WANT(opcode == IBV_WR_SEND || out.imm == (uint32_t)round);
	}
	region_check(target, target_off, n, round);
	region_check(target, target_off - EDGE, EDGE, ~round);
	region_check(target, target_off + n, EDGE, ~round);
}

/* move: arg has two kinds and two ways. */
static void move(const struct test *t)
{
	struct queue q[2], back[2];
	struct region a = region_open(nodes[0], (enum kind)t->arg[0], (enum way)t->arg[1], ROOM, ALL_RIGHTS);
	struct region b = region_open(nodes[1], (enum kind)t->arg[2], (enum way)t->arg[3], ROOM, ALL_RIGHTS);
	link01(q);
	back[0] = q[1], back[1] = q[0];
	for (int i = 0; i < COUNT(sizes); i++)
		for (int k = 0; k < COUNT(opcodes) && sizes[i].n <= max_message; k++) {
			move_one(q, &a, &b, opcodes[k], sizes[i].n, FRONT + sizes[i].from, FRONT + sizes[i].to);
			move_one(back, &b, &a, opcodes[k], sizes[i].n, FRONT + sizes[i].to, FRONT + sizes[i].from);
		}
	region_close(&a);
	region_close(&b);
	node_usable(nodes[0]);
	node_usable(nodes[1]);
}

/* ---- several requests under way ---- */

/* Messages are posted one behind the other without waiting: they are there, each in its place. arg: the kind of memory
 * that they come from, their length, and how often. */
static void deep(const struct test *t)
{
	enum { N = 48 };
	const uint32_t size = (uint32_t)t->arg[1];
	struct queue q[2];
	struct region a = region_open(nodes[0], (enum kind)t->arg[0], BY_ADDRESS, N * size, ALL_RIGHTS), b = gpu(nodes[1], N * size);
	link01(q);
	for (int pass = 0; pass < t->arg[2]; pass++) {
		const bool reads = pass & 1;
		const struct region *source = reads ? &b : &a, *target = reads ? &a : &b;
		const uint64_t first = rounds;
		for (int i = 0; i < N; i++)
			region_fill(source, (size_t)i * size, size, rounds++);
		for (int i = 0; i < N; i++) {
			size_t off = (size_t)(N - 1 - i) * size;
			struct request r = {.opcode = reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE, .rkey = b.rkey};
			r.piece[0] = (struct piece){&a, reads ? off : (size_t)i * size, size};
			r.to = b.addr + (reads ? (size_t)i * size : off);
			post(&q[0], &r);
		}
		WANT(await(&q[0], N).status == IBV_WC_SUCCESS);
		for (int i = 0; i < N; i++)
			region_check(target, (size_t)(N - 1 - i) * size, size, first + (uint64_t)i);
	}
}

/* What is posted behind a WRITE finds its bytes: a READ of them, an atomic on one of its words, and a READ of that. Only
 * a fence keeps an atomic behind a READ. */
static void behind(const struct test *t)
{
	enum { ROUNDS = 100 };
	const uint32_t n = (uint32_t)t->arg[1];
	struct queue q[2];
	struct region a = region_open(nodes[0], (enum kind)t->arg[0], BY_ADDRESS, n, ALL_RIGHTS), b = gpu(nodes[1], n + 8);
	struct region back = region_open(nodes[0], (enum kind)t->arg[0], BY_ADDRESS, n, ALL_RIGHTS), words = host(nodes[0], 64);
	uint64_t was, is;
	link01(q);
	for (int i = 0; i < ROUNDS; i++) {
		const uint64_t round = rounds++;
		const struct request all[] = {
			{.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 0, n}}, .to = b.addr, .rkey = b.rkey},
			{.opcode = IBV_WR_RDMA_READ, .piece = {{&back, 0, n}}, .to = b.addr, .rkey = b.rkey},
			{.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .piece = {{&words, 0, 8}}, .to = b.addr + n - 8, .rkey = b.rkey, .compare = 5,
			 .flags = IBV_SEND_FENCE},
			{.opcode = IBV_WR_RDMA_READ, .piece = {{&words, 8, 8}}, .to = b.addr + n - 8, .rkey = b.rkey},
		};
		region_fill(&a, 0, n, round);
		for (int k = 0; k < COUNT(all); k++)
			post(&q[0], &all[k]);
		struct outcome out = await(&q[0], COUNT(all));
		WANT(out.status == IBV_WC_SUCCESS);
		region_check(&back, 0, n, round);
		region_check(&b, 0, n - 8, round);
		memory_get(node_memory(&words), 0, &was, 8);
		memory_get(node_memory(&words), 8, &is, 8);
		WANT(was == pattern_word(round, n - 8) && is == was + 5);
	}
}

/* ---- several pieces ---- */

/* SEND, WRITE and READ with pieces of the host and of the GPU, mixed, on both sides. */
static void pieces(const struct test *t)
{
	enum { SIZE = 300000 };
	static const uint32_t lengths[] = {1, 4096, 70001, 13};
	static const uint32_t other[] = {50000, 7, 20000, 4104}; /* the same sum */
	(void)t;
	struct queue q[2];
	struct region a[2] = {host(nodes[0], SIZE), gpu(nodes[0], SIZE)}, b[2] = {host(nodes[1], SIZE), gpu(nodes[1], SIZE)};
	struct region flat[2] = {gpu(nodes[0], SIZE), gpu(nodes[1], SIZE)};
	link01(q);
	for (int pass = 0; pass < 16; pass++) {
		struct request gather = {.opcode = IBV_WR_RDMA_WRITE, .to = flat[1].addr + 5, .rkey = flat[1].rkey};
		struct request fetch = {.opcode = IBV_WR_RDMA_READ, .piece = {{&flat[0], 3, 74111}}, .to = flat[1].addr + 5, .rkey = flat[1].rkey};
		struct request sent = {.opcode = IBV_WR_SEND};
		struct piece into[MAX_SGE], all[MAX_SGE] = {{&flat[1], 9, 74111}};
		uint64_t first = rounds;
		size_t off = 0;
		for (int i = 0; i < MAX_SGE; i++) { /* each piece begins behind the one before, in its memory */
			gather.piece[i] = (struct piece){&a[pass >> i & 1], off + 3, lengths[i]};
			region_fill(gather.piece[i].of, gather.piece[i].off, lengths[i], rounds++);
			off += lengths[i] + 11;
		}
		must(&q[0], &gather);
		off = 5;
		for (int i = 0; i < MAX_SGE; i++) {
			region_check(&flat[1], off, lengths[i], first + (uint64_t)i);
			off += lengths[i];
		}
		must(&q[0], &fetch);
		off = 3;
		for (int i = 0; i < MAX_SGE; i++) {
			region_check(&flat[0], off, lengths[i], first + (uint64_t)i);
			off += lengths[i];
		}
		/* gathered here, scattered there */
		memcpy(sent.piece, gather.piece, sizeof sent.piece);
		post_receive(&q[1], all);
		must(&q[0], &sent);
		struct outcome out = await_receive(&q[1]);
		WANT(!out.status && out.bytes == 74111);
		off = 9;
		for (int i = 0; i < MAX_SGE; i++) {
			region_check(&flat[1], off, lengths[i], first + (uint64_t)i);
			off += lengths[i];
		}
		off = 0;
		for (int i = 0; i < MAX_SGE; i++) {
			into[i] = (struct piece){&b[pass >> (3 - i) & 1], off + 1, other[i]};
			off += other[i] + 17;
		}
		/* One message, whose pieces at the other end have other lengths: compared as one. */
		uint64_t round = rounds++;
		region_fill(&flat[0], 77, 74111, round);
		struct request whole = {.opcode = IBV_WR_SEND, .piece = {{&flat[0], 77, 74111}}};
		post_receive(&q[1], into);
		must(&q[0], &whole);
		out = await_receive(&q[1]);
		WANT(!out.status && out.bytes == 74111);
		/* The other end sends the pieces back, in the order in which they were filled. */
		struct request back = {.opcode = IBV_WR_RDMA_WRITE, .to = flat[0].addr + 100007, .rkey = flat[0].rkey};
		memcpy(back.piece, into, sizeof into);
		must(&q[1], &back);
		region_check(&flat[0], 100007, 74111, round);
	}
}

/* ---- atomics ---- */

/* Several queue pairs of both nodes add to one number at once, by FETCH_AND_ADD or by CMP_SWAP. arg: where the number
 * is, and how it is added to. */
static void atomics(const struct test *t)
{
	enum { EACH = 4, ADDS = 300, SWAPS = 60, AT = 4096 + 8 };
	const bool by_cas = t->arg[2];
	const uint64_t each = by_cas ? SWAPS : ADDS;
	struct region number = region_open(nodes[1], (enum kind)t->arg[0], (enum way)t->arg[1], 65536, ALL_RIGHTS);
	struct region results[2] = {host(nodes[0], 4096), host(nodes[1], 4096)};
	struct traffic traffic[2];
	region_fill(&number, 0, 65536, 3);
	uint64_t start = by_cas ? 0 : 0x1234567890abcdef, want = start + 2 * EACH * each, end = 0;
	struct region word = host(nodes[0], 4096);
	struct queue one[2];
	link01(one);
	/* The first value is written, and the last one read, as bytes. */
	memcpy(node_memory(&word)->host, &start, 8);
	struct request set = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&word, 0, 8}}, .to = number.addr + AT, .rkey = number.rkey};
	must(&one[0], &set);
	for (int i = 0; i < 2; i++) {
		traffic[i] = (struct traffic){.queues = EACH, .rounds = each, .by_cas = by_cas};
		traffic[i].what = (struct request){.opcode = by_cas ? IBV_WR_ATOMIC_CMP_AND_SWP : IBV_WR_ATOMIC_FETCH_AND_ADD,
						   .piece = {{&results[i], 64, 8}}, .to = number.addr + AT, .rkey = number.rkey,
						   .compare = by_cas ? start : 1};
		for (int k = 0; k < EACH; k++) {
			struct queue far;
			queue_link(&traffic[i].q[k], nodes[i], &far, nodes[1], 0);
		}
	}
	begin_traffic(nodes[0], &traffic[0]);
	begin_traffic(nodes[1], &traffic[1]);
	for (int i = 0; i < 2; i++) {
		struct outcome out = finish(nodes[i]);
		WANT(out.status == IBV_WC_SUCCESS);
		WANT(by_cas ? out.count >= EACH * each : out.count == EACH * each);
	}
	struct request get = set;
	get.opcode = IBV_WR_RDMA_READ;
	must(&one[0], &get);
	memcpy(&end, node_memory(&word)->host, 8);
	if (end != want)
		failed("the sum is %#llx, not %#llx", (unsigned long long)end, (unsigned long long)want);
	region_check(&number, 0, AT, 3); /* and nothing beside it */
	/* A misaligned atomic is refused. */
	struct request odd = {.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .piece = {{&word, 8, 8}}, .to = number.addr + AT + 4, .rkey = number.rkey};
	WANT(request_on(&one[0], &odd).status == IBV_WC_REM_INV_REQ_ERR);
}

/* The result of an atomic may go to GPU memory, too. */
static void atomic_result(const struct test *t)
{
	(void)t;
	struct queue q[2];
	struct region number = gpu(nodes[1], 4096), result = gpu(nodes[0], 4096);
	unsigned char want[8], got[8];
	link01(q);
	for (int i = 0; i < 20; i++) {
		region_fill(&number, 8, 8, rounds);
		pattern_fill(want, 8, rounds++);
		struct request add = {.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .piece = {{&result, 8 * (size_t)i, 8}}, .to = number.addr + 8,
				      .rkey = number.rkey, .compare = 1};
		must(&q[0], &add);
		memory_get(node_memory(&result), 8 * (size_t)i, got, 8);
		WANT(!memcmp(want, got, 8));
	}
}

/* ---- windows and indirect keys ---- */

static void windows(const struct test *t)
{
	enum { SIZE = 300000, AT = 4099, LENGTH = 70001 };
	struct queue q[2], again[2];
	struct region a = host(nodes[0], SIZE), b = region_try(nodes[1], (enum kind)t->arg[0], BY_ADDRESS, SIZE, ALL_RIGHTS | IBV_ACCESS_MW_BIND);
	if (!b.at && node_error(nodes[1]) == EINVAL)
		skipped("GPU memory cannot be registered for windows");
	WANT(b.at);
	link01(q);
	region_fill(&b, 0, SIZE, 2);
	uint32_t rkey = window_open(&q[1], &b, AT, LENGTH, IBV_ACCESS_REMOTE_WRITE);
	struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 7, LENGTH}}, .to = b.addr + AT, .rkey = rkey};
	for (int i = 0; i < 8; i++) {
		uint64_t round = rounds++;
		region_fill(&a, 7, LENGTH, round);
		must(&q[0], &r);
		region_check(&b, AT, LENGTH, round);
	}
	region_check(&b, 0, AT, 2);
	unsigned char *whole = (unsigned char *)malloc(SIZE);
	pattern_fill(whole, SIZE, 2);
	r.to++; /* one byte past its end */
	WANT(request_on(&q[0], &r).status == IBV_WC_REM_ACCESS_ERR);
	struct request look = {.opcode = IBV_WR_RDMA_READ, .piece = {{&a, 0, SIZE}}, .to = b.addr, .rkey = b.rkey};
	link01(again);
	must(&again[0], &look);
	/* What is behind the window is as it was. */
	WANT(!memcmp(node_memory(&a)->host + AT + LENGTH, whole + AT + LENGTH, SIZE - AT - LENGTH));
	/* No right to read by the window. */
	rkey = window_open(&again[1], &b, AT, LENGTH, IBV_ACCESS_REMOTE_WRITE);
	struct request read = {.opcode = IBV_WR_RDMA_READ, .piece = {{&a, 0, 8}}, .to = b.addr + AT, .rkey = rkey};
	WANT(request_on(&again[0], &read).status == IBV_WC_REM_ACCESS_ERR);
	free(whole);
}

/* Indirect keys of pieces of the host and the GPU, as remote and as local key. */
static void mkeys(const struct test *t)
{
	enum { SIZE = 300000, ROWS = 50, ROW = 100, STRIDE = 333 };
	(void)t;
	struct queue q[2];
	struct region a = gpu(nodes[0], SIZE), b[2] = {gpu(nodes[1], SIZE), host(nodes[1], SIZE)}, own = gpu(nodes[0], SIZE);
	queue_link(&q[0], nodes[0], &q[1], nodes[1], QP_MLX5);
	const struct piece list[MAX_SGE] = {{&b[0], 5000, 101}, {&b[1], 17, 4096}, {&b[0], 40000, 70001}};
	struct region key = mkey_open(&q[1], list, 0, 0);
	const uint32_t sum = 101 + 4096 + 70001;
	WANT(key.size == sum);
	for (int pass = 0; pass < 4; pass++) {
		uint64_t first = rounds;
		uint32_t off = 0;
		for (int i = 0; i < 3; i++) {
			region_fill(&a, 9 + off, list[i].n, rounds++);
			off += list[i].n;
		}
		struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 9, sum}}, .to = 0, .rkey = key.rkey};
		must(&q[0], &r);
		for (int i = 0; i < 3; i++)
			region_check(list[i].of, list[i].off, list[i].n, first + (uint64_t)i);
		r.opcode = IBV_WR_RDMA_READ;
		r.piece[0].of = &own;
		must(&q[0], &r);
		off = 0;
		for (int i = 0; i < 3; i++) {
			region_check(&own, 9 + off, list[i].n, first + (uint64_t)i);
			off += list[i].n;
		}
	}
	/* A column of a matrix in one GPU's memory becomes a column in the other's. */
	const struct piece from[MAX_SGE] = {{&a, 33, ROW}}, to[MAX_SGE] = {{&b[0], 7, ROW}};
	struct region source = mkey_open(&q[0], from, ROWS, STRIDE - ROW), target = mkey_open(&q[1], to, ROWS, STRIDE - ROW);
	uint64_t first = rounds;
	for (int i = 0; i < ROWS; i++)
		region_fill(&a, 33 + (size_t)i * STRIDE, ROW, rounds++);
	region_fill(&b[0], 7 + ROW, STRIDE - ROW, 1);
	struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&source, 0, ROWS * ROW}}, .to = 0, .rkey = target.rkey};
	must(&q[0], &r);
	for (int i = 0; i < ROWS; i++)
		region_check(&b[0], 7 + (size_t)i * STRIDE, ROW, first + (uint64_t)i);
	region_check(&b[0], 7 + ROW, STRIDE - ROW, 1);
	mkey_close(&key);
	mkey_close(&source);
	mkey_close(&target);
	region_close(&b[0]);
}

/* ---- the flush of NCCL ---- */

/* Regions as NCCL has them: with relaxed ordering. A peer WRITEs and says so by an immediate. The owner READs one byte of its GPU memory by a queue pair that is connected
 * to itself, and then the GPU's own copies see all bytes. */
static void flush(const struct test *t)
{
	enum { SIZE = 1 << 20, ROUNDS = 40 };
	struct queue q[2], self = queue_open(nodes[1], 0);
	const int access = ALL_RIGHTS | IBV_ACCESS_RELAXED_ORDERING;
	struct region a = region_open(nodes[0], (enum kind)t->arg[0], BY_ADDRESS, SIZE, access);
	struct region b = region_open(nodes[1], GPU, (enum way)t->arg[1], SIZE, access);
	struct region byte = host(nodes[1], 64);
	link01(q);
	queue_connect(&self, &self);
	struct request write = {.opcode = IBV_WR_RDMA_WRITE_WITH_IMM, .to = b.addr, .rkey = b.rkey};
	struct request read = {.opcode = IBV_WR_RDMA_READ, .piece = {{&byte, 0, 1}}, .to = b.addr, .rkey = b.rkey};
	for (int i = 0; i < ROUNDS; i++) {
		uint32_t n = i % 4 == 3 ? SIZE : (uint32_t)(i * 977 % 70000 + 1);
		uint64_t round = rounds++;
		region_fill(&a, 0, n, round);
		write.piece[0] = (struct piece){&a, 0, n};
		write.imm = (uint32_t)i;
		post_receive(&q[1], NULL);
		post(&q[0], &write);
		struct outcome out = await_receive(&q[1]);
		WANT(!out.status && out.imm == (uint32_t)i && out.bytes == n);
		must(&self, &read);
		region_check(&b, 0, n, round);
		region_check(&byte, 0, 1, round);
		WANT(await(&q[0], 1).status == IBV_WC_SUCCESS);
	}
}

/* ---- registered again ---- */

static void rereg(const struct test *t)
{
	enum { SIZE = 100000 };
	(void)t;
	struct queue q[2];
	struct region a = host(nodes[0], SIZE), b = host(nodes[1], SIZE), other = region_open(nodes[1], GPU, NO_WAY, SIZE, 0);
	struct region third = region_open(nodes[1], GPU, NO_WAY, SIZE, 0);
	link01(q);
	for (int i = 0; i < 6; i++) { /* host, GPU, another GPU memory, host, ... */
		uint64_t round = rounds++;
		struct request r = {.opcode = IBV_WR_RDMA_WRITE, .piece = {{&a, 1, SIZE - 1}}, .to = b.addr + 1, .rkey = b.rkey};
		region_fill(&a, 1, SIZE - 1, round);
		must(&q[0], &r);
		region_check(&b, 1, SIZE - 1, round);
		struct region was = b;
		b = region_rereg(&b, &other);
		other = third;
		third = was;
		WANT(!region_has(&b, 1, SIZE - 1, round));
	}
}

/* ---- datagrams, and a shared receive queue ---- */

static void datagrams(const struct test *t)
{
	enum { SIZE = 8192, N = 1000, COUNT_ = 30 };
	struct queue q[2];
	struct region a = gpu(nodes[0], SIZE), b = region_open(nodes[1], (enum kind)t->arg[0], BY_ADDRESS, SIZE, ALL_RIGHTS);
	queue_link(&q[0], nodes[0], &q[1], nodes[1], QP_UD);
	for (int i = 0; i < COUNT_; i++) {
		uint32_t n = (uint32_t)(i * 37 % N + 1);
		uint64_t round = rounds++;
		struct piece into[MAX_SGE] = {{&b, 3, GRH + N}};
		struct request r = {.opcode = IBV_WR_SEND, .piece = {{&a, 5, n}}, .ud_qpn = q[1].qpn};
		region_fill(&a, 5, n, round);
		region_fill(&b, 3 + GRH + n, 64, ~round);
		post_receive(&q[1], into);
		must(&q[0], &r);
		struct outcome out = await_receive(&q[1]);
		WANT(!out.status && out.bytes == GRH + n);
		region_check(&b, 3 + GRH, n, round);
		region_check(&b, 3 + GRH + n, 64, ~round);
	}
}

static void shared_receives(const struct test *t)
{
	enum { SLOT = 70001, SLOTS = 8 };
	(void)t;
	struct queue q[2];
	struct region a = gpu(nodes[0], SLOT), b[2] = {gpu(nodes[1], SLOTS * SLOT), host(nodes[1], SLOTS * SLOT)};
	queue_link(&q[0], nodes[0], &q[1], nodes[1], QP_SRQ);
	for (int pass = 0; pass < 4; pass++) {
		uint64_t first = rounds;
		for (int i = 0; i < SLOTS; i++) {
			struct piece into[MAX_SGE] = {{&b[i % 2], (size_t)i * SLOT, 1001}, {&b[(i + pass) % 2], (size_t)i * SLOT + 1001, SLOT - 1001}};
			post_receive(&q[1], into);
		}
		for (int i = 0; i < SLOTS; i++) {
			struct request r = {.opcode = IBV_WR_SEND, .piece = {{&a, 0, 1001}, {&a, 1001, SLOT - 1001}}};
			region_fill(&a, 0, 1001, rounds++);
			region_fill(&a, 1001, SLOT - 1001, rounds++);
			must(&q[0], &r);
			struct outcome out = await_receive(&q[1]);
			WANT(!out.status && out.bytes == SLOT);
		}
		for (int i = 0; i < SLOTS; i++) {
			region_check(&b[i % 2], (size_t)i * SLOT, 1001, first + 2 * (uint64_t)i);
			region_check(&b[(i + pass) % 2], (size_t)i * SLOT + 1001, SLOT - 1001, first + 2 * (uint64_t)i + 1);
		}
	}
}

/* ---- the tables ---- */

/* Pairs of memory between which messages are moved. */
static const struct {
	enum kind a;
	enum way a_way;
	enum kind b;
	enum way b_way;
} moves[] = {
	{PLAIN, BY_ADDRESS, GPU, BY_ADDRESS},
	{PLAIN, BY_ADDRESS, GPU, BY_DMABUF},
	{PLAIN, BY_ADDRESS, GPU, BY_PART},
	{PLAIN, BY_ADDRESS, GPU, BY_OFFSET},
	{PLAIN, BY_ADDRESS, GPU, BY_IOVA},
	{PAGE_LOCKED, BY_ADDRESS, GPU, BY_ADDRESS},
	{HOST_REGISTERED, BY_ADDRESS, GPU, BY_ADDRESS},
	{DEVICE_MEMORY, BY_ADDRESS, GPU, BY_ADDRESS},
	{ALLOCATED_MR, BY_ADDRESS, GPU, BY_ADDRESS},
	{GPU, BY_ADDRESS, GPU, BY_ADDRESS},
	{GPU, BY_DMABUF, GPU, BY_DMABUF},
	{GPU, BY_PART, GPU, BY_OFFSET},
	{GPU, BY_IOVA, GPU, BY_ADDRESS},
	{PLAIN, BY_ADDRESS, MANAGED, BY_ADDRESS},
	{MANAGED, BY_ADDRESS, GPU, BY_ADDRESS},
	{PLAIN, BY_ADDRESS, VMM, BY_ADDRESS},
	{PLAIN, BY_ADDRESS, VMM, BY_DMABUF},
	{PLAIN, BY_ADDRESS, VMM_FD, BY_ADDRESS},
	{PLAIN, BY_ADDRESS, VMM_FD, BY_DMABUF},
	{VMM, BY_ADDRESS, GPU, BY_ADDRESS},
	{VMM, BY_DMABUF, VMM, BY_DMABUF},
	{VMM_FD, BY_ADDRESS, VMM_FD, BY_ADDRESS},
	{VMM_FD, BY_DMABUF, GPU, BY_DMABUF},
};

/* The other cases; each is run in one process, and in two. */
static const struct {
	const char *name;
	void (*run)(const struct test *);
	int arg[3];
	const char *env[2];
} others[] = {
	{"deep/malloc", deep, {PLAIN, 30011, 4}, {0}},
	{"deep/locked", deep, {PAGE_LOCKED, 30011, 4}, {0}},
	{"deep/gpu", deep, {GPU, 30011, 4}, {0}},
	{"deep/malloc-small", deep, {PLAIN, 24, 20}, {0}},
	{"deep/gpu-small", deep, {GPU, 9, 20}, {0}},
	{"behind/malloc", behind, {PLAIN, 512}, {0}},
	{"behind/locked", behind, {PAGE_LOCKED, 70000}, {0}},
	{"behind/gpu", behind, {GPU, 70000}, {0}},
	{"pieces", pieces, {0}, {0}},
	{"add/gpu-address", atomics, {GPU, BY_ADDRESS, 0}, {0}},
	{"add/gpu-dmabuf", atomics, {GPU, BY_DMABUF, 0}, {0}},
	{"add/vmm-dmabuf", atomics, {VMM, BY_DMABUF, 0}, {0}},
	{"swap/gpu-address", atomics, {GPU, BY_ADDRESS, 1}, {0}},
	{"atomic-result", atomic_result, {0}, {0}},
	{"window/malloc", windows, {PLAIN}, {0}},
	{"window/gpu", windows, {GPU}, {0}},
	{"mkey", mkeys, {0}, {"VERBENA_IDENTITY", "mlx5"}},
	{"flush/malloc-address", flush, {PLAIN, BY_ADDRESS}, {0}},
	{"flush/gpu-dmabuf", flush, {GPU, BY_DMABUF}, {0}},
	{"rereg", rereg, {0}, {0}},
	{"datagram/malloc", datagrams, {PLAIN}, {0}},
	{"datagram/gpu", datagrams, {GPU}, {0}},
	{"srq", shared_receives, {0}, {0}},
};

int main(int argc, char **argv)
{
	static struct test tests[2 * (COUNT(moves) + COUNT(others))];
	int n = 0;
	for (int peers = 0; peers < 2; peers++) {
		const char *in = peers ? "two" : "one";
		for (int i = 0; i < COUNT(moves); i++) {
			struct test *t = &tests[n++];
			*t = (struct test){.run = move, .peers = peers, .arg = {moves[i].a, moves[i].a_way, moves[i].b, moves[i].b_way}};
			snprintf(t->name, sizeof t->name, "move/%s/%s-%s/%s-%s", in, kind_names[moves[i].a], way_names[moves[i].a_way],
				 kind_names[moves[i].b], way_names[moves[i].b_way]);
		}
		for (int i = 0; i < COUNT(others); i++) {
			struct test *t = &tests[n++];
			*t = (struct test){.run = others[i].run, .peers = peers, .env = {others[i].env[0], others[i].env[1]}};
			memcpy(t->arg, others[i].arg, sizeof others[i].arg);
			snprintf(t->name, sizeof t->name, "%s/%s", others[i].name, in);
		}
	}
	return run_tests(argc, argv, tests, n);
}
