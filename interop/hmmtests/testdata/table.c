// A device's page table, as the driver keeps one for each open file: an entry says that the device may read a page, or
// write it. It is good as long as the engine's count of changes of its chunk has not moved. Then a snapshot decides
// which of the chunk's entries stay. Protections are asked for at the beginning of each call, since nobody reports
// mprotect.

#include "dmirror.h"

#include <stdlib.h>

#define CHUNKS 128
#define SMALL 32 // pages of a chunk, and of what is faulted at a time; more, if a call has many pages

static struct chunk chunks[CHUNKS];
static uint64_t call, chunk_pages;

// dm_reach returns the devices whose memory a device reads in place: its own, and coherent memory.
uint64_t dm_reach(const struct dmirror *d) { return 1ull << d->device | 1ull << 2 | 1ull << 3; }

static void end(struct chunk *c)
{
	vh_mirror_end(dm_space, c->word);
	free(c->entry);
	c->of = NULL;
}

void dm_forget(struct dmirror *d)
{
	for (int i = 0; i < CHUNKS; i++)
		if (chunks[i].of == d)
			end(&chunks[i]);
}

void dm_forked(void) { memset(chunks, 0, sizeof chunks); }

// dm_begin starts a call of so many pages.
int dm_begin(struct dmirror *d, uint64_t pages)
{
	uint32_t *now;

	call++;
	for (chunk_pages = SMALL; pages / chunk_pages > CHUNKS * 3 / 4;)
		chunk_pages *= 2;
	for (int i = 0; i < CHUNKS; i++) {
		struct chunk *c = &chunks[i];

		if (c->of != d)
			continue;
		for (uint64_t k = 0; k < c->pages; k++)
			if (c->entry[k].bits & E_FOREIGN)
				c->entry[k].bits = 0;
		if ((now = malloc(c->pages * sizeof *now)) == NULL)
			return ENOMEM;
		dm_reconcile(c, 0, now);
		free(now);
	}
	return 0;
}

// dm_reconcile decides which entries stay, and returns the snapshot by which it does. A page at home may have been replaced by
// another one since, unless all changes were the caller's own.
int dm_reconcile(struct chunk *c, int own, uint32_t *now)
{
	uint64_t seq;
	struct map m = {0};
	int err = vh_snapshot(dm_space, dm_reach(c->of), c->start, c->pages, now, c->word, &seq);

	if (err != 0)
		return err;
	for (uint64_t k = 0; k < c->pages; k++) {
		struct entry *e = &c->entry[k];
		uint64_t addr = c->start + k * PAGE;

		if (e->bits == 0 || e->bits & E_FOREIGN)
			continue;
		if (addr >= m.end && dm_map(addr, &m) != 0)
			m = (struct map){.end = addr + PAGE};
		if (now[k] & VH_E_ERROR || dm_place(now[k]) != e->place || (e->place == 0 && seq != c->seq && !own))
			e->bits = 0;
		else if (!m.write)
			e->bits = e->bits & E_ATOMIC ? 0 : e->bits & ~E_WRITE;
	}
	c->seq = seq;
	return 0;
}

struct chunk *dm_find(struct dmirror *d, uint64_t addr)
{
	for (int i = 0; i < CHUNKS; i++)
		if (chunks[i].of == d && addr >= chunks[i].start && addr - chunks[i].start < chunks[i].pages * PAGE)
			return &chunks[i];
	return NULL;
}

// dm_chunk returns the chunk of an address, and makes it if there is none. The one that was used longest ago makes room.
struct chunk *dm_chunk(struct dmirror *d, uint64_t addr)
{
	struct chunk *c = dm_find(d, addr), *oldest = NULL, fresh = {.of = d, .pages = chunk_pages, .used = call};

	if (c != NULL && (c->pages >= chunk_pages || c->used == call)) {
		c->used = call;
		return c;
	}
	fresh.start = addr / (chunk_pages * PAGE) * (chunk_pages * PAGE);
	fresh.entry = calloc(fresh.pages, sizeof *fresh.entry);
	if (fresh.entry == NULL || vh_mirror(dm_space, fresh.start, fresh.pages * PAGE, &fresh.word) != 0) {
		free(fresh.entry);
		return NULL;
	}
	fresh.seq = vh_current(dm_space, fresh.word);
	for (int i = 0; i < CHUNKS; i++) {
		c = &chunks[i];
		if (c->of == d && c->start < fresh.start + fresh.pages * PAGE && fresh.start < c->start + c->pages * PAGE) {
			uint32_t *now = malloc(c->pages * sizeof *now); // its entries move into the larger one

			if (now != NULL && dm_reconcile(c, 0, now) == 0)
				for (uint64_t k = 0; k < c->pages; k++)
					*dm_entry(&fresh, c->start + k * PAGE) = c->entry[k];
			free(now);
			end(c);
		}
	}
	for (int i = 0; i < CHUNKS; i++)
		if (chunks[i].of == NULL || (chunks[i].used != call && (oldest == NULL || (oldest->of != NULL && chunks[i].used < oldest->used))))
			oldest = &chunks[i];
	if (oldest == NULL) {
		free(fresh.entry);
		vh_mirror_end(dm_space, fresh.word);
		return NULL;
	}
	if (oldest->of != NULL)
		end(oldest);
	*oldest = fresh;
	return oldest;
}

