// The memory that the thread of notifier.c shares with notifier_unsafe.go, and
// what Go calls to start and to end it. The Go side has the same layout as a
// struct of its own and compares sizes and offsets when it starts the thread.

#ifndef VERBENA_NOTIFIER_H
#define VERBENA_NOTIFIER_H

#include <stdint.h>

#define VN_SLOTS 4096 // a power of two

struct vn_slot {
	uint64_t kind, a, b, c; // the event's number, and its arguments in order
};

struct vn_ring {
	// Written by the thread.
	uint64_t announced; // moved before events are taken from the kernel
	uint64_t published; // set to announced when they stand in the slots
	uint64_t head;      // slots written since the start
	uint64_t lost;      // set when a slot was missing, cleared by Go
	uint64_t dead;      // the errno with which the thread has given up, or 0
	uint64_t pad[3];
	// Written by Go.
	uint64_t tail;     // slots read since the start
	uint64_t consumed; // announced, when everything until then was applied
	uint64_t open;     // 0 when there is no thread: before, after, and in a fork's child
	uint64_t pad2[5];
	struct vn_slot slots[VN_SLOTS];
};

// vn_start starts the thread on a userfaultfd and an eventfd that ends it. The
// thread owns the userfaultfd from then on and closes it when it ends. Returns 0
// or an errno; after an errno the descriptors are the caller's as before.
int vn_start(int uffd, int stop, struct vn_ring *ring);

// vn_stop ends the thread, waits for it, and closes the eventfd.
void vn_stop(void);

#endif
