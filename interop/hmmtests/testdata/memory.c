// The program's memory. The engine takes private anonymous memory. What it cannot take, files, shared and
// hugetlb memory, is populated by madvise, accessed by process_vm_readv and process_vm_writev, and looked at in
// /proc/self/pagemap: as the engine does with pages at home.

#include "dmirror.h"
#include "uffd.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <lib/test_hmm_uapi.h>

static int maps = -1, pagemap = -1;

uint64_t dm_now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

int dm_memory(void)
{
	struct map m;

	maps = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (maps < 0 || pagemap < 0)
		return errno;
	return dm_map((uintptr_t)&m, &m);
}

// dm_map returns the mapping of an address: 0, ENOENT if there is none, or what the kernel says.
int dm_map(uint64_t addr, struct map *m)
{
	struct vh_procmap_query q = {.size = sizeof q, .query_addr = addr};

	if (ioctl(maps, VH_PROCMAP_QUERY, &q) != 0)
		return errno;
	*m = (struct map){.start = q.vma_start, .end = q.vma_end, .inode = q.inode, .page_size = q.vma_page_size,
		.read = (q.vma_flags & 1) != 0, .write = (q.vma_flags & 2) != 0, .exec = (q.vma_flags & 4) != 0,
		.shared = (q.vma_flags & 8) != 0};
	return 0;
}

int dm_owned(uint64_t addr) { return vh_owns(dm_space, addr, PAGE) == 0; }

// dm_adopt gives the engine what it takes. A child whose memory still belongs to a userfaultfd that the parent's engine
// is about to close waits for that.
void dm_adopt(uint64_t start, uint64_t end)
{
	while (start < end) {
		struct map m;
		uint64_t stop, run;

		if (dm_map(start, &m) != 0) {
			start += PAGE;
			continue;
		}
		stop = m.end < end ? m.end : end;
		if (m.shared || m.inode != 0 || m.page_size != PAGE) {
			start = stop;
			continue;
		}
		for (; start < stop; start = run) {
			uint64_t since = dm_now();
			int owned = dm_owned(start);

			for (run = start + PAGE; run < stop && dm_owned(run) == owned; run += PAGE)
				continue;
			while (!owned && vh_adopt(dm_space, start, run - start) == EBUSY && dm_now() - since < 1000)
				usleep(100);
		}
	}
}

// dm_self copies from or to the program's memory: EFAULT, where a load or a store would be a signal.
int dm_self(uint64_t addr, void *buf, uint64_t bytes, int write)
{
	while (bytes > 0) {
		struct iovec local = {.iov_base = buf, .iov_len = bytes}, remote = {.iov_base = (void *)(uintptr_t)addr, .iov_len = bytes};
		ssize_t n = write ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0) : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);

		if (n <= 0)
			return EFAULT;
		buf = (char *)buf + n;
		addr += (uint64_t)n;
		bytes -= (uint64_t)n;
	}
	return 0;
}

// dm_foreign_fault makes pages present, or writable, that are not the space's.
int dm_foreign_fault(uint64_t start, uint64_t end, int write)
{
	while (start < end) {
		struct map m;
		uint64_t stop;

		if (dm_map(start, &m) != 0 || !m.read)
			return EFAULT;
		if (write && !m.write)
			return EPERM;
		stop = m.end < end ? m.end : end;
		if (madvise((void *)(uintptr_t)start, stop - start, write ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) != 0)
			return errno == ENOMEM ? ENOMEM : EFAULT;
		start = stop;
	}
	return 0;
}

