// A space: how it is opened and closed, its ranges, what the kernel reports, and forks.

#include "engine.h"
#include "uffd.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

static pthread_mutex_t spaces_lock = PTHREAD_MUTEX_INITIALIZER; // guards spaces
static struct vh_space *spaces;
static int open_spaces;
// alive is the process's generation where the engine works, and 0 in children of bare forks: it lies in a page that forks
// wipe. A child that the C library has made gets the next one, so that the parent's spaces are not its own.
static int *alive;
static int generation = 1;
static pthread_once_t once = PTHREAD_ONCE_INIT;

uint32_t vh_clock(void)
{
	struct timespec t;
	uint32_t ms;

	clock_gettime(CLOCK_MONOTONIC, &t);
	ms = (uint32_t)((uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000);
	return ms == 0 ? 1 : ms;
}

int vh_usable(struct vh_space *s)
{
	return s != NULL && alive != NULL && *alive == s->born ? (s->dead ? EIO : 0) : ENODEV;
}

int vh_spaces(void) { return __atomic_load_n(&open_spaces, __ATOMIC_SEQ_CST); }

void vh_lock(struct vh_space *s, sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, old);
	__atomic_add_fetch(&s->urgent, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&s->lock);
	__atomic_sub_fetch(&s->urgent, 1, __ATOMIC_RELAXED);
}

void vh_unlock(struct vh_space *s, const sigset_t *old)
{
	pthread_mutex_unlock(&s->lock);
	pthread_sigmask(SIG_SETMASK, old, NULL);
}

// vh_begin_change takes the change lock, with all signals blocked: a handler may call the engine.
void vh_begin_change(struct vh_space *s, sigset_t *old)
{
	sigset_t all;

	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, old);
	__atomic_add_fetch(&s->changers, 1, __ATOMIC_SEQ_CST);
	pthread_mutex_lock(&s->change_lock);
	__atomic_sub_fetch(&s->changers, 1, __ATOMIC_SEQ_CST);
}

void vh_end_change(struct vh_space *s, const sigset_t *old)
{
	pthread_mutex_unlock(&s->change_lock);
	pthread_sigmask(SIG_SETMASK, old, NULL);
}

// under_way returns how many accesses to pages at home that have begun in a phase are not over.
static int under_way(struct vh_space *s, unsigned phase) { return __atomic_load_n(&s->accesses[phase], __ATOMIC_ACQUIRE); }

// finish waits until the accesses of devices that have begun are over, however long that is. The change lock is held.
static void finish(struct vh_space *s)
{
	unsigned phase;
	sigset_t old;

	vh_lock(s, &old);
	phase = s->phase;
	s->phase ^= 1; // those that begin now count there
	vh_unlock(s, &old);
	while (under_way(s, phase) != 0)
		usleep(20);
}

// Lines of a file in /proc. It is open already: there may be no descriptor when it is needed.
struct vh_lines {
	int fd;
	off_t off;
	size_t have, at;
	char buf[4097];
};

// next_line returns the next line without its end, or NULL.
static const char *next_line(struct vh_lines *l)
{
	for (;;) {
		char *line = l->buf + l->at, *end = memchr(line, '\n', l->have - l->at);
		ssize_t n;

		if (end != NULL) {
			*end = 0;
			l->at = (size_t)(end - l->buf) + 1;
			return line;
		}
		memmove(l->buf, line, l->have - l->at);
		l->have -= l->at;
		l->at = 0;
		if (l->have == sizeof l->buf - 1)
			l->have = 0; // the name of a file is longer than that
		n = pread(l->fd, l->buf + l->have, sizeof l->buf - 1 - l->have, l->off);
		if (n <= 0)
			return NULL;
		l->have += (size_t)n;
		l->off += n;
	}
}

// next_flag finds the next mapping that has a flag as smaps has it, "um" for one with a userfaultfd.
static int next_flag(struct vh_lines *l, const char *flag, uint64_t *start, uint64_t *end)
{
	const char *line;

	while ((line = next_line(l)) != NULL) {
		unsigned long from, to;

		if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
			*start = from;
			*end = to;
		} else if (strncmp(line, "VmFlags:", 8) == 0 && strstr(line + 8, flag) != NULL) {
			return 1;
		}
	}
	return 0;
}

// first_after returns the index of the first range that ends after an address.
static size_t first_after(struct vh_space *s, uint64_t addr)
{
	size_t low = 0, high = s->ranges;

	while (low < high) {
		size_t mid = (low + high) / 2;
		struct vh_range *r = s->range[mid];

		if (r->start + (r->pages << s->page_shift) > addr)
			high = mid;
		else
			low = mid + 1;
	}
	return low;
}

struct vh_range *vh_find_next(struct vh_space *s, uint64_t addr)
{
	size_t i = first_after(s, addr);

	return i < s->ranges ? s->range[i] : NULL;
}

struct vh_range *vh_find(struct vh_space *s, uint64_t addr)
{
	struct vh_range *r = vh_find_next(s, addr);

	return r != NULL && r->start <= addr ? r : NULL;
}

// vh_inside reports whether all bytes are in ranges.
int vh_inside(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	uint64_t end = addr + bytes;

	if (bytes == 0 || end < addr)
		return 0;
	while (addr < end) {
		struct vh_range *r = vh_find(s, addr);

		if (r == NULL)
			return 0;
		addr = r->start + (r->pages << s->page_shift);
	}
	return 1;
}

// refill keeps what events need at hand, so that they need not fail.
static void refill(struct vh_space *s)
{
	while (s->spares < 16) {
		struct vh_range *r = calloc(1, sizeof *r);

		if (r == NULL)
			return;
		r->next = s->spare;
		s->spare = r;
		s->spares++;
	}
	if (s->range_cap < s->ranges + 64) {
		size_t cap = s->range_cap * 2 + 128;
		struct vh_range **list = realloc(s->range, cap * sizeof *list);

		if (list != NULL) {
			s->range = list;
			s->range_cap = cap;
		}
	}
}

