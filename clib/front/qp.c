/*
 * Queue pairs and address handles.
 */
#include <stdlib.h>
#include <string.h>

#include "front.h"

/* --- making --- */

enum { LEAST_INLINE = 64 }; /* bytes of inline data that every queue pair takes */

#define ALWAYS_EX (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)
#define WRITE_EX (ALWAYS_EX | IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM)
#define WINDOW_EX (IBV_QP_EX_WITH_LOCAL_INV | IBV_QP_EX_WITH_BIND_MW)
#define RELIABLE_EX                                                                                                    \
	(WRITE_EX | IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP |      \
	 IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD | VB_EX_WITH_FLUSH | VB_EX_WITH_ATOMIC_WRITE)

/* send_ops returns the ibv_wr_* functions that a type of queue pair can have. */
static uint64_t send_ops(enum ibv_qp_type type)
{
	switch (type) {
	case IBV_QPT_RC:
		return RELIABLE_EX | WINDOW_EX;
	case IBV_QPT_XRC_SEND:
		return RELIABLE_EX;
	case IBV_QPT_UC:
		return WRITE_EX | WINDOW_EX;
	case IBV_QPT_UD:
		return ALWAYS_EX;
	default:
		return 0;
	}
}

/* The objects that a queue pair uses, checked by find_parts. */
struct parts {
	struct vb_pd *pd;
	struct vb_cq *send_cq, *recv_cq;
	struct vb_srq *srq;
	struct vb_xrcd *xrcd;
};

static int find_parts(struct ibv_context *context, const struct ibv_qp_init_attr_ex *a, struct parts *p)
{
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_XRCD | IBV_QP_INIT_ATTR_CREATE_FLAGS |
			       IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	memset(p, 0, sizeof *p);
	if (a->comp_mask & ~known)
		return EOPNOTSUPP;
	if (a->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && a->create_flags)
		return EOPNOTSUPP;
	switch (a->qp_type) {
	case IBV_QPT_RC:
	case IBV_QPT_UC:
	case IBV_QPT_UD:
	case IBV_QPT_XRC_SEND:
		break;
	case IBV_QPT_XRC_RECV:
		if (!(a->comp_mask & IBV_QP_INIT_ATTR_XRCD) || !(p->xrcd = LIVE(vb_xrcd, XRCD, a->xrcd)) ||
		    a->xrcd->context != context)
			return EINVAL;
		return 0;
	case IBV_QPT_RAW_PACKET:
	case IBV_QPT_DRIVER:
		return EOPNOTSUPP;
	default:
		return EINVAL;
	}
	if (!(a->comp_mask & IBV_QP_INIT_ATTR_PD) || !(p->pd = LIVE(vb_pd, PD, a->pd)))
		return EINVAL;
	if (!a->send_cq || !vb_usable(&to_cq(a->send_cq)->h, CQ))
		return EINVAL;
	p->send_cq = to_cq(a->send_cq);
	if (a->qp_type == IBV_QPT_XRC_SEND)
		return 0; /* it does not receive, whatever the fields say */
	if (!a->recv_cq || !vb_usable(&to_cq(a->recv_cq)->h, CQ))
		return EINVAL;
	p->recv_cq = to_cq(a->recv_cq);
	if (a->srq && !(p->srq = LIVE(vb_srq, SRQ, a->srq)))
		return EINVAL;
	return 0;
}

