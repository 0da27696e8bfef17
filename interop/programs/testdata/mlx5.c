/*
 * mlx5's own verbs without traffic: what is refused, and how; the flags of queue pairs. With
 * an argument VERBENA_IDENTITY is not mlx5, and everything is refused.
 */
#include <infiniband/mlx5dv.h>

#include "self.h"

#define REFUSED(call, err)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT((call) == NULL);                                                                                  \
		WANT(errno == (err));                                                                                  \
	} while (0)

static struct ibv_context *ctx;
static struct ibv_pd *pd;

static struct ibv_qp_init_attr_ex attr_of(struct ibv_cq *send, struct ibv_cq *recv)
{
	return (struct ibv_qp_init_attr_ex){
		.send_cq = send,
		.recv_cq = recv,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND};
}

static void other(struct ibv_device *device)
{
	struct mlx5dv_context c = {0};
	struct ibv_cq *cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	struct ibv_qp_init_attr_ex a = attr_of(cq, cq);
	struct mlx5dv_mkey_init_attr k = {pd, MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, 4};
	WANT(cq && !mlx5dv_is_supported(device) && mlx5dv_query_device(ctx, &c) == EOPNOTSUPP);
	REFUSED(mlx5dv_open_device(device, NULL), EOPNOTSUPP);
	REFUSED(mlx5dv_create_qp(ctx, &a, NULL), EOPNOTSUPP);
	REFUSED(mlx5dv_create_mkey(&k), EOPNOTSUPP);
	WANT(!ibv_destroy_cq(cq));
}

static void devices(struct ibv_device *device)
{
	struct mlx5dv_context_attr devx = {.flags = MLX5DV_CONTEXT_FLAGS_DEVX}, newer = {.comp_mask = 1}, plain = {0};
	WANT(mlx5dv_is_supported(device) && !mlx5dv_is_supported(NULL));
	REFUSED(mlx5dv_open_device(device, &devx), EOPNOTSUPP);
	REFUSED(mlx5dv_open_device(device, &newer), EOPNOTSUPP);
	REFUSED(mlx5dv_open_device(NULL, NULL), EINVAL);
	for (int i = 0; i < 2; i++) {
		struct ibv_context *c = mlx5dv_open_device(device, i ? &plain : NULL);
		struct ibv_device_attr a;
		WANT(c && !ibv_query_device(c, &a) && a.vendor_id == 0x02c9 && !ibv_close_device(c));
	}
	struct mlx5dv_context c;
	memset(&c, 0xff, sizeof c);
	WANT(!mlx5dv_query_device(ctx, &c) && !c.version && !c.flags && !c.comp_mask);
	WANT(!c.max_wr_memcpy_length && !c.sig_caps.block_prot && !c.crypto_caps.flags && !c.dci_streams_caps.max_log_num_concurent);
	memset(&c, 0xff, sizeof c);
	c.comp_mask = MLX5DV_CONTEXT_MASK_SWP; /* other fields must not change */
	WANT(!mlx5dv_query_device(ctx, &c) && !c.sw_parsing_caps.supported_qpts && c.cqe_comp_caps.max_num == UINT32_MAX);
	WANT(mlx5dv_query_device(NULL, &c) == EINVAL && mlx5dv_query_device(ctx, NULL) == EINVAL);
	REFUSED(mlx5dv_devx_alloc_uar(ctx, 0), EOPNOTSUPP);
	struct mlx5dv_port port;
	WANT(mlx5dv_query_port(ctx, 1, &port) == EOPNOTSUPP);
}

