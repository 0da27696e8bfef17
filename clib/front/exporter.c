/*
 * An exporter of dma-bufs for programs that test what they do with them: verbena/verbs.h declares it.
 */
#include <stdlib.h>

#include "../include/verbena/verbs.h"
#include "front.h"

struct verbena_dmabuf {
	struct backend *backend;
	uint64_t handle;
};

/* usable reports whether a buffer belongs to this process, and not to its parent. */
static bool usable(const struct verbena_dmabuf *b) { return b && !atomic_load(&b->backend->dead); }

PUBLIC struct verbena_dmabuf *verbena_alloc_dmabuf(size_t size, uint32_t segments)
{
	struct backend *backend = vb_backend();
	struct verbena_dmabuf *b = backend ? calloc(1, sizeof *b) : NULL;
	if (!b)
		return backend ? vb_fail(ENOMEM) : NULL;
	int64_t h = backend->vbe_memory_alloc(size, segments);
	if (h < 0) {
		free(b);
		return vb_fail((int)-h);
	}
	b->backend = backend;
	b->handle = (uint64_t)h;
	return b;
}

PUBLIC int verbena_dmabuf_fd(struct verbena_dmabuf *b)
{
	int64_t fd = usable(b) ? b->backend->vbe_memory_fd(b->handle) : -EINVAL;
	if (fd < 0) {
		errno = (int)-fd;
		return -1;
	}
	return (int)fd;
}

static int memory_do(struct verbena_dmabuf *b, uint32_t what)
{
	return vb_num(usable(b) ? b->backend->vbe_memory_do(b->handle, what) : -EINVAL);
}

PUBLIC int verbena_move_dmabuf(struct verbena_dmabuf *b) { return memory_do(b, VBE_MEMORY_MOVE); }
PUBLIC int verbena_evict_dmabuf(struct verbena_dmabuf *b) { return memory_do(b, VBE_MEMORY_EVICT); }
PUBLIC int verbena_revoke_dmabuf(struct verbena_dmabuf *b) { return memory_do(b, VBE_MEMORY_REVOKE); }

static int memory_copy(struct verbena_dmabuf *b, uint64_t offset, const void *addr, size_t n, bool write)
{
	if (!usable(b) || (n && !addr))
		return vb_num(-EINVAL);
	return vb_num(n ? b->backend->vbe_memory_copy(b->handle, offset, (uintptr_t)addr, n, write) : 0);
}

PUBLIC int verbena_read_dmabuf(struct verbena_dmabuf *b, uint64_t offset, void *to, size_t n)
{
	return memory_copy(b, offset, to, n, false);
}

PUBLIC int verbena_write_dmabuf(struct verbena_dmabuf *b, uint64_t offset, const void *from, size_t n)
{
	return memory_copy(b, offset, from, n, true);
}

PUBLIC int verbena_free_dmabuf(struct verbena_dmabuf *b)
{
	if (!b)
		return vb_num(-EINVAL);
	int64_t r = usable(b) ? b->backend->vbe_memory_free(b->handle) : 0;
	if (r >= 0)
		free(b);
	return vb_num(r);
}
