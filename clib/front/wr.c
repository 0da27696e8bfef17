/*
 * Posting by ibv_wr_start, one call for each request, and ibv_wr_complete.
 *
 * Requests are built in the backend's form, with their lists and inline data in stores
 * of their own, and go to the backend in one call. After a mistake nothing is posted, and
 * ibv_wr_complete returns the first one.
 */
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "builder.h"

static inline struct vb_qp *of(struct ibv_qp_ex *qp) { return OUTER(vb_qp, qp); }

/* grow doubles the stores, up to the size of the send queue. */
static bool grow(struct vb_qp *q)
{
	struct builder *b = q->builder;
	size_t n = b->room ? 2 * (size_t)b->room : 16;
	if (n > q->cap.max_send_wr)
		n = q->cap.max_send_wr;
	if (n <= b->count)
		return false;
	void *w = realloc(b->wrs, n * sizeof *b->wrs);
	if (w)
		b->wrs = w;
	void *s = realloc(b->sges, n * (q->cap.max_send_sge + 1) * sizeof *b->sges);
	if (s)
		b->sges = s;
	void *i = realloc(b->inline_bytes, n * (q->cap.max_inline_data + 1));
	if (i)
		b->inline_bytes = i;
	if (!w || !s || !i)
		return false;
	b->room = (uint32_t)n;
	return true;
}

struct vbe_send_wr *vb_begin(struct vb_qp *q, uint32_t opcode)
{
	struct builder *b = q->builder;
	if (b->setters)
		vb_wrong(b, EINVAL); /* the request before this one is not complete */
	if (b->err)
		return NULL;
	if (b->count == b->room && !grow(q)) {
		b->err = ENOMEM;
		return NULL;
	}
	struct vbe_send_wr *w = &b->wrs[b->count++];
	vb_clear(w);
	w->id = q->pub.wr_id;
	w->flags = q->pub.wr_flags & ~(unsigned int)IBV_SEND_INLINE;
	w->opcode = opcode;
	return w;
}

static struct vbe_send_wr *begin(struct ibv_qp_ex *qp, uint32_t opcode) { return vb_begin(of(qp), opcode); }

/* now returns the request that a setter changes: the last one. NULL after a mistake. */
static struct vbe_send_wr *now(struct ibv_qp_ex *qp)
{
	struct builder *b = of(qp)->builder;
	if (!b->count)
		vb_wrong(b, EINVAL);
	if (b->err)
		return NULL;
	return &b->wrs[b->count - 1];
}

/* --- requests --- */

static void remote(struct ibv_qp_ex *qp, uint32_t opcode, uint32_t rkey, uint64_t addr, __be32 imm)
{
	struct vbe_send_wr *w = begin(qp, opcode);
	if (!w)
		return;
	w->rkey = rkey;
	w->remote_addr = addr;
	w->imm = ntohl(imm);
}

static void wr_rdma_read(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr)
{
	remote(qp, IBV_WR_RDMA_READ, rkey, addr, 0);
}

static void wr_rdma_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr)
{
	remote(qp, IBV_WR_RDMA_WRITE, rkey, addr, 0);
}

static void wr_rdma_write_imm(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, __be32 imm)
{
	remote(qp, IBV_WR_RDMA_WRITE_WITH_IMM, rkey, addr, imm);
}

static void wr_send(struct ibv_qp_ex *qp) { remote(qp, IBV_WR_SEND, 0, 0, 0); }

static void wr_send_imm(struct ibv_qp_ex *qp, __be32 imm) { remote(qp, IBV_WR_SEND_WITH_IMM, 0, 0, imm); }

static void invalidate(struct ibv_qp_ex *qp, uint32_t opcode, uint32_t rkey)
{
	struct vbe_send_wr *w = begin(qp, opcode);
	if (w)
		w->inv_key = rkey;
}

static void wr_send_inv(struct ibv_qp_ex *qp, uint32_t rkey) { invalidate(qp, IBV_WR_SEND_WITH_INV, rkey); }

static void wr_local_inv(struct ibv_qp_ex *qp, uint32_t rkey) { invalidate(qp, IBV_WR_LOCAL_INV, rkey); }

static void atomic(struct ibv_qp_ex *qp, uint32_t opcode, uint32_t rkey, uint64_t addr, uint64_t a, uint64_t b)
{
	struct vbe_send_wr *w = begin(qp, opcode);
	if (!w)
		return;
	w->rkey = rkey;
	w->remote_addr = addr;
	w->compare_add = a;
	w->swap = b;
}

static void wr_atomic_cmp_swp(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, uint64_t compare, uint64_t swap)
{
	atomic(qp, IBV_WR_ATOMIC_CMP_AND_SWP, rkey, addr, compare, swap);
}