static void queue_pairs(void)
{
	enum { FLAGS = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS, OPS = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS };
	const uint32_t on = MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE, off = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE;
	const uint64_t list = MLX5DV_QP_EX_WITH_MR_LIST;
	struct ibv_cq *cq = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	WANT(cq);
	struct ibv_qp_init_attr_ex a = attr_of(cq, cq), uc = a;
	uc.qp_type = IBV_QPT_UC;
	struct {
		struct ibv_qp_init_attr_ex *attr;
		struct mlx5dv_qp_init_attr own;
		int err;
	} cases[] = {
		{&a, {0}, 0},
		{&a, {.create_flags = UINT32_MAX, .send_ops_flags = UINT64_MAX}, 0}, /* ignored: comp_mask is 0 */
		{&a, {.comp_mask = FLAGS, .create_flags = on}, 0},
		{&a, {.comp_mask = FLAGS | OPS, .create_flags = off, .send_ops_flags = list}, 0},
		{&uc, {.comp_mask = FLAGS | OPS, .create_flags = off}, 0},
		{&a, {.comp_mask = FLAGS, .create_flags = on | off}, EINVAL},
		{&a, {.comp_mask = FLAGS, .create_flags = MLX5DV_QP_CREATE_SIG_PIPELINING}, EOPNOTSUPP},
		{&a, {.comp_mask = FLAGS, .create_flags = 1u << 31}, EOPNOTSUPP},
		{&a, {.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_DC}, EOPNOTSUPP},
		{&a, {.comp_mask = 1ull << 40}, EOPNOTSUPP},
		{&a, {.comp_mask = OPS, .send_ops_flags = list | MLX5DV_QP_EX_WITH_RAW_WQE}, EOPNOTSUPP},
		{&a, {.comp_mask = OPS, .send_ops_flags = MLX5DV_QP_EX_WITH_MEMCPY}, EOPNOTSUPP},
		{&uc, {.comp_mask = OPS, .send_ops_flags = list}, EOPNOTSUPP},
	};
	for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
		errno = 0;
		struct ibv_qp *q = mlx5dv_create_qp(ctx, cases[i].attr, &cases[i].own);
		WANT(cases[i].err ? !q && errno == cases[i].err : q && !ibv_destroy_qp(q));
	}
	REFUSED(mlx5dv_create_qp(NULL, &a, NULL), EINVAL);
	REFUSED(mlx5dv_create_qp(ctx, NULL, NULL), EINVAL);
	WANT(!ibv_destroy_cq(cq));
}

