/*
 * Protection domains, memory regions, memory windows; parent and thread domains.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "front.h"

/* --- domains --- */

PUBLIC struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct vb_context *c = live_context(context);
	if (!c)
		return vb_fail(EINVAL);
	struct vb_pd *p = vb_new(PD, c->h.backend);
	if (!p)
		return NULL;
	int64_t h = c->h.backend->vbe_alloc_pd(c->h.handle);
	if (h < 0) {
		vb_free(PD, &p->h);
		return vb_fail((int)-h);
	}
	p->h.handle = (uint64_t)h;
	p->pub.context = context;
	p->pub.handle = (uint32_t)h;
	return &p->pub;
}

struct vb_pd *vb_revive_pd(struct vb_pd *p)
{
	if (!vb_is(&p->h, PD) || p->imported)
		return NULL;
	struct vb_context *c = live_context(p->pub.context);
	if (!c)
		return NULL;
	if (p->of) {
		if (!live_vb_pd(&p->of->pub))
			return NULL;
		p->h.handle = p->of->h.handle;
	} else {
		int64_t h = c->h.backend->vbe_alloc_pd(c->h.handle);
		if (h < 0)
			return vb_fail((int)-h);
		p->h.handle = (uint64_t)h;
	}
	p->pub.handle = (uint32_t)p->h.handle;
	p->h.backend = c->h.backend;
	return p;
}

PUBLIC int ibv_dealloc_pd(struct ibv_pd *pd)
{
	if (!pd || !vb_is(&OUTER(vb_pd, pd)->h, PD))
		return vb_num(-EINVAL);
	struct vb_pd *p = OUTER(vb_pd, pd);
	if (vb_busy(&p->h)) /* parent domains stand on it, or objects are in this parent domain */
		return vb_num(-EBUSY);
	if (p->of) {
		vb_unref(&p->of->h);
		if (p->td)
			vb_unref(&p->td->h);
	} else {
		int64_t r = vb_undo(&p->h, PD);
		if (r < 0)
			return vb_num(r);
	}
	vb_free(PD, &p->h);
	return 0;
}

struct ibv_td *vb_alloc_td(struct ibv_context *context, struct ibv_td_init_attr *attr)
{
	struct vb_context *c = live_context(context);
	if (!c || !attr)
		return vb_fail(EINVAL);
	if (attr->comp_mask)
		return vb_fail(EOPNOTSUPP);
	struct vb_td *t = vb_new(TD, c->h.backend);
	if (!t)
		return NULL;
	t->pub.context = context;
	return &t->pub;
}

int vb_dealloc_td(struct ibv_td *td)
{
	if (!td || !vb_is(&OUTER(vb_td, td)->h, TD))
		return vb_num(-EINVAL);
	struct vb_td *t = OUTER(vb_td, td);
	if (vb_busy(&t->h))
		return vb_num(-EBUSY);
	vb_free(TD, &t->h);
	return 0;
}

/* A parent domain is another name for a protection domain. If it has a thread domain, the
 * program promises that one thread at a time uses what is made in it: completion queues then
 * take no lock (cq.c). */
struct ibv_pd *vb_alloc_parent_domain(struct ibv_context *context, struct ibv_parent_domain_init_attr *attr)
{
	const uint32_t known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT |
			       VB_PARENT_DOMAIN_ALLOW_CC_UNPROTECTED_ALLOC;
	struct vb_context *c = live_context(context);
	if (!c || !attr)
		return vb_fail(EINVAL);
	if (attr->comp_mask & ~known)
		return vb_fail(EOPNOTSUPP);
	struct vb_pd *of = LIVE(vb_pd, PD, attr->pd);
	if (!of || of->of || (attr->td && !LIVE(vb_td, TD, attr->td)))
		return vb_fail(EINVAL);
	if ((attr->comp_mask & IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) && (!attr->alloc || !attr->free))
		return vb_fail(EINVAL);
	struct vb_pd *p = vb_new(PD, c->h.backend);
	if (!p)
		return NULL;
	p->h.handle = of->h.handle;
	p->pub.context = context;
	p->pub.handle = of->pub.handle;
	p->of = of;
	p->init = *attr;
	p->dmabufs = attr->comp_mask & VB_PARENT_DOMAIN_ALLOW_CC_UNPROTECTED_ALLOC;
	vb_ref(&of->h);
	if (attr->td) {
		p->td = OUTER(vb_td, attr->td);
		vb_ref(&p->td->h);
	}
	return &p->pub;
}

