// Requests, and the thread that executes them. A request is executed in steps of VH_BATCH pages at most. After each the
// lock is free for a moment, and the next request has its turn.

#include "engine.h"
#include "uffd.h"

#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

// vh_submit queues a request.
void vh_submit(struct vh_space *s, struct vh_request *q)
{
	pthread_mutex_lock(&s->queue_lock);
	q->next = NULL;
	if (s->tail != NULL)
		s->tail->next = q;
	else
		s->head = q;
	s->tail = q;
	if (q->kind != VH_R_DRAIN)
		s->queued++;
	pthread_cond_broadcast(&s->queue_cond);
	pthread_mutex_unlock(&s->queue_lock);
}

// vh_execute queues a request and waits until it is done.
int vh_execute(struct vh_space *s, struct vh_request *q)
{
	q->since = vh_clock();
	vh_submit(s, q);
	pthread_mutex_lock(&s->queue_lock);
	while (!q->done)
		pthread_cond_wait(&s->done_cond, &s->queue_lock);
	pthread_mutex_unlock(&s->queue_lock);
	return q->err;
}

void vh_kick(struct vh_space *s)
{
	pthread_mutex_lock(&s->queue_lock);
	pthread_cond_broadcast(&s->queue_cond);
	pthread_mutex_unlock(&s->queue_lock);
}

// fail notes why pages do not go, and goes on behind them.
static void skip(struct vh_space *s, struct vh_request *q, int err, uint64_t pages)
{
	if (q->err == 0)
		q->err = err;
	q->at += pages << s->page_shift;
	q->since = vh_clock();
}

static void progress(struct vh_space *s, struct vh_request *q, uint64_t pages, uint64_t there)
{
	q->at += pages << s->page_shift;
	q->there += there;
	if (pages > 0)
		q->since = vh_clock();
}

// patience reports whether a step may be tried again.
static int patience(struct vh_request *q) { return vh_clock() - (uint32_t)q->since < VH_PATIENCE_MS; }

// unsettled reports whether the program has just discarded a page that the kernel still has: then it goes, or stays if
// it was MADV_FREE.
static int unsettled(struct vh_space *s, struct vh_page *p, uint64_t addr)
{
	if (p->removed == 0)
		return 0;
	if (vh_clock() - p->removed < VH_SETTLE_MS && vh_present(s, addr))
		return 1;
	p->removed = 0;
	return 0;
}

// chunk_of returns the part of a device's memory that a page lies in, and its offset in the file.
static struct vh_chunk *chunk_of(struct vh_device *d, uint64_t where, unsigned shift, uint64_t *off)
{
	for (size_t i = 0; i < d->chunks; i++)
		if (where - d->chunk[i].base < d->chunk[i].pages << shift) {
			*off = d->chunk[i].off + (where - d->chunk[i].base);
			return d->chunk[i].inode == 0 ? NULL : &d->chunk[i];
		}
	return NULL;
}

// vh_in_place reports whether the mapping of a coherent page is where it was made. m is what is mapped there. It is not if the
// program has unmapped it, moved it, or mapped something else over it: none of that is reported.
int vh_in_place(struct vh_space *s, const struct vh_page *p, uint64_t addr, struct vh_mapping *m)
{
	uint64_t off = 0;
	struct vh_chunk *chunk = chunk_of(&s->device[p->dev], p->where, s->page_shift, &off);

	return chunk != NULL && vh_query(s, addr, m) == 0 && m->shared && m->inode == chunk->inode && m->off + (addr - m->start) == off;
}

static int protection(const struct vh_mapping *m) { return (m->read ? PROT_READ : 0) | (m->write ? PROT_WRITE : 0); }

// make_coherent maps pages that are away at their addresses: a run from page i on whose memory lies together. The lock is
// held, and released meanwhile.
static struct vh_step make_coherent(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n, sigset_t *old)
{
	struct vh_step step = {0};
	struct vh_page *p = &r->page[i];
	uint64_t run = 1, off = 0, off2, addr = r->start + (i << s->page_shift), bytes;
	struct vh_chunk *chunk = chunk_of(&s->device[p->dev], p->where, s->page_shift, &off);
	struct vh_mapping m;
	int err;
	void *got;

