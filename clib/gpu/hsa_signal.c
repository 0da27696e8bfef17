/*
 * Signals of HSA, and copies that are ordered by them.
 *
 *  1. A copy waits for the signals that it depends on: each has a list of the copies that wait for it.
 *  2. The change of a signal to 0 takes it off the list. With the last one the copy starts.
 *  3. At its end, in a thread of the GPU, the completion signal is decremented; after an error it becomes negative.
 *
 * A handle is the number of a slot and how often it was used, so that a stale one finds nothing. Slots are never freed.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <time.h>

#include "hsa.h"

struct copy {
	void *to;
	const void *from;
	size_t n;
	uint64_t completion; /* 0: none */
	atomic_int waits;    /* signals that it still waits for, and one while they are counted */
};

struct waiter {
	struct copy *copy;
	struct waiter *next;
};

struct signal {
	_Atomic uint64_t handle; /* 0: the slot is free */
	_Atomic int64_t value;
	pthread_mutex_t lock; /* guards waiters, and changes of value */
	pthread_cond_t changed;
	struct waiter *waiters;
	uint64_t index, uses; /* guarded by slots_lock, as is next */
	struct signal *next;  /* in the list of free slots */
};

enum { INDEX_BITS = 16 };

static pthread_mutex_t slots_lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static _Atomic(struct signal *) slots[1 << INDEX_BITS];	       /* also read without the lock */
static struct signal *free_slots;
static uint64_t used; /* slots that were ever used */

void hsa_forget_signals(void)
{
	pthread_mutex_init(&slots_lock, NULL);
	for (uint64_t i = 0; i < used; i++)
		atomic_store(&slots[i], NULL); /* their locks may be held by threads that this process does not have */
	free_slots = NULL;
	used = 0;
}

/* find returns the signal of a handle; NULL if there is none. */
static struct signal *find(uint64_t handle)
{
	struct signal *s = atomic_load(&slots[handle & ((1 << INDEX_BITS) - 1)]);
	return s && handle && atomic_load(&s->handle) == handle ? s : NULL;
}

/* new_slot returns a slot that was never used; NULL if there is none. The slots are locked. */
static struct signal *new_slot(void)
{
	struct signal *s = used < 1 << INDEX_BITS ? calloc(1, sizeof *s) : NULL;
	if (!s)
		return NULL;
	pthread_condattr_t attr;
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_mutex_init(&s->lock, NULL);
	pthread_cond_init(&s->changed, &attr);
	s->index = used++;
	atomic_store(&slots[s->index], s);
	return s;
}

PUBLIC enum hsa_status hsa_signal_create(int64_t value, uint32_t num_consumers, const hsa_handle *consumers, hsa_handle *signal)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!signal || (num_consumers && !consumers))
		return INVALID_ARGUMENT;
	pthread_mutex_lock(&slots_lock);
	struct signal *s = free_slots ? free_slots : new_slot();
	if (s) {
		if (s == free_slots)
			free_slots = s->next;
		atomic_store(&s->value, value);
		signal->handle = ++s->uses << INDEX_BITS | s->index;
		atomic_store(&s->handle, signal->handle);
	}
	pthread_mutex_unlock(&slots_lock);
	return s ? SUCCESS : OUT_OF_RESOURCES;
}

static void start(struct copy *c);

/* let_go ends one of the waits of a copy. */
static void let_go(struct copy *c)
{
	if (atomic_fetch_sub(&c->waits, 1) == 1)
		start(c);
}

/* release ends the waits in a list. */
static void release(struct waiter *w)
{
	while (w) {
		struct waiter *next = w->next;
		let_go(w->copy);
		free(w);
		w = next;
	}
}

/* change sets a signal, or adds to it, and wakes whoever waits for it. */
static void change(struct signal *s, int64_t value, bool add)
{
	struct waiter *ready = NULL;
	pthread_mutex_lock(&s->lock);
	if (add)
		value += atomic_load(&s->value);
	atomic_store(&s->value, value);
	if (!value) {
		ready = s->waiters;
		s->waiters = NULL;
	}
	pthread_cond_broadcast(&s->changed);
	pthread_mutex_unlock(&s->lock);
	release(ready);
}

/* Copies that wait for a signal that is destroyed would wait for ever: they start. */
PUBLIC enum hsa_status hsa_signal_destroy(hsa_handle signal)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	struct signal *s = find(signal.handle);
	uint64_t is = signal.handle;
	if (!s || !atomic_compare_exchange_strong(&s->handle, &is, 0))
		return INVALID_SIGNAL;
	change(s, 0, false);
	pthread_mutex_lock(&slots_lock);
	s->next = free_slots;
	free_slots = s;
	pthread_mutex_unlock(&slots_lock);
	return SUCCESS;
}

