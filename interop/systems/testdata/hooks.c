/*
 * UCX's memory hooks see what a program unmaps, also what free() does: they change the C library's functions, which they
 * find by dlsym. argv[1] is "dlsym", or "ucx".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <malloc.h>
#include <string.h>
#include <sys/mman.h>
#include <ucm/api/ucm.h>
#include "check.h"

enum { SIZE = 1 << 20 };
static char *watched;
static volatile int seen; /* the compiler takes it that free() does not change it */

static void unmapped(ucm_event_type_t type, ucm_event_t *e, void *arg)
{
	char *start = e->vm_unmapped.address;
	if (start <= watched && watched + SIZE / 2 <= start + e->vm_unmapped.size)
		seen++;
}

/* gone calls how a memory is given up, and reports how many of its events came. */
#define GONE(call) (seen = 0, (call), seen)

int main(int argc, char **argv)
{
	static const char *const names[] = {"mmap", "mmap64", "munmap", "mremap", "madvise", "brk", "sbrk", "shmat", "shmdt", "remap_file_pages"};
	WANT(argc == 2);
	if (!strcmp(argv[1], "dlsym")) {
		void *c = dlopen("libc.so.6", RTLD_NOW | RTLD_NOLOAD);
		WANT(c);
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (dlsym(RTLD_DEFAULT, names[i]) != dlsym(c, names[i])) {
				fprintf(stderr, "dlsym(RTLD_DEFAULT, \"%s\") is not the C library's function\n", names[i]);
				return 1;
			}
		/* Those that programs call are others, which close a range before it is unmapped. */
		WANT((void *)munmap != dlsym(c, "munmap") && dlsym(RTLD_NEXT, "munmap") != dlsym(c, "munmap"));
		puts("ok");
		return 0;
	}
	mallopt(M_MMAP_THRESHOLD, SIZE / 2);
	WANT(ucm_set_event_handler(UCM_EVENT_VM_UNMAPPED, 0, unmapped, NULL) == UCS_OK);

	/* With a region: the backend is loaded, and watches memory, too. */
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	WANT(list && n > 0);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	WANT(ctx);
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	watched = malloc(SIZE);
	struct ibv_mr *mr = ibv_reg_mr(pd, watched, SIZE, IBV_ACCESS_LOCAL_WRITE);
	WANT(mr);
	WANT(GONE(free(watched)) == 1);
	WANT(!ibv_dereg_mr(mr));

	watched = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(watched != MAP_FAILED && (mr = ibv_reg_mr(pd, watched, SIZE, IBV_ACCESS_LOCAL_WRITE)));
	WANT(GONE(mmap(watched, SIZE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0)) == 1);
	WANT(GONE(madvise(watched, SIZE, MADV_DONTNEED)) == 1);
	WANT(GONE(munmap(watched, SIZE)) == 1);
	WANT(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	ibv_free_device_list(list);
	puts("ok");
	return 0;
}