// dm_foreign_snapshot returns what the device sees of a page that is not the space's. Whether the CPU's page table lets it be
// written is not told to programs. A private page is writable if it is this process's own, and shared memory if its
// mapping is; a file on a disk has to be asked first, as the kernel does to mark it dirty.
uint8_t dm_foreign_snapshot(uint64_t addr)
{
	struct vh_page_region region[1];
	struct vh_pm_scan scan = {.size = sizeof scan, .start = addr, .end = addr + PAGE, .vec = (uintptr_t)region, .vec_len = 1,
		.category_anyof_mask = VH_PM_PRESENT, .return_mask = VH_PM_PRESENT | VH_PM_ZERO | VH_PM_HUGE | 1 << 2};
	struct map m;
	uint64_t bits, seen;
	uint8_t e = 0;
	int file, writable;

	if (dm_map(addr, &m) != 0 || !m.read)
		return HMM_DMIRROR_PROT_ERROR;
	if (pread(pagemap, &bits, 8, (off_t)(addr / PAGE * 8)) != 8 || ioctl(pagemap, VH_PAGEMAP_SCAN, &scan) != 1)
		return HMM_DMIRROR_PROT_NONE;
	seen = region[0].categories;
	file = (seen & 1 << 2) != 0;
	if (seen & VH_PM_ZERO)
		e |= HMM_DMIRROR_PROT_ZERO;
	if (m.shared)
		writable = m.inode == 0 || m.page_size != PAGE;
	else
		writable = !file && bits >> 56 & 1;
	e |= m.write && writable && !(seen & VH_PM_ZERO) ? HMM_DMIRROR_PROT_WRITE : HMM_DMIRROR_PROT_READ;
	if (seen & VH_PM_HUGE)
		e |= m.page_size > BLOCK * PAGE ? HMM_DMIRROR_PROT_PUD : HMM_DMIRROR_PROT_PMD;
	return e;
}

// evict brings home the pages of a mapping that a device has.
static int evict(uint64_t start, uint64_t end, int device)
{
	uint32_t e[BLOCK];
	int err = 0;

	for (uint64_t at = start; at < end;) {
		uint64_t n = (end - at) / PAGE < BLOCK ? (end - at) / PAGE : BLOCK, there;

		if (vh_snapshot(dm_space, 0, at, n, e, NULL, NULL) != 0)
			return EIO;
		for (uint64_t k = 0, run; k < n; k = run) {
			run = k + 1;
			if (VH_E_DEVICE(e[k]) != device)
				continue;
			while (run < n && VH_E_DEVICE(e[run]) == device)
				run++;
			int now = vh_migrate(dm_space, at + k * PAGE, (run - k) * PAGE, VH_HOME, 0, &there);
			if (now != 0)
				err = now;
		}
		at += n * PAGE;
	}
	return err;
}

// dm_evict brings home all pages of this process that a device has.
int dm_evict(int device)
{
	size_t size = 1 << 20, have = 0;
	char *text, *line, *rest;
	int err = 0, fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
	ssize_t n;

	if (fd < 0)
		return errno;
	text = malloc(size);
	while (text != NULL && (n = read(fd, text + have, size - have - 1)) > 0) {
		have += (size_t)n;
		if (size - have < 8192) {
			char *more = realloc(text, size *= 2);

			if (more == NULL)
				free(text);
			text = more;
		}
	}
	close(fd);
	if (text == NULL)
		return ENOMEM;
	text[have] = 0;
	for (line = strtok_r(text, "\n", &rest); line != NULL; line = strtok_r(NULL, "\n", &rest)) {
		unsigned long start, end;

		if (sscanf(line, "%lx-%lx ", &start, &end) == 2 && vh_owns(dm_space, start, end - start) == 0) {
			int now = evict(start, end, device);
			if (now != 0)
				err = now;
		}
	}
	free(text);
	return err;
}

// dm_uncohere brings home coherent pages of a range, a part of which may not be the space's.
void dm_uncohere(uint64_t start, uint64_t end)
{
	for (uint64_t at = start; at < end;) {
		uint32_t e[BLOCK];
		uint64_t n = (end - at) / PAGE < BLOCK ? (end - at) / PAGE : BLOCK, there;

		if (vh_snapshot(dm_space, 0, at, n, e, NULL, NULL) != 0)
			return;
		for (uint64_t k = 0, run; k < n; k = run) {
			for (run = k + 1; run < n && (e[run] & VH_E_COHERENT) == (e[k] & VH_E_COHERENT); run++)
				continue;
			if (e[k] & VH_E_COHERENT)
				vh_migrate(dm_space, at + k * PAGE, (run - k) * PAGE, VH_HOME, 0, &there);
		}
		at += n * PAGE;
	}
}
