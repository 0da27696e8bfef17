// The engine of package hmm: pages of a process that leave for the memory of devices, and come home.
//
// It is plain C and needs no Go. Every function returns 0 or an errno. All may be called in any thread, by several
// at a time, but for vh_close, which is the last one.
//
//   space.c     a space: its userfaultfd, its two threads, the ranges, what the kernel reports
//   page.c      the transitions of pages, the memory of devices
//   request.c   requests: migration, exclusive access, coherent memory; the thread that executes them
//   access.c    what devices do: read, write, atomics, snapshots and faults
//
// The rules that make it sound are at the head of engine.h.

#ifndef VERBENA_HMM_H
#define VERBENA_HMM_H

#include <stddef.h>
#include <stdint.h>

struct vh_space;

// Limits. A call that would pass one fails with ENOSPC.
#define VH_MAX_RANGES 4096  // that vh_alloc and vh_adopt make; changes by the program may split them further
#define VH_MAX_DEVICES 63
#define VH_MAX_MIRRORS 256
#define VH_MAX_POLICIES 255 // pairs of a device and a count, of vh_policy
#define VH_MAX_EXCLUSIVE 65536 // pages at a time

#define VH_HOME (-1) // as a device: the memory of the process

struct vh_features {
	int transparent; // system calls of the program may touch pages that are away (no UFFD_USER_MODE_ONLY)
	int fork_events; // a child made by a bare fork gets its bytes
	int poison;      // a page whose device has failed is a SIGBUS
};

struct vh_stats {
	uint64_t out_pages;     // pages that went to a device
	uint64_t home_pages;    // pages that came home
	uint64_t cpu_faults;    // of them, because the CPU touched them
	uint64_t first_touches; // pages that the CPU touched first
	uint64_t failed_copies; // copies of pages that a device has failed
	uint64_t poisoned;      // pages that the CPU touched while their device could not give them back
	uint64_t dropped_pages; // pages that were away when the program unmapped or discarded them
	uint64_t orphaned_pages; // pages of devices that are lost until vh_close, with a coherent mapping that has gone
	uint64_t remapped_pages;// pages that were away when the program moved them to another address
	uint64_t exclusive_pages; // pages that were given to a device alone
	uint64_t coherent_pages;  // pages that went to coherent memory
	uint64_t counted_pages;   // pages that access counters have sent to a device
	uint64_t counted_missed;  // times that a counter was full, and too many pages waited already
	uint64_t forked_pages;    // pages that were away and were copied into a child
	uint64_t conflicts;       // pages that were away and found present: the CPU's bytes were kept
	uint64_t invalidations;   // of mirrors
	uint64_t away;            // pages that are away or coherent now
	uint64_t device_reads, device_writes, device_atomics; // pieces of pages
	uint64_t events;          // of the kernel: unmap, move, discard, fork
	uint64_t overruns;        // times that a change did not wait for the end of an access
};

// vh_open makes a space. On an error, why says in words what is missing. A child of fork may make one of its own; with its
// parent's, every call fails with ENODEV.
int vh_open(struct vh_space **out, struct vh_features *have, char *why, size_t why_size);

// vh_close brings all pages home and ends the space; memory of vh_alloc is unmapped. EIO: a device has failed, and
// pages that it had are poisoned.
int vh_close(struct vh_space *s);

int vh_alloc(struct vh_space *s, uint64_t bytes, uint64_t *addr);
int vh_adopt(struct vh_space *s, uint64_t addr, uint64_t bytes);
int vh_release(struct vh_space *s, uint64_t addr, uint64_t bytes); // pages come home, and are no longer the space's
int vh_unmap(struct vh_space *s, uint64_t addr, uint64_t bytes);
int vh_discard(struct vh_space *s, uint64_t addr, uint64_t bytes);
int vh_protect(struct vh_space *s, uint64_t addr, uint64_t bytes, int read, int write);
int vh_owns(struct vh_space *s, uint64_t addr, uint64_t bytes); // 0, or EFAULT

