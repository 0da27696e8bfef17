// What the files of the engine share.
//
// Two threads with all signals blocked belong to each space. The fault thread reads the userfaultfd: it serves the
// CPU's faults, and applies what the kernel reports. The worker executes requests. Rules:
//
//  1. The space's lock guards all states. Whoever holds it has all signals blocked, and does nothing that may fault
//     on a page of the space, or wait for an event to be read: no munmap, mremap or MADV_DONTNEED of registered memory,
//     no load or store of memory of the program, results of calls included. So the fault thread never waits for long.
//  2. Messages of the userfaultfd are read with the lock held, and applied before it is released, changes before
//     faults. As long as a change of mappings is not read, UFFDIO_MOVE, _COPY and _ZEROPAGE fail with EAGAIN. So the
//     holder of the lock never moves pages at addresses that are not the space's any more.
//  3. A page that is not away is the kernel's: whether it is absent, present, swapped out or the zero page is asked
//     for when it matters, and not remembered.
//  4. Devices access pages that are away with the lock held. So no access is under way when a page changes.
//     Accesses to pages at home are made without it, since they may fault. They begin with the lock held, and whoever
//     reads messages, or has pages leave, waits for their end: the caller of munmap sleeps until its message is read. The
//     wait is short, because an access may itself wait for a fault that is to be served.
//  5. Nobody waits for Go.
//  6. Who replaces, removes or protects mappings of the space by a call of it holds the change lock, which is taken before
//     the space's lock: the worker in each step, vh_unmap, vh_release, vh_discard, vh_protect. Such a call waits until accesses to pages
//     at home are over, however long that is: it holds nothing that they need.
//  7. A protection that the program has changed is not reported. So a device asks for it in each call, also where the
//     page is away, and a mapping that the engine replaces keeps it.
//
// What is reported when: munmap and mremap after the change, MADV_DONTNEED and its like before it. Changes of several threads may
// be reported in another order than the kernel has made them.

#ifndef VERBENA_HMM_ENGINE_H
#define VERBENA_HMM_ENGINE_H

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include "hmm.h"
#include "uffd.h"

#define VH_BATCH 512	  // pages that one step moves at most
#define VH_HOST 0xff	  // as a page's device: memory of the engine
#define VH_PATIENCE_MS 5000 // how long a step is tried again without progress
#define VH_SETTLE_MS 2000 // how long a page that the program has discarded may stay present before it can leave
#define VH_OVERRUN_US 1000 // how long a change waits for accesses
#define VH_REPORT_MS 1000 // how long a change that another thread must have made is waited for
#define VH_WAITS 64	  // moves that wait for others
#define VH_AUTO 1024	  // pages that wait because of access counters

enum vh_state {
	VH_S_HOME,	// the kernel's: absent, present or swapped out
	VH_S_AWAY,	// absent for the CPU; the bytes are at where
	VH_S_COHERENT,	// the CPU's mapping is of the device's memory, at where
};

#define VH_F_PENDING 1	// coherent, and the mapping is being made
#define VH_F_POISONED 2 // away, and the CPU gets a SIGBUS

struct vh_page {
	uint64_t where;
	uint32_t hits;	  // accesses of the policy's device
	uint32_t removed; // when the program has discarded the page, by vh_clock; 0: it has not, or long ago
	uint8_t state, dev, policy, flags;
	uint32_t pad;
};

// The pages of a range, which ranges that it was split into share.
struct vh_block {
	void *mem;
	size_t size;
	long refs;
};

struct vh_range {
	uint64_t start, pages;
	struct vh_page *page;
	struct vh_block *block;
	int own;     // of vh_alloc
	int leaving; // the program is unmapping it by vh_unmap: devices do not access it any more
	uint32_t arrived; // when mremap has moved it here, by vh_clock; 0: it has not
	struct vh_range *next; // of the spare ones
};

struct vh_chunk {
	uint64_t base, pages, off;
	uint64_t inode;
	int fd;
};

struct vh_device {
	uint64_t *free; // pages
	size_t nfree, total;
	struct vh_chunk *chunk;
	size_t chunks;
	int64_t fail_after; // pages that can still be copied; negative: all
};

struct vh_mirror_word {
	uint64_t seq;
	uint64_t start, end; // end 0: nobody's
	uint64_t pad[5];
};

struct vh_mapping {
	uint64_t start, end, off, inode;
	int read, write, shared;
};

enum vh_kind { VH_R_MIGRATE, VH_R_EXCLUSIVE, VH_R_DRAIN };

struct vh_request {
	enum vh_kind kind;
	int dev, flags;
	int all;	 // gaps between ranges are no error
	int counted;	 // because of access counters
	uint64_t at, end;
	uint64_t there;
	int err;
	uint64_t shared; // the address whose copy on write was ended last
	uint64_t since;	 // when there was progress last, by vh_clock
	int done, async;
	struct vh_request *next;
};

struct vh_space {
	int uffd;  // of the ranges and the staging pages
	int trash_uffd; // of the trash, without events
	int stop;  // an eventfd: the fault thread is to end
	int maps;
	int pagemap, smaps; // or -1
	int spare_fd;	    // given up so that the descriptor of a child can be read, or -1
	uint64_t page_size;
	unsigned page_shift;
	int have_poison, have_fork, transparent;
	int born; // the generation of the process that has opened it

