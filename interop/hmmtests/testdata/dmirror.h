// What the files of the library share that stands for Linux's test driver of HMM, lib/test_hmm.c.
//
//   calls.c     the calls that a program makes: open, ioctl, mmap, close
//   dmirror.c   the driver's commands
//   table.c     a device's page table: what it may read and write without asking
//   memory.c    the program's memory: mappings, what the engine takes, and what it cannot take
//   own.c       memory of the library itself, and of the engine

#ifndef DMIRROR_H
#define DMIRROR_H

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "hmm.h"

#define DEVICES 4 // 0 and 1 have private memory, 2 and 3 coherent memory
#define PAGE 4096ull
#define BLOCK 512 // pages of a huge page
#define COHERENT(device) ((device) >= 2)

// An open file of a device.
struct dmirror {
	int device;
	uint64_t flags;
	int inherited; // the process that opened it is this one's parent
};

extern struct vh_space *dm_space; // NULL until a device is opened
extern int dm_coherent;		  // whether pages went to a device with coherent memory

// Bits of an entry of a device's page table.
#define E_VALID 1
#define E_WRITE 2
#define E_ATOMIC 4  // the page was given to devices alone
#define E_LARGE 8   // it went as a part of a huge page
#define E_FOREIGN 16 // not the space's memory: the entry is good for one call, since nobody reports changes of it

struct entry {
	uint32_t place; // of the engine's snapshot
	uint8_t bits;
};

// Entries of adjacent pages, with the engine's count of their changes.
struct chunk {
	struct dmirror *of;
	uint64_t start, pages;
	const uint64_t *word;
	uint64_t seq;  // of *word, for which the entries are good
	uint64_t used; // by which call
	struct entry *entry;
};

// dmirror.c
int dm_open(void);
int dm_command(struct dmirror *d, unsigned long request, uint64_t arg);

// table.c
uint64_t dm_reach(const struct dmirror *d);
int dm_begin(struct dmirror *d, uint64_t pages);
void dm_forget(struct dmirror *d);  // all entries of a device; NULL: of all devices
void dm_forked(void);		    // the table is the parent's
struct chunk *dm_find(struct dmirror *d, uint64_t addr);
struct chunk *dm_chunk(struct dmirror *d, uint64_t addr);
int dm_reconcile(struct chunk *c, int own, uint32_t *now);
int dm_copy(struct dmirror *d, uint64_t start, uint64_t end, char *buf, int write, uint64_t *pages);
int dm_fault(struct dmirror *d, uint64_t start, uint64_t end, int write);
static inline struct entry *dm_entry(struct chunk *c, uint64_t addr) { return &c->entry[(addr - c->start) / PAGE]; }
static inline uint32_t dm_place(uint32_t e) { return e & (VH_E_PRIVATE | VH_E_COHERENT | VH_E_EXCLUSIVE | 0xffffff00u); }

// memory.c
struct map {
	uint64_t start, end, inode, page_size;
	int read, write, exec, shared;
};
int dm_memory(void); // opens what the rest needs
int dm_map(uint64_t addr, struct map *m);
int dm_owned(uint64_t addr);
void dm_adopt(uint64_t start, uint64_t end);
int dm_self(uint64_t addr, void *buf, uint64_t bytes, int write);
int dm_foreign_fault(uint64_t start, uint64_t end, int write);
uint8_t dm_foreign_snapshot(uint64_t addr);
int dm_evict(int device);
void dm_uncohere(uint64_t start, uint64_t end);
uint64_t dm_now(void); // milliseconds

#endif
