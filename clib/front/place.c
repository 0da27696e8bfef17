/*
 * Where the backend's heap lies. The Go runtime puts its heap at a low address, below a position-independent program.
 * OpenSHMEM of Open MPI takes all writable memory below the program's end that belongs to no other file for the
 * program's own variables, and registers it at its start. It ends if that fails, and the heap cannot be registered.
 *
 * So in a program of OpenSHMEM the free address space below the program is filled while the backend is loaded. The
 * runtime then finds its usual places taken, and its heap lies above the program, as the rest of the backend does.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "front.h"

/* The kernel lets no program map the lowest 64 KiB (vm.mmap_min_addr). Gaps that are smaller than an arena of the
 * runtime's heap need not be filled. */
enum { LOWEST = 1 << 16, ARENA = 64 << 20 };

/* program_start returns the lowest address of the program; the C library names the program first. */
static int program_start(struct dl_phdr_info *info, size_t size, void *result)
{
	(void)size;
	uintptr_t lowest = UINTPTR_MAX;
	for (int i = 0; i < info->dlpi_phnum; i++)
		if (info->dlpi_phdr[i].p_type == PT_LOAD && info->dlpi_addr + info->dlpi_phdr[i].p_vaddr < lowest)
			lowest = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr;
	*(uintptr_t *)result = lowest;
	return 1;
}

static void fill(struct vb_filled *f, uintptr_t start, uintptr_t end)
{
	if (end <= start || end - start < ARENA || f->n == sizeof f->gaps / sizeof *f->gaps)
		return;
	void *at = mmap((void *)start, end - start, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
	if (at == MAP_FAILED) {
		vb_say("the address space below the program cannot be filled: OpenSHMEM may find the backend's heap there");
		return;
	}
	f->gaps[f->n++] = (struct vb_gap){at, end - start};
}

void vb_fill_below_program(struct vb_filled *f)
{
	f->n = 0;
	if (!dlsym(RTLD_DEFAULT, "shmem_init"))
		return;
	uintptr_t limit = 0, from = LOWEST;
	unsigned long start, end;
	char *line = NULL;
	size_t size = 0;
	FILE *maps = fopen("/proc/self/maps", "re");
	if (!maps)
		return;
	dl_iterate_phdr(program_start, &limit);
	while (from < limit && getline(&line, &size, maps) > 0)
		if (sscanf(line, "%lx-%lx", &start, &end) == 2) {
			fill(f, from, start < limit ? start : limit);
			from = end;
		}
	free(line);
	fclose(maps);
}

void vb_empty_below_program(struct vb_filled *f)
{
	while (f->n > 0) {
		f->n--;
		munmap(f->gaps[f->n].start, f->gaps[f->n].size);
	}
}