/* --- regions --- */

/* The rights that a region may have. Others in the optional range are hints, and ignored;
 * the rest is refused. */
#define KNOWN_ACCESS                                                                                                   \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |        \
	 IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED | IBV_ACCESS_ON_DEMAND | VB_ACCESS_FLUSH_GLOBAL |                  \
	 VB_ACCESS_FLUSH_PERSISTENT | IBV_ACCESS_RELAXED_ORDERING)

/* clean stores the rights for the backend, and reports whether all are known. */
static bool clean(unsigned int access, uint32_t *to)
{
	access &= ~(unsigned int)IBV_ACCESS_HUGETLB; /* a promise about pages: nothing depends on it */
	*to = access & KNOWN_ACCESS;
	return !(access & ~(unsigned int)(KNOWN_ACCESS | IBV_ACCESS_OPTIONAL_RANGE));
}

/* make has the backend make a region, and fills in what the program sees of it. */
static struct ibv_mr *make(struct vb_pd *p, struct ibv_pd *pd, void *addr, size_t length, struct vbe_mr *r)
{
	struct vb_mr *m = vb_new(MR, p->h.backend);
	if (!m)
		return NULL;
	vb_guard_signals();
	vb_peers(p->h.backend);
	int64_t e = p->h.backend->vbe_reg_mr(p->h.handle, r);
	if (e < 0) {
		vb_free(MR, &m->h);
		return vb_fail((int)-e);
	}
	m->h.handle = r->handle;
	m->dmabuf = r->kind == VBE_MEM_DMABUF;
	if (r->kind == VBE_MEM_ALLOC || r->kind == VBE_MEM_SHARED) {
		addr = (void *)(uintptr_t)r->addr;
		length = r->length;
	}
	m->pub = (struct ibv_mr){.context = pd->context,
				 .pd = pd,
				 .addr = addr,
				 .length = length,
				 .handle = (uint32_t)r->handle,
				 .lkey = r->lkey,
				 .rkey = r->rkey};
	vb_enter(&m->h, p);
	return &m->pub;
}

/* reg_range registers memory by address, or device memory, with a DMA handle if dmah is not 0. */
static struct ibv_mr *reg_range(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access,
				struct vb_dm *on, uint64_t dmah)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_mr r = {.addr = (uintptr_t)addr, .length = length, .iova = iova, .dmah = dmah};
	bool alloc = access & VB_ACCESS_ALLOCATE_MR;
	if (!p || !clean(access & ~(unsigned int)VB_ACCESS_ALLOCATE_MR, &r.access))
		return vb_fail(EINVAL);
	if (alloc) { /* the address is the library's choice, and that of requests, too */
		if (addr || iova || on || access & IBV_ACCESS_ZERO_BASED)
			return vb_fail(EINVAL);
		r.kind = VBE_MEM_ALLOC;
		return make(p, pd, NULL, length, &r);
	}
	if (access & IBV_ACCESS_ON_DEMAND && !addr && length == SIZE_MAX)
		r.kind = VBE_MEM_IMPLICIT;
	else if (length > UINTPTR_MAX - (uintptr_t)addr) /* it wraps around */
		return vb_fail(EINVAL);
	r.dm = on ? on->h.handle : 0;
	if (access & IBV_ACCESS_ZERO_BASED && !on)
		r.iova = 0;
	return make(p, pd, addr, length, &r);
}

struct ibv_mr *vb_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access,
			 struct vb_dm *on)
{
	return reg_range(pd, addr, length, iova, access, on, 0);
}

struct ibv_mr *vb_reg_mr_hinted(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access,
				uint64_t dmah)
{
	return reg_range(pd, addr, length, iova, access, NULL, dmah);
}