static void insert(struct vh_space *s, struct vh_range *r)
{
	size_t i = first_after(s, r->start);

	refill(s);
	if (s->ranges == s->range_cap)
		abort(); // no memory for sixty-four changes in a row
	memmove(&s->range[i + 1], &s->range[i], (s->ranges - i) * sizeof *s->range);
	s->range[i] = r;
	s->ranges++;
}

static void take_out(struct vh_space *s, size_t i)
{
	s->ranges--;
	memmove(&s->range[i], &s->range[i + 1], (s->ranges - i) * sizeof *s->range);
}

static void free_range(struct vh_space *s, struct vh_range *r)
{
	if (--r->block->refs == 0) {
		munmap(r->block->mem, r->block->size);
		free(r->block);
	}
	r->next = s->spare;
	s->spare = r;
	s->spares++;
}

// split makes an address the boundary of two ranges, if it lies inside one.
static void split(struct vh_space *s, uint64_t addr)
{
	struct vh_range *r = vh_find(s, addr), *rest;

	if (r == NULL || r->start == addr)
		return;
	refill(s);
	rest = s->spare;
	if (rest == NULL)
		abort(); // no memory for sixteen changes in a row
	s->spare = rest->next;
	s->spares--;
	*rest = *r;
	r->pages = (addr - r->start) >> s->page_shift;
	rest->start = addr;
	rest->pages -= r->pages;
	rest->page += r->pages;
	rest->block->refs++;
	insert(s, rest);
}

// lose gives up a coherent page whose mapping the program may have moved by itself, and still use: the device's memory goes to no
// other page.
static void lose(struct vh_space *s, struct vh_page *p)
{
	p->state = VH_S_HOME;
	p->flags = 0;
	p->where = 0;
	s->stats.away--;
	s->stats.orphaned_pages++;
}

// cut takes addresses out of the space. What was away is given up.
static void cut(struct vh_space *s, uint64_t start, uint64_t end)
{
	split(s, start);
	split(s, end);
	for (size_t i = first_after(s, start); i < s->ranges && s->range[i]->start < end;) {
		struct vh_range *r = s->range[i];

		vh_invalidate(s, r->start, r->start + (r->pages << s->page_shift));
		for (uint64_t k = 0; k < r->pages; k++)
			if (r->page[k].state != VH_S_HOME) {
				if (r->page[k].state == VH_S_COHERENT && !r->leaving)
					lose(s, &r->page[k]);
				else
					vh_drop(s, &r->page[k]);
				s->stats.dropped_pages++;
			}
		take_out(s, i);
		free_range(s, r);
	}
}

// vh_orphan takes a coherent page out of the space whose mapping is not where it was.
void vh_orphan(struct vh_space *s, uint64_t addr)
{
	struct vh_range *r = vh_find(s, addr);

	lose(s, &r->page[(addr - r->start) >> s->page_shift]);
	s->stats.dropped_pages++;
	cut(s, addr, addr + s->page_size);
}

// vh_orphans takes those coherent pages out of the space whose mapping is not where it was.
void vh_orphans(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (uint64_t addr = start; addr < end; addr += s->page_size) {
		struct vh_range *r = vh_find_next(s, addr);
		struct vh_mapping m;
		struct vh_page *p;

		if (r == NULL || r->start >= end)
			return;
		if (addr < r->start)
			addr = r->start;
		p = &r->page[(addr - r->start) >> s->page_shift];
		if (p->state == VH_S_COHERENT && !(p->flags & VH_F_PENDING) && !vh_in_place(s, p, addr, &m))
			vh_orphan(s, addr);
	}
}

// moved is called when a mapping has been moved by mremap.
static void moved(struct vh_space *s, uint64_t from, uint64_t to, uint64_t bytes)
{
	struct vh_range *first = NULL, **last = &first;

	split(s, from);
	split(s, from + bytes);
	for (size_t i = first_after(s, from); i < s->ranges && s->range[i]->start < from + bytes;) {
		struct vh_range *r = s->range[i];

		take_out(s, i);
		r->next = NULL;
		*last = r;
		last = &r->next;
	}
	if (first == NULL)
		return;
	cut(s, to, to + bytes);
	vh_invalidate(s, from, from + bytes);
	while (first != NULL) {
		struct vh_range *r = first;

		first = r->next;
		r->start = r->start - from + to;
		r->leaving = 0;
		r->arrived = vh_clock();
		for (uint64_t k = 0; k < r->pages; k++)
			if (r->page[k].state == VH_S_AWAY)
				s->stats.remapped_pages++;
		insert(s, r);
	}
}

// discarded is called before the kernel drops pages. Those that are away are dropped here. One that is home must not leave
// before the kernel has dropped it, or it would come back with its old bytes: so it waits until it is absent, or has been
// (its next touch is a fault), or for VH_SETTLE_MS, since MADV_FREE may keep it.
static void discarded(struct vh_space *s, uint64_t start, uint64_t end)
{
	uint32_t now = vh_clock();

	for (uint64_t addr = start; addr < end;) {
		struct vh_range *r = vh_find_next(s, addr);

		if (r == NULL || r->start >= end)
			return;
		if (addr < r->start)
			addr = r->start;
		vh_invalidate(s, addr, end);
		for (; addr < end && addr < r->start + (r->pages << s->page_shift); addr += s->page_size) {
			struct vh_page *p = &r->page[(addr - r->start) >> s->page_shift];

			if (p->state == VH_S_AWAY) {
				vh_drop(s, p);
				s->stats.dropped_pages++;
			}
			p->removed = now;
		}
	}
}

// forked is called when a child was made by a bare fork: what is away is copied into it. fd is a userfaultfd of
// the child's memory.
static void forked(struct vh_space *s, int fd)
{
	struct vh_lines lines = {.fd = s->smaps};
	uint64_t wiped = 0, wiped_end = 0; // mappings that forks wipe in the child (MADV_WIPEONFORK)
	int more = s->stats.away != 0;

	for (size_t i = 0; i < s->ranges; i++) {
		struct vh_range *r = s->range[i];

		for (uint64_t k = 0; k < r->pages; k++) {
			struct vh_page *p = &r->page[k];
			uint64_t done, addr = r->start + (k << s->page_shift);

			// A coherent page may have become one between the fork and this event: then it is absent in the child. Else
			// the child has no mapping there, and what follows fails.
			if (p->state == VH_S_HOME)
				continue;
			while (more && wiped_end <= addr)
				more = next_flag(&lines, " wf", &wiped, &wiped_end);
			if (more && wiped <= addr)
				continue;
			if (vh_copies(s, p->dev) && vh_copy_in(fd, addr, p->where, s->page_size, &done) == 0)
				s->stats.forked_pages++;
			else
				vh_poison(s, fd, addr); // never zeros
		}
	}
	close(fd);
}

