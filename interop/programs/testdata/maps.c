/*
 * Calls that change mappings, which "verbena exec" intercepts: results and errno are the
 * kernel's, what a call has changed is stale, and everything else is not. Also in several
 * threads, in a signal handler and in a child of fork().
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

enum { PAGE = 4096, N = 16, SIZE = N * PAGE, RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static struct self s;
static char *from;
static struct ibv_mr *from_mr;

static void reconnect(void)
{
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
		WANT(!ibv_modify_qp(s.qp[i], &a, IBV_QP_STATE));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
}

/* works reports whether a page of a region can be written to by a peer. */
static bool works(struct ibv_mr *mr, int page)
{
	enum ibv_wc_status st = write_to(&s, from, from_mr->lkey, (uintptr_t)mr->addr + (uintptr_t)page * PAGE, mr->rkey, 64);
	if (st != IBV_WC_SUCCESS)
		reconnect();
	WANT(st == IBV_WC_SUCCESS || st == IBV_WC_REM_ACCESS_ERR);
	return st == IBV_WC_SUCCESS;
}

/* STALE checks that accesses to the pages from first to end - 1, and to no others, fail. */
#define STALE(first, end)                                                                                              \
	do {                                                                                                           \
		for (int i = 0; i < N; i++)                                                                            \
			WANT(works(mr, i) == !(i >= (first) && i < (end)));                                            \
	} while (0)

/* FAILS checks that a call fails with an errno, GIVES that it succeeds and does not change
 * errno. */
#define FAILS(err, call) WANT((errno = 0, (long)(call) == -1) && errno == (err))
#define GIVES(what, call) WANT((errno = 77, (long)(call) == (long)(what)) && errno == 77)