struct ibv_mr *vb_alloc_null_mr(struct ibv_pd *pd)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_mr r = {.kind = VBE_MEM_NULL};
	return p ? make(p, pd, NULL, SIZE_MAX, &r) : vb_fail(EINVAL);
}

/* The backend checks everything, in the kernel's order. What the program sees as the region's
 * address is the offset, as with the kernel. */
struct ibv_mr *vb_reg_dmabuf_hinted(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
				    uint64_t dmah)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_mr r = {.addr = offset,
			   .length = length,
			   .iova = iova,
			   .access = (uint32_t)access,
			   .kind = VBE_MEM_DMABUF,
			   .fd = fd,
			   .dmah = dmah};
	vb_cuda_exports(&r);
	return p ? make(p, pd, (void *)(uintptr_t)offset, length, &r) : vb_fail(EINVAL);
}

PUBLIC struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
					int access)
{
	return vb_reg_dmabuf_hinted(pd, offset, length, iova, fd, access, 0);
}

PUBLIC struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *addr, size_t length, int access)
{
	return vb_reg_mr(pd, addr, length, (uintptr_t)addr, (unsigned int)access, NULL);
}

PUBLIC struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, int access)
{
	return vb_reg_mr(pd, addr, length, iova, (unsigned int)access, NULL);
}

PUBLIC struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access)
{
	return vb_reg_mr(pd, addr, length, iova, access, NULL);
}

/* rereg changes a region; r has the new memory and rights, as far as they change. */
static int rereg(struct vb_mr *m, int flags, struct ibv_pd *pd, struct vbe_mr *r)
{
	const int known = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
	struct vb_pd *to = NULL;
	errno = EINVAL;
	if (!m || flags & ~known || !flags)
		return IBV_REREG_MR_ERR_INPUT;
	if (flags & IBV_REREG_MR_CHANGE_PD && !(to = LIVE(vb_pd, PD, pd)))
		return IBV_REREG_MR_ERR_INPUT;
	int32_t is = 0;
	int64_t e = m->h.backend->vbe_rereg_mr(m->h.handle, (uint32_t)flags, to ? to->h.handle : 0, r, &is);
	if (e < 0)
		errno = (int)-e;
	if (e < 0 && is != VBE_REREG_NEW)
		return is;
	m->pub.lkey = r->lkey;
	m->pub.rkey = r->rkey;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION) {
		m->pub.addr = (void *)(uintptr_t)r->addr;
		m->pub.length = r->length;
		m->dmabuf = r->kind == VBE_MEM_DMABUF;
	}
	if (to) {
		vb_enter(&m->h, to);
		m->pub.pd = pd;
	}
	return e < 0 ? is : 0;
}

PUBLIC int ibv_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int access)
{
	struct vb_mr *m = LIVE(vb_mr, MR, mr);
	struct vbe_mr r = {.addr = (uintptr_t)addr, .length = length, .iova = (uintptr_t)addr};
	errno = EINVAL;
	if (m && m->dmabuf) /* as adapters answer: ibv_rereg_mr_fd can do it */
		return IBV_REREG_MR_ERR_INPUT;
	bool alloc = flags & IBV_REREG_MR_CHANGE_ACCESS && access & VB_ACCESS_ALLOCATE_MR;
	if (alloc && !(flags & IBV_REREG_MR_CHANGE_TRANSLATION)) /* it is about other memory */
		return IBV_REREG_MR_ERR_INPUT;
	if (flags & IBV_REREG_MR_CHANGE_TRANSLATION && (!length || !addr == !alloc))
		return IBV_REREG_MR_ERR_INPUT;
	if (flags & IBV_REREG_MR_CHANGE_ACCESS && !clean((unsigned int)access & ~(unsigned int)VB_ACCESS_ALLOCATE_MR, &r.access))
		return IBV_REREG_MR_ERR_INPUT;
	if (alloc)
		r.kind = VBE_MEM_ALLOC;
	return rereg(m, flags, pd, &r);
}