/* ibv_wr_complete returns mistakes in requests, and then posts nothing. */
static void requests(void)
{
	struct self s = {.ctx = ctx, .pd = pd};
	WANT(s.cq = ibv_create_cq(ctx, 16, NULL, NULL, 0));
	WANT(!ibv_query_gid(ctx, 1, 0, &s.gid));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex a = attr_of(s.cq, s.cq);
		struct mlx5dv_qp_init_attr own = {.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
						  .send_ops_flags = MLX5DV_QP_EX_WITH_MKEY_CONFIGURE};
		WANT(s.qp[i] = mlx5dv_create_qp(ctx, &a, &own));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(s.qp[0]);
	struct mlx5dv_qp_ex *dv = mlx5dv_qp_ex_from_ibv_qp_ex(x);
	WANT(dv && !mlx5dv_qp_ex_from_ibv_qp_ex(NULL));
	struct mlx5dv_mkey_init_attr ka = {pd, MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, 2};
	struct mlx5dv_mkey *k = mlx5dv_create_mkey(&ka), *old = mlx5dv_create_mkey(&ka);
	WANT(k && k->lkey && k->lkey == k->rkey && old && !mlx5dv_destroy_mkey(old));
	static char buf[64];
	struct ibv_mr *mr = ibv_reg_mr(pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE);
	WANT(mr);
	struct ibv_sge sge[3] = {{(uintptr_t)buf, 8, mr->lkey}, {(uintptr_t)buf, 8, mr->lkey}, {(uintptr_t)buf, 8, mr->lkey}};
	struct mlx5dv_mr_interleaved il[3] = {{(uintptr_t)buf, 8, 8, mr->lkey}};
	struct mlx5dv_mkey_conf_attr none = {0}, reset = {.conf_flags = MLX5DV_MKEY_CONF_FLAG_RESET_SIG_ATTR},
				     newer = {.conf_flags = 2}, masked = {.comp_mask = 1};
	struct mlx5dv_sig_block_attr sig = {0};
	struct mlx5dv_crypto_attr crypto = {0};
	const uint32_t rw = IBV_ACCESS_LOCAL_WRITE;
#define LIST(err, what)                                                                                                \
	do {                                                                                                           \
		ibv_wr_start(x);                                                                                       \
		x->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;                                                     \
		what;                                                                                                  \
		WANT(ibv_wr_complete(x) == (err));                                                                     \
	} while (0)
	LIST(EOPNOTSUPP, (x->wr_flags = IBV_SEND_SIGNALED, mlx5dv_wr_mr_list(dv, k, rw, 1, sge)));
	LIST(EINVAL, mlx5dv_wr_mr_list(dv, NULL, rw, 1, sge));
	LIST(EINVAL, mlx5dv_wr_mr_list(dv, old, rw, 1, sge));
	LIST(EINVAL, mlx5dv_wr_mr_list(dv, k, rw, 0, sge));
	LIST(ENOMEM, mlx5dv_wr_mr_list(dv, k, rw, 3, sge));
	LIST(ENOMEM, mlx5dv_wr_mr_interleaved(dv, k, rw, 2, 3, il));
	LIST(EINVAL, mlx5dv_wr_mr_list(dv, k, IBV_ACCESS_MW_BIND, 1, sge));
	LIST(EINVAL, mlx5dv_wr_set_mkey_access_flags(dv, rw)); /* no request before */
	LIST(EINVAL, mlx5dv_wr_mkey_configure(dv, k, 1, &none)); /* a setter is missing */
	LIST(EINVAL, (mlx5dv_wr_mkey_configure(dv, k, 2, &none), mlx5dv_wr_set_mkey_access_flags(dv, rw), ibv_wr_send(x)));
	LIST(EINVAL, (mlx5dv_wr_mkey_configure(dv, k, 1, &none), mlx5dv_wr_set_mkey_access_flags(dv, rw),
		      mlx5dv_wr_set_mkey_layout_list(dv, 1, sge))); /* one too many */
	LIST(EINVAL, (mlx5dv_wr_mkey_configure(dv, k, 2, &none), mlx5dv_wr_set_mkey_layout_list(dv, 1, sge),
		      mlx5dv_wr_set_mkey_layout_interleaved(dv, 1, 1, il)));
	LIST(EINVAL, (mlx5dv_wr_mkey_configure(dv, k, 2, &none), mlx5dv_wr_set_mkey_access_flags(dv, rw),
		      mlx5dv_wr_set_mkey_access_flags(dv, rw)));
	LIST(EOPNOTSUPP, mlx5dv_wr_mkey_configure(dv, k, 0, &newer));
	LIST(EOPNOTSUPP, mlx5dv_wr_mkey_configure(dv, k, 0, &masked));
	LIST(EOPNOTSUPP, (mlx5dv_wr_mkey_configure(dv, k, 2, &none), mlx5dv_wr_set_mkey_layout_list(dv, 1, sge),
			  mlx5dv_wr_set_mkey_sig_block(dv, &sig)));
	LIST(EOPNOTSUPP, (mlx5dv_wr_mkey_configure(dv, k, 1, &none), mlx5dv_wr_set_mkey_crypto(dv, &crypto)));
	LIST(EOPNOTSUPP, mlx5dv_wr_memcpy(dv, mr->lkey, (uintptr_t)buf, mr->lkey, (uintptr_t)buf + 8, 8));
	LIST(EOPNOTSUPP, mlx5dv_wr_raw_wqe(dv, buf));
	LIST(EOPNOTSUPP, (ibv_wr_send(x), mlx5dv_wr_set_dc_addr(dv, NULL, 0, 0)));
	struct ibv_send_wr wr = {.opcode = IBV_WR_DRIVER1}, *bad;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
	struct ibv_wc wc;
	WANT(ibv_poll_cq(s.cq, 1, &wc) == 0);
	LIST(0, mlx5dv_wr_mkey_configure(dv, k, 0, &reset));
	int n;
	while (!(n = ibv_poll_cq(s.cq, 1, &wc)))
		;
	WANT(n == 1 && wc.status == IBV_WC_SUCCESS);

	struct mlx5dv_mkey_init_attr w = ka;
	w.create_flags = 0;
	REFUSED(mlx5dv_create_mkey(&w), EOPNOTSUPP);
	w.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT | MLX5DV_MKEY_INIT_ATTR_FLAGS_BLOCK_SIGNATURE;
	REFUSED(mlx5dv_create_mkey(&w), EOPNOTSUPP);
	w = ka;
	w.max_entries = 0;
	REFUSED(mlx5dv_create_mkey(&w), EINVAL);
	w.pd = NULL;
	REFUSED(mlx5dv_create_mkey(&w), EINVAL);
	REFUSED(mlx5dv_create_mkey(NULL), EINVAL);
	WANT(mlx5dv_destroy_mkey(NULL) == EINVAL && ibv_dealloc_pd(pd) == EBUSY);
	WANT(!mlx5dv_destroy_mkey(k) && !ibv_dereg_mr(mr));
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
}

