// What devices do with pages.
//
// A page that is away or coherent is accessed where it lies, with the lock held: no page changes under an access. If the
// bytes of the caller lie in memory of a space, they pass through a small buffer of the engine. Other memory of the caller is
// touched before the lock is taken: it may have a userfaultfd, as what mremap adds to memory of a space has.
//
// A page that is home is the kernel's, and is accessed by process_vm_readv and process_vm_writev, which fail where
// a load would be a signal. If it leaves meanwhile the call fails or brings it home, and nothing is lost.

#include "engine.h"
#include "uffd.h"

#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

// reaches reports whether a page that is away is accessed where it lies.
static int reaches(const struct vh_page *p, uint64_t reach) { return p->dev == VH_HOST || (reach >> p->dev & 1) != 0; }

// counted counts an access of a device to a page that is not in its memory, and has the page come if it was the
// last one that it takes. It reports whether the worker is to be told.
static int counted(struct vh_space *s, struct vh_page *p, int self, uint64_t addr)
{
	if (p->policy == 0 || s->policy[p->policy].dev != self)
		return 0;
	if (++p->hits < s->policy[p->policy].after)
		return 0;
	p->hits = 0;
	if (s->auto_head - s->auto_tail == VH_AUTO) {
		s->stats.counted_missed++;
		return 0;
	}
	s->automatic[s->auto_head % VH_AUTO].addr = addr;
	s->automatic[s->auto_head % VH_AUTO].dev = self;
	__atomic_store_n(&s->auto_head, s->auto_head + 1, __ATOMIC_RELEASE);
	return 1;
}

static int bring_home(struct vh_space *s, uint64_t addr)
{
	struct vh_request q = {.kind = VH_R_MIGRATE, .dev = VH_HOME, .at = addr, .end = addr + s->page_size};

	return vh_execute(s, &q);
}

// at_home accesses bytes of pages that are home: *bytes at most, and afterwards how many.
static int at_home(uint64_t addr, char *buf, uint64_t *bytes, int write)
{
	struct iovec local = {.iov_base = buf, .iov_len = *bytes}, remote = {.iov_base = (void *)(uintptr_t)addr, .iov_len = *bytes};
	ssize_t n = write ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0) : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);

	if (n <= 0)
		return n < 0 ? errno : EFAULT;
	*bytes = (uint64_t)n;
	return 0;
}

// why_not returns why a page cannot be accessed: nothing is mapped there, or not for that.
static int why_not(struct vh_space *s, uint64_t addr, int write)
{
	struct vh_mapping m = {0};
	sigset_t old;
	int err;

	vh_lock(s, &old);
	err = vh_allowed(s, addr, write, &m);
	vh_unlock(s, &old);
	return err;
}

#define VH_BOUNCE 4096
#define VH_PART 65536 // bytes that are accessed under one hold of the lock

// lends reports whether the caller's bytes can be accessed with the lock held: they lie in no space, so that no fault on
// them waits for the lock of one.
static int lends(struct vh_space *s, const char *buf, uint64_t bytes)
{
	struct vh_range *next = vh_find_next(s, (uintptr_t)buf);

	return vh_spaces() == 1 && (next == NULL || next->start >= (uintptr_t)buf + bytes);
}

// touch has the kernel make the pages of some bytes present.
static void touch(struct vh_space *s, const char *buf, uint64_t bytes)
{
	for (uint64_t at = 0; at < bytes; at += s->page_size)
		(void)*(const volatile char *)(buf + at);
	(void)*(const volatile char *)(buf + bytes - 1);
}

// in_place returns how many of the bytes from page p on lie together where the device reaches them, up to the end of the
// mapping.
static uint64_t in_place(struct vh_space *s, struct vh_range *r, struct vh_page *p, uint64_t reach, uint64_t addr, uint64_t bytes, uint64_t end)
{
	uint64_t n = s->page_size - (addr & (s->page_size - 1)), k = 1, left = r->pages - (uint64_t)(p - r->page);

	if (bytes > end - addr)
		bytes = end - addr;
	for (; n < bytes && k < left && p[k].state != VH_S_HOME && p[k].dev == p->dev && p[k].where == p->where + (k << s->page_shift) && reaches(&p[k], reach); k++)
		n += s->page_size;
	return n < bytes ? n : bytes;
}

// home_run returns how many of the bytes from page p on lie in pages that are home and that the kernel has; at least those of
// the first one. An access to one that it does not have would wait for the fault thread, which waits for accesses.
static uint64_t home_run(struct vh_space *s, struct vh_range *r, struct vh_page *p, uint64_t addr, uint64_t bytes)
{
	uint64_t entry[VH_PART / 4096 + 1], first = addr & ~(s->page_size - 1);
	uint64_t n = s->page_size - (addr & (s->page_size - 1)), k = 1, left = r->pages - (uint64_t)(p - r->page);
	ssize_t got = -1;

	if (n < bytes && s->pagemap >= 0)
		got = pread(s->pagemap, entry, sizeof entry, (off_t)(first >> s->page_shift << 3));
	for (; n < bytes && k < left && p[k].state == VH_S_HOME && (ssize_t)(8 * k + 8) <= got && entry[k] >> 62 != 0; k++)
		n += s->page_size;
	return n < bytes ? n : bytes;
}