void vh_expect_unmap(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (int i = 0; i < 4; i++)
		if (s->expect_end[i] == 0) {
			s->expect_start[i] = start;
			s->expect_end[i] = end;
			return;
		}
}

void vh_expect_none(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (int i = 0; i < 4; i++)
		if (s->expect_start[i] == start && s->expect_end[i] == end)
			s->expect_end[i] = 0;
}

// registered reports whether an address has a userfaultfd.
static int registered(struct vh_space *s, uint64_t addr)
{
	struct vh_lines lines = {.fd = s->smaps};
	uint64_t start, end = 0;

	while (end <= addr)
		if (!next_flag(&lines, " um", &start, &end))
			return 0;
	return start <= addr;
}

static void unmapped(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (int i = 0; i < 4; i++)
		if (s->expect_end[i] == end && s->expect_start[i] == start) {
			s->expect_end[i] = 0;
			return;
		}
	if (start == s->own_start && end == s->own_end)
		return;
	// What mremap has just moved here may have come after that: it is still mapped, then.
	for (uint64_t addr = start; addr < end;) {
		struct vh_range *r = vh_find_next(s, addr);
		uint64_t to;

		if (r == NULL || r->start >= end)
			return;
		if (addr < r->start)
			addr = r->start;
		to = r->start + (r->pages << s->page_shift);
		if (to > end)
			to = end;
		if (r->arrived == 0 || vh_clock() - r->arrived > VH_PATIENCE_MS || !registered(s, addr))
			cut(s, addr, to);
		addr = to;
	}
}

// taken reports whether pages of the space are where mremap has moved others: another thread has moved or unmapped them before,
// which is not reported yet.
static int taken(struct vh_space *s, const struct uffd_msg *m)
{
	struct vh_range *r;

	if (m->arg.remap.from == s->own_start)
		return 0;
	vh_orphans(s, m->arg.remap.to, m->arg.remap.to + m->arg.remap.len);
	r = vh_find_next(s, m->arg.remap.to);
	return r != NULL && r->start < m->arg.remap.to + m->arg.remap.len;
}

static void fault(struct vh_space *s, uint64_t addr, int write)
{
	struct vh_range *r;
	struct vh_page *p;

	addr &= ~(s->page_size - 1);
	if (addr >= s->own_start && addr < s->own_end) { // mlockall touches it. It stays absent
		vh_wake(s, addr, s->page_size);
		return;
	}
	r = vh_find(s, addr);
	p = r == NULL ? NULL : &r->page[(addr - r->start) >> s->page_shift];
	if (p != NULL && p->state == VH_S_COHERENT && p->flags & VH_F_PENDING)
		return; // the worker wakes it when the mapping is made
	if (p != NULL && p->state == VH_S_AWAY) {
		struct vh_step step = vh_come_home(s, r, (addr - r->start) >> s->page_shift, 1);

		s->stats.cpu_faults += step.moved;
		if (step.err == EIO) {
			p->flags |= VH_F_POISONED;
			s->stats.poisoned++;
			vh_poison(s, s->uffd, addr);
		}
		if (step.moved == 0)
			vh_wake(s, addr, s->page_size); // to fault again, or to die
		return;
	}
	if (vh_zero(s, addr, write) == 0) {
		s->stats.first_touches++;
		if (p != NULL)
			p->removed = 0; // what was discarded has gone
	} else {
		vh_wake(s, addr, s->page_size);
	}
}

// vh_quiet waits until no access to pages at home is under way, for VH_OVERRUN_US at most. None begins meanwhile: the caller
// holds the lock.
void vh_quiet(struct vh_space *s)
{
	struct timespec start, now;

	if (under_way(s, 0) + under_way(s, 1) == 0)
		return;
	clock_gettime(CLOCK_MONOTONIC, &start);
	while (under_way(s, 0) + under_way(s, 1) != 0) {
		clock_gettime(CLOCK_MONOTONIC, &now);
		if ((now.tv_sec - start.tv_sec) * 1000000 + (now.tv_nsec - start.tv_nsec) / 1000 > VH_OVERRUN_US) {
			s->stats.overruns++;
			return;
		}
		sched_yield();
	}
}

// vh_read_events reads what the kernel reports, and applies it: changes first, since a fault may be at an address
// apply_waiting applies those moves whose target is free, or the first one by force.
static void apply_waiting(struct vh_space *s, int force)
{
	for (int i = 0; i < s->waits;) {
		struct uffd_msg m = s->waiting[i];

		if (!force && taken(s, &m)) {
			i++;
			continue;
		}
		force = 0;
		s->waits--;
		memmove(&s->waiting[i], &s->waiting[i + 1], (size_t)(s->waits - i) * sizeof m);
		if (m.arg.remap.from != s->own_start)
			moved(s, m.arg.remap.from, m.arg.remap.to, m.arg.remap.len);
		i = 0;
	}
}