/* A short message is kept with its completion, and in memory when that is polled; or before,
 * with DISABLE_SCATTER_TO_CQE. */
static void scatter(uint32_t flags, int waits)
{
	struct ibv_cq *sent = ibv_create_cq(ctx, 4, NULL, NULL, 0), *got = ibv_create_cq(ctx, 4, NULL, NULL, 0);
	WANT(sent && got);
	struct self s = {.ctx = ctx, .pd = pd};
	WANT(!ibv_query_gid(ctx, 1, 0, &s.gid));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex a = attr_of(i ? got : sent, i ? got : sent);
		struct mlx5dv_qp_init_attr own = {.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS, .create_flags = flags};
		WANT(s.qp[i] = mlx5dv_create_qp(ctx, &a, &own));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	static char from[16], to[16];
	memset(from, 'a', sizeof from);
	memset(to, 'b', sizeof to);
	struct ibv_mr *m[2] = {ibv_reg_mr(pd, from, sizeof from, 0), ibv_reg_mr(pd, to, sizeof to, IBV_ACCESS_LOCAL_WRITE)};
	WANT(m[0] && m[1]);
	struct ibv_sge out = {(uintptr_t)from, sizeof from, m[0]->lkey}, in = {(uintptr_t)to, sizeof to, m[1]->lkey};
	struct ibv_recv_wr rr = {.sg_list = &in, .num_sge = 1}, *rbad;
	struct ibv_send_wr wr = {.sg_list = &out, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	struct ibv_wc wc;
	int n;
	WANT(!ibv_post_recv(s.qp[1], &rr, &rbad) && !ibv_post_send(s.qp[0], &wr, &bad));
	while (!(n = ibv_poll_cq(sent, 1, &wc)))
		;
	WANT(n == 1 && wc.status == IBV_WC_SUCCESS);
	WANT(to[0] == (waits ? 'b' : 'a') && to[15] == to[0]);
	while (!(n = ibv_poll_cq(got, 1, &wc)))
		;
	WANT(n == 1 && wc.status == IBV_WC_SUCCESS && !memcmp(from, to, sizeof to));
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(sent) && !ibv_destroy_cq(got));
	WANT(!ibv_dereg_mr(m[0]) && !ibv_dereg_mr(m[1]));
}

int main(int argc, char **argv)
{
	(void)argv;
	ctx = open_first();
	WANT(pd = ibv_alloc_pd(ctx));
	if (argc > 1) {
		other(ctx->device);
	} else {
		devices(ctx->device);
		queue_pairs();
		requests();
		scatter(0, 1);
		scatter(MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE, 1);
		scatter(MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE, 0);
	}
	WANT(!ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	puts("ok");
	return 0;
}