/* make makes a queue pair, or opens an XRC target by its number. */
static struct ibv_qp *make(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr, enum vb_qp_manner manner,
			   uint32_t number)
{
	struct vb_context *c = live_context(context);
	struct parts p;
	if (!c || !attr)
		return vb_fail(EINVAL);
	int err = find_parts(context, attr, &p);
	if (err)
		return vb_fail(err);
	uint64_t ops = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? attr->send_ops_flags : 0;
	if (ops & ~send_ops(attr->qp_type))
		return vb_fail(EOPNOTSUPP);
	struct vb_qp *q = vb_new(QP, c->h.backend);
	if (!q)
		return NULL;
	struct vbe_qp_new n = {.pd = p.pd ? p.pd->h.handle : 0,
			       .send_cq = p.send_cq ? p.send_cq->h.handle : 0,
			       .recv_cq = p.recv_cq ? p.recv_cq->h.handle : 0,
			       .srq = p.srq ? p.srq->h.handle : 0,
			       .xrcd = p.xrcd ? p.xrcd->h.handle : 0,
			       .cookie = (uintptr_t)q,
			       .type = (uint32_t)attr->qp_type,
			       .signal_all = attr->sq_sig_all != 0,
			       .no_scatter = (manner & NO_SCATTER) != 0,
			       .cap = {attr->cap.max_send_wr, attr->cap.max_recv_wr, attr->cap.max_send_sge,
				       attr->cap.max_recv_sge, attr->cap.max_inline_data},
			       .number = number};
	/* Programs post short inline messages without having asked for room, since other devices
	 * give some to each. ibv_wr_atomic_write takes its 8 bytes by value, too. */
	if (attr->qp_type != IBV_QPT_XRC_RECV && n.cap.inline_data < LEAST_INLINE)
		n.cap.inline_data = LEAST_INLINE;
	int64_t r = c->h.backend->vbe_create_qp(c->h.handle, &n);
	if (r < 0) {
		vb_free(QP, &q->h);
		return vb_fail((int)-r);
	}
	struct ibv_qp_cap cap = {n.cap.send_wr, n.cap.recv_wr, n.cap.send_sge, n.cap.recv_sge, n.cap.inline_data};
	attr->cap = q->cap = cap;
	q->h.handle = (uint64_t)r;
	q->sig_all = attr->sq_sig_all;
	q->xrcd = p.xrcd;
	struct ibv_qp *b = &q->pub.qp_base;
	b->context = context;
	b->qp_context = attr->qp_context;
	/* An XRC target has no domain of its own; librdmacm takes the one that it gave from here. */
	b->pd = attr->comp_mask & IBV_QP_INIT_ATTR_PD ? attr->pd : NULL;
	b->send_cq = p.send_cq ? attr->send_cq : NULL;
	b->recv_cq = p.recv_cq ? attr->recv_cq : NULL;
	b->srq = p.srq ? attr->srq : NULL;
	b->handle = (uint32_t)r;
	b->qp_num = n.number;
	b->state = number ? IBV_QPS_UNKNOWN : IBV_QPS_RESET;
	b->qp_type = attr->qp_type;
	pthread_mutex_init(&b->mutex, NULL);
	pthread_cond_init(&b->cond, NULL);
	vb_enter(&q->h, p.pd);
	if (manner & ALL_SEND_OPS)
		ops = send_ops(attr->qp_type);
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS && (err = vb_start_builder(q, ops))) {
		ibv_destroy_qp(b);
		return vb_fail(err);
	}
	return b;
}

struct ibv_qp *vb_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	return make(context, attr, USUAL, 0);
}

struct ibv_qp *vb_make_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr, enum vb_qp_manner manner)
{
	return make(context, attr, manner, 0);
}

struct ibv_qp *vb_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr)
{
	const uint32_t needed = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD | IBV_QP_OPEN_ATTR_TYPE;
	if (!attr)
		return vb_fail(EINVAL);
	if (attr->comp_mask & ~(needed | IBV_QP_OPEN_ATTR_CONTEXT))
		return vb_fail(EOPNOTSUPP);
	if ((attr->comp_mask & needed) != needed || attr->qp_type != IBV_QPT_XRC_RECV || !attr->qp_num)
		return vb_fail(EINVAL);
	struct ibv_qp_init_attr_ex x = {.qp_context = attr->qp_context,
					.qp_type = attr->qp_type,
					.comp_mask = IBV_QP_INIT_ATTR_XRCD,
					.xrcd = attr->xrcd};
	return make(context, &x, USUAL, attr->qp_num);
}

PUBLIC struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	if (!LIVE(vb_pd, PD, pd) || !attr)
		return vb_fail(EINVAL);
	struct ibv_qp_init_attr_ex x = {.qp_context = attr->qp_context,
					.send_cq = attr->send_cq,
					.recv_cq = attr->recv_cq,
					.srq = attr->srq,
					.cap = attr->cap,
					.qp_type = attr->qp_type,
					.sq_sig_all = attr->sq_sig_all,
					.comp_mask = IBV_QP_INIT_ATTR_PD,
					.pd = pd};
	struct ibv_qp *q = vb_create_qp_ex(pd->context, &x);
	if (q)
		attr->cap = x.cap;
	return q;
}