// read_events reads what the kernel reports, and applies it: changes first, since a fault may be at an address
// that a change has moved pages to. It returns 0 or an errno; EAGAIN: there is nothing.
static int read_events(struct vh_space *s)
{
	struct uffd_msg msg[64];
	ssize_t n;

	vh_quiet(s);
	n = read(s->uffd, msg, sizeof msg);
	if (n < 0 && errno == EMFILE && s->spare_fd >= 0) { // a fork's event comes with a descriptor
		close(s->spare_fd);
		s->spare_fd = -1;
		n = read(s->uffd, msg, sizeof msg);
	}
	if (n < 0)
		return errno;
	n /= (ssize_t)sizeof msg[0];
	for (ssize_t i = 0; i < n; i++) {
		switch (msg[i].event) {
		case UFFD_EVENT_UNMAP:
			unmapped(s, msg[i].arg.remove.start, msg[i].arg.remove.end);
			break;
		case UFFD_EVENT_REMOVE:
			discarded(s, msg[i].arg.remove.start, msg[i].arg.remove.end);
			break;
		case UFFD_EVENT_REMAP:
			if (s->waits == VH_WAITS)
				apply_waiting(s, 1);
			s->waiting[s->waits++] = msg[i];
			break;
		case UFFD_EVENT_FORK:
			forked(s, (int)msg[i].arg.fork.ufd);
			break;
		default:
			continue;
		}
		s->stats.events++;
		apply_waiting(s, 0);
	}
	for (ssize_t i = 0; i < n; i++)
		if (msg[i].event == UFFD_EVENT_PAGEFAULT)
			fault(s, msg[i].arg.pagefault.address, (msg[i].arg.pagefault.flags & UFFD_PAGEFAULT_FLAG_WRITE) != 0);
	if (s->spare_fd < 0)
		s->spare_fd = fcntl(s->stop, F_DUPFD_CLOEXEC, 0);
	return 0;
}

// vh_read_events applies what the kernel reports. Between a change and its report there are a few instructions of the thread that
// has made it, for which it waits.
int vh_read_events(struct vh_space *s)
{
	uint32_t start = vh_clock();
	int err = read_events(s);

	while (s->waits > 0) {
		int now = read_events(s);

		if (now == 0)
			continue;
		if (vh_clock() - start > VH_REPORT_MS) {
			apply_waiting(s, 1);
			break;
		}
		sched_yield();
	}
	return err;
}

// vh_changing reports whether a change of mappings was made, or is being made, that is not applied yet.
int vh_changing(struct vh_space *s)
{
	struct uffdio_writeprotect w = {.range = {.start = (uintptr_t)s->probe, .len = s->page_size}};

	for (int i = 0; i < 64 && vh_read_events(s) == 0; i++)
		continue;
	return ioctl(s->uffd, UFFDIO_WRITEPROTECT, &w) != 0 && errno == EAGAIN;
}

static void *serve(void *space)
{
	struct vh_space *s = space;
	sigset_t old;

	pthread_setname_np(pthread_self(), "hmm-faults");
	for (;;) {
		struct pollfd p[2] = {{.fd = s->uffd, .events = POLLIN}, {.fd = s->stop, .events = POLLIN}};
		int err;

		if (poll(p, 2, -1) < 0) { // no memory, or the process may have no descriptors any more
			eventfd_t any;

			usleep(1000);
			p[0].revents = POLLIN;
			p[1].revents = eventfd_read(s->stop, &any) == 0 ? POLLIN : 0;
		}
		if (p[1].revents != 0)
			return NULL;
		vh_lock(s, &old);
		err = p[0].revents & ~POLLIN ? EBADF : vh_read_events(s);
		if (err == EBADF || err == EINVAL)
			s->dead = err;
		vh_unlock(s, &old);
		if (s->dead)
			return NULL;
		if (err != 0 && err != EAGAIN && err != EINTR)
			usleep(1000); // no memory, or no descriptor for a fork's event: whoever waits goes on waiting
	}
}

// vh_query finds the mapping of an address.
int vh_query(struct vh_space *s, uint64_t addr, struct vh_mapping *m)
{
	struct vh_procmap_query q = {.size = sizeof q, .query_addr = addr};
	struct vh_lines lines = {.fd = s->maps};
	const char *line;

	if (ioctl(s->maps, VH_PROCMAP_QUERY, &q) == 0) {
		*m = (struct vh_mapping){.start = q.vma_start, .end = q.vma_end, .off = q.vma_offset, .inode = q.inode,
			.read = (q.vma_flags & 1) != 0, .write = (q.vma_flags & 2) != 0, .shared = (q.vma_flags & 8) != 0};
		return 0;
	}
	if (errno != ENOTTY)
		return ENOENT;
	while ((line = next_line(&lines)) != NULL) {
		unsigned long start, end, off, inode;
		char perms[8];

		if (sscanf(line, "%lx-%lx %7s %lx %*s %lu", &start, &end, perms, &off, &inode) != 5)
			continue;
		if (addr < start || addr >= end)
			continue;
		*m = (struct vh_mapping){.start = start, .end = end, .off = off, .inode = inode,
			.read = perms[0] == 'r', .write = perms[1] == 'w', .shared = perms[3] == 's'};
		return 0;
	}
	return ENOENT;
}

// vh_allowed returns 0 if an address may be read, or written: EFAULT, if nothing is mapped there or nothing that may be read;
// EPERM, if it may not be written. m is the mapping that the caller asked for last, and is asked for again where it does
// not have the address. The lock is held.
int vh_allowed(struct vh_space *s, uint64_t addr, int write, struct vh_mapping *m)
{
	if (addr >= s->replaced.start && addr < s->replaced.end)
		*m = s->replaced;
	if ((addr < m->start || addr >= m->end) && vh_query(s, addr, m) != 0) {
		m->start = m->end = 0;
		return EFAULT;
	}
	if (!m->read)
		return EFAULT;
	return write && !m->write ? EPERM : 0;
}

static int say(char *why, size_t size, int err, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	vsnprintf(why, size, format, args);
	va_end(args);
	return err;
}

static int enroll(int uffd, uint64_t addr, uint64_t bytes, uint64_t mode)
{
	struct uffdio_register r = {.range = {.start = addr, .len = bytes}, .mode = mode};

	return ioctl(uffd, UFFDIO_REGISTER, &r) == 0 ? 0 : errno;
}

