/*
 * A peer accesses a registered region in a loop while the owner of the memory maps
 * something else there.
 *
 *   mapover one|two SECONDS SEED WAY...
 *
 * Owner and peer are two threads of one process, or two processes. In each round:
 *
 *  1. The owner makes memory for one of the WAYs (the table "ways"), fills it with OLD,
 *     registers it, and posts address and key on the board, which both sides see.
 *  2. The peer connects and keeps a few WRITEs of PEER bytes, or READs, under way.
 *  3. After some of them the owner replaces the memory. The new memory contains NEW
 *     (zeros, where the kernel gives no choice).
 *  4. The peer goes on until it is refused or told to stop. Meanwhile the owner looks at
 *     its new memory.
 *
 * PEER bytes in the new memory are write hits, NEW bytes in what a successful READ has
 * returned are read hits. For each way a line is printed: the way, rounds, rounds with a
 * write hit, bytes of them, rounds with a read hit, bytes of them, rounds in which the
 * peer was refused, and the longest replacement in microseconds.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "self.h"

enum { MOST = 256 << 10, PAGE = 4096, OLD = 0x11, NEW = 0x77, PEER = 0xee, AFTER = 100 };

/* --- the board --- */

static struct {
	_Atomic uint64_t round;	 /* the owner has registered memory */
	_Atomic uint64_t ready;	 /* the peer has connected */
	_Atomic uint64_t ops;	 /* the peer's requests of this round that have succeeded */
	_Atomic uint64_t stop;	 /* the peer is to end this round */
	_Atomic uint64_t done;	 /* the peer has no more requests under way */
	_Atomic uint64_t refused; /* a request of this round has failed */
	_Atomic uint64_t read_bytes; /* NEW bytes that READs of this round have returned */
	_Atomic uint32_t qpn[2];
	uint64_t addr;
	uint32_t rkey, len;
	int reads, fresh; /* in this round: the peer READs; the value of NEW bytes */
} *board;

static void await(_Atomic uint64_t *word, uint64_t value)
{
	while (atomic_load(word) < value)
		sched_yield();
}

static uint64_t micros(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static uint64_t random_state;
static uint64_t draw(uint64_t below)
{
	random_state = random_state * 6364136223846793005u + 1442695040888963407u;
	return (random_state >> 33) % below;
}

/* --- both sides --- */

struct end {
	struct self s;
	int me;
};

static struct end open_end(int me)
{
	struct end e = {.me = me};
	e.s.ctx = open_first();
	WANT(e.s.pd = ibv_alloc_pd(e.s.ctx));
	WANT(!ibv_query_gid(e.s.ctx, 1, 0, &e.s.gid));
	WANT(e.s.cq = ibv_create_cq(e.s.ctx, 64, NULL, NULL, 0));
	WANT(e.s.qp[0] = plain_qp(&e.s));
	atomic_store(&board->qpn[me], e.s.qp[0]->qp_num);
	while (!atomic_load(&board->qpn[!me]))
		sched_yield();
	return e;
}

static void again(struct end *e)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
	struct ibv_wc wc[16];
	WANT(!ibv_modify_qp(e->s.qp[0], &a, IBV_QP_STATE));
	while (ibv_poll_cq(e->s.cq, 16, wc) > 0)
		;
	connect_to(e->s.qp[0], board->qpn[!e->me], e->s.gid);
}

/* --- the peer --- */

enum { DEPTH = 4 };

