//go:build cgo

// The thread that reads what the kernel tells about mappings.
//
// Whoever unmaps watched memory sleeps in the kernel until this thread has read
// the event. That may be any thread with any lock held: the Go runtime that gives
// memory back with the world stopped, the C library in free(). So this thread
// waits for nobody, but for accesses under way, and for these not for long
// (notifier_access.c). It calls no Go, takes no lock, allocates no memory, and has
// all signals blocked; when the ring is full it says so and goes on.
//
// Stages of one turn: wait for something to read; announce it; wait for accesses that
// are under way; read it, with which those who unmap go on; write it to the ring;
// publish.
//
// Announcing comes first, because the thread that has unmapped may use the address again
// before the event stands in the ring. An access that begins after the call has returned
// then finds "moved" changed, and goes on only when the event has been applied.

#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "notifier.h"

// What read(2) on a userfaultfd returns (struct uffd_msg of the kernel).
struct message {
	uint8_t event;
	uint8_t reserved[7];
	uint64_t a, b, c;
};

_Static_assert(sizeof(struct message) == 32, "a message has 32 bytes");

enum {
	batch = 32,
	// The C library keeps thread-local variables of all libraries here, too, so it
	// is not as small as this code could do with. Only what is used is ever present.
	stack_size = 1 << 20,
	guard_size = 1 << 16,
};

// There is one thread in a process. Go calls vn_start and vn_stop one at a time.
static struct {
	pthread_t thread;
	struct vn_ring *ring;
	char *stack;
	int uffd, stop; // -1: there is no thread
} state = {.uffd = -1, .stop = -1};

static void put(struct vn_ring *r, const struct message *m)
{
	uint64_t head = __atomic_load_n(&r->head, __ATOMIC_RELAXED);
	uint64_t tail = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE);

	if (head - tail >= VN_SLOTS) {
		__atomic_store_n(&r->lost, 1, __ATOMIC_SEQ_CST);
		return;
	}
	struct vn_slot *s = &r->slots[head % VN_SLOTS];
	s->kind = m->event;
	s->a = m->a;
	s->b = m->b;
	s->c = m->c;
	__atomic_store_n(&r->head, head + 1, __ATOMIC_RELEASE);
}

// hold waits for accesses under way, unless a thread that has closed a range has waited for
// them already and has not finished its call: then no access has begun since, and none will
// before Go has applied what the caller has announced.
static void hold(struct vn_ring *r)
{
	uint64_t held = __atomic_load_n(&r->held, __ATOMIC_SEQ_CST);

	if (held != __atomic_load_n(&r->begun, __ATOMIC_SEQ_CST) || held == __atomic_load_n(&r->done, __ATOMIC_SEQ_CST))
		vn_hold_accesses(r);
}

// turn reads once. It returns 0, or the errno after which there is no point in
// reading again.
static int turn(int uffd, struct vn_ring *r)
{
	struct message got[batch];
	uint64_t now = __atomic_load_n(&r->announced, __ATOMIC_RELAXED) + 1;

	__atomic_store_n(&r->announced, now, __ATOMIC_SEQ_CST);
	__atomic_add_fetch(&r->moved, 1, __ATOMIC_SEQ_CST);
	hold(r);
	ssize_t n = read(uffd, got, sizeof got);
	int err = n < 0 ? errno : 0;
	for (ssize_t i = 0; i < n / (ssize_t)sizeof got[0]; i++)
		put(r, &got[i]);
	if (err == EAGAIN || err == EINTR)
		err = 0;
	if (err != 0)
		__atomic_store_n(&r->dead, (uint64_t)err, __ATOMIC_SEQ_CST);
	__atomic_store_n(&r->published, now, __ATOMIC_SEQ_CST);
	return err;
}

static void *run(void *arg)
{
	struct vn_ring *r = arg;
	int uffd = state.uffd;
	struct pollfd fds[2] = {
		{.fd = uffd, .events = POLLIN},
		{.fd = state.stop, .events = POLLIN},
	};

	prctl(PR_SET_NAME, "verbena-notify");
	for (;;) {
		fds[0].revents = fds[1].revents = 0;
		if (poll(fds, 2, -1) < 0)
			continue; // a signal of the C library's own, or the kernel is short of memory
		if (fds[0].revents != 0) {
			if (turn(uffd, r) != 0)
				break;
		} else if (fds[1].revents != 0) {
			break;
		}
	}
	// With the descriptor everything that it watched is free again, and who still
	// sleeps for an event wakes up. It must not wait for vn_stop's caller: that one
	// may need a lock of the C library whose holder is asleep for an event.
	__atomic_store_n(&state.uffd, -1, __ATOMIC_SEQ_CST); // not the child's any more
	close(uffd);
	return NULL;
}

// forked runs in the child of a fork. The descriptors refer to the memory of the
// parent, and the child would keep it watched for longer than the parent wants.
static void forked(void)
{
	int uffd = __atomic_load_n(&state.uffd, __ATOMIC_SEQ_CST);

	if (uffd >= 0)
		close(uffd);
	if (state.stop >= 0)
		close(state.stop);
	state.uffd = state.stop = -1;
	vn_withdraw_closing();
}

static pthread_once_t fork_once = PTHREAD_ONCE_INIT;

static void at_fork(void)
{
	pthread_atfork(NULL, NULL, forked);
}

int vn_start(int uffd, int stop, struct vn_ring *ring)
{
	pthread_attr_t attr;
	sigset_t all, old;
	int err;

	pthread_once(&fork_once, at_fork);
	// The stack is ours. The C library gives the one that it allocates back to the
	// kernel when a thread ends; were it watched, the thread would wait for itself.
	char *stack = mmap(NULL, stack_size, PROT_NONE,
		MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
	if (stack == MAP_FAILED)
		return errno;
	if (mprotect(stack + guard_size, stack_size - guard_size, PROT_READ | PROT_WRITE) != 0) {
		err = errno;
		munmap(stack, stack_size);
		return err;
	}
	err = pthread_attr_init(&attr);
	if (err == 0) {
		err = pthread_attr_setstack(&attr, stack + guard_size, stack_size - guard_size);
		if (err == 0) {
			state.ring = ring;
			state.stack = stack;
			state.uffd = uffd;
			state.stop = stop;
			sigfillset(&all);
			pthread_sigmask(SIG_SETMASK, &all, &old);
			err = pthread_create(&state.thread, &attr, run, ring);
			pthread_sigmask(SIG_SETMASK, &old, NULL);
		}
		pthread_attr_destroy(&attr);
	}
	if (err != 0) {
		state.uffd = state.stop = -1;
		munmap(stack, stack_size);
		return err;
	}
	vn_offer_closing(ring);
	return 0;
}

void vn_stop(void)
{
	uint64_t one = 1;

	if (state.stop < 0)
		return;
	while (write(state.stop, &one, sizeof one) < 0 && errno == EINTR)
		;
	pthread_join(state.thread, NULL);
	close(state.stop);
	state.uffd = state.stop = -1;
	munmap(state.stack, stack_size);
}