// open_uffd opens the userfaultfd with all that it may have.
static int open_uffd(struct vh_space *s, char *why, size_t size)
{
	const uint64_t must = UFFD_FEATURE_PAGEFAULT_FLAG_WP | UFFD_FEATURE_EVENT_REMAP | UFFD_FEATURE_EVENT_REMOVE |
			      UFFD_FEATURE_EVENT_UNMAP | VH_UFFD_MOVE | VH_UFFD_POISON;
	int refused = 0;

	for (int mode = 0; mode < 4; mode++) { // the best first: transparent, and with events of forks
		int user = mode >= 2, forks = mode % 2 == 0;
		struct uffdio_api api = {.api = UFFD_API, .features = must | (forks ? UFFD_FEATURE_EVENT_FORK : 0)};

		s->uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | (user ? VH_USER_MODE_ONLY : 0));
		if (s->uffd < 0) {
			refused = errno;
			continue;
		}
		if (ioctl(s->uffd, UFFDIO_API, &api) == 0 && (api.features & must) == must) {
			s->transparent = !user;
			s->have_fork = forks;
			s->have_poison = 1;
			return 0;
		}
		refused = errno == EPERM ? EPERM : EINVAL;
		close(s->uffd);
		s->uffd = -1;
	}
	if (refused == EINVAL)
		return say(why, size, EOPNOTSUPP, "the kernel's userfaultfd has no UFFDIO_MOVE (Linux 6.8); GPU memory and on-demand regions work without it");
	return say(why, size, refused, "userfaultfd: %s (the kernel has none, or seccomp or vm.unprivileged_userfaultfd forbids it); GPU memory and on-demand regions work without it", strerror(refused));
}