PUBLIC struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	return q && q->extended ? &q->pub : NULL;
}

PUBLIC int ibv_destroy_qp(struct ibv_qp *qp)
{
	if (!qp || !vb_is(&to_qp(qp)->h, QP))
		return vb_num(-EINVAL);
	struct vb_qp *q = to_qp(qp);
	if (vb_usable(&q->h, QP)) {
		int64_t r = q->h.backend->vbe_destroy(q->h.handle);
		if (r < 0)
			return vb_num(r);
		vb_forget_completions(q);
		vb_await_acks(to_context(qp->context), qp, &qp->mutex, &qp->cond, &q->async_taken,
			      &qp->events_completed);
	}
	vb_end_builder(q);
	vb_free(QP, &q->h);
	return 0;
}

/* --- attributes --- */

/* RoCE has only global addresses; the device has one port. */
static bool good_path(const struct ibv_ah_attr *a)
{
	if (!a->is_global)
		vb_say("a path without a global address: RoCE needs is_global and a GID; many tools have an option for the index of their own GID, -g 0");
	return a->is_global && a->port_num == 1;
}

static void path_of(const struct ibv_ah_attr *a, struct vbe_path *p)
{
	memset(p, 0, sizeof *p);
	memcpy(p->dgid, a->grh.dgid.raw, sizeof p->dgid);
	p->flow_label = a->grh.flow_label & 0xfffff; /* programs set more, and drivers take 20 bits */
	p->sgid_index = a->grh.sgid_index;
	p->hop_limit = a->grh.hop_limit;
	p->traffic_class = a->grh.traffic_class;
	p->sl = a->sl;
	p->port = a->port_num;
}

static void fill_path(const struct vbe_path *p, struct ibv_ah_attr *a)
{
	memset(a, 0, sizeof *a);
	memcpy(a->grh.dgid.raw, p->dgid, sizeof p->dgid);
	a->grh.flow_label = p->flow_label;
	a->grh.sgid_index = p->sgid_index;
	a->grh.hop_limit = p->hop_limit;
	a->grh.traffic_class = p->traffic_class;
	a->sl = p->sl;
	a->port_num = p->port;
	a->is_global = 1;
}

PUBLIC int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	if (!q || !attr)
		return vb_num(-EINVAL);
	/* Attributes of the half that a queue pair does not have are ignored, as by the kernel. */
	if (qp->qp_type == IBV_QPT_XRC_SEND)
		mask &= ~(IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (qp->qp_type == IBV_QPT_XRC_RECV)
		mask &= ~(IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY);
	if (mask & IBV_QP_AV && !good_path(&attr->ah_attr))
		return vb_num(-EINVAL);
	/* A queue pair's rights are its peer's. The others are accepted, and mean nothing. */
	const unsigned int rights = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
				    VB_ACCESS_FLUSH_GLOBAL | VB_ACCESS_FLUSH_PERSISTENT;
	const unsigned int others = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND | IBV_ACCESS_ZERO_BASED |
				    IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB | IBV_ACCESS_OPTIONAL_RANGE;
	if (mask & IBV_QP_ACCESS_FLAGS && attr->qp_access_flags & ~(rights | others))
		return vb_num(-EINVAL);
	struct vbe_qp_attr a = {.state = (uint32_t)attr->qp_state,
				.cur_state = (uint32_t)attr->cur_qp_state,
				.path_mtu = (uint32_t)attr->path_mtu,
				.qkey = attr->qkey,
				.rq_psn = attr->rq_psn,
				.sq_psn = attr->sq_psn,
				.dest_qpn = attr->dest_qp_num,
				.access = attr->qp_access_flags & rights,
				.cap = {attr->cap.max_send_wr, attr->cap.max_recv_wr, attr->cap.max_send_sge,
					attr->cap.max_recv_sge, attr->cap.max_inline_data},
				.pkey_index = attr->pkey_index,
				.sqd_notify = attr->en_sqd_async_notify,
				.max_rd_atomic = attr->max_rd_atomic,
				.max_dest_rd_atomic = attr->max_dest_rd_atomic,
				.min_rnr_timer = attr->min_rnr_timer,
				.port = attr->port_num,
				.timeout = attr->timeout,
				.retry_cnt = attr->retry_cnt,
				.rnr_retry = attr->rnr_retry};
	path_of(&attr->ah_attr, &a.av);
	vb_guard_signals();
	int64_t r = q->h.backend->vbe_modify_qp(q->h.handle, &a, (uint32_t)mask);
	if (r < 0)
		return vb_num(r);
	if (mask & IBV_QP_STATE) {
		qp->state = attr->qp_state;
		if (attr->qp_state == IBV_QPS_RESET)
			vb_forget_completions(q);
	}
	return 0;
}

