/*
 * A backend for the front (VERBENA_BACKEND) that prints what it is told about memory of CUDA. It has one device, on which
 * memory can be registered. What it does not have is in cudabackend_rest.c.
 */
#include <stdio.h>
#include <string.h>

#include "../../../clib/front/backend.h"

int64_t vbe_version(struct vbe_front *front)
{
	(void)front;
	return VBE_VERSION;
}

int64_t vbe_list(struct vbe_device *d, int64_t room)
{
	if (room < 1)
		return 0;
	memset(d, 0, sizeof *d);
	strcpy(d->name, "stand-in");
	return 1;
}

int64_t vbe_open(char *name, uint64_t cookie)
{
	(void)name, (void)cookie;
	return VBE_HANDLE(VBE_CONTEXT, 1);
}

int64_t vbe_alloc_pd(uint64_t context)
{
	(void)context;
	return VBE_HANDLE(VBE_PD, 1);
}

int64_t vbe_reg_mr(uint64_t pd, struct vbe_mr *m)
{
	(void)pd;
	dprintf(1, "registered %lx %lx\n", m->exported, m->exported_size);
	m->handle = VBE_HANDLE(VBE_MR, 1);
	return 0;
}

int64_t vbe_rereg_mr(uint64_t mr, uint32_t flags, uint64_t pd, struct vbe_mr *m, int32_t *is)
{
	(void)mr, (void)flags, (void)pd, (void)is;
	dprintf(1, "changed %lx %lx\n", m->exported, m->exported_size);
	return 0;
}

int64_t vbe_cuda_gone(uint32_t what, uint64_t addr, uint64_t size)
{
	dprintf(1, "told %u %lx %lx\n", what, addr, size);
	return 0;
}
