/*
 * A libibverbs.so.1 that prints what the preloaded library tells it, for cudafree.c.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>

void verbena_cuda_gone(int what, uint64_t addr, uint64_t size)
{
	dprintf(1, "told %d %lx %lx\n", what, addr, size);
	errno = EIO;
}

void verbena_cuda_exported(int fd, uint64_t addr, uint64_t size)
{
	dprintf(1, "exported %d %lx %lx\n", fd, addr, size);
	errno = EIO;
}