	pthread_mutex_t lock; // guards all that follows up to the queue
	int urgent;	      // threads that want the lock for a fault, or for an access
	pthread_mutex_t change_lock; // see rule 6
	int changers;		     // threads that wait for it
	unsigned phase;		     // which of the next two counts
	int accesses[2];	     // to pages at home, which are made without the lock; atomic
	struct vh_range **range;
	size_t ranges, range_cap;
	struct vh_range *spare;
	int spares;
	struct vh_device device[VH_MAX_DEVICES];
	int devices;
	uint64_t *host_free; // pages of the engine's own memory
	size_t host_nfree, host_cap, host_used;
	void **host_chunk;
	size_t host_chunks;
	struct vh_mirror_word *mirror;
	struct {
		int dev;
		uint32_t after;
	} policy[VH_MAX_POLICIES + 1]; // from 1 on
	int policies;
	uint64_t expect_start[4], expect_end[4]; // mappings that the engine itself replaces
	uint64_t own_start, own_end;		 // the mapping that it moves
	struct vh_mapping replaced;		 // what was there: while it is replaced the kernel may show nothing
	struct uffd_msg waiting[VH_WAITS];	 // moves to where other pages are, whose own change is not read yet
	int waits;
	char *reserve; // mappings that are given up when there may be no more, so that coherent pages can come home
	struct vh_stats stats;
	int dead;   // why the userfaultfd cannot be read any more
	int hidden; // pages are kept from the child of a fork

	char *staging, *trash, *zero; // VH_BATCH pages, VH_BATCH pages, one page
	uint64_t littered;	      // so many of the first staging pages may have something in them
	char *probe;		      // one page

	pthread_mutex_t queue_lock; // guards what follows; it is never taken with lock held
	pthread_cond_t queue_cond, done_cond;
	struct vh_request *head, *tail;
	int queued; // requests that are not done, but for VH_R_DRAIN
	int forking, closing;
	int staying; // nothing leaves any more: the space is being closed
	struct {
		uint64_t addr;
		int dev;
	} automatic[VH_AUTO]; // guarded by lock
	unsigned auto_head, auto_tail;

	pthread_t fault_thread, worker;
	struct vh_space *next; // of all spaces
};

// space.c
uint32_t vh_clock(void); // milliseconds, never 0
int vh_usable(struct vh_space *s);
int vh_spaces(void); // that are open
void vh_lock(struct vh_space *s, sigset_t *old);
void vh_unlock(struct vh_space *s, const sigset_t *old);
void vh_begin_change(struct vh_space *s, sigset_t *old);
void vh_end_change(struct vh_space *s, const sigset_t *old);
struct vh_range *vh_find(struct vh_space *s, uint64_t addr);
struct vh_range *vh_find_next(struct vh_space *s, uint64_t addr); // the one with the address, or the next one
int vh_inside(struct vh_space *s, uint64_t addr, uint64_t bytes);
int vh_read_events(struct vh_space *s);
int vh_changing(struct vh_space *s);
void vh_quiet(struct vh_space *s);
int vh_reserve(struct vh_space *s);
void vh_give_up_reserve(struct vh_space *s);
void vh_expect_unmap(struct vh_space *s, uint64_t start, uint64_t end);
void vh_orphan(struct vh_space *s, uint64_t addr);
void vh_orphans(struct vh_space *s, uint64_t start, uint64_t end);
void vh_expect_none(struct vh_space *s, uint64_t start, uint64_t end);
int vh_query(struct vh_space *s, uint64_t addr, struct vh_mapping *m);
int vh_in_place(struct vh_space *s, const struct vh_page *p, uint64_t addr, struct vh_mapping *m);
int vh_allowed(struct vh_space *s, uint64_t addr, int write, struct vh_mapping *m);

// page.c
struct vh_step {
	uint64_t pages; // that were dealt with
	uint64_t moved;
	int err;
	int again;  // the kernel is busy: try again
	int shared; // the next page is shared with another process
};
int vh_take(struct vh_space *s, int dev, uint64_t *where);
void vh_give(struct vh_space *s, int dev, uint64_t where);
int vh_host_reserve(struct vh_space *s, size_t pages);
void vh_drop(struct vh_space *s, struct vh_page *p);
void vh_invalidate(struct vh_space *s, uint64_t start, uint64_t end);
int vh_copies(struct vh_space *s, int dev);
struct vh_step vh_leave(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n, int dev);
struct vh_step vh_come_home(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n);
int vh_zero(struct vh_space *s, uint64_t addr, int write);
void vh_wake(struct vh_space *s, uint64_t addr, uint64_t bytes);
void vh_poison(struct vh_space *s, int uffd, uint64_t addr);
int vh_copy_in(int uffd, uint64_t dst, uint64_t src, uint64_t bytes, uint64_t *done);
int vh_present(struct vh_space *s, uint64_t addr);

// request.c
void *vh_work(void *space);
void vh_submit(struct vh_space *s, struct vh_request *q);
int vh_execute(struct vh_space *s, struct vh_request *q);
void vh_kick(struct vh_space *s);

#endif