/* verbena_rereg_mr_fd is ibv_rereg_mr_fd of verbena/verbs.h: addr is an offset in the dma-buf. */
PUBLIC int verbena_rereg_mr_fd(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int fd,
			       int access)
{
	struct vbe_mr r = {.addr = (uintptr_t)addr,
			   .length = length,
			   .iova = (uintptr_t)addr,
			   .access = (uint32_t)access,
			   .kind = VBE_MEM_DMABUF,
			   .fd = fd};
	vb_cuda_exports(&r);
	return rereg(LIVE(vb_mr, MR, mr), flags, pd, &r);
}

/* --- memory that the library allocates, shared with other processes --- */

PUBLIC int verbena_share_mr(struct ibv_mr *mr, char *handle, size_t size)
{
	struct vb_mr *m = LIVE(vb_mr, MR, mr);
	if (!m || !handle)
		return vb_num(-EINVAL);
	return vb_num(m->h.backend->vbe_share_mr(m->h.handle, handle, size));
}

PUBLIC struct ibv_mr *verbena_reg_shared_mr(const char *handle, struct ibv_pd *pd, void *addr, int access)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_mr r = {.kind = VBE_MEM_SHARED, .share = (uintptr_t)handle};
	if (!p || !handle || addr || !clean((unsigned int)access, &r.access) || access & IBV_ACCESS_ZERO_BASED)
		return vb_fail(EINVAL);
	return make(p, pd, NULL, 0, &r);
}

PUBLIC int ibv_dereg_mr(struct ibv_mr *mr)
{
	int64_t r = mr ? vb_undo(&OUTER(vb_mr, mr)->h, MR) : -EINVAL;
	if (r >= 0)
		vb_free(MR, &OUTER(vb_mr, mr)->h);
	return vb_num(r);
}

int vb_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sgl, uint32_t n)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	if (!p || !sgl || flags & ~(uint32_t)IBV_ADVISE_MR_FLAG_FLUSH)
		return vb_num(-EINVAL);
	return vb_num(p->h.backend->vbe_advise(p->h.handle, (uint32_t)advice, flags & IBV_ADVISE_MR_FLAG_FLUSH,
					       (uintptr_t)sgl, n));
}

/* --- import: from a context of this process, or of another one --- */

/* An import is another object for the same thing. Destroying any of these objects destroys
 * the thing; all that is left to do with the others is to unimport them.
 *
 * Within a process these objects have the same handle of the backend. For a thing of another
 * process the backend makes one of its own, which stands for the original. */
void *vb_import(enum kind kind, struct ibv_context *context, uint64_t handle)
{
	struct vb_context *c = live_context(context);
	if (!c)
		return vb_fail(EINVAL);
	if (c->foreign)
		return vb_fail(EOPNOTSUPP);
	if (c->h.backend->vbe_has(c->h.handle, handle) < 0)
		return vb_fail(ENOENT);
	struct head *h = vb_new(kind, c->h.backend);
	if (h)
		h->handle = handle;
	return h;
}

/* foreign makes an object for an import from another process. h is the backend's handle, or
 * its negative errno. */
static void *foreign(enum kind kind, struct backend *b, int64_t h)
{
	struct head *o = h < 0 ? vb_fail((int)-h) : vb_new(kind, b);
	if (o)
		o->handle = (uint64_t)h;
	else if (h > 0)
		b->vbe_unimport((uint64_t)h);
	return o;
}

/* forget ends an import. */
static void forget(enum kind kind, struct head *h, bool foreign)
{
	if (foreign && vb_usable(h, kind))
		h->backend->vbe_unimport(h->handle);
	vb_free(kind, h);
}

PUBLIC struct ibv_pd *ibv_import_pd(struct ibv_context *context, uint32_t handle)
{
	struct vb_context *c = live_context(context);
	bool far = c && c->foreign;
	struct vb_pd *p = far ? foreign(PD, c->h.backend, c->h.backend->vbe_import_pd(c->h.handle, handle))
			      : vb_import(PD, context, VBE_HANDLE(VBE_PD, handle));
	if (!p)
		return NULL;
	p->pub.context = context;
	p->pub.handle = handle;
	p->imported = true;
	p->foreign = far;
	return &p->pub;
}

