//go:build cgo

// Waiting for accesses to watched memory that are under way.
//
// An access counts itself first and then looks at "moved"; the thread and the closers
// increment it first and then look at the counts. One of them sees the other: the access
// turns back, or it is waited for. So when each count has been seen at zero once, no
// access is under way, and none begins before Go has applied what was announced.
//
// The wait has a bound. Whoever unmaps may be the one without whom the access cannot
// end: the Go runtime with the world stopped, or a signal handler that has interrupted
// the access. Accesses that were waited for in vain are not waited for again.

#define _GNU_SOURCE
#include <sched.h>
#include <stdint.h>
#include <time.h>

#include "notifier.h"

enum {
	spins = 2000,            // some microseconds: a copy that goes on in another thread
	yields = 100,            // a copy whose thread waits for this processor
	nap_ns = 50 * 1000,      // a copy whose thread sleeps, as for a page on a disk
	most_ns = 100 * 1000000, // all of it
};

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

// move_tickets changes the words by which other processes see that memory which they
// were about to read is not meant any more. In that order: the word changes before the
// memory does, and a reader looks at the word after it has read.
static void move_tickets(struct vn_ring *r)
{
	__atomic_add_fetch(&r->moving, 1, __ATOMIC_SEQ_CST);
	for (int i = 0; i < VN_TICKETS; i++) {
		uint64_t *word = (uint64_t *)(uintptr_t)__atomic_load_n(&r->tickets[i], __ATOMIC_SEQ_CST);

		if (word)
			__atomic_add_fetch(word, 1, __ATOMIC_SEQ_CST);
	}
	__atomic_sub_fetch(&r->moving, 1, __ATOMIC_SEQ_CST);
}

// await waits for the accesses of one shard. It reports whether they have ended.
static int await(struct vn_count *c, int *looks, uint64_t *deadline)
{
	const struct timespec nap = {.tv_nsec = nap_ns};

	for (;;) {
		uint64_t word = __atomic_load_n(&c->word, __ATOMIC_SEQ_CST);
		if ((uint32_t)word == 0)
			return 1;
		if (word == __atomic_load_n(&c->stuck, __ATOMIC_RELAXED))
			return 0;
		if (++*looks < spins) {
			relax();
			continue;
		}
		uint64_t now = now_ns();
		if (*deadline == 0)
			*deadline = now + most_ns;
		if (now >= *deadline) {
			__atomic_store_n(&c->stuck, word, __ATOMIC_RELAXED);
			return 0;
		}
		if (*looks < spins + yields)
			sched_yield();
		else
			nanosleep(&nap, NULL);
	}
}

void vn_hold_accesses(struct vn_ring *r)
{
	uint64_t deadline = 0;
	int looks = 0, ended = 1;

	move_tickets(r);
	for (int i = 0; i < VN_SHARDS; i++)
		ended &= await(&r->accesses[i], &looks, &deadline);
	if (!ended)
		__atomic_add_fetch(&r->overruns, 1, __ATOMIC_SEQ_CST);
}