static void wr_atomic_fetch_add(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, uint64_t add)
{
	atomic(qp, IBV_WR_ATOMIC_FETCH_AND_ADD, rkey, addr, add, 0);
}

static void put_inline(struct ibv_qp_ex *qp, struct vbe_send_wr *w, size_t n, const struct ibv_data_buf *list);

static void wr_atomic_write(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, const void *word)
{
	struct vbe_send_wr *w = begin(qp, VB_WR_ATOMIC_WRITE);
	if (!w)
		return;
	w->rkey = rkey;
	w->remote_addr = addr;
	struct ibv_data_buf data = {(void *)(uintptr_t)word, 8};
	put_inline(qp, w, 1, &data);
}

static void wr_flush(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t addr, size_t len, uint8_t type, uint8_t level)
{
	struct vbe_send_wr *w = begin(qp, VB_WR_FLUSH);
	if (!w)
		return;
	if (len > UINT32_MAX) {
		of(qp)->builder->err = EINVAL;
		return;
	}
	w->rkey = rkey;
	w->remote_addr = addr;
	w->flush_len = (uint32_t)len;
	w->flush_type = type;
	w->flush_level = level;
}

static void wr_bind_mw(struct ibv_qp_ex *qp, struct ibv_mw *mw, uint32_t rkey, const struct ibv_mw_bind_info *info)
{
	struct vbe_send_wr *w = begin(qp, IBV_WR_BIND_MW);
	if (!w)
		return;
	if (!LIVE(vb_mw, MW, mw) || (info->length && !LIVE(vb_mr, MR, info->mr))) {
		of(qp)->builder->err = EINVAL;
		return;
	}
	w->mw_key = mw->rkey;
	w->mw_new_key = rkey;
	w->mw_lkey = info->mr ? info->mr->lkey : 0;
	w->mw_access = info->mw_access_flags & ~(unsigned int)IBV_ACCESS_LOCAL_WRITE;
	w->mw_addr = info->addr;
	w->mw_length = info->length;
}

static void wr_send_tso(struct ibv_qp_ex *qp, void *hdr, uint16_t hdr_sz, uint16_t mss)
{
	(void)hdr;
	(void)hdr_sz;
	(void)mss;
	of(qp)->builder->err = EINVAL;
}

/* --- setters --- */

static void wr_set_ud_addr(struct ibv_qp_ex *qp, struct ibv_ah *ah, uint32_t qpn, uint32_t qkey)
{
	struct vbe_send_wr *w = now(qp);
	if (!w)
		return;
	if (!LIVE(vb_ah, AH, ah)) {
		of(qp)->builder->err = EINVAL;
		return;
	}
	w->ah = OUTER(vb_ah, ah)->h.handle;
	w->qpn = qpn;
	w->qkey = qkey;
}

static void wr_set_xrc_srqn(struct ibv_qp_ex *qp, uint32_t srqn)
{
	struct vbe_send_wr *w = now(qp);
	if (w)
		w->srqn = srqn;
}

static void wr_set_sge_list(struct ibv_qp_ex *qp, size_t n, const struct ibv_sge *list)
{
	struct vb_qp *q = of(qp);
	struct builder *b = q->builder;
	struct vbe_send_wr *w = now(qp);
	if (!w)
		return;
	if (n > q->cap.max_send_sge) {
		b->err = EINVAL;
		return;
	}
	/* The store may move, so wr_complete sets w->sgl. */
	memcpy(b->sges + (size_t)(b->count - 1) * (q->cap.max_send_sge + 1), list, n * sizeof *list);
	w->num_sge = (uint32_t)n;
}

static void wr_set_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t addr, uint32_t length)
{
	struct ibv_sge one = {addr, length, lkey};
	wr_set_sge_list(qp, 1, &one);
}

static void put_inline(struct ibv_qp_ex *qp, struct vbe_send_wr *w, size_t n, const struct ibv_data_buf *list)
{
	struct vb_qp *q = of(qp);
	struct builder *b = q->builder;
	uint8_t *to = b->inline_bytes + (size_t)(b->count - 1) * (q->cap.max_inline_data + 1);
	uint32_t len = 0;
	for (size_t i = 0; i < n; i++) {
		if (list[i].length > q->cap.max_inline_data - len) {
			b->err = EINVAL;
			return;
		}
		memcpy(to + len, list[i].addr, list[i].length);
		len += (uint32_t)list[i].length;
	}
	w->flags |= IBV_SEND_INLINE;
	w->inline_len = len;
}