	if (chunk == NULL) {
		step.err = EOPNOTSUPP;
		return step;
	}
	if (vh_reserve(s) != 0) { // or they might not come home
		step.err = ENOMEM;
		return step;
	}
	if (vh_changing(s)) {
		step.again = 1;
		return step;
	}
	if (vh_find(s, addr) != r || addr != r->start + (i << s->page_shift) || p != &r->page[i] || p->state != VH_S_AWAY) {
		step.again = 1; // a change was just applied
		return step;
	}
	if (vh_query(s, addr, &m) != 0 || m.shared) {
		step.err = EFAULT;
		return step;
	}
	while (run < n && i + run < r->pages && addr + (run << s->page_shift) < m.end && p[run].state == VH_S_AWAY && p[run].dev == p->dev &&
	       p[run].where == p->where + (run << s->page_shift) &&
	       chunk_of(&s->device[p->dev], p[run].where, s->page_shift, &off2) == chunk && off2 == off + (run << s->page_shift))
		run++;
	bytes = run << s->page_shift;
	vh_invalidate(s, addr, addr + bytes);
	for (uint64_t k = 0; k < run; k++) {
		p[k].state = VH_S_COHERENT;
		p[k].flags = VH_F_PENDING;
	}
	vh_expect_unmap(s, addr, addr + bytes);
	s->replaced = m;
	s->replaced.start = addr;
	s->replaced.end = addr + bytes;
	vh_unlock(s, old);
	// The child of a fork must not have it: the memory is another page's later. So it is made elsewhere, and moved.
	err = 0;
	got = mmap(NULL, bytes, protection(&m), MAP_SHARED, chunk->fd, (off_t)off);
	if (got == MAP_FAILED || madvise(got, bytes, MADV_DONTFORK) != 0 ||
	    mremap(got, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)addr) == MAP_FAILED) {
		err = errno;
		if (got != MAP_FAILED)
			munmap(got, bytes);
	}
	vh_lock(s, old);
	s->replaced.end = 0;
	vh_expect_none(s, addr, addr + bytes);
	for (uint64_t k = 0; k < run; k++) {
		struct vh_range *now = vh_find(s, addr + (k << s->page_shift)); // r may have changed
		struct vh_page *at;

		if (now == NULL)
			continue;
		at = &now->page[(addr + (k << s->page_shift) - now->start) >> s->page_shift];
		if (at->state != VH_S_COHERENT || !(at->flags & VH_F_PENDING))
			continue;
		at->flags = 0;
		if (err != 0)
			at->state = VH_S_AWAY;
		else
			s->stats.coherent_pages++;
	}
	vh_wake(s, addr, bytes);
	step.pages = run;
	step.moved = err == 0 ? run : 0;
	step.err = err;
	return step;
}

// no_room is called when the process may have no more mappings: it gives up the reserve, and it is tried again.
static struct vh_step no_room(struct vh_space *s)
{
	if (s->reserve == NULL)
		return (struct vh_step){.err = ENOMEM};
	vh_give_up_reserve(s);
	return (struct vh_step){.again = 1};
}

// end_coherent makes coherent pages ordinary ones that are away: an empty mapping takes the place of the device's,
// in one step, so that no store of the CPU is lost. The lock is held, and released meanwhile.
static struct vh_step end_coherent(struct vh_space *s, struct vh_range *r, uint64_t i, uint64_t n, sigset_t *old)
{
	struct vh_step step = {0};
	struct vh_page *p = &r->page[i];
	struct vh_mapping m;
	uint64_t run = 1, bytes, addr = r->start + (i << s->page_shift);
	unsigned char core[VH_BATCH];
	struct uffdio_register reg;
	char *empty;
	int err;

