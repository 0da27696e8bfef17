//go:build cgo

// Closing ranges of addresses before a system call changes them.
//
// For some calls the kernel's event comes too late: mmap over a mapping and mremap
// install the new mapping before the event can be read, and shmdt, shmat, remap_file_pages
// and MADV_GUARD_INSTALL raise none. A library that sees the call before it is made
// (clib/files/maps.c) closes the range here.
//
// Stages: take the lock; announce; wait for accesses that are under way; the caller makes
// the system call; write what has changed into slots of its own; publish; let the lock go.
//
// All of this runs in the program's threads: also in a signal handler, and while the
// program holds any lock. So it calls no Go and allocates nothing, and all signals are
// blocked from before the lock is taken until it is free. The thread of notifier.c never
// takes the lock. It must be able to run meanwhile, since the system call itself sleeps
// until the thread has read the kernel's event.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "notifier.h"
#include "notifier_hook.h"

enum { unmapped = 0x16 }; // UFFD_EVENT_UNMAP

// The ring, once there was a notifier. It is never unmapped, and all zeros in the child
// of a fork: then it is not open.
static struct vn_ring *the_ring;

static uint32_t *futex_of(struct vn_ring *r)
{
	uint32_t *half = (uint32_t *)&r->lock;

	return half + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
}

static void lock(struct vn_ring *r)
{
	uint32_t *word = futex_of(r), was = 0;

	if (__atomic_compare_exchange_n(word, &was, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
		return;
	while (__atomic_exchange_n(word, 2, __ATOMIC_ACQUIRE) != 0)
		syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static void unlock(struct vn_ring *r)
{
	uint32_t *word = futex_of(r);

	if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) == 2)
		syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

// block_signals blocks all of them, those of the C library too, which its own function
// leaves alone.
static uint64_t block_signals(void)
{
	uint64_t all = ~(uint64_t)0, old = 0;

	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &all, &old, sizeof old);
	return old;
}

static void restore_signals(uint64_t old)
{
	syscall(SYS_rt_sigprocmask, SIG_SETMASK, &old, NULL, sizeof old);
}

// watched reports whether a part of a range may be watched.
static bool watched(const struct vn_ring *r, const struct vn_range *range)
{
	if (range->start >= range->end)
		return false;
	uint64_t first = (uint64_t)range->start >> VN_UNIT_BITS, last = (uint64_t)(range->end - 1) >> VN_UNIT_BITS;
	if (last >> 6 >= VN_UNIT_WORDS)
		return true;
	uint64_t low = __atomic_load_n(&r->low, __ATOMIC_SEQ_CST), high = __atomic_load_n(&r->high, __ATOMIC_SEQ_CST);
	uint64_t from = first >> 6 > low ? first >> 6 : low;
	for (uint64_t i = from; i <= last >> 6 && i < high; i++) {
		uint64_t mask = ~(uint64_t)0;
		if (i == first >> 6)
			mask &= ~(uint64_t)0 << (first & 63);
		if (i == last >> 6)
			mask &= ~(uint64_t)0 >> (63 - (last & 63));
		if (__atomic_load_n(&r->units[i], __ATOMIC_SEQ_CST) & mask)
			return true;
	}
	return false;
}

static bool any_watched(const struct vn_ring *r, const struct vn_range *ranges, int n)
{
	for (int i = 0; i < n; i++)
		if (watched(r, &ranges[i]))
			return true;
	return false;
}

static int close_begin(const struct vn_range *ranges, int n, struct vn_closing *c)
{
	struct vn_ring *r = __atomic_load_n(&the_ring, __ATOMIC_ACQUIRE);

	if (r == NULL || __atomic_load_n(&r->open, __ATOMIC_SEQ_CST) == 0 || !any_watched(r, ranges, n))
		return 0;
	int err = errno;
	c->signals = block_signals();
	uint64_t self = (uint64_t)syscall(SYS_gettid);
	if (__atomic_load_n(&r->owner, __ATOMIC_RELAXED) == self) {
		// A call within a call: a sanitizer's function reports something. It is closed.
		restore_signals(c->signals);
		errno = err;
		return 0;
	}
	lock(r);
	__atomic_store_n(&r->owner, self, __ATOMIC_RELAXED);
	uint64_t now = __atomic_load_n(&r->begun, __ATOMIC_RELAXED) + 1;
	__atomic_store_n(&r->begun, now, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&r->closings, 1, __ATOMIC_RELAXED);
	__atomic_add_fetch(&r->moved, 1, __ATOMIC_SEQ_CST);
	vn_hold_accesses(r);
	__atomic_store_n(&r->held, now, __ATOMIC_SEQ_CST);
	errno = err;
	return 1;
}

static void put(struct vn_ring *r, const struct vn_range *range)
{
	uint64_t head = __atomic_load_n(&r->closed_head, __ATOMIC_RELAXED);
	uint64_t tail = __atomic_load_n(&r->closed_tail, __ATOMIC_ACQUIRE);

	if (range->start >= range->end)
		return;
	if (head - tail >= VN_CLOSED_SLOTS) {
		__atomic_store_n(&r->lost, 1, __ATOMIC_SEQ_CST);
		return;
	}
	struct vn_slot *s = &r->closed[head % VN_CLOSED_SLOTS];
	s->kind = unmapped;
	s->a = range->start;
	s->b = range->end;
	s->c = 0;
	__atomic_store_n(&r->closed_head, head + 1, __ATOMIC_RELEASE);
}

static void close_end(struct vn_closing *c, const struct vn_range *changed, int n)
{
	struct vn_ring *r = __atomic_load_n(&the_ring, __ATOMIC_ACQUIRE);
	int err = errno;

	for (int i = 0; i < n; i++)
		put(r, &changed[i]);
	__atomic_store_n(&r->done, __atomic_load_n(&r->begun, __ATOMIC_RELAXED), __ATOMIC_SEQ_CST);
	__atomic_store_n(&r->owner, 0, __ATOMIC_RELAXED);
	unlock(r);
	restore_signals(c->signals);
	errno = err;
}

static struct vn_hook *the_hook(void)
{
	struct vn_hook *h = dlsym(RTLD_DEFAULT, "verbena_preload_ranges");

	return h != NULL && h->version == VN_HOOK_VERSION ? h : NULL;
}

static struct vn_hook *hook; // where the functions were stored

void vn_offer_closing(struct vn_ring *ring)
{
	__atomic_store_n(&the_ring, ring, __ATOMIC_RELEASE);
	hook = the_hook();
	if (hook != NULL) {
		__atomic_store_n(&hook->end, close_end, __ATOMIC_RELEASE);
		__atomic_store_n(&hook->begin, close_begin, __ATOMIC_RELEASE);
	}
}

void vn_withdraw_closing(void)
{
	if (hook != NULL)
		__atomic_store_n(&hook->begin, NULL, __ATOMIC_RELEASE);
}