// count counts an access to all pages of some bytes, and reports whether the worker is to be told.
static int count(struct vh_space *s, struct vh_range *r, int self, uint64_t addr, uint64_t bytes, int write)
{
	int tell = 0;

	for (uint64_t at = addr & ~(s->page_size - 1); at < addr + bytes; at += s->page_size) {
		struct vh_page *p = &r->page[(at - r->start) >> s->page_shift];

		if (p->state == VH_S_HOME || (p->state == VH_S_AWAY && p->dev != self))
			tell |= counted(s, p, self, at);
		if (write)
			s->stats.device_writes++;
		else
			s->stats.device_reads++;
	}
	return tell;
}

// put copies bytes to memory of a device; with last, those in the last aligned word after the others.
static void put(char *to, const char *from, uint64_t bytes, int last)
{
	uint64_t tail = last ? ((uintptr_t)to + bytes - 1) % 8 + 1 : 0, word;

	if (tail > bytes)
		tail = bytes;
	memcpy(to, from, bytes - tail);
	if (tail == 0)
		return;
	__atomic_thread_fence(__ATOMIC_RELEASE);
	if (tail < 8) {
		memcpy(to + bytes - tail, from + bytes - tail, tail);
		return;
	}
	memcpy(&word, from + bytes - 8, 8);
	__atomic_store_n((uint64_t *)(uintptr_t)(to + bytes - 8), word, __ATOMIC_RELEASE);
}

// part accesses the first of some bytes; *done is how many.
static int part(struct vh_space *s, int self, uint64_t reach, uint64_t addr, char *buf, uint64_t bytes, int flags, uint64_t *done)
{
	int write = (flags & VH_WRITE) != 0;
	uint64_t first = addr & ~(s->page_size - 1), n;
	char bounce[VH_BOUNCE], *b = buf;
	uint32_t start = 0;
	unsigned phase;
	int err, tell = 0;
	sigset_t old;

	if (bytes > VH_PART) {
		bytes = VH_PART;
		flags &= ~VH_LAST;
	}
	for (int tries = 0;; tries++) {
		struct vh_mapping m = {0};
		struct vh_range *r;
		struct vh_page *p;

		if (tries == 2)
			start = vh_clock();
		if (tries > 2 && vh_clock() - start > VH_PATIENCE_MS)
			return EBUSY;
		if (tries == 0 && !(flags & VH_STEADY))
			touch(s, buf, bytes);
		vh_lock(s, &old);
		if (b == buf && !(flags & VH_STEADY) && (tries > 0 || !lends(s, buf, bytes))) {
			vh_unlock(s, &old);
			b = bounce;
			if (bytes > VH_BOUNCE) {
				bytes = VH_BOUNCE;
				flags &= ~VH_LAST;
			}
			if (write)
				memcpy(bounce, buf, bytes);
			vh_lock(s, &old);
		}
		r = vh_find(s, first);
		if (r == NULL || r->leaving) {
			vh_unlock(s, &old);
			return EFAULT;
		}
		p = &r->page[(first - r->start) >> s->page_shift];
		if (p->state != VH_S_HOME && reaches(p, reach)) {
			char *at = (char *)(uintptr_t)(p->where + (addr - first));

			err = vh_allowed(s, first, write, &m);
			if (err == 0 && p->dev != VH_HOST && s->device[p->dev].fail_after == 0)
				err = EIO;
			if (err != 0) {
				vh_unlock(s, &old);
				return err;
			}
			n = in_place(s, r, p, reach, addr, bytes, m.end);
			if (write)
				put(at, b, n, flags & VH_LAST && n == bytes);
			else
				memcpy(b, at, n);
			tell = count(s, r, self, addr, n, write);
			vh_unlock(s, &old);
			break;
		}
		if (p->state != VH_S_HOME) {
			vh_unlock(s, &old);
			if ((err = bring_home(s, first)) != 0 && err != EFAULT)
				return err;
			continue;
		}
		if ((tries > 0 || !vh_present(s, first)) && vh_zero(s, first, write) == 0) {
			s->stats.first_touches++;
			p->removed = 0;
		}
		n = home_run(s, r, p, addr, bytes);
		if (flags & VH_LAST && n == bytes && n > (addr + n - 1) % 8 + 1)
			n -= (addr + n - 1) % 8 + 1; // the rest is the next part
		phase = s->phase;
		__atomic_add_fetch(&s->accesses[phase], 1, __ATOMIC_ACQ_REL);
		vh_unlock(s, &old);
		err = at_home(addr, b, &n, write);
		__atomic_sub_fetch(&s->accesses[phase], 1, __ATOMIC_ACQ_REL);
		if (err == 0) {
			vh_lock(s, &old);
			r = vh_find(s, first); // it is counted after the access, which would bring the page home again
			if (r != NULL && r->start + (r->pages << s->page_shift) >= addr + n)
				tell = count(s, r, self, addr, n, write);
			vh_unlock(s, &old);
			break;
		}
		if (err != EFAULT)
			return err;
		if ((err = why_not(s, first, write)) != 0)
			return err;
		if (tries > 2)
			usleep(20);
	}
	if (tell)
		vh_kick(s);
	if (!write && b != buf)
		memcpy(buf, b, n);
	*done = n;
	return 0;
}

