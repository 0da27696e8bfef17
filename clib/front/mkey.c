/*
 * Indirect memory keys by mlx5's interface: mlx5dv_create_mkey, and the requests that
 * configure them, which are built between ibv_wr_start and ibv_wr_complete.
 *
 * mlx5dv_wr_mkey_configure begins a request that changes nothing of the key; each setter
 * then changes one thing. mlx5dv_wr_mr_list and mlx5dv_wr_mr_interleaved are that with
 * two setters. ibv_wr_complete returns the first mistake.
 */
#include <stdlib.h>

#include "builder.h"

/* --- keys --- */

PUBLIC struct mlx5dv_mkey *mlx5dv_create_mkey(struct mlx5dv_mkey_init_attr *attr)
{
	const uint32_t known =
		MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT | MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE;
	struct vb_pd *p = attr ? LIVE(vb_pd, PD, attr->pd) : NULL;
	if (!p)
		return vb_fail(EINVAL);
	if (!mlx5dv_is_supported(attr->pd->context->device) || !attr->create_flags || attr->create_flags & ~known)
		return vb_fail(EOPNOTSUPP);
	struct vb_mkey *m = vb_new(MKEY, p->h.backend);
	if (!m)
		return NULL;
	uint32_t key;
	int64_t h = p->h.backend->vbe_create_mkey(
		p->h.handle, attr->max_entries,
		attr->create_flags & MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE, &key);
	if (h < 0) {
		vb_free(MKEY, &m->h);
		return vb_fail((int)-h);
	}
	m->h.handle = (uint64_t)h;
	m->pd = attr->pd;
	m->max = attr->max_entries;
	m->pub = (struct mlx5dv_mkey){.lkey = key, .rkey = key};
	vb_enter(&m->h, p);
	return &m->pub;
}

PUBLIC int mlx5dv_destroy_mkey(struct mlx5dv_mkey *mkey)
{
	if (!mkey || !vb_is(&OUTER(vb_mkey, mkey)->h, MKEY))
		return vb_num(-EINVAL);
	struct vb_mkey *m = OUTER(vb_mkey, mkey);
	int64_t r = vb_undo(&m->h, MKEY);
	if (r < 0)
		return vb_num(r);
	vb_free(MKEY, &m->h);
	return 0;
}

/* --- requests --- */

static struct vb_qp *of(struct mlx5dv_qp_ex *dv)
{
	return (struct vb_qp *)((char *)dv - offsetof(struct vb_qp, dv));
}

/* room returns a store with room for n more elements, which may have moved; NULL if there
 * is no memory. */
static void *room(void *store, size_t size, size_t used, size_t *have, size_t n)
{
	if (n <= *have - used)
		return store;
	size_t want = used + n < 16 ? 16 : 2 * (used + n);
	void *p = realloc(store, want * size);
	if (p)
		*have = want;
	return p;
}

/* begin adds a request that changes nothing of a key. */
static void begin(struct vb_qp *q, struct mlx5dv_mkey *mkey, uint32_t setters)
{
	struct builder *b = q->builder;
	/* mlx5 refuses these requests without the flag: programs must notice that here too. */
	if (!(q->pub.wr_flags & IBV_SEND_INLINE))
		vb_wrong(b, EOPNOTSUPP);
	if (!LIVE(vb_mkey, MKEY, mkey))
		vb_wrong(b, EINVAL);
	struct vbe_send_wr *w = vb_begin(q, IBV_WR_DRIVER1);
	if (!w)
		return;
	void *store = room(b->layouts, sizeof *b->layouts, b->num_layouts, &b->room_layouts, 1);
	if (!store) {
		vb_wrong(b, ENOMEM);
		return;
	}
	b->layouts = store;
	b->layouts[b->num_layouts++] =
		(struct vbe_layout){.key = mkey->lkey, .keep = VBE_KEEP_ACCESS | VBE_KEEP_LAYOUT};
	w->layout = b->num_layouts;
	b->setters = setters;
	b->max = OUTER(vb_mkey, mkey)->max;
}

/* set counts a setter, and returns the layout that it changes; NULL after a mistake. */
static struct vbe_layout *set(struct builder *b, uint32_t what)
{
	struct vbe_layout *l = b->setters ? &b->layouts[b->num_layouts - 1] : NULL;
	if (!l || !(l->keep & what))
		vb_wrong(b, EINVAL); /* too many, or the same twice */
	if (b->err)
		return NULL;
	l->keep &= ~what;
	b->setters--;
	return l;
}

/* lay returns room for the pieces of a key; NULL after a mistake. */
static struct vbe_piece *lay(struct builder *b, uint64_t repeat, uint16_t n)
{
	struct vbe_layout *l = set(b, VBE_KEEP_LAYOUT);
	if (!l)
		return NULL;
	void *store = n && n <= b->max ? room(b->pieces, sizeof *b->pieces, b->num_pieces, &b->room_pieces, n) : NULL;
	if (!store) {
		vb_wrong(b, n ? ENOMEM : EINVAL);
		return NULL;
	}
	b->pieces = store;
	l->repeat = repeat;
	l->num = n;
	l->pieces = b->num_pieces;
	b->num_pieces += n;
	return b->pieces + l->pieces;
}

static void set_access(struct builder *b, uint32_t access)
{
	const uint32_t known =
		IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
	if (access & ~known)
		vb_wrong(b, EINVAL);
	struct vbe_layout *l = set(b, VBE_KEEP_ACCESS);
	if (l)
		l->access = access;
}

static void set_list(struct builder *b, uint16_t n, const struct ibv_sge *list)
{
	struct vbe_piece *to = lay(b, 1, n);
	for (uint16_t i = 0; to && i < n; i++)
		to[i] = (struct vbe_piece){.addr = list[i].addr, .bytes = list[i].length, .lkey = list[i].lkey};
}

