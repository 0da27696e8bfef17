// The memory that the C side of the notifier shares with notifier_unsafe.go, and
// what Go calls to start and to end the thread. The Go side has the same layout as a
// struct of its own and compares sizes when it is compiled.
//
//   notifier.c         the thread that reads events
//   notifier_access.c  waiting for accesses that are under way
//   notifier_close.c   closing a range before a system call changes it

#ifndef VERBENA_NOTIFIER_H
#define VERBENA_NOTIFIER_H

#include <stdint.h>

#define VN_SLOTS 4096	 // of events of the kernel; a power of two
#define VN_CLOSED_SLOTS 64 // of ranges that were closed; a power of two
#define VN_SHARDS 64	 // of the count of accesses under way; a power of two
#define VN_TICKETS 256

// A unit of the address space is watched as a whole or not at all, as far as
// vn_close_begin can see. Addresses above the last unit count as watched.
#define VN_UNIT_BITS 21
#define VN_ADDR_BITS 48
#define VN_UNIT_WORDS (1 << (VN_ADDR_BITS - VN_UNIT_BITS - 6))

struct vn_slot {
	uint64_t kind, a, b, c; // the event's number, and its arguments in order
};

// Accesses under way, in the low half, and how many have ended, in the high half: a
// word that has not changed stands for the same accesses.
struct vn_count {
	uint64_t word;
	uint64_t stuck; // the word when accesses took too long to be waited for
	uint64_t pad[6]; // a cache line for each
};

struct vn_ring {
	// What an access looks at, on one cache line.
	uint64_t moved;    // counts announcements of both kinds; incremented after announced or begun
	uint64_t consumed; // written by Go: moved, when everything until then was applied
	uint64_t pad[6];
	// Written by the thread. The closers set lost and count overruns, too.
	uint64_t announced; // incremented before events are taken from the kernel
	uint64_t published; // set to announced when they stand in the slots
	uint64_t head;      // slots written since the start
	uint64_t lost;      // set when a slot was missing, cleared by Go
	uint64_t dead;      // the errno with which the thread has given up, or 0
	uint64_t overruns;  // how often accesses took too long to be waited for
	uint64_t pad2[2];
	// Written by closers, one at a time: the holder of lock.
	uint64_t lock;        // the low half is a futex: 0 free, 1 held, 2 held and waited for
	uint64_t begun;       // incremented before a system call changes a range
	uint64_t done;        // set to begun when what it has changed stands in the slots
	uint64_t closed_head; // slots of closed that were written since the start
	uint64_t closings;    // how many there were
	uint64_t held;        // set to begun when no access is under way any more
	uint64_t owner;       // the thread that holds the lock, or 0
	uint64_t pad3;
	// Written by Go.
	uint64_t tail;        // slots read since the start
	uint64_t closed_tail; // slots of closed that were read since the start
	uint64_t open;        // 0 when there is no thread: before, after, and in a fork's child
	uint64_t low, high;   // the first word of units that has a bit, and the last one's successor
	uint64_t pad4[3];

	uint64_t tickets[VN_TICKETS]; // addresses of words, or 0
	uint64_t moving;              // who is using the addresses now
	uint64_t pad5[7];
	struct vn_count accesses[VN_SHARDS]; // accesses under way
	struct vn_slot closed[VN_CLOSED_SLOTS];
	struct vn_slot slots[VN_SLOTS];
	uint64_t units[VN_UNIT_WORDS]; // a bit for each unit that was ever watched
};

// vn_start starts the thread on a userfaultfd and an eventfd that ends it. The
// thread owns the userfaultfd from then on and closes it when it ends. Returns 0
// or an errno; after an errno the descriptors are the caller's as before.
int vn_start(int uffd, int stop, struct vn_ring *ring);

// vn_stop ends the thread, waits for it, and closes the eventfd.
void vn_stop(void);

// vn_hold_accesses waits until every access that was under way when it was called
// has ended. The caller has incremented "moved" before, so that no other access begins. It
// gives up after about a tenth of a second, and counts that.
void vn_hold_accesses(struct vn_ring *r);

// vn_offer_closing gives the functions of notifier_hook.h to the preloaded library,
// if there is one; vn_withdraw_closing takes them back, in the child of a fork.
void vn_offer_closing(struct vn_ring *ring);
void vn_withdraw_closing(void);

#endif
