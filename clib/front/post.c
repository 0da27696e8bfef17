/*
 * Posting: a list of requests is flattened, a batch at a time, and each batch is one call
 * into the backend.
 */
#include <arpa/inet.h>
#include <string.h>

#include "front.h"

enum { BATCH = 16, MAX_INLINE = 512 };

/* inline_data makes the inline bytes of a request one piece, in room if they are
 * several. */
static int inline_data(const struct vb_qp *q, const struct ibv_send_wr *w, struct vbe_send_wr *f, uint8_t *room)
{
	f->num_sge = 0;
	if (w->num_sge == 1) {
		f->inline_data = w->sg_list[0].addr;
		f->inline_len = w->sg_list[0].length;
		return f->inline_len > q->cap.max_inline_data ? EINVAL : 0;
	}
	uint32_t n = 0;
	for (int i = 0; i < w->num_sge; i++) {
		uint32_t len = w->sg_list[i].length;
		if (len > q->cap.max_inline_data - n || len > MAX_INLINE - n)
			return EINVAL;
		memcpy(room + n, (void *)(uintptr_t)w->sg_list[i].addr, len);
		n += len;
	}
	f->inline_data = (uintptr_t)room;
	f->inline_len = n;
	return 0;
}

static int bind_info(const struct ibv_send_wr *w, struct vbe_send_wr *f)
{
	const struct ibv_mw_bind_info *b = &w->bind_mw.bind_info;
	if (!LIVE(vb_mw, MW, w->bind_mw.mw) || (b->length && !LIVE(vb_mr, MR, b->mr)))
		return EINVAL;
	f->mw_key = w->bind_mw.mw->rkey;
	f->mw_new_key = w->bind_mw.rkey;
	f->mw_lkey = b->mr ? b->mr->lkey : 0;
	f->mw_access = b->mw_access_flags & ~(unsigned int)IBV_ACCESS_LOCAL_WRITE; /* a window's rights are a peer's */
	f->mw_addr = b->addr;
	f->mw_length = b->length;
	return 0;
}

/* flatten turns one request into the backend's form. */
static inline int flatten(const struct vb_qp *q, const struct ibv_send_wr *w, struct vbe_send_wr *f, uint8_t *room)
{
	vb_clear(f);
	if (w->num_sge < 0 || (uint32_t)w->num_sge > q->cap.max_send_sge || (w->num_sge && !w->sg_list))
		return EINVAL;
	f->id = w->wr_id;
	f->opcode = (uint32_t)w->opcode;
	f->flags = w->send_flags;
	f->sgl = (uintptr_t)w->sg_list;
	f->num_sge = (uint32_t)w->num_sge;
	f->imm = ntohl(w->imm_data);
	f->inv_key = w->invalidate_rkey;
	enum ibv_qp_type type = q->pub.qp_base.qp_type;
	if (type == IBV_QPT_UD) {
		if (!LIVE(vb_ah, AH, w->wr.ud.ah))
			return EINVAL;
		f->ah = OUTER(vb_ah, w->wr.ud.ah)->h.handle;
		f->qpn = w->wr.ud.remote_qpn;
		f->qkey = w->wr.ud.remote_qkey;
	} else if (w->opcode == IBV_WR_ATOMIC_CMP_AND_SWP || w->opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		f->remote_addr = w->wr.atomic.remote_addr;
		f->rkey = w->wr.atomic.rkey;
		f->compare_add = w->wr.atomic.compare_add;
		f->swap = w->wr.atomic.swap;
	} else {
		f->remote_addr = w->wr.rdma.remote_addr;
		f->rkey = w->wr.rdma.rkey;
	}
	if (type == IBV_QPT_XRC_SEND)
		f->srqn = w->qp_type.xrc.remote_srqn;
	if (w->opcode == IBV_WR_BIND_MW)
		return bind_info(w, f);
	if (w->send_flags & IBV_SEND_INLINE)
		return inline_data(q, w, f, room);
	return 0;
}

int vb_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct vb_qp *q = to_qp(qp);
	struct vbe_send_wr flat[BATCH];
	struct ibv_send_wr *from[BATCH];
	uint8_t room[BATCH][MAX_INLINE];
	struct ibv_send_wr *w = wr;
	if (!vb_usable(&q->h, QP)) {
		*bad = wr;
		return EINVAL;
	}
	VB_WHOLE;
	while (w) {
		int n = 0, err = 0;
		for (; w && n < BATCH; w = w->next, n++) {
			if ((err = flatten(q, w, &flat[n], room[n])))
				break;
			from[n] = w;
		}
		int64_t posted = 0, r = 0;
		if (n)
			r = q->h.backend->vbe_post_send(q->h.handle, flat, n, &posted);
		if (r < 0) {
			*bad = from[posted];
			return (int)-r;
		}
		if (err) {
			*bad = w;
			return err;
		}
	}
	return 0;
}

/* The backend's function for a queue pair's receive queue, or an SRQ. */
typedef int64_t post_recv_function(uint64_t, struct vbe_recv_wr *, int64_t, int64_t *);

static inline int post_receives(post_recv_function *post, uint64_t handle, struct ibv_recv_wr *wr,
				struct ibv_recv_wr **bad)
{
	struct vbe_recv_wr flat[BATCH];
	struct ibv_recv_wr *from[BATCH];
	struct ibv_recv_wr *w = wr;
	VB_WHOLE;
	while (w) {
		int n = 0;
		bool wrong = false;
		for (; w && n < BATCH; w = w->next, n++) {
			if ((wrong = w->num_sge < 0 || (w->num_sge && !w->sg_list)))
				break;
			flat[n] = (struct vbe_recv_wr){w->wr_id, (uintptr_t)w->sg_list, (uint32_t)w->num_sge};
			from[n] = w;
		}
		int64_t posted = 0, r = 0;
		if (n)
			r = post(handle, flat, n, &posted);
		if (r < 0) {
			*bad = from[posted];
			return (int)-r;
		}
		if (wrong) {
			*bad = w;
			return EINVAL;
		}
	}
	return 0;
}

int vb_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct vb_qp *q = to_qp(qp);
	if (!vb_usable(&q->h, QP)) {
		*bad = wr;
		return EINVAL;
	}
	return post_receives(q->h.backend->vbe_post_recv, q->h.handle, wr, bad);
}

int vb_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct vb_srq *s = OUTER(vb_srq, srq);
	if (!vb_usable(&s->h, SRQ)) {
		*bad = wr;
		return EINVAL;
	}
	return post_receives(s->h.backend->vbe_post_srq_recv, s->h.handle, wr, bad);
}