static void set_interleaved(struct builder *b, uint32_t repeat, uint16_t n, const struct mlx5dv_mr_interleaved *list)
{
	struct vbe_piece *to = lay(b, repeat, n);
	for (uint16_t i = 0; to && i < n; i++)
		to[i] = (struct vbe_piece){
			.addr = list[i].addr, .bytes = list[i].bytes_count, .skip = list[i].bytes_skip, .lkey = list[i].lkey};
}

void vb_place_layouts(struct builder *b)
{
	for (size_t i = 0; i < b->num_layouts; i++)
		b->layouts[i].pieces = (uintptr_t)(b->pieces + b->layouts[i].pieces);
	for (uint32_t i = 0; b->num_layouts && i < b->count; i++)
		if (b->wrs[i].layout)
			b->wrs[i].layout = (uintptr_t)(b->layouts + b->wrs[i].layout - 1);
}

/* --- as mlx5 calls them --- */

static void wr_mkey_configure(struct mlx5dv_qp_ex *dv, struct mlx5dv_mkey *mkey, uint8_t setters,
			      struct mlx5dv_mkey_conf_attr *attr)
{
	/* No key has a signature, so there is nothing to reset. */
	if (attr->comp_mask || attr->conf_flags & ~(uint32_t)MLX5DV_MKEY_CONF_FLAG_RESET_SIG_ATTR)
		vb_wrong(of(dv)->builder, EOPNOTSUPP);
	begin(of(dv), mkey, setters);
}

static void wr_set_mkey_access_flags(struct mlx5dv_qp_ex *dv, uint32_t access) { set_access(of(dv)->builder, access); }

static void wr_set_mkey_layout_list(struct mlx5dv_qp_ex *dv, uint16_t n, const struct ibv_sge *list)
{
	set_list(of(dv)->builder, n, list);
}

static void wr_set_mkey_layout_interleaved(struct mlx5dv_qp_ex *dv, uint32_t repeat, uint16_t n,
					   const struct mlx5dv_mr_interleaved *list)
{
	set_interleaved(of(dv)->builder, repeat, n, list);
}

static void wr_mr_list(struct mlx5dv_qp_ex *dv, struct mlx5dv_mkey *mkey, uint32_t access, uint16_t n,
		       struct ibv_sge *list)
{
	begin(of(dv), mkey, 2);
	set_access(of(dv)->builder, access);
	set_list(of(dv)->builder, n, list);
}

static void wr_mr_interleaved(struct mlx5dv_qp_ex *dv, struct mlx5dv_mkey *mkey, uint32_t access, uint32_t repeat,
			      uint16_t n, struct mlx5dv_mr_interleaved *list)
{
	begin(of(dv), mkey, 2);
	set_access(of(dv)->builder, access);
	set_interleaved(of(dv)->builder, repeat, n, list);
}

/* Not supported: signatures, encryption, raw requests, copies, DC. */
static void refuse(struct mlx5dv_qp_ex *dv) { vb_wrong(of(dv)->builder, EOPNOTSUPP); }

static void wr_set_mkey_sig_block(struct mlx5dv_qp_ex *dv, const struct mlx5dv_sig_block_attr *attr)
{
	(void)attr;
	refuse(dv);
}

static void wr_set_mkey_crypto(struct mlx5dv_qp_ex *dv, const struct mlx5dv_crypto_attr *attr)
{
	(void)attr;
	refuse(dv);
}

static void wr_raw_wqe(struct mlx5dv_qp_ex *dv, const void *wqe)
{
	(void)wqe;
	refuse(dv);
}

static void wr_memcpy(struct mlx5dv_qp_ex *dv, uint32_t to_lkey, uint64_t to, uint32_t from_lkey, uint64_t from, size_t n)
{
	(void)to_lkey, (void)to, (void)from_lkey, (void)from, (void)n;
	refuse(dv);
}

static void wr_set_dc_addr(struct mlx5dv_qp_ex *dv, struct ibv_ah *ah, uint32_t dctn, uint64_t key)
{
	(void)ah, (void)dctn, (void)key;
	refuse(dv);
}

static void wr_set_dc_addr_stream(struct mlx5dv_qp_ex *dv, struct ibv_ah *ah, uint32_t dctn, uint64_t key, uint16_t id)
{
	(void)ah, (void)dctn, (void)key, (void)id;
	refuse(dv);
}

void vb_fill_dv(struct vb_qp *q)
{
	q->dv = (struct mlx5dv_qp_ex){.wr_set_dc_addr = wr_set_dc_addr,
				      .wr_mr_interleaved = wr_mr_interleaved,
				      .wr_mr_list = wr_mr_list,
				      .wr_mkey_configure = wr_mkey_configure,
				      .wr_set_mkey_access_flags = wr_set_mkey_access_flags,
				      .wr_set_mkey_layout_list = wr_set_mkey_layout_list,
				      .wr_set_mkey_layout_interleaved = wr_set_mkey_layout_interleaved,
				      .wr_set_mkey_sig_block = wr_set_mkey_sig_block,
				      .wr_raw_wqe = wr_raw_wqe,
				      .wr_set_dc_addr_stream = wr_set_dc_addr_stream,
				      .wr_memcpy = wr_memcpy,
				      .wr_set_mkey_crypto = wr_set_mkey_crypto};
}

PUBLIC struct mlx5dv_qp_ex *mlx5dv_qp_ex_from_ibv_qp_ex(struct ibv_qp_ex *qp)
{
	struct vb_qp *q = qp ? LIVE(vb_qp, QP, &qp->qp_base) : NULL;
	return q && q->extended ? &q->dv : vb_fail(EINVAL);
}
