/*
 * Verbs that rdma-core 60 and later have: ibv_reg_mr_ex, buffers that the library allocates,
 * DMA handles. The headers that this is built with may be older, so they have other names here.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "front.h"

/* --- DMA handles --- */

enum { DMAH_CPU_ID = 1, DMAH_PH = 2, DMAH_TPH_MEM_TYPE = 4, DMAH_STEERS = DMAH_CPU_ID | DMAH_TPH_MEM_TYPE };

struct dmah_init_attr { /* struct ibv_dmah_init_attr */
	uint32_t mask, cpu_id;
	uint8_t ph, tph_mem_type;
};

PUBLIC struct vb_dmah_pub *alloc_dmah(struct ibv_context *context, struct dmah_init_attr *a) NEWER(ibv_alloc_dmah);
PUBLIC int dealloc_dmah(struct vb_dmah_pub *d) NEWER(ibv_dealloc_dmah);

/* The rules about fields that are missing are those of adapters (mlx5). */
struct vb_dmah_pub *alloc_dmah(struct ibv_context *context, struct dmah_init_attr *a)
{
	struct vb_context *c = live_context(context);
	if (!c || !a)
		return vb_fail(EINVAL);
	if (a->mask & ~(uint32_t)(DMAH_STEERS | DMAH_PH))
		return vb_fail(EOPNOTSUPP);
	if (!(a->mask & DMAH_PH) || (a->mask & DMAH_STEERS && (a->mask & DMAH_STEERS) != DMAH_STEERS))
		return vb_fail(EINVAL);
	struct vb_dmah *d = vb_new(DMAH, c->h.backend);
	if (!d)
		return NULL;
	int64_t h = c->h.backend->vbe_alloc_dmah(c->h.handle, a->ph, a->mask & DMAH_STEERS, a->cpu_id, a->tph_mem_type);
	if (h < 0) {
		vb_free(DMAH, &d->h);
		return vb_fail((int)-h);
	}
	d->h.handle = (uint64_t)h;
	d->pub.context = context;
	return &d->pub;
}

int dealloc_dmah(struct vb_dmah_pub *d)
{
	int64_t r = d ? vb_undo(&OUTER(vb_dmah, d)->h, DMAH) : -EINVAL;
	if (r >= 0)
		vb_free(DMAH, &OUTER(vb_dmah, d)->h);
	return vb_num(r);
}

/* --- buffers --- */

struct buf { /* struct ibv_buf */
	struct ibv_pd *pd;
	void *addr;
	size_t size, mapped; /* mapped: bytes of the file that are mapped at addr; 0: there is no file */
	int dmabuf;	     /* the descriptor of the dma-buf; -1: it is ordinary memory */
};

PUBLIC void *alloc_buf(struct ibv_pd *pd, size_t size, struct buf **buf) NEWER(ibv_alloc_buf);
PUBLIC void free_buf(struct buf *b) NEWER(ibv_free_buf);
PUBLIC int export_buf_dmabuf_fd(struct buf *b) NEWER(ibv_export_buf_dmabuf_fd);

/* alloc_dmabuf makes a memory file, maps it, and has the backend make a dma-buf of it. It
 * returns 0 or an errno. */
