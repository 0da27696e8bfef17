/*
 * Device memory: buffers without an address, and regions on them. dma-bufs of it, and of
 * memory files.
 */
#include <string.h>

#include "../files/files.h"
#include "front.h"

/* Adapters copy whole words only. If other lengths worked here, programs would work here
 * alone. */
static bool in_words(uint64_t offset, size_t length) { return !(offset % 4) && !(length % 4); }

static int memcpy_to_dm(struct ibv_dm *dm, uint64_t offset, const void *host, size_t length)
{
	struct vb_dm *d = live_vb_dm(dm);
	if (!d || !in_words(offset, length))
		return vb_num(-EINVAL);
	return vb_num(d->h.backend->vbe_copy_dm(d->h.handle, offset, (uintptr_t)host, length, 1));
}

static int memcpy_from_dm(void *host, struct ibv_dm *dm, uint64_t offset, size_t length)
{
	struct vb_dm *d = live_vb_dm(dm);
	if (!d || !in_words(offset, length))
		return vb_num(-EINVAL);
	return vb_num(d->h.backend->vbe_copy_dm(d->h.handle, offset, (uintptr_t)host, length, 0));
}

struct ibv_dm *vb_alloc_dm(struct ibv_context *context, struct ibv_alloc_dm_attr *attr)
{
	struct vb_context *c = live_context(context);
	if (!c || !attr)
		return vb_fail(EINVAL);
	if (attr->comp_mask)
		return vb_fail(EOPNOTSUPP);
	struct vb_dm *d = vb_new(DM, c->h.backend);
	if (!d)
		return NULL;
	int64_t h = c->h.backend->vbe_alloc_dm(c->h.handle, attr->length, attr->log_align_req);
	if (h < 0) {
		vb_free(DM, &d->h);
		return vb_fail((int)-h);
	}
	d->h.handle = (uint64_t)h;
	d->pub = (struct ibv_dm){.context = context,
				 .memcpy_to_dm = memcpy_to_dm,
				 .memcpy_from_dm = memcpy_from_dm,
				 .handle = (uint32_t)h};
	return &d->pub;
}

int vb_free_dm(struct ibv_dm *dm)
{
	int64_t r = dm ? vb_undo(&OUTER(vb_dm, dm)->h, DM) : -EINVAL;
	if (r >= 0)
		vb_free(DM, &OUTER(vb_dm, dm)->h);
	return vb_num(r);
}

PUBLIC struct ibv_dm *ibv_import_dm(struct ibv_context *context, uint32_t handle)
{
	struct vb_dm *d = vb_import(DM, context, VBE_HANDLE(VBE_DM, handle));
	if (!d)
		return NULL;
	d->pub = (struct ibv_dm){.context = context,
				 .memcpy_to_dm = memcpy_to_dm,
				 .memcpy_from_dm = memcpy_from_dm,
				 .handle = handle};
	return &d->pub;
}

PUBLIC void ibv_unimport_dm(struct ibv_dm *dm)
{
	if (dm && vb_is(&OUTER(vb_dm, dm)->h, DM))
		vb_free(DM, &OUTER(vb_dm, dm)->h);
}

struct ibv_mr *vb_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned int access)
{
	struct vb_dm *d = live_vb_dm(dm);
	if (!d || !(access & IBV_ACCESS_ZERO_BASED)) /* device memory has no address to be based on */
		return vb_fail(EINVAL);
	return vb_reg_mr(pd, NULL, length, offset, access, d);
}

PUBLIC int dm_export_dmabuf_fd(struct ibv_dm *dm) NEWER(ibv_dm_export_dmabuf_fd);

int dm_export_dmabuf_fd(struct ibv_dm *dm)
{
	struct vb_dm *d = live_vb_dm(dm);
	int64_t fd = d ? d->h.backend->vbe_export_dm(d->h.handle) : -EINVAL;
	if (fd < 0) {
		errno = (int)-fd;
		return -1;
	}
	return (int)fd;
}

/* --- for the render node that is preloaded: ../files/drm.c --- */

PUBLIC int verbena_export_file(int file)
{
	struct backend *b = vb_backend();
	return b ? (int)b->vbe_export_file(file) : -errno;
}

PUBLIC int verbena_dmabuf_file(int fd)
{
	struct backend *b = vb_backend();
	return b ? (int)b->vbe_dmabuf_file(fd) : -errno;
}
