// The driver: what lib/test_hmm.c does with a command, on the engine of package hmm. Who moves pages, and knows where they are, is
// the engine.
//
// What differs: devices are a process's own, so that no command reaches pages of another process. They have no large
// pages. While read-only memory moves, another thread could write to it.

#include "dmirror.h"

#include <stdio.h>
#include <stdlib.h>
#include <lib/test_hmm_uapi.h>

#define VRAM (512ull << 20) // of each device

struct vh_space *dm_space;
int dm_coherent;

// add_device gives the space a device with memory.
static int add_device(void)
{
	int dev, err, fd = memfd_create("hmm_dmirror memory", MFD_CLOEXEC);
	void *p;

	if (fd < 0 || ftruncate(fd, VRAM) != 0)
		return errno;
	p = mmap(NULL, VRAM, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
	if (p == MAP_FAILED || madvise(p, VRAM, MADV_DONTFORK) != 0)
		return errno;
	if ((err = vh_device_add(dm_space, &dev)) != 0)
		return err;
	return vh_vram_add(dm_space, dev, (uintptr_t)p, VRAM / PAGE, fd, 0);
}

// dm_open makes the process's space, if it has none.
int dm_open(void)
{
	struct vh_features have;
	char why[256] = "no memory for the devices";
	int err = 0;

	if (dm_space != NULL)
		return 0;
	if ((err = dm_memory()) != 0)
		snprintf(why, sizeof why, "/proc/self/maps and pagemap: %s (PROCMAP_QUERY takes Linux 6.11)", strerror(err));
	else if ((err = vh_open(&dm_space, &have, why, sizeof why)) == 0)
		for (int i = 0; i < DEVICES && err == 0; i++)
			err = add_device();
	if (err != 0) {
		fprintf(stderr, "hmm_dmirror: %s\n", why);
		if (dm_space != NULL)
			vh_close(dm_space);
		dm_space = NULL;
	}
	return err;
}

// bounce returns memory for a call's bytes: the program's stay as they are if the call fails.
static char *bounce(uint64_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

static int read_or_write(struct dmirror *d, struct hmm_dmirror_cmd *cmd, int write)
{
	uint64_t bytes = cmd->npages * PAGE, done = 0, since = dm_now();
	char *buf = bounce(bytes);
	int err = 0;

	if (buf == NULL)
		return ENOMEM;
	if (write)
		err = dm_self(cmd->ptr, buf, bytes, 0);
	while (err == 0) {
		err = dm_copy(d, cmd->addr + done * PAGE, cmd->addr + bytes, buf + done * PAGE, write, &done);
		if (err != ENOENT)
			break;
		err = dm_now() - since > 10000 ? EBUSY : dm_fault(d, cmd->addr + done * PAGE, cmd->addr + bytes, write);
		if (err == 0)
			cmd->faults++;
	}
	if (err == 0 && !write)
		err = dm_self(cmd->ptr, buf, bytes, 1);
	cmd->cpages = done;
	munmap(buf, bytes);
	return err;
}

static int do_read(struct dmirror *d, struct hmm_dmirror_cmd *cmd) { return read_or_write(d, cmd, 0); }
static int do_write(struct dmirror *d, struct hmm_dmirror_cmd *cmd) { return read_or_write(d, cmd, 1); }

// verify returns the bytes of pages that the device's table has: ENOENT, if it has not all of them.
static int verify(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	uint64_t bytes = cmd->npages * PAGE, done = 0;
	char *buf = bounce(bytes);
	int err;

	if (buf == NULL)
		return ENOMEM;
	err = dm_copy(d, cmd->addr, cmd->addr + bytes, buf, 0, &done);
	if (err == 0)
		err = dm_self(cmd->ptr, buf, bytes, 1);
	cmd->cpages = done;
	munmap(buf, bytes);
	return err;
}

// settle renews the entries of pages that the caller's call has changed, pages of e: those that pick chooses get one.
static int settle(struct dmirror *d, uint64_t start, uint64_t end, const uint32_t *before, const uint8_t *bits)
{
	while (start < end) {
		struct chunk *c = dm_chunk(d, start);
		uint32_t *now;
		int err;

		if (c == NULL || (now = malloc(c->pages * sizeof *now)) == NULL)
			return ENOMEM;
		err = dm_reconcile(c, 1, now);
		for (; err == 0 && start < end && start < c->start + c->pages * PAGE; start += PAGE, before++, bits++)
			if (*bits != 0 && dm_place(now[(start - c->start) / PAGE]) == *before)
				*dm_entry(c, start) = (struct entry){.place = *before, .bits = *bits};
		free(now);
		if (err != 0)
			return err;
	}
	return 0;
}

// at_home reports whether a page is the process's own, or absent: pages of other devices, and exclusive ones, do not go.
static int at_home(uint32_t e) { return !(e & VH_E_ERROR) && dm_place(e) == 0; }

// large reports whether pages are a huge page, or a hole in the place of one: then the driver wants a large page.
static int large(uint64_t addr, const uint32_t *e, uint64_t left)
{
	if (addr % (BLOCK * PAGE) != 0 || left < BLOCK)
		return 0;
	for (int k = 0; k < BLOCK; k++)
		if (!at_home(e[k]) || (e[k] & (VH_E_VALID | VH_E_HUGE)) != (e[0] & (VH_E_VALID | VH_E_HUGE)) || (e[k] & (VH_E_VALID | VH_E_HUGE)) == VH_E_VALID)
			return 0;
	return 1;
}

static uint32_t place_on(const struct dmirror *d)
{
	return (uint32_t)(d->device + 1) << 8 | (COHERENT(d->device) ? VH_E_COHERENT : VH_E_PRIVATE);
}

// leave moves pages to the device. If an allocation is to fail, a large page goes as small ones, and a
// small one stays, as in the driver.
static int leave(struct dmirror *d, uint64_t start, uint64_t end)
{
	uint64_t n = (end - start) / PAGE, there;
	uint32_t *e = malloc(n * sizeof *e);
	uint8_t *bits = calloc(n, 1);
	uint32_t place = place_on(d);
	int err = e == NULL || bits == NULL ? ENOMEM : vh_snapshot(dm_space, dm_reach(d), start, n, e, NULL, NULL);

	for (uint64_t k = 0, run; k < n && err == 0; k = run) {
		int fail = (d->flags & HMM_DMIRROR_FLAG_FAIL_ALLOC) != 0, big = large(start + k * PAGE, e + k, n - k);

		run = k + (big ? BLOCK : 1);
		if (!at_home(e[k]))
			continue;
		d->flags &= ~HMM_DMIRROR_FLAG_FAIL_ALLOC;
		if (fail && !big)
			continue;
		for (uint64_t i = k; i < run; i++)
			bits[i] = (uint8_t)(E_VALID | (e[i] & VH_E_WRITE ? E_WRITE : 0) | (big && !fail ? E_LARGE : 0));
	}
	if (COHERENT(d->device))
		dm_coherent = 1;
	for (uint64_t k = 0, run; k < n && err == 0; k = run) {
		for (run = k + 1; run < n && (bits[run] != 0) == (bits[k] != 0); run++)
			continue;
		if (bits[k] != 0) // the engine's error is of some pages; the table will not have these
			vh_migrate(dm_space, start + k * PAGE, (run - k) * PAGE, d->device, COHERENT(d->device) ? VH_COHERENT : 0, &there);
	}
	for (uint64_t k = 0; k < n && err == 0; k++)
		e[k] = place;
	if (err == 0)
		err = settle(d, start, end, e, bits);
	free(e);
	free(bits);
	return err;
}

// each_piece calls act for what the space has of the memory that a command names. EINVAL: there is a hole, or memory that
// may not be read, or hugetlb memory; what lies before it is done.
static int each_piece(struct dmirror *d, struct hmm_dmirror_cmd *cmd, int (*act)(struct dmirror *, struct hmm_dmirror_cmd *, uint64_t, uint64_t))
{
	uint64_t end = cmd->addr, stop = cmd->addr + cmd->npages * PAGE, run;
	struct map m;
	int err;

	while (end < stop && dm_map(end, &m) == 0 && m.read && m.page_size == PAGE)
		end = m.end;
	err = end < stop ? EINVAL : 0;
	if (end > stop)
		end = stop;
	dm_adopt(cmd->addr, end);
	for (uint64_t addr = cmd->addr; addr < end; addr = run) {
		int owned = dm_owned(addr), now = 0;

		for (run = addr + PAGE; run < end && dm_owned(run) == owned; run += PAGE)
			continue;
		if (owned)
			now = act(d, cmd, addr, run);
		if (now != 0)
			return now;
	}
	return err;
}

static int leave_piece(struct dmirror *d, struct hmm_dmirror_cmd *cmd, uint64_t start, uint64_t end)
{
	(void)cmd;
	return leave(d, start, end);
}

// Memory that is read-only is made writable for the time of a move, since the engine does not take it otherwise.
struct lifted {
	uint64_t start, end;
	int prot;
};

static size_t lift(struct hmm_dmirror_cmd *cmd, struct lifted **list)
{
	uint64_t stop = cmd->addr + cmd->npages * PAGE;
	size_t n = 0;
	struct map m;

	for (uint64_t addr = cmd->addr; addr < stop && dm_map(addr, &m) == 0; addr = m.end) {
		struct lifted *more, one = {addr, m.end < stop ? m.end : stop, PROT_READ | (m.exec ? PROT_EXEC : 0)};

		if (!m.read || m.write || m.shared || m.inode != 0 || m.page_size != PAGE)
			continue;
		if ((more = realloc(*list, (n + 1) * sizeof *more)) == NULL)
			break;
		*list = more;
		if (mprotect((void *)(uintptr_t)one.start, one.end - one.start, one.prot | PROT_WRITE) == 0)
			more[n++] = one;
	}
	return n;
}

static int to_device(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	struct lifted *list = NULL;
	size_t n = lift(cmd, &list);
	int err = each_piece(d, cmd, leave_piece);

	for (size_t i = 0; i < n; i++)
		mprotect((void *)(uintptr_t)list[i].start, list[i].end - list[i].start, list[i].prot);
	free(list);
	return err != 0 ? err : verify(d, cmd);
}

// whole reports whether a page belongs to a huge page that went to the device and is there in one piece.
static int whole(struct dmirror *d, uint64_t addr, const uint32_t *e, uint64_t left, uint32_t place)
{
	if (addr % (BLOCK * PAGE) != 0 || left < BLOCK)
		return 0;
	for (int k = 0; k < BLOCK; k++) {
		struct chunk *c = dm_find(d, addr + (uint64_t)k * PAGE);

		if (c == NULL || !(dm_entry(c, addr + (uint64_t)k * PAGE)->bits & E_LARGE) || dm_place(e[k]) != place)
			return 0;
	}
	return 1;
}

// come_home brings home the pages that the device has of a piece. If an allocation is to fail, a page that went in one
// piece with its huge page comes as a small one, and for another one there is no memory, as in the driver.
static int come_home(struct dmirror *d, struct hmm_dmirror_cmd *cmd, uint64_t start, uint64_t end)
{
	uint64_t n = (end - start) / PAGE, there;
	uint32_t place = place_on(d);
	uint32_t *e = malloc(n * sizeof *e);
	int err = e == NULL ? ENOMEM : vh_snapshot(dm_space, dm_reach(d), start, n, e, NULL, NULL);

	for (uint64_t k = 0, run; k < n && err == 0; k = run) {
		run = k + 1;
		if (dm_place(e[k]) != place)
			continue;
		if (d->flags & HMM_DMIRROR_FLAG_FAIL_ALLOC) {
			d->flags &= ~HMM_DMIRROR_FLAG_FAIL_ALLOC;
			if (!whole(d, start + k * PAGE, e + k, n - k, place)) {
				err = ENOMEM;
				break;
			}
		}
		while (run < n && dm_place(e[run]) == place)
			run++;
		vh_migrate(dm_space, start + k * PAGE, (run - k) * PAGE, VH_HOME, 0, &there);
		cmd->cpages += there;
	}
	free(e);
	return err;
}

static int to_system(struct dmirror *d, struct hmm_dmirror_cmd *cmd) { return each_piece(d, cmd, come_home); }

static uint8_t perm_of(struct dmirror *d, uint32_t e)
{
	int mine = VH_E_DEVICE(e) == d->device;
	uint8_t perm = 0;

	if (e & VH_E_ERROR)
		return HMM_DMIRROR_PROT_ERROR;
	if (!(e & VH_E_VALID) || e & VH_E_EXCLUSIVE)
		return HMM_DMIRROR_PROT_NONE; // a fault would bring it home
	if (e & VH_E_PRIVATE)
		perm = mine ? HMM_DMIRROR_PROT_DEV_PRIVATE_LOCAL : HMM_DMIRROR_PROT_DEV_PRIVATE_REMOTE;
	else if (e & VH_E_COHERENT)
		perm = mine ? HMM_DMIRROR_PROT_DEV_COHERENT_LOCAL : HMM_DMIRROR_PROT_DEV_COHERENT_REMOTE;
	else if (e & VH_E_ZERO)
		perm = HMM_DMIRROR_PROT_ZERO;
	perm |= e & VH_E_WRITE ? HMM_DMIRROR_PROT_WRITE : HMM_DMIRROR_PROT_READ;
	return perm | (e & VH_E_HUGE ? HMM_DMIRROR_PROT_PMD : 0);
}

static int snapshot(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	uint64_t addr = cmd->addr, end = addr + cmd->npages * PAGE, next;

	for (; addr < end; addr = next) {
		struct chunk *c = dm_chunk(d, addr);
		uint64_t n, seq, since = dm_now();
		uint32_t e[BLOCK];
		uint8_t perm[BLOCK];
		int err;

		if (c == NULL)
			return ENOMEM;
		next = c->start + c->pages * PAGE < end ? c->start + c->pages * PAGE : end;
		if (next - addr > BLOCK * PAGE)
			next = addr + BLOCK * PAGE;
		n = (next - addr) / PAGE;
		dm_adopt(addr, next);
		do {
			if (dm_now() - since > 1000)
				return EBUSY;
			if ((err = vh_snapshot(dm_space, dm_reach(d), addr, n, e, c->word, &seq)) != 0)
				return err;
			for (uint64_t k = 0; k < n; k++)
				perm[k] = dm_owned(addr + k * PAGE) ? perm_of(d, e[k]) : dm_foreign_snapshot(addr + k * PAGE);
		} while (vh_current(dm_space, c->word) != seq);
		if ((err = dm_self(cmd->ptr + cmd->cpages, perm, n, 1)) != 0)
			return err;
		cmd->cpages += n;
	}
	return 0;
}

static int exclusive(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	uint64_t n = cmd->npages, end = cmd->addr + n * PAGE, there;
	uint32_t *e;
	uint8_t *bits;
	struct map m;
	int err;

	dm_adopt(cmd->addr, end);
	for (uint64_t addr = cmd->addr; addr < end; addr += PAGE) {
		if (dm_map(addr, &m) != 0 || !m.read || !m.write)
			return EFAULT;
		if (!dm_owned(addr))
			return EOPNOTSUPP;
	}
	if ((err = vh_exclusive(dm_space, cmd->addr, n * PAGE, &there)) != 0)
		return err;
	e = malloc(n * sizeof *e);
	bits = malloc(n);
	for (uint64_t k = 0; e != NULL && bits != NULL && k < n; k++) {
		e[k] = VH_E_EXCLUSIVE;
		bits[k] = E_VALID | E_ATOMIC;
	}
	err = e == NULL || bits == NULL ? ENOMEM : settle(d, cmd->addr, end, e, bits);
	free(e);
	free(bits);
	return err != 0 ? err : verify(d, cmd);
}

static int check_exclusive(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	for (uint64_t k = 0; k < cmd->npages; k++) {
		struct chunk *c = dm_find(d, cmd->addr + k * PAGE);

		if (c != NULL && dm_entry(c, cmd->addr + k * PAGE)->bits & E_ATOMIC)
			return EPERM;
	}
	return 0;
}

static int release(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	(void)cmd;
	return dm_evict(d->device);
}

static int set_flags(struct dmirror *d, struct hmm_dmirror_cmd *cmd)
{
	d->flags = cmd->npages;
	return 0;
}

static const struct {
	unsigned long request;
	int (*act)(struct dmirror *, struct hmm_dmirror_cmd *);
} calls[] = {
	{HMM_DMIRROR_READ, do_read},
	{HMM_DMIRROR_WRITE, do_write},
	{HMM_DMIRROR_MIGRATE_TO_DEV, to_device},
	{HMM_DMIRROR_MIGRATE_TO_SYS, to_system},
	{HMM_DMIRROR_SNAPSHOT, snapshot},
	{HMM_DMIRROR_EXCLUSIVE, exclusive},
	{HMM_DMIRROR_CHECK_EXCLUSIVE, check_exclusive},
	{HMM_DMIRROR_RELEASE, release},
	{HMM_DMIRROR_FLAGS, set_flags},
};

int dm_command(struct dmirror *d, unsigned long request, uint64_t arg)
{
	struct hmm_dmirror_cmd cmd;
	int err;

	if (dm_self(arg, &cmd, sizeof cmd, 0) != 0)
		return EFAULT;
	if (cmd.addr % PAGE != 0 || cmd.addr >= cmd.addr + cmd.npages * PAGE)
		return EINVAL;
	cmd.cpages = cmd.faults = 0;
	for (size_t i = 0; i < sizeof calls / sizeof calls[0]; i++) {
		if (calls[i].request != request)
			continue;
		if (d->inherited)
			return EOPNOTSUPP; // it is the parent's memory
		if ((err = dm_begin(d, cmd.npages)) != 0 || (err = calls[i].act(d, &cmd)) != 0)
			return err;
		return dm_self(arg, &cmd, sizeof cmd, 1);
	}
	return EINVAL;
}