static int alloc_dmabuf(struct backend *backend, struct buf *b, size_t page)
{
	int err = ENOMEM, file = memfd_create("verbena-buf", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int64_t fd = -1;
	if (file < 0)
		return errno;
	b->mapped = (b->size + page - 1) / page * page;
	if (!ftruncate(file, (off_t)b->mapped) && !fcntl(file, F_ADD_SEALS, F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
		b->addr = mmap(NULL, b->mapped, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
		if (b->addr != MAP_FAILED) {
			fd = backend->vbe_export_file(file);
			err = fd < 0 ? (int)-fd : 0;
			if (err)
				munmap(b->addr, b->mapped);
		}
	}
	close(file);
	b->dmabuf = (int)fd;
	return err;
}

/* A parent domain that allows unprotected memory of confidential machines gets dma-bufs, as
 * adapters need them there. For this device all memory is the same. */
void *alloc_buf(struct ibv_pd *pd, size_t size, struct buf **buf)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	if (!p || !buf || !size || size > SIZE_MAX / 2 - page)
		return vb_fail(EINVAL);
	struct buf *b = calloc(1, sizeof *b);
	if (!b)
		return vb_fail(ENOMEM);
	b->pd = pd;
	b->size = size;
	b->dmabuf = -1;
	int err = p->dmabufs ? alloc_dmabuf(p->h.backend, b, page) : posix_memalign(&b->addr, page, size);
	if (err) {
		free(b);
		return vb_fail(err);
	}
	*buf = b;
	return b->addr;
}

void free_buf(struct buf *b)
{
	if (b && b->mapped) {
		munmap(b->addr, b->mapped);
		close(b->dmabuf);
	} else if (b)
		free(b->addr);
	free(b);
}

int export_buf_dmabuf_fd(struct buf *b)
{
	if (b && b->dmabuf >= 0)
		return fcntl(b->dmabuf, F_DUPFD_CLOEXEC, 0);
	errno = b ? ENODATA : EINVAL;
	return -1;
}

/* --- regions --- */

enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_FD_OFFSET = 8, MASK_DMAH = 16, MASK_BUF = 32, MASK_ALL = 63 };

struct mr_init_attr { /* struct ibv_mr_init_attr */
	size_t length;
	int access;
	uint64_t mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	struct vb_dmah_pub *dmah;
	struct buf *buf;
};

PUBLIC struct ibv_mr *reg_mr_ex(struct ibv_pd *pd, struct mr_init_attr *a) NEWER(ibv_reg_mr_ex);
PUBLIC struct ibv_mr *reg_buf_mr(struct ibv_pd *pd, struct buf *b, void *addr, size_t length,
				 int access) NEWER(ibv_reg_buf_mr);

/* holds reports whether a buffer is of a domain, and has these bytes. */
static bool holds(const struct buf *b, const struct ibv_pd *pd, const void *addr, size_t length)
{
	size_t off = b ? (uintptr_t)addr - (uintptr_t)b->addr : 0;
	return b && b->pd == pd && (uintptr_t)addr >= (uintptr_t)b->addr && off <= b->size && length <= b->size - off;
}

struct ibv_mr *reg_mr_ex(struct ibv_pd *pd, struct mr_init_attr *a)
{
	if (!a || !LIVE(vb_pd, PD, pd))
		return vb_fail(EINVAL);
	if (a->mask & ~(uint64_t)MASK_ALL)
		return vb_fail(EOPNOTSUPP);
	struct vb_dmah *d = a->mask & MASK_DMAH ? LIVE(vb_dmah, DMAH, a->dmah) : NULL;
	if (a->mask & MASK_DMAH && !d)
		return vb_fail(EINVAL);
	uint64_t hint = d ? d->h.handle : 0;
	if (a->mask & MASK_FD) {
		if (a->mask & (MASK_ADDR | MASK_BUF) || !(a->mask & MASK_FD_OFFSET) || !(a->mask & MASK_IOVA))
			return vb_fail(EINVAL);
		return vb_reg_dmabuf_hinted(pd, a->fd_offset, a->length, a->iova, a->fd, a->access, hint);
	}
	if (a->mask & MASK_FD_OFFSET || !(a->mask & MASK_ADDR))
		return vb_fail(EINVAL);
	if (a->mask & MASK_BUF) {
		if (!holds(a->buf, pd, a->addr, a->length) || (a->buf->dmabuf >= 0 && a->mask & MASK_IOVA))
			return vb_fail(EINVAL);
		if (a->buf->dmabuf >= 0) /* as for other dma-bufs, the region's address is the offset */
			return vb_reg_dmabuf_hinted(pd, (uintptr_t)a->addr - (uintptr_t)a->buf->addr, a->length,
						    (uintptr_t)a->addr, a->buf->dmabuf, a->access, hint);
	}
	return vb_reg_mr_hinted(pd, a->addr, a->length, a->mask & MASK_IOVA ? a->iova : (uintptr_t)a->addr,
				(unsigned int)a->access, hint);
}

struct ibv_mr *reg_buf_mr(struct ibv_pd *pd, struct buf *b, void *addr, size_t length, int access)
{
	struct mr_init_attr a = {
		.length = length, .access = access, .mask = MASK_ADDR | MASK_BUF, .addr = addr, .buf = b};
	return reg_mr_ex(pd, &a);
}