// current sees to it that a chunk's entries are good.
static int current(struct chunk *c)
{
	uint32_t *now;
	int err;

	if (vh_current(dm_space, c->word) == c->seq)
		return 0;
	if ((now = malloc(c->pages * sizeof *now)) == NULL)
		return ENOMEM;
	err = dm_reconcile(c, 0, now);
	free(now);
	return err;
}

// dm_copy copies pages that the table has, and counts them. ENOENT: it has not the next one, or not for writing.
int dm_copy(struct dmirror *d, uint64_t start, uint64_t end, char *buf, int write, uint64_t *pages)
{
	int need = E_VALID | (write ? E_WRITE : 0);

	for (; start < end; start += PAGE, buf += PAGE, ++*pages) {
		struct chunk *c = dm_find(d, start);
		struct entry *e = c == NULL ? NULL : dm_entry(c, start);
		int err;

		if (c == NULL)
			return ENOENT;
		if ((err = current(c)) != 0)
			return err;
		if ((e->bits & need) != need)
			return ENOENT;
		if (e->bits & E_FOREIGN)
			err = dm_self(start, buf, PAGE, write);
		else
			err = write ? vh_write(dm_space, d->device, dm_reach(d), start, buf, PAGE) : vh_read(dm_space, d->device, dm_reach(d), start, buf, PAGE);
		if (err == EIO || err == ENODEV)
			return err;
		if (err != 0) { // it has changed since
			e->bits = 0;
			return ENOENT;
		}
	}
	return 0;
}

// own_fault makes pages of the space valid. Pages that are devices' alone come home first, as a fault ends that in the kernel.
static int own_fault(struct chunk *c, uint64_t addr, uint64_t pages, int write, uint32_t *e)
{
	uint64_t seq, there;
	int err = vh_snapshot(dm_space, dm_reach(c->of), addr, pages, e, NULL, NULL);

	for (uint64_t k = 0; k < pages && err == 0; k++) {
		if (!(e[k] & VH_E_EXCLUSIVE))
			continue;
		if (write && !(e[k] & VH_E_WRITE))
			return EPERM;
		err = vh_migrate(dm_space, addr + k * PAGE, PAGE, VH_HOME, 0, &there);
	}
	return err != 0 ? err : vh_fault(dm_space, dm_reach(c->of), addr, pages, write, e, c->word, &seq);
}

static int fault_chunk(struct chunk *c, uint64_t start, uint64_t end, int write, uint32_t *e)
{
	for (uint64_t since = dm_now(); dm_now() - since < 1000;) { // the kernel's HMM_RANGE_DEFAULT_TIMEOUT
		int err = current(c);
		uint64_t seq = c->seq, run;

		dm_adopt(start, end);
		for (uint64_t at = start; at < end && err == 0; at = run) {
			int owned = dm_owned(at);

			for (run = at + PAGE; run < end && dm_owned(run) == owned; run += PAGE)
				continue;
			if (owned) {
				err = own_fault(c, at, (run - at) / PAGE, write, e + (at - start) / PAGE);
				continue;
			}
			err = dm_foreign_fault(at, run, write);
			for (uint64_t k = at; k < run; k += PAGE)
				e[(k - start) / PAGE] = VH_E_ERROR;
		}
		if (err == EBUSY)
			continue;
		if (err != 0)
			return err;
		if (vh_current(dm_space, c->word) != seq)
			continue; // some of them have changed since
		for (uint64_t at = start; at < end; at += PAGE) {
			uint32_t now = e[(at - start) / PAGE];
			struct entry *entry = dm_entry(c, at);

			if (now & VH_E_ERROR)
				*entry = (struct entry){.bits = E_VALID | E_FOREIGN | (write ? E_WRITE : 0)};
			else
				*entry = (struct entry){.place = dm_place(now), .bits = (uint8_t)((entry->bits & E_LARGE) | E_VALID | (now & VH_E_WRITE ? E_WRITE : 0))};
		}
		return 0;
	}
	return EBUSY;
}

// dm_fault makes entries of pages. It is the loop of hmm_range_fault: fault, and again if they have changed since.
int dm_fault(struct dmirror *d, uint64_t start, uint64_t end, int write)
{
	while (start < end) {
		struct chunk *c = dm_chunk(d, start);
		uint64_t next;
		uint32_t *e;
		int err;

		if (c == NULL || (e = malloc(c->pages * sizeof *e)) == NULL)
			return ENOMEM;
		next = c->start + c->pages * PAGE < end ? c->start + c->pages * PAGE : end;
		err = fault_chunk(c, start, next, write, e);
		free(e);
		if (err != 0)
			return err;
		start = next;
	}
	return 0;
}