/* The functions that follow return no status: what is no signal has the value 0, and stores do nothing. */

PUBLIC int64_t hsa_signal_load_scacquire(hsa_handle signal)
{
	struct signal *s = find(signal.handle);
	return s ? atomic_load(&s->value) : 0;
}

PUBLIC void hsa_signal_store_screlease(hsa_handle signal, int64_t value)
{
	struct signal *s = find(signal.handle);
	if (s)
		change(s, value, false);
}

static bool holds(int64_t value, int condition, int64_t than)
{
	switch (condition) {
	case 0:
		return value == than;
	case 1:
		return value != than;
	case 2:
		return value < than;
	}
	return value >= than;
}

/* The timeout is in nanoseconds. The value that it returns need not fulfil the condition: so says the interface. */
PUBLIC int64_t hsa_signal_wait_scacquire(hsa_handle signal, int condition, int64_t than, uint64_t timeout, int state)
{
	enum { SPINS = 200, SECOND = 1000000000 };
	struct signal *s = find(signal.handle);
	(void)state; /* a thread that waits lets others run, whatever it asks for: these may be the GPU's */
	if (!s)
		return 0;
	for (int i = 0; i < SPINS; i++) {
		int64_t value = atomic_load(&s->value);
		if (holds(value, condition, than))
			return value;
		sched_yield();
	}
	struct timespec end;
	clock_gettime(CLOCK_MONOTONIC, &end);
	uint64_t left = timeout < (uint64_t)SECOND << 30 ? timeout : (uint64_t)SECOND << 30; /* 34 years */
	left += (uint64_t)end.tv_nsec;
	end.tv_sec += (time_t)(left / SECOND);
	end.tv_nsec = (long)(left % SECOND);
	pthread_mutex_lock(&s->lock);
	while (!holds(atomic_load(&s->value), condition, than) && atomic_load(&s->handle) == signal.handle)
		if (pthread_cond_timedwait(&s->changed, &s->lock, &end))
			break;
	int64_t value = atomic_load(&s->value);
	pthread_mutex_unlock(&s->lock);
	return value;
}

/* ended is called at the end of a copy, by a thread of the GPU. */
static void ended(void *arg, int error)
{
	struct copy *c = arg;
	struct signal *s = find(c->completion);
	if (s)
		change(s, -1, !error);
	free(c);
}

/* start starts a copy whose waits have ended. */
static void start(struct copy *c)
{
	int r = verbena_gpu_copy_then(c->to, c->from, c->n, ended, c);
	if (r)
		ended(c, r);
}

/* after has a copy wait for a signal. It reports whether memory was there. */
static bool after(struct signal *s, struct copy *c)
{
	struct waiter *w = malloc(sizeof *w);
	if (!w)
		return false;
	*w = (struct waiter){c, NULL};
	atomic_fetch_add(&c->waits, 1);
	pthread_mutex_lock(&s->lock);
	bool waits = atomic_load(&s->value);
	if (waits) {
		w->next = s->waiters;
		s->waiters = w;
	}
	pthread_mutex_unlock(&s->lock);
	if (!waits)
		release(w);
	return true;
}

PUBLIC enum hsa_status hsa_amd_memory_async_copy(void *to, hsa_handle to_agent, const void *from, hsa_handle from_agent, size_t n,
						 uint32_t num, const hsa_handle *signals, hsa_handle completion)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(to_agent) || !hsa_is_agent(from_agent))
		return INVALID_AGENT;
	if (!to || !from || (num && !signals))
		return INVALID_ARGUMENT;
	if (completion.handle && !find(completion.handle))
		return INVALID_SIGNAL;
	for (uint32_t i = 0; i < num; i++)
		if (!find(signals[i].handle))
			return INVALID_SIGNAL;
	struct copy *c = malloc(sizeof *c);
	if (!c)
		return OUT_OF_RESOURCES;
	*c = (struct copy){to, from, n, completion.handle, 1};
	if (!num) { /* an error is found at once */
		int r = verbena_gpu_copy_then(to, from, n, ended, c);
		if (r)
			free(c);
		return hsa_answer(r, INVALID_ARGUMENT);
	}
	bool ok = true;
	for (uint32_t i = 0; i < num && ok; i++) {
		struct signal *s = find(signals[i].handle);
		ok = !s || after(s, c);
	}
	if (!ok) { /* the copy, for which waits are left, does nothing */
		c->n = 0;
		c->completion = 0;
	}
	let_go(c);
	return ok ? SUCCESS : OUT_OF_RESOURCES;
}