PUBLIC void ibv_unimport_pd(struct ibv_pd *pd)
{
	if (pd && vb_is(&OUTER(vb_pd, pd)->h, PD) && !OUTER(vb_pd, pd)->of && !vb_busy(&OUTER(vb_pd, pd)->h))
		forget(PD, &OUTER(vb_pd, pd)->h, OUTER(vb_pd, pd)->foreign);
}

PUBLIC struct ibv_mr *ibv_import_mr(struct ibv_pd *pd, uint32_t handle)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_mr r = {0};
	bool far = p && to_context(pd->context)->foreign;
	struct vb_mr *m = far ? foreign(MR, p->h.backend, p->h.backend->vbe_import_mr(p->h.handle, handle, &r))
			: p   ? vb_import(MR, pd->context, VBE_HANDLE(VBE_MR, handle))
			      : vb_fail(EINVAL);
	if (!m)
		return NULL;
	int64_t e = far ? 0 : p->h.backend->vbe_query_mr(m->h.handle, &r);
	if (e < 0) {
		vb_free(MR, &m->h);
		return vb_fail((int)-e);
	}
	m->pub = (struct ibv_mr){.context = pd->context,
				 .pd = pd,
				 .length = r.length,
				 .handle = handle,
				 .lkey = r.lkey,
				 .rkey = r.rkey};
	m->foreign = far;
	vb_enter(&m->h, p);
	return &m->pub;
}

PUBLIC void ibv_unimport_mr(struct ibv_mr *mr)
{
	if (mr && vb_is(&OUTER(vb_mr, mr)->h, MR))
		forget(MR, &OUTER(vb_mr, mr)->h, OUTER(vb_mr, mr)->foreign);
}

/* --- windows --- */

struct ibv_mw *vb_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	if (!p)
		return vb_fail(EINVAL);
	struct vb_mw *w = vb_new(MW, p->h.backend);
	if (!w)
		return NULL;
	uint32_t rkey;
	int64_t h = p->h.backend->vbe_alloc_mw(p->h.handle, (uint32_t)type, &rkey);
	if (h < 0) {
		vb_free(MW, &w->h);
		return vb_fail((int)-h);
	}
	w->h.handle = (uint64_t)h;
	w->pub = (struct ibv_mw){
		.context = pd->context, .pd = pd, .rkey = rkey, .handle = (uint32_t)h, .type = type};
	vb_enter(&w->h, p);
	return &w->pub;
}

int vb_dealloc_mw(struct ibv_mw *mw)
{
	int64_t r = mw ? vb_undo(&OUTER(vb_mw, mw)->h, MW) : -EINVAL;
	if (r >= 0)
		vb_free(MW, &OUTER(vb_mw, mw)->h);
	return vb_num(r);
}

/* vb_bind_mw posts a bind of a type 1 window, after it has checked the region. */
int vb_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	struct vb_mw *w = LIVE(vb_mw, MW, mw);
	if (!q || !w || !bind || mw->type != IBV_MW_TYPE_1)
		return vb_num(-EINVAL);
	struct ibv_mw_bind_info *b = &bind->bind_info;
	if (b->length && (!LIVE(vb_mr, MR, b->mr) || b->mr->pd->handle != mw->pd->handle))
		return vb_num(-EPERM);
	struct vbe_send_wr r = {.id = bind->wr_id,
				.flags = bind->send_flags,
				.mw_lkey = b->mr ? b->mr->lkey : 0,
				.mw_access = b->mw_access_flags & ~(unsigned int)IBV_ACCESS_LOCAL_WRITE,
				.mw_addr = b->addr,
				.mw_length = b->length};
	uint32_t rkey;
	int64_t e = q->h.backend->vbe_bind_mw(q->h.handle, w->h.handle, &r, &rkey);
	if (e < 0)
		return vb_num(e);
	mw->rkey = rkey;
	return 0;
}
