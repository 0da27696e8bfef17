// The transitions of pages. The caller holds the lock.
//
// A page leaves in one step of the lock: UFFDIO_MOVE takes it from its address to the staging pages, so that no
// writer has it any more; its bytes are copied to the device; its state says so; the page itself goes to the trash,
// where it is freed without an event. If the device fails, the bytes stay in memory of the engine and come home
// from there.
//
// A page comes home by UFFDIO_COPY, which wakes those who wait for it.

#include "engine.h"
#include "uffd.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

// vh_copies reports whether the device can copy a page now.
int vh_copies(struct vh_space *s, int dev)
{
	struct vh_device *d;

	if (dev == VH_HOST)
		return 1;
	d = &s->device[dev];
	if (d->fail_after < 0)
		return 1;
	if (d->fail_after == 0) {
		s->stats.failed_copies++;
		return 0;
	}
	d->fail_after--;
	return 1;
}

// vh_host_reserve makes sure that so many pages of the engine's own memory are free.
int vh_host_reserve(struct vh_space *s, size_t pages)
{
	while (s->host_nfree < pages) {
		uint64_t *list;
		void **chunks;
		char *mem = mmap(NULL, VH_BATCH << s->page_shift, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (mem == MAP_FAILED)
			return ENOMEM;
		list = realloc(s->host_free, (s->host_cap + VH_BATCH) * sizeof *list);
		if (list != NULL)
			s->host_free = list;
		chunks = realloc(s->host_chunk, (s->host_chunks + 1) * sizeof *chunks);
		if (chunks != NULL)
			s->host_chunk = chunks;
		if (list == NULL || chunks == NULL) {
			munmap(mem, VH_BATCH << s->page_shift);
			return ENOMEM;
		}
		madvise(mem, VH_BATCH << s->page_shift, MADV_DONTFORK);
		s->host_cap += VH_BATCH;
		s->host_chunk[s->host_chunks++] = mem;
		for (int i = VH_BATCH - 1; i >= 0; i--)
			s->host_free[s->host_nfree++] = (uint64_t)(uintptr_t)mem + ((uint64_t)i << s->page_shift);
	}
	return 0;
}

// vh_take takes a page of a device's memory.
int vh_take(struct vh_space *s, int dev, uint64_t *where)
{
	if (dev == VH_HOST) {
		if (s->host_nfree == 0)
			return ENOMEM;
		*where = s->host_free[--s->host_nfree];
		s->host_used++;
		return 0;
	}
	if (s->device[dev].nfree == 0)
		return ENOMEM;
	*where = s->device[dev].free[--s->device[dev].nfree];
	return 0;
}

void vh_give(struct vh_space *s, int dev, uint64_t where)
{
	if (dev == VH_HOST) {
		s->host_used--;
		s->host_free[s->host_nfree++] = where;
		return;
	}
	s->device[dev].free[s->device[dev].nfree++] = where;
}

// vh_drop gives up what a page has with a device: it is the kernel's from now on.
void vh_drop(struct vh_space *s, struct vh_page *p)
{
	if (p->state == VH_S_HOME)
		return;
	vh_give(s, p->dev, p->where);
	p->state = VH_S_HOME;
	p->flags = 0;
	p->where = 0;
	p->hits = 0;
	s->stats.away--;
}

// vh_invalidate tells the mirrors of a range that its pages change.
void vh_invalidate(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (int i = 0; i < VH_MAX_MIRRORS; i++) {
		struct vh_mirror_word *m = &s->mirror[i];

		if (m->end != 0 && m->start < end && start < m->end) {
			__atomic_add_fetch(&m->seq, 1, __ATOMIC_SEQ_CST);
			s->stats.invalidations++;
		}
	}
}

// move_pages moves pages to absent ones, as many as it can. It returns how many bytes, or a negative errno.
static int64_t move_pages(int uffd, uint64_t dst, uint64_t src, uint64_t bytes, uint64_t mode)
{
	struct vh_uffdio_move m = {.dst = dst, .src = src, .len = bytes, .mode = mode};

	if (ioctl(uffd, VH_UFFDIO_MOVE, &m) == 0)
		return (int64_t)bytes;
	if (m.move > 0)
		return m.move;
	return m.move < 0 ? m.move : -errno;
}

// tidy is called when pages are where none should be: mlockall has had them made.
static void tidy(struct vh_space *s)
{
	munlock(s->staging, VH_BATCH << s->page_shift);
	munlock(s->trash, VH_BATCH << s->page_shift);
	madvise(s->trash, VH_BATCH << s->page_shift, MADV_DONTNEED);
	s->littered = VH_BATCH;
}

// throw_away frees the staging pages that have something in them. It reports whether all are empty then: the kernel may
// hold one for a moment (reclaim, compaction), and until it is gone nothing else leaves.
static int throw_away(struct vh_space *s)
{
	uint64_t bytes = s->littered << s->page_shift, off = 0;

	for (int tries = 0; off < bytes && tries < 100;) {
		int64_t n = move_pages(s->trash_uffd, (uintptr_t)s->trash + off, (uintptr_t)s->staging + off, bytes - off,
				       VH_MOVE_DONTWAKE | VH_MOVE_HOLES);
		if (n > 0) {
			off += (uint64_t)n;
		} else {
			if (n == -EEXIST) {
				tidy(s);
				bytes = s->littered << s->page_shift;
			}
			tries++;
			sched_yield();
		}
	}
	madvise(s->trash, bytes, MADV_DONTNEED);
	if (off == bytes)
		s->littered = 0;
	return s->littered == 0;
}

// in_mapping returns how many of n pages at an address lie in its mapping: UFFDIO_MOVE and _COPY take those of one mapping
// at a time, and the program may have split it.
static uint64_t in_mapping(struct vh_space *s, uint64_t addr, uint64_t n)
{
	struct vh_mapping m;

	if (n <= 1 || vh_query(s, addr, &m) != 0)
		return 1;
	return n < (m.end - addr) >> s->page_shift ? n : (m.end - addr) >> s->page_shift;
}

// vh_leave takes pages that are home to a device, VH_HOST for the engine's own memory. Only the worker calls it.
struct vh_step vh_leave(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n, int dev)
{
	struct vh_step step = {0};
	uint64_t where[VH_BATCH], addr = r->start + (i << s->page_shift), ready = 0, taken = 0;
	uint8_t hole[VH_BATCH];
	int single = 0;

	if (n > VH_BATCH)
		n = VH_BATCH;
	n = in_mapping(s, addr, n);
	if (s->littered != 0 && !throw_away(s)) {
		step.again = 1;
		return step;
	}
	if (vh_host_reserve(s, n) != 0) { // for bytes that a device does not take
		step.err = ENOMEM;
		return step;
	}
	while (ready < n && vh_take(s, dev, &where[ready]) == 0)
		ready++;
	if (ready == 0) {
		step.err = ENOMEM;
		return step;
	}
	vh_invalidate(s, addr, addr + (ready << s->page_shift));
	while (taken < ready) {
		int64_t got = move_pages(s->uffd, (uintptr_t)s->staging + (taken << s->page_shift), addr + (taken << s->page_shift),
					 (single ? 1 : ready - taken) << s->page_shift, VH_MOVE_DONTWAKE);

		if (got > 0) {
			for (got >>= s->page_shift; got > 0; got--)
				hole[taken++] = 0;
			s->littered = taken;
			continue;
		}
		if (got == -ENOENT) { // the kernel has no page there, and no bytes but zeros
			hole[taken++] = 1;
			continue;
		}
		if (got == -EINVAL && !single) { // the mapping may just have been split
			single = 1;
			continue;
		}
		if (got == -EEXIST)
			tidy(s);
		if (got == -EAGAIN || got == -EEXIST)
			step.again = 1;
		else if (got == -EBUSY)
			step.shared = 1;
		else
			step.err = got == -EINVAL ? EPERM : got == 0 ? EIO : (int)-got;
		break;
	}
	for (uint64_t k = 0; k < taken; k++) {
		struct vh_page *p = &r->page[i + k];
		const char *from = s->staging + (k << s->page_shift);
		int to = dev;

		if (!vh_copies(s, dev)) {
			step.err = EIO;
			vh_give(s, dev, where[k]);
			if (hole[k])
				continue; // it stays as it is
			to = VH_HOST;
			if (vh_take(s, to, &where[k]) != 0)
				abort(); // they were reserved
		}
		if (hole[k])
			memset((void *)(uintptr_t)where[k], 0, s->page_size);
		else
			memcpy((void *)(uintptr_t)where[k], from, s->page_size);
		p->where = where[k];
		p->dev = (uint8_t)to;
		p->state = VH_S_AWAY;
		p->flags = 0;
		p->hits = 0;
		p->removed = 0;
		s->stats.away++;
		if (to == dev) {
			step.moved++;
			if (dev == VH_HOST)
				s->stats.exclusive_pages++;
			else
				s->stats.out_pages++;
		}
	}
	if (s->littered != 0)
		throw_away(s);
	for (uint64_t k = taken; k < ready; k++)
		vh_give(s, dev, where[k]);
	step.pages = taken;
	if (ready < n && step.err == 0 && !step.again && !step.shared)
		step.err = ENOMEM;
	if (step.err == EIO && dev != VH_HOST) { // what the device did not take comes home, or waits for a touch
		for (uint64_t k = 0; k < taken; k++)
			if (r->page[i + k].state == VH_S_AWAY && r->page[i + k].dev == VH_HOST)
				vh_come_home(s, r, i + k, 1);
	}
	return step;
}

// vh_copy_in puts bytes into absent pages. It returns 0 or an errno; *done is how many bytes are in.
int vh_copy_in(int uffd, uint64_t dst, uint64_t src, uint64_t bytes, uint64_t *done)
{
	struct uffdio_copy c = {.dst = dst, .src = src, .len = bytes};

	if (ioctl(uffd, UFFDIO_COPY, &c) == 0) {
		*done = bytes;
		return 0;
	}
	*done = c.copy > 0 ? (uint64_t)c.copy : 0;
	if (c.copy < 0)
		return (int)-c.copy;
	return c.copy > 0 ? EAGAIN : errno;
}

// vh_come_home brings pages home that are away: a run of them from i on, n at most.
struct vh_step vh_come_home(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n)
{
	struct vh_step step = {0};

	if (n > VH_BATCH)
		n = VH_BATCH;
	while (step.pages < n) {
		struct vh_page *p = &r->page[i + step.pages];
		uint64_t addr = r->start + ((i + step.pages) << s->page_shift), run = 0, done, fits;
		int err, failed = 0;

		if (p->state != VH_S_AWAY)
			break;
		fits = in_mapping(s, addr, n - step.pages);
		while (run < fits && p[run].state == VH_S_AWAY && p[run].dev == p->dev && p[run].where == p->where + (run << s->page_shift)) {
			if (!vh_copies(s, p->dev)) {
				failed = 1;
				break;
			}
			run++;
		}
		if (run == 0) {
			step.err = EIO;
			break;
		}
		vh_invalidate(s, addr, addr + (run << s->page_shift));
		err = vh_copy_in(s->uffd, addr, p->where, run << s->page_shift, &done);
		for (uint64_t k = done >> s->page_shift; k-- > 0;) { // the first one is taken first next time: runs stay runs
			vh_drop(s, &p[k]);
			p[k].removed = 0;
			s->stats.home_pages++;
			step.moved++;
			step.pages++;
		}
		if (err == EEXIST) { // somebody else has put a page there: the CPU's bytes count
			vh_drop(s, &p[done >> s->page_shift]);
			vh_wake(s, addr + done, s->page_size);
			s->stats.conflicts++;
			step.pages++;
			continue;
		}
		if (err != 0) {
			if (err == EAGAIN || err == ENOENT) // a change of mappings is not read yet
				step.again = 1;
			else
				step.err = err;
			break;
		}
		if (failed) {
			step.err = EIO;
			break;
		}
	}
	return step;
}

// vh_zero puts zeros where the kernel has no page.
int vh_zero(struct vh_space *s, uint64_t addr, int write)
{
	uint64_t done;

	if (write)
		return vh_copy_in(s->uffd, addr, (uintptr_t)s->zero, s->page_size, &done);
	struct uffdio_zeropage z = {.range = {.start = addr, .len = s->page_size}};
	if (ioctl(s->uffd, UFFDIO_ZEROPAGE, &z) == 0)
		return 0;
	return z.zeropage < 0 ? (int)-z.zeropage : errno;
}

void vh_wake(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	struct uffdio_range w = {.start = addr, .len = bytes};

	ioctl(s->uffd, UFFDIO_WAKE, &w);
}

// vh_poison makes an access of the CPU a SIGBUS, and wakes those who wait.
void vh_poison(struct vh_space *s, int uffd, uint64_t addr)
{
	struct vh_uffdio_poison p = {.range = {.start = addr, .len = s->page_size}};

	if (s->have_poison)
		ioctl(uffd, VH_UFFDIO_POISON, &p);
}

// vh_present reports whether the kernel has bytes of a page; where it cannot be asked, 1.
int vh_present(struct vh_space *s, uint64_t addr)
{
	uint64_t entry;

	if (s->pagemap < 0 || pread(s->pagemap, &entry, 8, (off_t)(addr >> s->page_shift << 3)) != 8)
		return 1;
	return (entry >> 62) != 0; // present or swapped out
}