	if (!vh_in_place(s, p, addr, &m)) {
		vh_orphan(s, addr);
		step.err = EFAULT;
		step.pages = 1;
		return step;
	}
	while (run < n && i + run < r->pages && p[run].state == VH_S_COHERENT && addr + (run << s->page_shift) < m.end &&
	       p[run].dev == p->dev && p[run].where == p->where + (run << s->page_shift))
		run++;
	bytes = run << s->page_shift;
	empty = mmap(NULL, bytes, protection(&m), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (empty == MAP_FAILED && s->reserve == NULL && run > 1) {
		run = 1; // the process may have so many bytes, and no more
		bytes = s->page_size;
		empty = mmap(NULL, bytes, protection(&m), MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	}
	if (empty == MAP_FAILED)
		return no_room(s);
	munlock(empty, bytes); // after mlockall(MCL_FUTURE) it has pages
	madvise(empty, bytes, MADV_DONTNEED);
	reg = (struct uffdio_register){.range = {.start = (uintptr_t)empty, .len = bytes}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	err = ioctl(s->uffd, UFFDIO_REGISTER, &reg) != 0 ? errno : 0;
	if (err == 0 && mincore(empty, bytes, core) == 0 && memchr(core, 1, run) != NULL) { // mlockall, since
		ioctl(s->uffd, UFFDIO_UNREGISTER, &reg.range);
		err = EAGAIN;
	}
	if (err != 0) {
		munmap(empty, bytes);
		if (err == ENOMEM)
			return no_room(s);
		step.again = err == EAGAIN;
		step.err = err == EAGAIN ? 0 : err;
		return step;
	}
	vh_invalidate(s, addr, addr + bytes);
	for (uint64_t k = 0; k < run; k++)
		p[k].state = VH_S_AWAY;
	s->own_start = (uintptr_t)empty;
	s->own_end = s->own_start + bytes;
	s->replaced = m;
	s->replaced.start = addr;
	s->replaced.end = addr + bytes;
	vh_unlock(s, old);
	if (mremap(empty, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)addr) == MAP_FAILED) {
		err = errno;
		munmap(empty, bytes);
	}
	vh_lock(s, old);
	s->own_start = s->own_end = s->replaced.end = 0;
	for (uint64_t k = 0; k < run && err != 0; k++) {
		struct vh_range *now = vh_find(s, addr + (k << s->page_shift));

		if (now != NULL && now->page[(addr + (k << s->page_shift) - now->start) >> s->page_shift].state == VH_S_AWAY)
			now->page[(addr + (k << s->page_shift) - now->start) >> s->page_shift].state = VH_S_COHERENT;
	}
	if (err == ENOMEM)
		return no_room(s);
	step.err = err;
	return step; // no pages: they are looked at again, as pages that are away
}

// run_of returns how many pages from i on are in the state of the first one, with the same device.
static uint64_t run_of(struct vh_range *r, uint64_t i, uint64_t n)
{
	uint64_t k = 1;

	if (n > r->pages - i)
		n = r->pages - i;
	if (n > VH_BATCH)
		n = VH_BATCH;
	while (k < n && r->page[i + k].state == r->page[i].state && (r->page[i].state == VH_S_HOME || r->page[i + k].dev == r->page[i].dev))
		k++;
	return k;
}

// step executes a part of a request. It returns how long to wait before the next one, in microseconds.
static int step(struct vh_space *s, struct vh_request *q)
{
	struct vh_step did = {0};
	struct vh_range *r;
	struct vh_page *p;
	uint64_t i, n;
	sigset_t old;
	int wait = 0, end_sharing = 0;
	int target = q->kind == VH_R_EXCLUSIVE ? VH_HOST : q->dev;

	if (__atomic_load_n(&s->changers, __ATOMIC_SEQ_CST) > 0)
		usleep(50); // they take the change lock first
	pthread_mutex_lock(&s->change_lock);
	vh_lock(s, &old);
	r = vh_find_next(s, q->at);
	if (r == NULL || r->start >= q->end) {
		if (!q->all && q->err == 0)
			q->err = EFAULT;
		q->at = q->end;
		goto out;
	}
	if (r->start > q->at) {
		if (!q->all && q->err == 0)
			q->err = EFAULT;
		q->at = r->start;
	}
	i = (q->at - r->start) >> s->page_shift;
	p = &r->page[i];
	n = run_of(r, i, (q->end - q->at) >> s->page_shift);
	switch (p->state) {
	case VH_S_HOME:
		if (target == VH_HOME) {
			progress(s, q, n, n);
			break;
		}
		for (uint64_t k = 0; k < n; k++)
			if (unsettled(s, &p[k], q->at + (k << s->page_shift))) {
				if (k == 0) {
					wait = 200;
					goto out;
				}
				n = k;
			}
		if (target == VH_HOST && s->host_used + n > VH_MAX_EXCLUSIVE) {
			skip(s, q, ENOSPC, n);
			break;
		}
		if (target == VH_HOST && vh_host_reserve(s, 2 * n) != 0) {
			skip(s, q, ENOMEM, n);
			break;
		}
		vh_quiet(s); // an access holds pages
		did = vh_leave(s, r, i, n, target);
		if (q->counted)
			s->stats.counted_pages += did.moved;
		// With VH_COHERENT they are looked at again, as pages that are away.
		if (!(q->flags & VH_COHERENT) || did.err == EIO)
			progress(s, q, did.pages, did.moved);
		else if (did.pages > 0)
			q->since = vh_clock();
		break;
	case VH_S_AWAY:
		if (target == VH_HOME && q->flags & VH_COHERENT) {
			progress(s, q, n, n); // only coherent pages are asked for
			break;
		}
		if (p->dev == target) {
			if (target != VH_HOST && q->flags & VH_COHERENT) {
				did = make_coherent(s, r, i, n, &old);
				progress(s, q, did.pages, did.moved);
			} else {
				progress(s, q, n, n);
			}
			break;
		}
		did = vh_come_home(s, r, i, n);
		if (target == VH_HOME)
			progress(s, q, did.pages, did.pages);
		else if (did.pages > 0)
			q->since = vh_clock();
		break;
	case VH_S_COHERENT:
		if (p->dev == target && q->flags & VH_COHERENT) {
			progress(s, q, n, n);
			break;
		}
		did = end_coherent(s, r, i, n, &old);
		if (target == VH_HOME && q->flags & VH_COHERENT && did.err == 0) {
			// They are away now, and on their way home.
			r = vh_find(s, q->at);
			if (r != NULL)
				did = vh_come_home(s, r, (q->at - r->start) >> s->page_shift, run_of(r, (q->at - r->start) >> s->page_shift, n));
			progress(s, q, did.pages, did.pages);
		}
		break;
	}
	if (did.shared && q->shared != q->at) {
		q->shared = q->at;
		end_sharing = 1;
	} else if (did.shared) {
		skip(s, q, EBUSY, 1);
	} else if (did.err == ENOMEM && did.pages == 0) {
		skip(s, q, ENOMEM, n);
	} else if (did.err != 0) {
		if (did.pages == 0)
			skip(s, q, did.err, 1);
		else if (q->err == 0 && did.err != ENOMEM)
			q->err = did.err;
	} else if (did.again) {
		if (patience(q))
			wait = 20;
		else
			skip(s, q, EBUSY, 1);
	}
out:
	vh_unlock(s, &old);
	pthread_mutex_unlock(&s->change_lock);
	if (end_sharing) // a write fault makes the page this process's own. If it has gone, the fault thread serves it
		madvise((void *)(uintptr_t)q->at, s->page_size, MADV_POPULATE_WRITE);
	return wait;
}

// turn executes a request until some of its pages are where they are to go: what one request has brought half way the next one
// could undo, for ever.
static int turn(struct vh_space *s, struct vh_request *q)
{
	const uint64_t at = q->at;
	int wait = step(s, q);

	for (int i = 1; i < 8 && wait == 0 && q->at == at && q->at < q->end; i++)
		wait = step(s, q);
	return wait;
}

// automatic makes a request of a page whose access counter is full.
static int automatic(struct vh_space *s, struct vh_request *q)
{
	sigset_t old;
	int any;

	vh_lock(s, &old);
	any = s->auto_head != s->auto_tail;
	if (any) {
		*q = (struct vh_request){.kind = VH_R_MIGRATE, .counted = 1, .all = 1, .since = vh_clock()};
		q->at = s->automatic[s->auto_tail % VH_AUTO].addr;
		q->dev = s->automatic[s->auto_tail % VH_AUTO].dev;
		q->end = q->at + s->page_size;
	}
	vh_unlock(s, &old);
	return any;
}

// automatic_done takes the page off the list. Until then vh_drain waits for it.
static void automatic_done(struct vh_space *s)
{
	sigset_t old;

	vh_lock(s, &old);
	s->auto_tail++;
	vh_unlock(s, &old);
}

// vh_work is the thread that executes requests.
void *vh_work(void *space)
{
	struct vh_space *s = space;
	struct vh_request counted;

	pthread_setname_np(pthread_self(), "hmm-worker");
	for (;;) {
		struct vh_request *q;
		int wait = 0, forking, staying, leaves, done = 0;

		pthread_mutex_lock(&s->queue_lock);
		for (;;) {
			q = s->head;
			forking = s->forking;
			staying = s->staying;
			if (q != NULL || s->closing)
				break;
			pthread_mutex_unlock(&s->queue_lock);
			if (!forking && !staying && automatic(s, &counted)) {
				while (counted.at < counted.end && (wait = step(s, &counted)) >= 0)
					if (wait > 0)
						usleep((useconds_t)wait);
				automatic_done(s);
				pthread_mutex_lock(&s->queue_lock);
				continue;
			}
			pthread_mutex_lock(&s->queue_lock);
			if (s->head == NULL && !s->closing && s->auto_tail == __atomic_load_n(&s->auto_head, __ATOMIC_ACQUIRE))
				pthread_cond_wait(&s->queue_cond, &s->queue_lock);
			else if ((forking || staying) && s->head == NULL && !s->closing)
				pthread_cond_wait(&s->queue_cond, &s->queue_lock);
		}
		if (q == NULL) {
			pthread_mutex_unlock(&s->queue_lock);
			return NULL;
		}
		s->head = q->next;
		if (s->head == NULL)
			s->tail = NULL;
		pthread_mutex_unlock(&s->queue_lock);
		leaves = q->kind == VH_R_EXCLUSIVE || (q->kind == VH_R_MIGRATE && q->dev != VH_HOME);
		if (q->kind == VH_R_DRAIN) {
			pthread_mutex_lock(&s->queue_lock);
			done = s->queued == 0;
			pthread_mutex_unlock(&s->queue_lock);
			wait = done ? 0 : 20;
		} else if (staying && leaves) {
			q->err = ENODEV;
			q->at = q->end;
		} else if (forking && leaves) {
			q->since = vh_clock();
			wait = 50; // nothing leaves during a fork
		} else {
			wait = turn(s, q);
		}
		if (s->dead && q->at < q->end) {
			q->err = EIO;
			q->at = q->end;
		}
		if (q->kind != VH_R_DRAIN)
			done = q->at >= q->end;
		if (done) {
			int async = q->async;

			pthread_mutex_lock(&s->queue_lock);
			if (q->kind != VH_R_DRAIN)
				s->queued--;
			q->done = 1;
			pthread_cond_broadcast(&s->done_cond);
			pthread_mutex_unlock(&s->queue_lock);
			if (async)
				free(q);
		} else {
			pthread_mutex_lock(&s->queue_lock);
			q->next = NULL;
			if (s->tail != NULL)
				s->tail->next = q;
			else
				s->head = q;
			s->tail = q;
			if (q != s->head && wait > 20)
				wait = 20;
			pthread_mutex_unlock(&s->queue_lock);
			if (wait > 0)
				usleep((useconds_t)wait);
			else if (__atomic_load_n(&s->urgent, __ATOMIC_RELAXED) > 0)
				sched_yield(); // a fault waits for the lock
		}
	}
}

static int checked(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev)
{
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (bytes == 0 || (addr | bytes) & (s->page_size - 1) || addr + bytes < addr)
		return EINVAL;
	if (dev != VH_HOME && (dev < 0 || dev >= __atomic_load_n(&s->devices, __ATOMIC_ACQUIRE)))
		return ENODEV;
	return vh_owns(s, addr, bytes);
}

int vh_migrate(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, int flags, uint64_t *there)
{
	struct vh_request q = {.kind = VH_R_MIGRATE, .dev = dev, .flags = dev == VH_HOME ? 0 : flags, .at = addr, .end = addr + bytes};
	int err = checked(s, addr, bytes, dev);

	*there = 0;
	if (err != 0)
		return err;
	err = vh_execute(s, &q);
	*there = q.there;
	return err;
}

int vh_prefetch(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, int flags)
{
	struct vh_request *q;
	int err = checked(s, addr, bytes, dev);

	if (err != 0)
		return err;
	if ((q = calloc(1, sizeof *q)) == NULL)
		return ENOMEM;
	*q = (struct vh_request){.kind = VH_R_MIGRATE, .dev = dev, .flags = dev == VH_HOME ? 0 : flags, .at = addr, .end = addr + bytes, .async = 1, .all = 1, .since = vh_clock()};
	vh_submit(s, q);
	return 0;
}

int vh_drain(struct vh_space *s)
{
	struct vh_request q = {.kind = VH_R_DRAIN};
	int err = vh_usable(s);
	unsigned left;

	if (err != 0)
		return err;
	for (;;) {
		sigset_t old;

		q.done = 0;
		vh_execute(s, &q);
		vh_lock(s, &old);
		left = s->auto_head - s->auto_tail;
		vh_unlock(s, &old);
		if (left == 0)
			return 0;
		vh_kick(s);
		usleep(50);
	}
}

int vh_exclusive(struct vh_space *s, uint64_t addr, uint64_t bytes, uint64_t *there)
{
	struct vh_request q = {.kind = VH_R_EXCLUSIVE, .dev = VH_HOST, .at = addr, .end = addr + bytes};
	int err = checked(s, addr, bytes, VH_HOME);

	*there = 0;
	if (err != 0)
		return err;
	err = vh_execute(s, &q);
	*there = q.there;
	return err;
}

int vh_policy(struct vh_space *s, uint64_t addr, uint64_t bytes, int dev, uint32_t after)
{
	sigset_t old;
	int id = 0, err = checked(s, addr, bytes, after == 0 ? VH_HOME : dev);

	if (err != 0)
		return err;
	if (after != 0 && dev == VH_HOME)
		return EINVAL;
	vh_lock(s, &old);
	if (after != 0) {
		for (id = 1; id <= s->policies; id++)
			if (s->policy[id].dev == dev && s->policy[id].after == after)
				break;
		if (id > VH_MAX_POLICIES) {
			vh_unlock(s, &old);
			return ENOSPC;
		}
		if (id > s->policies) {
			s->policies = id;
			s->policy[id].dev = dev;
			s->policy[id].after = after;
		}
	}
	for (uint64_t at = addr; at < addr + bytes; at += s->page_size) {
		struct vh_range *r = vh_find(s, at);

		if (r == NULL) {
			err = EFAULT; // it was unmapped meanwhile
			break;
		}
		r->page[(at - r->start) >> s->page_shift].policy = (uint8_t)id;
		r->page[(at - r->start) >> s->page_shift].hits = 0;
	}
	vh_unlock(s, &old);
	return err;
}

int vh_device_add(struct vh_space *s, int *dev)
{
	sigset_t old;
	int err = vh_usable(s), id = 0;

	if (err != 0)
		return err;
	vh_lock(s, &old);
	if (s->devices == VH_MAX_DEVICES) {
		err = ENOSPC;
	} else {
		id = s->devices;
		s->device[id].fail_after = -1;
		__atomic_store_n(&s->devices, id + 1, __ATOMIC_RELEASE);
	}
	vh_unlock(s, &old);
	if (err == 0)
		*dev = id;
	return err;
}

int vh_vram_add(struct vh_space *s, int dev, uint64_t base, uint64_t pages, int fd, uint64_t off)
{
	struct vh_device *d;
	uint64_t *list;
	struct vh_chunk *chunk;
	struct stat file;
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (fd < 0 || fstat(fd, &file) != 0)
		file.st_ino = 0; // without a file there is no coherent memory
	if (dev < 0 || dev >= __atomic_load_n(&s->devices, __ATOMIC_ACQUIRE) || pages == 0 || pages > UINT32_MAX || base & (s->page_size - 1))
		return EINVAL;
	vh_lock(s, &old);
	d = &s->device[dev];
	list = realloc(d->free, (d->total + pages) * sizeof *list);
	if (list != NULL)
		d->free = list;
	chunk = realloc(d->chunk, (d->chunks + 1) * sizeof *chunk);
	if (chunk != NULL)
		d->chunk = chunk;
	if (list == NULL || chunk == NULL) {
		err = ENOMEM;
	} else {
		d->chunk[d->chunks++] = (struct vh_chunk){.base = base, .pages = pages, .fd = fd, .off = off, .inode = file.st_ino};
		d->total += pages;
		for (uint64_t i = pages; i > 0; i--) // the first page is taken first
			d->free[d->nfree++] = base + ((i - 1) << s->page_shift);
	}
	vh_unlock(s, &old);
	return err;
}

int vh_vram_free(struct vh_space *s, int dev, uint64_t *pages)
{
	uint64_t n;
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (dev < 0 || dev >= __atomic_load_n(&s->devices, __ATOMIC_ACQUIRE))
		return ENODEV;
	vh_lock(s, &old);
	n = s->device[dev].nfree;
	vh_unlock(s, &old);
	*pages = n;
	return 0;
}

int vh_device_fail(struct vh_space *s, int dev, int64_t after)
{
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (dev < 0 || dev >= __atomic_load_n(&s->devices, __ATOMIC_ACQUIRE))
		return ENODEV;
	vh_lock(s, &old);
	s->device[dev].fail_after = after;
	vh_unlock(s, &old);
	return 0;
}