static char *arena(struct vh_space *s, uint64_t pages)
{
	char *p = mmap(NULL, pages << s->page_shift, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

	if (p == MAP_FAILED)
		return NULL;
	madvise(p, pages << s->page_shift, MADV_NOHUGEPAGE);
	madvise(p, pages << s->page_shift, MADV_DONTFORK);
	munlock(p, pages << s->page_shift); // after mlockall(MCL_FUTURE) it has pages
	madvise(p, pages << s->page_shift, MADV_DONTNEED);
	return p;
}

#define VH_RESERVE 24

// vh_reserve makes mappings that can be given up: every other page has other rights, so that they stay apart.
int vh_reserve(struct vh_space *s)
{
	char *p;

	if (s->reserve != NULL)
		return 0;
	p = mmap(NULL, VH_RESERVE << s->page_shift, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return ENOMEM;
	munlock(p, VH_RESERVE << s->page_shift);
	for (int i = 1; i < VH_RESERVE; i += 2)
		if (mprotect(p + ((uint64_t)i << s->page_shift), s->page_size, PROT_READ) != 0) {
			munmap(p, VH_RESERVE << s->page_shift);
			return ENOMEM;
		}
	s->reserve = p;
	return 0;
}

void vh_give_up_reserve(struct vh_space *s)
{
	if (s->reserve != NULL)
		munmap(s->reserve, VH_RESERVE << s->page_shift);
	s->reserve = NULL;
}

static void prepare_fork(void);
static void after_fork_parent(void);
static void after_fork_child(void);

static void init_once(void)
{
	int *p = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED || madvise(p, (size_t)sysconf(_SC_PAGESIZE), MADV_WIPEONFORK) != 0 ||
	    pthread_atfork(prepare_fork, after_fork_parent, after_fork_child) != 0)
		return;
	*p = generation;
	alive = p;
}

static void release_all(struct vh_space *s)
{
	// The userfaultfd first: to unmap registered memory would wait for somebody to read it.
	for (int *fd = (int[]){s->uffd, s->trash_uffd, s->stop, s->pagemap, s->maps, s->smaps, s->spare_fd, -2}; *fd != -2; fd++)
		if (*fd >= 0)
			close(*fd);
	for (int i = 0; i < s->devices; i++) {
		free(s->device[i].free);
		free(s->device[i].chunk);
	}
	for (size_t i = 0; i < s->host_chunks; i++)
		munmap(s->host_chunk[i], VH_BATCH << s->page_shift);
	free(s->host_chunk);
	free(s->host_free);
	if (s->mirror != NULL)
		munmap(s->mirror, VH_MAX_MIRRORS * sizeof *s->mirror);
	if (s->staging != NULL)
		munmap(s->staging, VH_BATCH << s->page_shift);
	if (s->trash != NULL)
		munmap(s->trash, VH_BATCH << s->page_shift);
	if (s->zero != NULL)
		munmap(s->zero, s->page_size);
	if (s->probe != NULL)
		munmap(s->probe, s->page_size);
	vh_give_up_reserve(s);
	while (s->spare != NULL) {
		struct vh_range *r = s->spare;

		s->spare = r->next;
		free(r);
	}
	free(s->range);
	free(s);
}

int vh_open(struct vh_space **out, struct vh_features *have, char *why, size_t why_size)
{
	struct vh_space *s;
	struct uffdio_api api = {.api = UFFD_API, .features = VH_UFFD_MOVE};
	pthread_condattr_t attr;
	sigset_t all, old;
	int err;

	pthread_once(&once, init_once);
	if (alive == NULL || !*alive)
		return say(why, why_size, ENODEV, "this is the child of a bare fork of a process that has used package hmm, or there is no memory");
	if ((s = calloc(1, sizeof *s)) == NULL)
		return say(why, why_size, ENOMEM, "no memory");
	s->born = *alive;
	s->uffd = s->trash_uffd = s->stop = s->pagemap = s->maps = s->smaps = s->spare_fd = -1;
	s->page_size = (uint64_t)sysconf(_SC_PAGESIZE);
	while (1u << s->page_shift < s->page_size)
		s->page_shift++;
	pthread_mutex_init(&s->lock, NULL);
	pthread_mutex_init(&s->change_lock, NULL);
	pthread_mutex_init(&s->queue_lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&s->queue_cond, &attr);
	pthread_cond_init(&s->done_cond, &attr);
	pthread_condattr_destroy(&attr);
	if ((err = open_uffd(s, why, why_size)) != 0)
		goto fail;
	s->trash_uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | VH_USER_MODE_ONLY);
	if (s->trash_uffd < 0 || ioctl(s->trash_uffd, UFFDIO_API, &api) != 0) {
		err = say(why, why_size, errno, "a second userfaultfd: %s", strerror(errno));
		goto fail;
	}
	s->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	s->pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	s->maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	s->smaps = open("/proc/self/smaps", O_RDONLY | O_CLOEXEC);
	s->spare_fd = fcntl(s->stop, F_DUPFD_CLOEXEC, 0);
	s->staging = arena(s, VH_BATCH);
	s->trash = arena(s, VH_BATCH);
	s->zero = arena(s, 1);
	s->probe = arena(s, 1);
	s->mirror = mmap(NULL, VH_MAX_MIRRORS * sizeof *s->mirror, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (s->mirror == MAP_FAILED)
		s->mirror = NULL;
	refill(s);
	if (s->stop < 0 || s->maps < 0 || s->spare_fd < 0 || vh_reserve(s) != 0 || s->staging == NULL || s->trash == NULL || s->zero == NULL || s->probe == NULL || s->mirror == NULL || s->range == NULL || s->spare == NULL) {
		err = say(why, why_size, ENOMEM, "no memory, or no descriptors");
		goto fail;
	}
	memset(s->zero, 0, s->page_size);
	if ((err = enroll(s->uffd, (uintptr_t)s->staging, VH_BATCH << s->page_shift, UFFDIO_REGISTER_MODE_MISSING)) != 0 ||
	    (err = enroll(s->trash_uffd, (uintptr_t)s->trash, VH_BATCH << s->page_shift, UFFDIO_REGISTER_MODE_MISSING)) != 0 ||
	    (err = enroll(s->uffd, (uintptr_t)s->probe, s->page_size, UFFDIO_REGISTER_MODE_WP)) != 0) {
		say(why, why_size, err, "registering with userfaultfd: %s", strerror(err));
		goto fail;
	}
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &old); // the threads inherit it
	err = pthread_create(&s->fault_thread, NULL, serve, s);
	if (err == 0 && (err = pthread_create(&s->worker, NULL, vh_work, s)) != 0) {
		eventfd_write(s->stop, 1);
		pthread_join(s->fault_thread, NULL);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (err != 0) {
		say(why, why_size, err, "a thread: %s", strerror(err));
		goto fail;
	}
	*have = (struct vh_features){.transparent = s->transparent, .fork_events = s->have_fork, .poison = s->have_poison};
	pthread_mutex_lock(&spaces_lock);
	s->next = spaces;
	spaces = s;
	__atomic_add_fetch(&open_spaces, 1, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&spaces_lock);
	*out = s;
	return 0;
fail:
	release_all(s);
	return err;
}

static int all_home(struct vh_space *s)
{
	struct vh_request q = {.kind = VH_R_MIGRATE, .dev = VH_HOME, .all = 1, .end = UINT64_MAX & ~(s->page_size - 1)};

	return vh_execute(s, &q);
}

// unregister ends what a range has with the userfaultfd. A page that could not come home is poisoned.
static int unregister(struct vh_space *s, struct vh_range *r)
{
	struct uffdio_range u = {.start = r->start, .len = r->pages << s->page_shift};

	for (uint64_t k = 0; k < r->pages; k++)
		if (r->page[k].state == VH_S_AWAY)
			vh_poison(s, s->uffd, r->start + (k << s->page_shift));
	return ioctl(s->uffd, UFFDIO_UNREGISTER, &u) == 0 ? 0 : errno;
}

int vh_close(struct vh_space *s)
{
	struct vh_space **at;
	sigset_t old;
	int err = vh_usable(s);

	if (err == ENODEV)
		return 0; // a child: nothing of it is here
	pthread_mutex_lock(&s->queue_lock);
	s->staying = 1; // or a request that is queued could take pages away again
	pthread_mutex_unlock(&s->queue_lock);
	if (err == 0)
		err = all_home(s);
	pthread_mutex_lock(&spaces_lock); // a fork brings all home before, or waits until nothing is away
	for (at = &spaces; *at != NULL && *at != s; at = &(*at)->next)
		continue;
	if (*at == s)
		*at = s->next;
	__atomic_sub_fetch(&open_spaces, 1, __ATOMIC_SEQ_CST);
	pthread_mutex_lock(&s->queue_lock);
	s->closing = 1;
	pthread_cond_broadcast(&s->queue_cond);
	pthread_mutex_unlock(&s->queue_lock);
	pthread_join(s->worker, NULL);
	vh_lock(s, &old);
	for (size_t i = 0; i < s->ranges; i++)
		if (unregister(s, s->range[i]) != 0)
			s->range[i]->own = 0; // munmap would wait for ever: no thread reads its event any more
	// A child of a fork may have the descriptor, so that closing it does not end what is registered.
	ioctl(s->uffd, UFFDIO_UNREGISTER, &(struct uffdio_range){.start = (uintptr_t)s->staging, .len = VH_BATCH << s->page_shift});
	ioctl(s->uffd, UFFDIO_UNREGISTER, &(struct uffdio_range){.start = (uintptr_t)s->probe, .len = s->page_size});
	ioctl(s->trash_uffd, UFFDIO_UNREGISTER, &(struct uffdio_range){.start = (uintptr_t)s->trash, .len = VH_BATCH << s->page_shift});
	vh_unlock(s, &old);
	pthread_mutex_unlock(&spaces_lock);
	eventfd_write(s->stop, 1);
	pthread_join(s->fault_thread, NULL);
	while (s->ranges > 0) {
		struct vh_range *r = s->range[s->ranges - 1];

		if (r->own)
			munmap((void *)(uintptr_t)r->start, r->pages << s->page_shift);
		take_out(s, s->ranges - 1);
		free_range(s, r);
	}
	release_all(s);
	return err;
}

// add makes a range of registered memory. The caller holds the lock, and no change is pending.
static int add(struct vh_space *s, uint64_t addr, uint64_t bytes, int own)
{
	struct vh_block *b = calloc(1, sizeof *b);
	struct vh_range *r;

	refill(s);
	if (b == NULL || s->spare == NULL) {
		free(b);
		return ENOMEM;
	}
	b->refs = 1;
	b->size = (bytes >> s->page_shift) * sizeof(struct vh_page);
	b->mem = mmap(NULL, b->size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (b->mem == MAP_FAILED) {
		free(b);
		return ENOMEM;
	}
	madvise(b->mem, b->size, MADV_DONTFORK);
	r = s->spare;
	s->spare = r->next;
	s->spares--;
	*r = (struct vh_range){.start = addr, .pages = bytes >> s->page_shift, .page = b->mem, .block = b, .own = own};
	insert(s, r);
	return 0;
}

// settle takes the lock when all changes of mappings are applied. On an error the lock is not held.
static int settle(struct vh_space *s, sigset_t *old)
{
	for (uint32_t start = vh_clock();;) {
		vh_lock(s, old);
		if (!vh_changing(s))
			return 0;
		vh_unlock(s, old);
		if (vh_clock() - start > VH_PATIENCE_MS)
			return EBUSY;
		usleep(50);
	}
}

static int whole_pages(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	return bytes == 0 || (addr | bytes) & (s->page_size - 1) || addr + bytes < addr ? EINVAL : 0;
}

// vanished takes those coherent pages out of the space whose mapping the program has unmapped by itself: new memory lies there.
// It returns EEXIST if other pages of the space do.
static int vanished(struct vh_space *s, uint64_t start, uint64_t end)
{
	for (uint64_t addr = start; addr < end; addr += s->page_size) {
		struct vh_range *r = vh_find_next(s, addr);
		struct vh_mapping m;
		struct vh_page *p;

		if (r == NULL || r->start >= end)
			return 0;
		if (addr < r->start)
			addr = r->start;
		p = &r->page[(addr - r->start) >> s->page_shift];
		if (p->state != VH_S_COHERENT || p->flags & VH_F_PENDING || vh_in_place(s, p, addr, &m))
			return EEXIST;
		if (r->leaving)
			cut(s, addr, addr + s->page_size); // vh_unmap has unmapped it, and is about to say so
		else
			vh_orphan(s, addr);
	}
	return 0;
}

// join registers mapped memory and makes a range of it.
static int join(struct vh_space *s, uint64_t addr, uint64_t bytes, int own)
{
	struct uffdio_range u = {.start = addr, .len = bytes};
	sigset_t old;
	int err;

	if ((err = settle(s, &old)) != 0)
		return err;
	if ((err = vanished(s, addr, addr + bytes)) != 0)
		; // it is the space's already
	else if (s->ranges >= VH_MAX_RANGES)
		err = ENOSPC;
	else if ((err = enroll(s->uffd, addr, bytes, UFFDIO_REGISTER_MODE_MISSING)) == 0 && (err = add(s, addr, bytes, own)) != 0)
		ioctl(s->uffd, UFFDIO_UNREGISTER, &u);
	vh_unlock(s, &old);
	return err;
}

int vh_alloc(struct vh_space *s, uint64_t bytes, uint64_t *addr)
{
	int err = vh_usable(s);
	void *p;

	if (err != 0)
		return err;
	if (bytes > UINT64_MAX / 2 || (err = whole_pages(s, 0, bytes)) != 0)
		return EINVAL;
	p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return errno;
	if ((err = join(s, (uintptr_t)p, bytes, 1)) != 0) {
		munmap(p, bytes);
		return err;
	}
	*addr = (uintptr_t)p;
	return 0;
}

int vh_adopt(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if ((err = whole_pages(s, addr, bytes)) != 0)
		return err;
	for (uint64_t at = addr; at < addr + bytes;) {
		struct vh_mapping m;

		if (vh_query(s, at, &m) != 0)
			return EFAULT;
		if (m.shared || m.inode != 0)
			return EOPNOTSUPP; // only private anonymous pages can leave
		if (!m.read || !m.write)
			return EPERM;
		at = m.end;
	}
	return join(s, addr, bytes, 0);
}

int vh_owns(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	vh_lock(s, &old);
	err = vh_inside(s, addr, bytes) ? 0 : EFAULT;
	vh_unlock(s, &old);
	return err;
}

static int check(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	int err = vh_usable(s);

	if (err == 0)
		err = whole_pages(s, addr, bytes);
	return err != 0 ? err : vh_owns(s, addr, bytes);
}

int vh_release(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	struct vh_request q = {.kind = VH_R_MIGRATE, .dev = VH_HOME, .at = addr, .end = addr + bytes};
	struct uffdio_range u = {.start = addr, .len = bytes};
	sigset_t old, signals;
	int err = check(s, addr, bytes);

	if (err != 0)
		return err;
	for (uint32_t start = vh_clock(); vh_clock() - start < VH_PATIENCE_MS;) { // another request may move them again
		struct vh_request home = q;

		if ((err = vh_execute(s, &home)) != 0)
			return err;
		vh_begin_change(s, &signals);
		if ((err = settle(s, &old)) != 0) {
			vh_end_change(s, &signals);
			return err;
		}
		err = vh_inside(s, addr, bytes) ? 0 : EFAULT;
		for (uint64_t at = addr; at < addr + bytes && err == 0; at += s->page_size) {
			struct vh_range *r = vh_find(s, at);

			if (r->page[(at - r->start) >> s->page_shift].state != VH_S_HOME)
				err = EBUSY;
		}
		if (err == 0 && ioctl(s->uffd, UFFDIO_UNREGISTER, &u) != 0)
			err = errno;
		if (err == 0)
			cut(s, addr, addr + bytes);
		vh_unlock(s, &old);
		finish(s);
		vh_end_change(s, &signals);
		if (err != EBUSY && err != EAGAIN)
			return err;
	}
	return EBUSY;
}

int vh_unmap(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	sigset_t old, signals;
	int err = vh_usable(s);

	if (err == 0)
		err = whole_pages(s, addr, bytes);
	if (err != 0)
		return err;
	vh_begin_change(s, &signals);
	vh_lock(s, &old);
	if (!vh_inside(s, addr, bytes)) {
		vh_unlock(s, &old);
		vh_end_change(s, &signals);
		return EFAULT;
	}
	vh_orphans(s, addr, addr + bytes);
	split(s, addr);
	split(s, addr + bytes);
	for (size_t i = first_after(s, addr); i < s->ranges && s->range[i]->start < addr + bytes; i++)
		s->range[i]->leaving = 1;
	vh_unlock(s, &old);
	finish(s);
	err = munmap((void *)(uintptr_t)addr, bytes) == 0 ? 0 : errno;
	// The event was read, and has cut the ranges. Only mappings of coherent pages have none. A range that another thread has
	// allocated meanwhile at these addresses is not one that was leaving.
	vh_lock(s, &old);
	for (size_t i = first_after(s, addr); i < s->ranges && s->range[i]->start < addr + bytes;) {
		struct vh_range *r = s->range[i];

		if (!r->leaving) {
			i++;
			continue;
		}
		if (err != 0) {
			r->leaving = 0;
			i++;
		} else
			cut(s, r->start, r->start + (r->pages << s->page_shift));
	}
	vh_unlock(s, &old);
	vh_end_change(s, &signals);
	return err;
}

int vh_discard(struct vh_space *s, uint64_t addr, uint64_t bytes)
{
	struct vh_request q = {.kind = VH_R_MIGRATE, .dev = VH_HOME, .flags = VH_COHERENT, .at = addr, .end = addr + bytes};
	uint32_t start = vh_clock();
	sigset_t old, signals;
	int err = check(s, addr, bytes);

	if (err != 0)
		return err;
	do {
		struct vh_request home = q;

		if ((err = vh_execute(s, &home)) != 0) // coherent pages come home first
			return err;
		vh_begin_change(s, &signals);
		vh_lock(s, &old);
		err = vh_inside(s, addr, bytes) ? 0 : EFAULT;
		for (uint64_t at = addr; at < addr + bytes && err == 0; at += s->page_size) {
			struct vh_range *r = vh_find(s, at);

			if (r->page[(at - r->start) >> s->page_shift].state == VH_S_COHERENT)
				err = EBUSY; // another request has moved it again
		}
		vh_unlock(s, &old);
		if (err == 0 && madvise((void *)(uintptr_t)addr, bytes, MADV_DONTNEED) != 0)
			err = errno;
		vh_end_change(s, &signals);
	} while (err == EBUSY && vh_clock() - start < VH_PATIENCE_MS);
	return err;
}

int vh_protect(struct vh_space *s, uint64_t addr, uint64_t bytes, int read, int write)
{
	sigset_t signals;
	int err = check(s, addr, bytes);

	if (err != 0)
		return err;
	vh_begin_change(s, &signals);
	err = mprotect((void *)(uintptr_t)addr, bytes, (read ? PROT_READ : 0) | (write ? PROT_WRITE : 0)) == 0 ? 0 : errno;
	finish(s);
	vh_end_change(s, &signals);
	return err;
}

int vh_mirror(struct vh_space *s, uint64_t addr, uint64_t bytes, const uint64_t **seq)
{
	const uint64_t *word = NULL;
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (bytes == 0 || addr + bytes < addr)
		return EINVAL;
	vh_lock(s, &old);
	err = ENOSPC;
	for (int i = 0; i < VH_MAX_MIRRORS && err != 0; i++)
		if (s->mirror[i].end == 0) {
			s->mirror[i].seq++;
			s->mirror[i].start = addr;
			s->mirror[i].end = addr + bytes;
			word = &s->mirror[i].seq;
			err = 0;
		}
	vh_unlock(s, &old);
	if (err == 0)
		*seq = word;
	return err;
}

void vh_mirror_end(struct vh_space *s, const uint64_t *seq)
{
	sigset_t old;

	if (vh_usable(s) == ENODEV)
		return;
	vh_lock(s, &old);
	for (int i = 0; i < VH_MAX_MIRRORS; i++)
		if (&s->mirror[i].seq == seq) {
			s->mirror[i].end = 0;
			__atomic_add_fetch(&s->mirror[i].seq, 1, __ATOMIC_SEQ_CST);
		}
	vh_unlock(s, &old);
}

uint64_t vh_current(struct vh_space *s, const uint64_t *seq)
{
	uint64_t now;
	sigset_t old;

	if (vh_usable(s) == ENODEV)
		return 0; // no number of a mirror: they begin at 1
	vh_lock(s, &old);
	now = *seq;
	vh_unlock(s, &old);
	return now;
}

void vh_get_stats(struct vh_space *s, struct vh_stats *out)
{
	struct vh_stats now;
	sigset_t old;

	memset(out, 0, sizeof *out);
	if (vh_usable(s) == ENODEV)
		return;
	vh_lock(s, &old);
	now = s->stats;
	vh_unlock(s, &old);
	*out = now;
}

// A fork by the C library: pages come home first, and none leaves until it is over. If a device does not give its
// pages back, and the kernel does not report forks, the child has no memory there.

static void fork_advice(struct vh_space *s, int advice)
{
	sigset_t old;

	vh_lock(s, &old);
	for (size_t i = 0; i < s->ranges; i++) {
		struct vh_range *r = s->range[i];

		for (uint64_t k = 0; k < r->pages; k++)
			if (r->page[k].state == VH_S_AWAY || (advice == MADV_DOFORK && r->page[k].state == VH_S_HOME))
				madvise((void *)(uintptr_t)(r->start + (k << s->page_shift)), s->page_size, advice);
	}
	s->hidden = advice == MADV_DONTFORK;
	vh_unlock(s, &old);
}

static void prepare_fork(void)
{
	if (alive == NULL || !*alive)
		return;
	pthread_mutex_lock(&spaces_lock);
	for (struct vh_space *s = spaces; s != NULL; s = s->next) {
		pthread_mutex_lock(&s->queue_lock);
		s->forking++;
		pthread_mutex_unlock(&s->queue_lock);
		if (all_home(s) != 0 && !s->have_fork)
			fork_advice(s, MADV_DONTFORK);
	}
}

static void after_fork_parent(void)
{
	if (alive == NULL || !*alive)
		return;
	for (struct vh_space *s = spaces; s != NULL; s = s->next) {
		if (s->hidden)
			fork_advice(s, MADV_DOFORK);
		pthread_mutex_lock(&s->queue_lock);
		s->forking--;
		pthread_cond_broadcast(&s->queue_cond);
		pthread_mutex_unlock(&s->queue_lock);
	}
	pthread_mutex_unlock(&spaces_lock);
}

static void after_fork_child(void)
{
	if (alive == NULL)
		return;
	pthread_mutex_init(&spaces_lock, NULL); // the parent's thread that forks has taken it
	spaces = NULL;
	open_spaces = 0;
	*alive = ++generation; // which no space has
}