static void *peer(void *unused)
{
	struct end e = open_end(1);
	char *buf = mmap(NULL, DEPTH * MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(buf != MAP_FAILED);
	struct ibv_mr *mr = ibv_reg_mr(e.s.pd, buf, DEPTH * MOST, IBV_ACCESS_LOCAL_WRITE);
	WANT(mr);
	for (uint64_t round = 1;; round++) {
		await(&board->round, round);
		if (!board->len)
			return NULL;
		again(&e);
		memset(buf, PEER, DEPTH * MOST);
		atomic_store(&board->ready, round);
		int under_way = 0, next = 0;
		bool failed = false;
		while (!failed || under_way) {
			bool stop = atomic_load(&board->stop) >= round;
			if (stop && !under_way)
				break;
			while (!failed && !stop && under_way < (board->reads ? 1 : DEPTH)) {
				struct ibv_sge sge = {(uintptr_t)buf + (uintptr_t)next * MOST, board->len, mr->lkey};
				struct ibv_send_wr wr = {.wr_id = (uint64_t)next, .sg_list = &sge, .num_sge = 1,
							 .opcode = board->reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
							 .send_flags = IBV_SEND_SIGNALED,
							 .wr.rdma = {board->addr, board->rkey}}, *bad;
				WANT(!ibv_post_send(e.s.qp[0], &wr, &bad));
				under_way++, next = (next + 1) % DEPTH;
			}
			struct ibv_wc wc;
			if (ibv_poll_cq(e.s.cq, 1, &wc) != 1) {
				sched_yield();
				continue;
			}
			under_way--;
			if (wc.status != IBV_WC_SUCCESS) {
				if (!failed && wc.status != IBV_WC_REM_ACCESS_ERR && wc.status != IBV_WC_REM_OP_ERR)
					fprintf(stderr, "a request ended with %s\n", ibv_wc_status_str(wc.status));
				failed = true;
				continue;
			}
			if (board->reads) {
				uint64_t k = 0;
				for (uint32_t i = 0; i < board->len; i++)
					k += (uint8_t)buf[wc.wr_id * MOST + i] == board->fresh;
				atomic_fetch_add(&board->read_bytes, k);
			}
			atomic_fetch_add(&board->ops, 1);
		}
		if (failed)
			atomic_store(&board->refused, round);
		atomic_store(&board->done, round);
	}
}

/* --- the ways: "over" replaces the memory. It returns false if another thread has mapped
 * something into a hole first: then nothing there is ours --- */

static int file;	  /* with MOST bytes of NEW */
static int segments[2]; /* of shared memory: the first is registered, the second has NEW */

static char *map_old(void)
{
	char *p = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(p != MAP_FAILED);
	return p;
}
static void unmap(char *p) { WANT(!munmap(p, MOST)); }

static bool fixed_over(char *p)
{
	WANT(mmap(p, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == p);
	return true;
}
static bool fixed_raw(char *p)
{
	WANT(syscall(SYS_mmap, p, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file, 0) == (long)p);
	return true;
}
static char *moving; /* what mremap moves over the region */
static char *mremap_old(void)
{
	moving = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	WANT(moving != MAP_FAILED);
	memset(moving, NEW, MOST); /* so its pages are present, and move */
	return map_old();
}
static bool mremap_over(char *p)
{
	WANT(mremap(moving, MOST, MOST, MREMAP_MAYMOVE | MREMAP_FIXED, p) == p);
	return true;
}
static char *dontneed_old(void)
{
	char *p = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
	WANT(p != MAP_FAILED);
	return p;
}
static bool dontneed_over(char *p)
{
	WANT(!madvise(p, MOST, MADV_DONTNEED));
	return true;
}
static bool munmap_over(char *p)
{
	WANT(!munmap(p, MOST));
	return mmap(p, MOST, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED_NOREPLACE, file, 0) == p;
}
static char *shm_old(void)
{
	char *p = shmat(segments[0], NULL, 0);
	WANT(p != (char *)-1);
	char *q = shmat(segments[1], NULL, 0); /* to overwrite what the peer has left there in the last round */
	WANT(q != (char *)-1);
	memset(q, NEW, MOST);
	WANT(!shmdt(q));
	return p;
}
static bool shm_over(char *p)
{
	WANT(!shmdt(p));
	return shmat(segments[1], p, 0) == p;
}
static bool shm_remap_over(char *p)
{
	WANT(shmat(segments[1], p, SHM_REMAP) == p);
	return true;
}
static void shm_unmap(char *p) { WANT(!shmdt(p)); }
static char *brk_old(void)
{
	uintptr_t now = (uintptr_t)sbrk(0), p = (now + PAGE - 1) & -(uintptr_t)PAGE;
	WANT(!brk((void *)(p + MOST)));
	return (char *)p;
}
static bool brk_over(char *p)
{
	WANT(!brk(p) && !brk(p + MOST));
	return true;
}
static void brk_unmap(char *p) { WANT(!brk(p)); }

static const struct way {
	const char *name;
	char *(*make)(void);
	bool (*over)(char *);
	void (*drop)(char *);
	int fresh;
} ways[] = {
	{"fixed", map_old, fixed_over, unmap, NEW},
	{"mremap", mremap_old, mremap_over, unmap, NEW},
	{"shm", shm_old, shm_over, shm_unmap, NEW},
	{"shm-remap", shm_old, shm_remap_over, shm_unmap, NEW},
	{"dontneed", dontneed_old, dontneed_over, unmap, NEW},
	{"munmap", map_old, munmap_over, unmap, NEW},
	{"brk", brk_old, brk_over, brk_unmap, 0},
	{"raw", map_old, fixed_raw, unmap, NEW},
};

/* --- the owner --- */

struct tally {
	uint64_t rounds, write_rounds, write_bytes, read_rounds, read_bytes, refused, longest;
};

static void one_round(struct end *e, uint64_t round, const struct way *w, struct tally *t)
{
	static const uint32_t sizes[] = {64, 256, 4096, 16384, 65536, MOST};
	uint32_t len = sizes[draw(sizeof sizes / sizeof *sizes)];
	char *p = w->make();
	memset(p, OLD, MOST);
	struct ibv_mr *mr = ibv_reg_mr(e->s.pd, p, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
	WANT(mr);
	again(e);
	board->addr = (uintptr_t)p, board->rkey = mr->rkey, board->len = len;
	board->reads = (int)draw(2), board->fresh = w->fresh;
	atomic_store(&board->ops, 0);
	atomic_store(&board->read_bytes, 0);
	atomic_store(&board->round, round);
	await(&board->ready, round);
	await(&board->ops, 1 + draw(len < 65536 ? 40 : 10));

	uint64_t began = micros();
	bool ours = w->over(p);
	uint64_t took = micros() - began;
	uint64_t until = atomic_load(&board->ops) + AFTER;
	while (atomic_load(&board->done) < round && atomic_load(&board->ops) < until)
		sched_yield();
	atomic_store(&board->stop, round);
	await(&board->done, round);

	WANT(!ibv_dereg_mr(mr));
	if (!ours)
		return;
	uint64_t hit = 0;
	for (uint32_t i = 0; i < len; i++)
		hit += (uint8_t)p[i] == PEER;
	uint64_t got = atomic_load(&board->read_bytes);
	t->rounds++;
	t->write_rounds += hit > 0, t->write_bytes += hit;
	t->read_rounds += got > 0, t->read_bytes += got;
	t->refused += atomic_load(&board->refused) == round;
	t->longest = took > t->longest ? took : t->longest;
	w->drop(p);
}

int main(int argc, char **argv)
{
	WANT(argc > 4);
	bool two = !strcmp(argv[1], "two");
	uint64_t micros_each = strtoull(argv[2], NULL, 10) * 1000000 / (uint64_t)(argc - 4);
	random_state = strtoull(argv[3], NULL, 10);

	/* The way "brk" needs its memory at the end of the heap: malloc gets its room before. */
	mallopt(M_TRIM_THRESHOLD, 1 << 30);
	mallopt(M_TOP_PAD, 32 << 20);
	free(malloc(PAGE));
	board = mmap(NULL, sizeof *board, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	WANT(board != MAP_FAILED);
	WANT((file = memfd_create("new", MFD_CLOEXEC)) >= 0 && !ftruncate(file, MOST));
	char *fill = mmap(NULL, MOST, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	WANT(fill != MAP_FAILED);
	memset(fill, NEW, MOST);
	WANT(!munmap(fill, MOST));
	for (int i = 0; i < 2; i++) {
		WANT((segments[i] = shmget(IPC_PRIVATE, MOST, 0600)) >= 0);
		char *keep = shmat(segments[i], NULL, 0); /* the segment ends with the process */
		WANT(keep != (char *)-1 && !shmctl(segments[i], IPC_RMID, NULL));
	}

	pthread_t thread;
	pid_t child = 0;
	if (two) {
		WANT((child = fork()) >= 0);
		if (!child) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			peer(NULL);
			return 0;
		}
	} else {
		WANT(!pthread_create(&thread, NULL, peer, NULL));
	}
	struct end e = open_end(0);
	uint64_t round = 0;
	for (int i = 4; i < argc; i++) {
		const struct way *w = NULL;
		for (size_t k = 0; k < sizeof ways / sizeof *ways; k++)
			if (!strcmp(ways[k].name, argv[i]))
				w = &ways[k];
		WANT(w);
		struct tally t = {0};
		for (uint64_t end = micros() + micros_each; micros() < end;)
			one_round(&e, ++round, w, &t);
		printf("%s %lu %lu %lu %lu %lu %lu %lu\n", w->name, t.rounds, t.write_rounds, t.write_bytes,
		       t.read_rounds, t.read_bytes, t.refused, t.longest);
		fflush(stdout);
	}
	board->len = 0; /* the peer ends */
	atomic_store(&board->round, round + 1);
	if (two) {
		int status;
		WANT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	} else {
		pthread_join(thread, NULL);
	}
	puts("ok");
	return 0;
}