// vh_device_add makes a device without memory, vh_vram_add gives it memory: pages from base on, which the
// caller has mapped for reading and writing from offset off of a file, and keeps until vh_close.
int vh_device_add(struct vh_space *s, int *dev);
int vh_vram_add(struct vh_space *s, int dev, uint64_t base, uint64_t pages, int fd, uint64_t off);
int vh_vram_free(struct vh_space *s, int dev, uint64_t *pages);
// vh_device_fail makes copies of the device fail after so many pages; a negative number: they work.
int vh_device_fail(struct vh_space *s, int dev, int64_t after);

#define VH_COHERENT 1 // the CPU reaches the pages where they are, without a fault

// vh_migrate moves pages to a device, or home; *there is how many of them are there then. The error is why the first
// page that is not did not go; the others go nevertheless.
int vh_migrate(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, int flags, uint64_t *there);
// vh_prefetch queues that, and returns. vh_drain waits for everything that is queued.
int vh_prefetch(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, int flags);
int vh_drain(struct vh_space *s);
// vh_exclusive gives pages to devices alone, until the CPU touches them: for atomics.
int vh_exclusive(struct vh_space *s, uint64_t addr, uint64_t bytes, uint64_t *there);
// vh_policy: a page goes to the device after so many accesses of it; 0: never.
int vh_policy(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, uint32_t after);

// A mirror counts the changes of a range of addresses: the number changes before a page does. vh_current returns it; of
// changes that a system call of the program has made it knows when that returns.
int vh_mirror(struct vh_space *s, uint64_t addr, uint64_t bytes, const uint64_t **seq);
uint64_t vh_current(struct vh_space *s, const uint64_t *seq);
void vh_mirror_end(struct vh_space *s, const uint64_t *seq);

// reach has a bit for each device whose memory the one that accesses reaches; self is its own number, VH_HOME if
// it is no device of the space.
int vh_read(struct vh_space *s, int self, uint64_t reach, uint64_t addr, void *buf, uint64_t bytes);
int vh_write(struct vh_space *s, int self, uint64_t reach, uint64_t addr, const void *buf, uint64_t bytes);
// vh_access is both. With VH_STEADY the caller vouches that buf lies in no space, and stays mapped. With VH_LAST the bytes in
// the last aligned word are written after all others.
#define VH_WRITE 1
#define VH_STEADY 2
#define VH_LAST 4
int vh_access(struct vh_space *s, int self, uint64_t reach, uint64_t addr, void *buf, uint64_t bytes, int flags);
#define VH_ATOMIC_ADD 0
#define VH_ATOMIC_CAS 1
#define VH_ATOMIC_SWAP 2
int vh_atomic(struct vh_space *s, uint64_t reach, uint64_t addr, int op, uint64_t a, uint64_t b, uint64_t *old);

// Entries of a snapshot, a word for each page.
#define VH_E_VALID 1     // the device may read the page
#define VH_E_WRITE 2     // and write it
#define VH_E_ERROR 4     // nothing is mapped there, or nothing that may be read
#define VH_E_PRIVATE 8   // it lies in device-private memory
#define VH_E_COHERENT 16 // it lies in device-coherent memory
#define VH_E_EXCLUSIVE 32
#define VH_E_ZERO 64     // it is the kernel's zero page
#define VH_E_HUGE 128    // it is part of a huge page
#define VH_E_DEVICE(e) ((int)((e) >> 8) - 1) // whose memory it lies in; VH_HOME: the process's

// vh_snapshot looks at pages as they are; seq is a mirror's word of them, or NULL.
int vh_snapshot(struct vh_space *s, uint64_t reach, uint64_t addr, uint64_t pages, uint32_t *entries, const uint64_t *word, uint64_t *seq);
// vh_fault makes pages valid first, or writable. EFAULT: not mapped, EPERM: not for this access, EBUSY: they did
// not stay for long enough.
int vh_fault(struct vh_space *s, uint64_t reach, uint64_t addr, uint64_t pages, int write, uint32_t *entries, const uint64_t *word, uint64_t *seq);

void vh_get_stats(struct vh_space *s, struct vh_stats *out);

#endif