static char *fresh(void)
{
	/* With room behind it, so that it can grow. */
	char *p = mmap(NULL, 3 * SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(p != MAP_FAILED && !munmap(p + SIZE, 2 * SIZE));
	memset(p, 1, SIZE);
	return p;
}

static struct ibv_mr *reg(char *p)
{
	struct ibv_mr *mr = ibv_reg_mr(s.pd, p, SIZE, RIGHTS);
	WANT(mr);
	return mr;
}

static void map_and_unmap(void)
{
	char *p = fresh();
	struct ibv_mr *mr = reg(p);
	int anon = MAP_PRIVATE | MAP_ANONYMOUS;
	FAILS(EINVAL, mmap(p + 1, PAGE, PROT_READ, anon | MAP_FIXED, -1, 0));
	FAILS(EINVAL, mmap(p, 0, PROT_READ, anon | MAP_FIXED, -1, 0));
	FAILS(EINVAL, mmap(p, PAGE, PROT_READ, MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	FAILS(EBADF, mmap(p, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, -1, 0));
	FAILS(EINVAL, mmap(p, PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, 0, 1));
	FAILS(EEXIST, mmap(p, PAGE, PROT_READ, anon | MAP_FIXED_NOREPLACE, -1, 0));
	FAILS(EINVAL, munmap(p + 1, PAGE));
	FAILS(EINVAL, munmap(p, 0));
#ifndef __SANITIZE_THREAD__ /* which ends the program for a size like this */
	FAILS(ENOMEM, mmap(p, -(size_t)PAGE, PROT_READ, anon | MAP_FIXED, -1, 0));
	FAILS(EINVAL, munmap(p, -(size_t)PAGE));
#endif
	STALE(0, 0);
	char *other = mmap(p, PAGE, PROT_READ, anon, -1, 0); /* a hint: it goes elsewhere */
	WANT(other != MAP_FAILED && other != p && !munmap(other, PAGE));
	STALE(0, 0);
	GIVES(p + PAGE, mmap(p + PAGE, PAGE + 1, PROT_READ | PROT_WRITE, anon | MAP_FIXED, -1, 0));
	STALE(1, 3);
	GIVES(0, munmap(p + 3 * PAGE, 1));
	STALE(1, 4);
	GIVES(p + 3 * PAGE, mmap64(p + 3 * PAGE, 2 * PAGE, PROT_READ | PROT_WRITE, anon | MAP_FIXED, -1, 0));
	STALE(1, 5);
	WANT(!ibv_dereg_mr(mr));
	mr = reg(p); /* a new region of the new memory works */
	STALE(0, 0);
	WANT(!ibv_dereg_mr(mr) && !munmap(p, SIZE));
}

static void move(void)
{
	char *p = fresh(), *q;
	struct ibv_mr *mr = reg(p);
	FAILS(EINVAL, mremap(p + 1, SIZE, SIZE, 0));
	FAILS(EINVAL, mremap(p, SIZE, 0, 0));
	FAILS(EINVAL, mremap(p, SIZE, SIZE, MREMAP_FIXED, p + 4 * SIZE));
	FAILS(EINVAL, mremap(p, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, p + PAGE)); /* they overlap */
	STALE(0, 0);
	GIVES(p, mremap(p, SIZE, SIZE, 0));
	STALE(0, 0);
	GIVES(p, mremap(p, SIZE, 2 * SIZE, 0)); /* it grows where it is */
	STALE(0, 0);
	GIVES(p, mremap(p, 2 * SIZE, SIZE - 4 * PAGE, 0));
	STALE(N - 4, N);
	WANT(!ibv_dereg_mr(mr) && !munmap(p, SIZE - 4 * PAGE));

	p = fresh();
	mr = reg(p);
	q = mremap(p, 2 * PAGE, 64 * SIZE, MREMAP_MAYMOVE);
	WANT(q != MAP_FAILED && q != p);
	STALE(0, 2);
	WANT(!munmap(q, 64 * SIZE));
	q = fresh();
	GIVES(p + 4 * PAGE, mremap(q, 2 * PAGE, 2 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, p + 4 * PAGE));
	for (int i = 0; i < N; i++)
		WANT(works(mr, i) == !(i < 2 || (i >= 4 && i < 6)));
	WANT(!munmap(q + 2 * PAGE, SIZE - 2 * PAGE));
	WANT(!ibv_dereg_mr(mr) && !munmap(p, SIZE));
}

static void discard(void)
{
	char *p = fresh();
	struct ibv_mr *mr = reg(p);
	FAILS(EINVAL, madvise(p + 1, PAGE, MADV_DONTNEED));
	FAILS(EINVAL, madvise(p, PAGE, 12345));
	GIVES(0, madvise(p, SIZE, MADV_WILLNEED));
	GIVES(0, posix_madvise(p, SIZE, POSIX_MADV_DONTNEED));
	STALE(0, 0);
	GIVES(0, madvise(p, PAGE, MADV_DONTNEED));
	STALE(0, 1);
	GIVES(0, madvise(p + PAGE, PAGE, MADV_FREE));
	STALE(0, 2);
	if (!madvise(p + 2 * PAGE, PAGE, MADV_GUARD_INSTALL)) { /* Linux 6.13 */
		WANT(!madvise(p + 2 * PAGE, PAGE, MADV_GUARD_INSTALL + 1)); /* MADV_GUARD_REMOVE: then it is another page */
		STALE(0, 3);
	} else {
		WANT(errno == EINVAL);
	}
	WANT(!munmap(p + SIZE - PAGE, PAGE));
	FAILS(ENOMEM, madvise(p + SIZE - 2 * PAGE, 2 * PAGE, MADV_DONTNEED)); /* done, except in the hole */
	WANT(works(mr, N - 3) && !works(mr, N - 2) && !works(mr, N - 1));
	WANT(!ibv_dereg_mr(mr) && !munmap(p, SIZE));
}

static void heap(void)
{
	char *now = sbrk(0), *p = (char *)(((uintptr_t)now + PAGE - 1) & -(uintptr_t)PAGE);
	GIVES(0, brk(p + SIZE));
	struct ibv_mr *mr = reg(p);
	WANT(!brk((void *)1) && sbrk(0) == p + SIZE); /* the C library returns 0 for that */
	FAILS(ENOMEM, brk((void *)-1));
	FAILS(ENOMEM, sbrk((intptr_t)1 << 60));
	GIVES(p + SIZE, sbrk(PAGE));
	GIVES(p + SIZE + PAGE, sbrk(-PAGE));
	STALE(0, 0);
	GIVES(p + SIZE, sbrk(-PAGE));
	GIVES(p + SIZE - PAGE, sbrk(PAGE)); /* a new page */
	STALE(N - 1, N);
	GIVES(0, brk(p + SIZE - 3 * PAGE + 1));
	GIVES(0, brk(p + SIZE));
	STALE(N - 2, N);
	WANT(!ibv_dereg_mr(mr) && !brk(now));
}

static void segments(void)
{
	int a = shmget(IPC_PRIVATE, SIZE, 0600), b = shmget(IPC_PRIVATE, 2 * PAGE, 0600);
	WANT(a >= 0 && b >= 0);
	char *p = shmat(a, NULL, 0);
	WANT(p != (char *)-1);
	struct ibv_mr *mr = reg(p);
	FAILS(EINVAL, shmdt(p + PAGE));
	FAILS(EINVAL, shmdt(p + 1));
	FAILS(EINVAL, shmat(b, p, 0)); /* something is there */
	FAILS(EINVAL, shmat(b, p + 1, SHM_REMAP));
	FAILS(EINVAL, shmat(-1, p, SHM_REMAP));
	FAILS(EINVAL, shmat(b, NULL, SHM_REMAP));
	STALE(0, 0);
	/* The region keeps the segment, whatever is attached or detached there. */
	GIVES(p + 4 * PAGE, shmat(b, p + 4 * PAGE + 7, SHM_REMAP | SHM_RND));
	STALE(0, 0);
	WANT(p[4 * PAGE] == 0 && p[5 * PAGE] == 0);
	GIVES(0, shmdt(p + 4 * PAGE));
	STALE(0, 0);
	GIVES(0, shmdt(p)); /* both parts of the segment */
	STALE(0, 0);
	GIVES(p, shmat(a, p, 0));
	WANT(p[4 * PAGE] != 0); /* the peer's WRITEs have reached the segment */
	STALE(0, 0);
	WANT(!ibv_dereg_mr(mr) && !shmdt(p));
	WANT(!shmctl(a, IPC_RMID, NULL) && !shmctl(b, IPC_RMID, NULL));
}

/* --- many at once --- */

/* A handler that has interrupted an access of its own thread waits for the end of that access
 * in vain, for a tenth of a second. */

static _Atomic int ended, handled;

static char *mine; /* the signal handler's: a registered page */

static void handler(int sig)
{
	int err = errno;
	if (mmap(mine, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != mine)
		abort();
	handled++;
	errno = err;
}

static void *churn(void *unused)
{
	char *p = fresh();
	for (int i = 0; i < 300; i++) {
		struct ibv_mr *mr = reg(p);
		WANT(mmap(p, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
		WANT(!madvise(p, SIZE, MADV_DONTNEED));
		WANT(!ibv_dereg_mr(mr));
	}
	WANT(!munmap(p, SIZE));
	ended++;
	return NULL;
}

static void crowd(void)
{
	enum { THREADS = 4 };
	pthread_t threads[THREADS];
	char *p = fresh();
	mine = fresh();
	struct ibv_mr *mr = reg(p), *mine_mr = reg(mine);
	signal(SIGALRM, handler);
	struct itimerval often = {{0, 20000}, {0, 20000}}, never = {{0, 0}, {0, 0}};
	for (int i = 0; i < THREADS; i++)
		WANT(!pthread_create(&threads[i], NULL, churn, NULL));
	WANT(!setitimer(ITIMER_REAL, &often, NULL));
	while (ended < THREADS || handled < 5)
		WANT(write_to(&s, from, from_mr->lkey, (uintptr_t)p, mr->rkey, PAGE) == IBV_WC_SUCCESS);
	WANT(!setitimer(ITIMER_REAL, &never, NULL));
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	WANT(!works(mine_mr, 0) && works(mine_mr, 1));
	STALE(0, 0);

	pid_t child = fork(); /* it has no live backend */
	WANT(child >= 0);
	if (!child) {
		for (int i = 0; i < 100; i++)
			if (mmap(p, SIZE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p || p[0])
				_exit(1);
		_exit(munmap(p, SIZE));
	}
	int status;
	WANT(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	STALE(0, 0);
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(mine_mr) && !munmap(p, SIZE) && !munmap(mine, SIZE));
}

int main(void)
{
	/* Before the backend is loaded. */
	char *p = fresh();
	GIVES(p, mmap(p, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0));
	GIVES(0, munmap(p, SIZE));

	s = connect_self();
	from = fresh();
	from_mr = reg(from);
	map_and_unmap();
	move();
	discard();
	heap();
	segments();
	crowd();
	WANT(!ibv_dereg_mr(from_mr));
	close_self(&s);
	puts("ok");
	return 0;
}
