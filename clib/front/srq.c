/*
 * Shared receive queues and XRC domains.
 */
#include <fcntl.h>

#include "front.h"

static struct vb_srq *create(struct ibv_context *context, struct vb_pd *pd, struct ibv_pd *pub_pd, void *srq_context,
			     struct ibv_srq_attr *attr, struct vb_xrcd *xrcd, struct vb_cq *cq)
{
	struct vb_srq *s = vb_new(SRQ, pd->h.backend);
	if (!s)
		return NULL;
	struct vbe_srq_new n = {.pd = pd->h.handle,
				.xrcd = xrcd ? xrcd->h.handle : 0,
				.cq = cq ? cq->h.handle : 0,
				.cookie = (uintptr_t)s,
				.max_wr = attr->max_wr,
				.max_sge = attr->max_sge,
				.limit = 0}; /* the verb ignores srq_limit */
	int64_t r = pd->h.backend->vbe_create_srq(to_context(context)->h.handle, &n);
	if (r < 0) {
		vb_free(SRQ, &s->h);
		return vb_fail((int)-r);
	}
	s->h.handle = (uint64_t)r;
	s->number = n.number;
	s->xrcd = xrcd;
	s->cq = cq;
	s->type = xrcd ? IBV_SRQT_XRC : IBV_SRQT_BASIC;
	s->pub.context = context;
	s->pub.srq_context = srq_context;
	s->pub.pd = pub_pd;
	s->pub.handle = (uint32_t)r;
	pthread_mutex_init(&s->pub.mutex, NULL);
	pthread_cond_init(&s->pub.cond, NULL);
	vb_enter(&s->h, pd);
	return s;
}

PUBLIC struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	if (!p || !attr)
		return vb_fail(EINVAL);
	struct vb_srq *s = create(pd->context, p, pd, attr->srq_context, &attr->attr, NULL, NULL);
	return s ? &s->pub : NULL;
}

struct ibv_srq *vb_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr)
{
	const uint32_t known = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD | IBV_SRQ_INIT_ATTR_XRCD |
			       IBV_SRQ_INIT_ATTR_CQ;
	if (!live_context(context) || !attr)
		return vb_fail(EINVAL);
	if (attr->comp_mask & ~known)
		return vb_fail(EOPNOTSUPP);
	struct vb_pd *p = attr->comp_mask & IBV_SRQ_INIT_ATTR_PD ? LIVE(vb_pd, PD, attr->pd) : NULL;
	if (!p)
		return vb_fail(EINVAL);
	enum ibv_srq_type type = attr->comp_mask & IBV_SRQ_INIT_ATTR_TYPE ? attr->srq_type : IBV_SRQT_BASIC;
	struct vb_xrcd *x = NULL;
	struct vb_cq *cq = NULL;
	if (type == IBV_SRQT_XRC) {
		x = attr->comp_mask & IBV_SRQ_INIT_ATTR_XRCD ? LIVE(vb_xrcd, XRCD, attr->xrcd) : NULL;
		if (attr->comp_mask & IBV_SRQ_INIT_ATTR_CQ && attr->cq && vb_usable(&to_cq(attr->cq)->h, CQ))
			cq = to_cq(attr->cq);
		if (!x || !cq)
			return vb_fail(EINVAL);
	} else if (type != IBV_SRQT_BASIC)
		return vb_fail(EOPNOTSUPP); /* tag matching */
	struct vb_srq *s = create(context, p, attr->pd, attr->srq_context, &attr->attr, x, cq);
	return s ? &s->pub : NULL;
}

PUBLIC int ibv_modify_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr, int mask)
{
	struct vb_srq *s = LIVE(vb_srq, SRQ, srq);
	if (!s || !attr || mask & ~(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT))
		return vb_num(-EINVAL);
	return vb_num(s->h.backend->vbe_modify_srq(s->h.handle, mask & IBV_SRQ_MAX_WR ? (int64_t)attr->max_wr : -1,
						   mask & IBV_SRQ_LIMIT ? (int64_t)attr->srq_limit : -1));
}

PUBLIC int ibv_query_srq(struct ibv_srq *srq, struct ibv_srq_attr *attr)
{
	struct vb_srq *s = LIVE(vb_srq, SRQ, srq);
	if (!s || !attr)
		return vb_num(-EINVAL);
	return vb_num(s->h.backend->vbe_query_srq(s->h.handle, &attr->max_wr, &attr->max_sge, &attr->srq_limit));
}

int vb_get_srq_num(struct ibv_srq *srq, uint32_t *num)
{
	struct vb_srq *s = LIVE(vb_srq, SRQ, srq);
	if (!s || !num)
		return vb_num(-EINVAL);
	if (s->type != IBV_SRQT_XRC)
		return vb_num(-EOPNOTSUPP);
	*num = s->number;
	return 0;
}

PUBLIC int ibv_destroy_srq(struct ibv_srq *srq)
{
	if (!srq || !vb_is(&OUTER(vb_srq, srq)->h, SRQ))
		return vb_num(-EINVAL);
	struct vb_srq *s = OUTER(vb_srq, srq);
	if (vb_usable(&s->h, SRQ)) {
		int64_t r = s->h.backend->vbe_destroy(s->h.handle);
		if (r < 0)
			return vb_num(r);
		vb_await_acks(to_context(srq->context), srq, &srq->mutex, &srq->cond, &s->async_taken,
			      &srq->events_completed);
	}
	vb_free(SRQ, &s->h);
	return 0;
}

struct ibv_xrcd *vb_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr)
{
	const uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	struct vb_context *c = live_context(context);
	if (!c || !attr || (attr->comp_mask & needed) != needed)
		return vb_fail(EINVAL);
	if (attr->comp_mask & ~needed)
		return vb_fail(EOPNOTSUPP);
	if (attr->oflags & ~(O_CREAT | O_EXCL))
		return vb_fail(EINVAL);
	struct vb_xrcd *x = vb_new(XRCD, c->h.backend);
	if (!x)
		return NULL;
	int64_t h = c->h.backend->vbe_open_xrcd(c->h.handle, attr->fd,
						(attr->oflags & O_CREAT ? 1 : 0) | (attr->oflags & O_EXCL ? 2 : 0));
	if (h < 0) {
		vb_free(XRCD, &x->h);
		return vb_fail((int)-h);
	}
	x->h.handle = (uint64_t)h;
	x->pub.context = context;
	return &x->pub;
}

int vb_close_xrcd(struct ibv_xrcd *xrcd)
{
	int64_t r = xrcd ? vb_undo(&OUTER(vb_xrcd, xrcd)->h, XRCD) : -EINVAL;
	if (r >= 0)
		vb_free(XRCD, &OUTER(vb_xrcd, xrcd)->h);
	return vb_num(r);
}