static void wr_set_inline_data_list(struct ibv_qp_ex *qp, size_t n, const struct ibv_data_buf *list)
{
	struct vbe_send_wr *w = now(qp);
	if (w)
		put_inline(qp, w, n, list);
}

static void wr_set_inline_data(struct ibv_qp_ex *qp, void *addr, size_t length)
{
	struct ibv_data_buf one = {addr, length};
	wr_set_inline_data_list(qp, 1, &one);
}

/* --- start and end --- */

static void wr_start(struct ibv_qp_ex *qp)
{
	struct builder *b = of(qp)->builder;
	int type = vb_defer_cancel();
	pthread_mutex_lock(&b->lock);
	b->cancel_type = type;
	b->count = b->setters = 0;
	b->num_layouts = b->num_pieces = 0;
	b->err = vb_usable(&of(qp)->h, QP) ? 0 : EINVAL;
}

static int wr_complete(struct ibv_qp_ex *qp)
{
	struct vb_qp *q = of(qp);
	struct builder *b = q->builder;
	if (b->setters)
		vb_wrong(b, EINVAL);
	int err = b->err;
	if (!err && b->count) {
		vb_place_layouts(b);
		for (uint32_t i = 0; i < b->count; i++) {
			struct vbe_send_wr *w = &b->wrs[i];
			if (w->num_sge)
				w->sgl = (uintptr_t)(b->sges + (size_t)i * (q->cap.max_send_sge + 1));
			if (w->flags & IBV_SEND_INLINE)
				w->inline_data =
					(uintptr_t)(b->inline_bytes + (size_t)i * (q->cap.max_inline_data + 1));
		}
		int64_t posted = -1; /* none, if the send queue has no room for all */
		int64_t r = q->h.backend->vbe_post_send(q->h.handle, b->wrs, b->count, &posted);
		err = r < 0 ? (int)-r : 0;
	}
	int type = b->cancel_type;
	pthread_mutex_unlock(&b->lock);
	vb_allow_cancel(&type);
	return err;
}

static void wr_abort(struct ibv_qp_ex *qp)
{
	struct builder *b = of(qp)->builder;
	int type = b->cancel_type;
	pthread_mutex_unlock(&b->lock);
	vb_allow_cancel(&type);
}

int vb_start_builder(struct vb_qp *q, uint64_t ops)
{
	struct builder *b = calloc(1, sizeof *b);
	if (!b)
		return ENOMEM;
	pthread_mutex_init(&b->lock, NULL);
	q->builder = b;
	q->extended = true;
	struct ibv_qp_ex *p = &q->pub;
	p->wr_start = wr_start;
	p->wr_complete = wr_complete;
	p->wr_abort = wr_abort;
	p->wr_set_sge = wr_set_sge;
	p->wr_set_sge_list = wr_set_sge_list;
	p->wr_set_inline_data = wr_set_inline_data;
	p->wr_set_inline_data_list = wr_set_inline_data_list;
	p->wr_set_ud_addr = wr_set_ud_addr;
	p->wr_set_xrc_srqn = wr_set_xrc_srqn;
	p->wr_send_tso = wr_send_tso;
#define OP(bit, name) p->name = ops & (bit) ? name : NULL
	OP(IBV_QP_EX_WITH_RDMA_READ, wr_rdma_read);
	OP(IBV_QP_EX_WITH_RDMA_WRITE, wr_rdma_write);
	OP(IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM, wr_rdma_write_imm);
	OP(IBV_QP_EX_WITH_SEND, wr_send);
	OP(IBV_QP_EX_WITH_SEND_WITH_IMM, wr_send_imm);
	OP(IBV_QP_EX_WITH_SEND_WITH_INV, wr_send_inv);
	OP(IBV_QP_EX_WITH_LOCAL_INV, wr_local_inv);
	OP(IBV_QP_EX_WITH_BIND_MW, wr_bind_mw);
	OP(IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP, wr_atomic_cmp_swp);
	OP(IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD, wr_atomic_fetch_add);
	OP(VB_EX_WITH_ATOMIC_WRITE, wr_atomic_write);
#undef OP
	/* Headers from rdma-core 46 on have wr_flush, behind wr_atomic_write. */
	void **last = (void **)&p->wr_atomic_write;
	last[1] = ops & VB_EX_WITH_FLUSH ? (void *)wr_flush : NULL;
	return 0;
}

void vb_end_builder(struct vb_qp *q)
{
	struct builder *b = q->builder;
	if (!b)
		return;
	free(b->wrs);
	free(b->sges);
	free(b->inline_bytes);
	free(b->layouts);
	free(b->pieces);
	free(b);
	q->builder = NULL;
}