int vh_access(struct vh_space *s, int self, uint64_t reach, uint64_t addr, void *buf, uint64_t bytes, int flags)
{
	uint64_t done = 0;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (addr + bytes < addr)
		return EFAULT;
	for (char *at = buf; bytes > 0; addr += done, at += done, bytes -= done)
		if ((err = part(s, self, reach, addr, at, bytes, flags, &done)) != 0)
			return err;
	return 0;
}

int vh_read(struct vh_space *s, int self, uint64_t reach, uint64_t addr, void *buf, uint64_t bytes)
{
	return vh_access(s, self, reach, addr, buf, bytes, 0);
}

int vh_write(struct vh_space *s, int self, uint64_t reach, uint64_t addr, const void *buf, uint64_t bytes)
{
	return vh_access(s, self, reach, addr, (void *)(uintptr_t)buf, bytes, VH_WRITE);
}

// vh_atomic changes 8 bytes. A page that is home, or in memory that is not reached, is given to devices alone first.
int vh_atomic(struct vh_space *s, uint64_t reach, uint64_t addr, int op, uint64_t a, uint64_t b, uint64_t *old_value)
{
	uint64_t first = addr & ~(s->page_size - 1), there, value = a;
	uint32_t start = vh_clock();
	struct vh_mapping m = {0};
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (addr & 7 || op < 0 || op > VH_ATOMIC_SWAP)
		return EINVAL;
	for (;;) {
		struct vh_range *r;
		struct vh_page *p;

		vh_lock(s, &old);
		r = vh_find(s, first);
		p = r == NULL || r->leaving ? NULL : &r->page[(first - r->start) >> s->page_shift];
		if (p != NULL && p->state != VH_S_HOME && reaches(p, reach)) {
			uint64_t *at = (uint64_t *)(uintptr_t)(p->where + (addr - first));

			m.end = 0;
			err = vh_allowed(s, first, 1, &m);
			if (err == 0 && p->dev != VH_HOST && s->device[p->dev].fail_after == 0)
				err = EIO;
			if (err != 0) {
				vh_unlock(s, &old);
				return err;
			}
			switch (op) { // the CPU may reach a coherent page at the same time
			case VH_ATOMIC_ADD:
				value = __atomic_fetch_add(at, a, __ATOMIC_SEQ_CST);
				break;
			case VH_ATOMIC_SWAP:
				value = __atomic_exchange_n(at, a, __ATOMIC_SEQ_CST);
				break;
			case VH_ATOMIC_CAS:
				__atomic_compare_exchange_n(at, &value, b, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
				break;
			}
			s->stats.device_atomics++;
			vh_unlock(s, &old);
			*old_value = value;
			return 0;
		}
		vh_unlock(s, &old);
		if (p == NULL)
			return EFAULT;
		if ((err = why_not(s, first, 1)) != 0)
			return err;
		if ((err = vh_exclusive(s, first, s->page_size, &there)) != 0 && err != EBUSY)
			return err;
		if (vh_clock() - start > VH_PATIENCE_MS) // the CPU touches it all the time
			return EBUSY;
	}
}

// look fills in what pages are. The lock is held.
static void look(struct vh_space *s, uint64_t reach, uint64_t addr, uint64_t pages, uint32_t *entries)
{
	struct vh_mapping m = {0};

	for (uint64_t k = 0; k < pages; k++) {
		uint64_t at = addr + (k << s->page_shift), bits = 0;
		struct vh_range *r = vh_find(s, at);
		struct vh_page *p = r == NULL ? NULL : &r->page[(at - r->start) >> s->page_shift];
		struct vh_page_region region[1];
		struct vh_pm_scan scan = {.size = sizeof scan, .start = at, .end = at + s->page_size, .vec = (uintptr_t)region, .vec_len = 1,
			.category_anyof_mask = VH_PM_PRESENT, .return_mask = VH_PM_PRESENT | VH_PM_ZERO | VH_PM_HUGE};

		entries[k] = 0;
		if (p == NULL || vh_allowed(s, at, 0, &m) != 0) {
			entries[k] = VH_E_ERROR;
			continue;
		}
		if (p->state != VH_S_HOME) {
			if (p->dev == VH_HOST)
				entries[k] = VH_E_EXCLUSIVE;
			else
				entries[k] = (uint32_t)(p->dev + 1) << 8 | (p->state == VH_S_COHERENT ? VH_E_COHERENT : VH_E_PRIVATE);
			if (reaches(p, reach))
				entries[k] |= VH_E_VALID | (m.write ? VH_E_WRITE : 0);
			continue;
		}
		if (s->pagemap < 0 || pread(s->pagemap, &bits, 8, (off_t)(at >> s->page_shift << 3)) != 8 || bits >> 63 == 0)
			continue;
		entries[k] = VH_E_VALID;
		if (ioctl(s->pagemap, VH_PAGEMAP_SCAN, &scan) == 1) {
			if (region[0].categories & VH_PM_ZERO)
				entries[k] |= VH_E_ZERO;
			if (region[0].categories & VH_PM_HUGE)
				entries[k] |= VH_E_HUGE;
		}
		if (m.write && bits >> 56 & 1 && !(entries[k] & VH_E_ZERO))
			entries[k] |= VH_E_WRITE;
	}
}

int vh_snapshot(struct vh_space *s, uint64_t reach, uint64_t addr, uint64_t pages, uint32_t *entries, const uint64_t *word, uint64_t *seq)
{
	uint32_t some[64];
	uint64_t now = 0;
	sigset_t old;
	int err = vh_usable(s);

	if (err != 0)
		return err;
	if (pages == 0 || addr & (s->page_size - 1) || pages > UINT64_MAX >> s->page_shift || addr + (pages << s->page_shift) < addr)
		return EINVAL;
	vh_lock(s, &old);
	if (word != NULL)
		now = __atomic_load_n(word, __ATOMIC_SEQ_CST);
	vh_unlock(s, &old);
	if (word != NULL)
		*seq = now;
	for (uint64_t k = 0; k < pages; k += 64) {
		uint64_t n = pages - k < 64 ? pages - k : 64;

		vh_lock(s, &old);
		look(s, reach, addr + (k << s->page_shift), n, some);
		vh_unlock(s, &old);
		memcpy(entries + k, some, n * sizeof *some);
	}
	return 0;
}

// resolve makes one page valid for a device.
static int resolve(struct vh_space *s, uint64_t reach, uint64_t addr, int write)
{
	struct vh_range *r;
	struct vh_page *p;
	sigset_t old;
	int err = 0, home = 0;

	vh_lock(s, &old);
	r = vh_find(s, addr);
	p = r == NULL ? NULL : &r->page[(addr - r->start) >> s->page_shift];
	if (p == NULL)
		err = EFAULT;
	else if (p->state == VH_S_HOME) {
		home = 1;
		if (!vh_present(s, addr) && vh_zero(s, addr, write) == 0) {
			s->stats.first_touches++;
			p->removed = 0;
		}
	} else if (!reaches(p, reach)) {
		home = 2;
	}
	vh_unlock(s, &old);
	if (err != 0 || (err = why_not(s, addr, write)) != 0)
		return err;
	if (home == 2)
		return bring_home(s, addr);
	// A page that left since is away, and need not be present.
	if (home == 1 && madvise((void *)(uintptr_t)addr, s->page_size, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0 && errno != EFAULT && errno != EAGAIN)
		return errno == EINVAL ? EPERM : errno == ENOMEM ? EFAULT : errno;
	return 0;
}

int vh_fault(struct vh_space *s, uint64_t reach, uint64_t addr, uint64_t pages, int write, uint32_t *entries, const uint64_t *word, uint64_t *seq)
{
	const uint32_t want = VH_E_VALID | (write ? VH_E_WRITE : 0);

	uint32_t start = vh_clock();

	for (int round = 0;; round++) {
		int err = vh_snapshot(s, reach, addr, pages, entries, word, seq);
		uint64_t missing = 0;

		if (err != 0)
			return err;
		for (uint64_t k = 0; k < pages; k++) {
			// Of some huge pages the kernel does not say that they are this process's own. A write fault has made them so.
			if (round > 0 && write && (entries[k] & ~VH_E_HUGE) == VH_E_VALID)
				entries[k] |= VH_E_WRITE;
			if ((entries[k] & want) != want) {
				missing++;
				if ((err = resolve(s, reach, addr + (k << s->page_shift), write)) != 0)
					return err;
			}
		}
		if (missing == 0)
			return 0;
		if (vh_clock() - start > VH_PATIENCE_MS)
			return EBUSY;
	}
}