PUBLIC int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	struct vbe_qp_attr a;
	(void)mask; /* a hint of what the program wants: it gets everything */
	if (!q || !attr || !init)
		return vb_num(-EINVAL);
	int64_t r = q->h.backend->vbe_query_qp(q->h.handle, &a);
	if (r < 0)
		return vb_num(r);
	memset(attr, 0, offsetof(struct ibv_qp_attr, rate_limit)); /* older programs' structure ends there */
	attr->qp_state = (enum ibv_qp_state)a.state;
	attr->cur_qp_state = (enum ibv_qp_state)a.state;
	attr->path_mtu = (enum ibv_mtu)a.path_mtu;
	attr->path_mig_state = IBV_MIG_MIGRATED;
	attr->qkey = a.qkey;
	attr->rq_psn = a.rq_psn;
	attr->sq_psn = a.sq_psn;
	attr->dest_qp_num = a.dest_qpn;
	attr->qp_access_flags = a.access;
	attr->cap = q->cap;
	fill_path(&a.av, &attr->ah_attr);
	attr->pkey_index = a.pkey_index;
	attr->en_sqd_async_notify = a.sqd_notify;
	attr->sq_draining = a.sq_draining;
	attr->max_rd_atomic = a.max_rd_atomic;
	attr->max_dest_rd_atomic = a.max_dest_rd_atomic;
	attr->min_rnr_timer = a.min_rnr_timer;
	attr->port_num = a.port;
	attr->timeout = a.timeout;
	attr->retry_cnt = a.retry_cnt;
	attr->rnr_retry = a.rnr_retry;
	qp->state = attr->qp_state;
	*init = (struct ibv_qp_init_attr){.qp_context = qp->qp_context,
					  .send_cq = qp->send_cq,
					  .recv_cq = qp->recv_cq,
					  .srq = qp->srq,
					  .cap = q->cap,
					  .qp_type = qp->qp_type,
					  .sq_sig_all = q->sig_all};
	return 0;
}

/* Payload is copied in no particular order, except that the end of a message is stored last.
 * There is no bit for that, so the answer is that nothing is in order. */
PUBLIC int ibv_query_qp_data_in_order(struct ibv_qp *qp, enum ibv_wr_opcode op, uint32_t flags)
{
	(void)qp;
	(void)op;
	(void)flags;
	return 0;
}

/* --- multicast --- */

static int mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint32_t attach)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	if (!q || !gid)
		return vb_num(-EINVAL);
	union ibv_gid copy = *gid;
	return vb_num(q->h.backend->vbe_mcast(q->h.handle, copy.raw, attach));
}

PUBLIC int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid; /* RoCE has none */
	return mcast(qp, gid, 1);
}

PUBLIC int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid)
{
	(void)lid;
	return mcast(qp, gid, 0);
}

/* --- address handles --- */

PUBLIC struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attr)
{
	struct vb_pd *p = LIVE(vb_pd, PD, pd);
	struct vbe_path path;
	if (!p || !attr || !good_path(attr))
		return vb_fail(EINVAL);
	struct vb_ah *a = vb_new(AH, p->h.backend);
	if (!a)
		return NULL;
	path_of(attr, &path);
	int64_t h = p->h.backend->vbe_create_ah(p->h.handle, &path);
	if (h < 0) {
		vb_free(AH, &a->h);
		return vb_fail((int)-h);
	}
	a->h.handle = (uint64_t)h;
	a->pub = (struct ibv_ah){.context = pd->context, .pd = pd, .handle = (uint32_t)h};
	vb_enter(&a->h, p);
	return &a->pub;
}

PUBLIC int ibv_destroy_ah(struct ibv_ah *ah)
{
	int64_t r = ah ? vb_undo(&OUTER(vb_ah, ah)->h, AH) : -EINVAL;
	if (r >= 0)
		vb_free(AH, &OUTER(vb_ah, ah)->h);
	return vb_num(r);
}
