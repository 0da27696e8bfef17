/*
 * Indirect keys by mlx5's own verbs, between two queue pairs: lists, columns of a matrix, keys
 * of keys; as local and as remote keys; configured again, and invalidated. With an argument
 * the memory is registered on demand.
 */
#include <infiniband/mlx5dv.h>

#include "self.h"

enum { SIZE = 1 << 16, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

static struct self s;
static struct ibv_qp_ex *x[2];
static struct mlx5dv_qp_ex *dv[2];
static uint8_t *mem[2]; /* of the sender, of the receiver */
static struct ibv_mr *mr[2];
static int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;

static struct ibv_qp *mlx5_qp(struct self *s)
{
	struct ibv_qp_init_attr_ex a = {
		.send_cq = s->cq,
		.recv_cq = s->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 512},
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = s->pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND |
				  IBV_QP_EX_WITH_SEND_WITH_INV | IBV_QP_EX_WITH_LOCAL_INV};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS | MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
		.create_flags = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
		.send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST | MLX5DV_QP_EX_WITH_MR_INTERLEAVED |
				  MLX5DV_QP_EX_WITH_MKEY_CONFIGURE};
	return mlx5dv_create_qp(s->ctx, &a, &own);
}

static struct mlx5dv_mkey *key(uint16_t entries, uint32_t flags)
{
	struct mlx5dv_mkey_init_attr a = {
		.pd = s.pd, .create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT | flags, .max_entries = entries};
	struct mlx5dv_mkey *k = mlx5dv_create_mkey(&a);
	WANT(k && a.max_entries >= entries);
	return k;
}

/* done waits for a completion of a queue pair, and keeps at most one of the other. */
static struct ibv_wc done(int i)
{
	static struct ibv_wc other[2];
	static int waits[2];
	for (; !waits[i];) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(s.cq, 1, &wc);
		WANT(n >= 0);
		if (n) {
			int of = wc.qp_num == s.qp[1]->qp_num;
			WANT(!waits[of]);
			other[of] = wc;
			waits[of] = 1;
		}
	}
	waits[i] = 0;
	return other[i];
}

/* reconnect connects the queue pairs again, after an error. */
static void reconnect(void)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RESET};
	for (int i = 0; i < 2; i++)
		WANT(!ibv_modify_qp(s.qp[i], &a, IBV_QP_STATE));
	to_rts(&s, 0);
	to_rts(&s, 1);
}

static void begin(int i, uint64_t id)
{
	ibv_wr_start(x[i]);
	x[i]->wr_id = id;
	x[i]->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
}

/* configured completes the list that begin has begun, which must succeed with mlx5's opcode. */
static void configured(int i)
{
	WANT(!ibv_wr_complete(x[i]));
	struct ibv_wc wc = done(i);
	WANT(wc.status == IBV_WC_SUCCESS && wc.opcode == (enum ibv_wc_opcode)MLX5DV_WC_UMR);
}

static void list(int i, struct mlx5dv_mkey *k, uint32_t access, uint16_t n, struct ibv_sge *sge)
{
	begin(i, 1);
	mlx5dv_wr_mr_list(dv[i], k, access, n, sge);
	configured(i);
}

/* column configures a key as a column of a matrix of words in memory. */
static void column(int i, struct mlx5dv_mkey *k, uint32_t at, uint32_t rows, uint32_t cols)
{
	struct mlx5dv_mr_interleaved d = {
		.addr = (uintptr_t)mem[i] + 4 * at, .bytes_count = 4, .bytes_skip = 4 * (cols - 1), .lkey = mr[i]->lkey};
	begin(i, 2);
	mlx5dv_wr_mr_interleaved(dv[i], k, ALL, rows, 1, &d);
	configured(i);
}

/* op does one operation from qp[0], and returns its status. */
static enum ibv_wc_status op(enum ibv_wr_opcode code, uint32_t lkey, uint64_t addr, uint32_t n, uint32_t rkey, uint64_t to)
{
	struct ibv_sge sge = {addr, n, lkey};
	struct ibv_send_wr wr = {.sg_list = &sge,
				 .num_sge = 1,
				 .opcode = code,
				 .send_flags = IBV_SEND_SIGNALED,
				 .wr.rdma = {to, rkey}},
			   *bad;
	if (code == IBV_WR_SEND_WITH_INV)
		wr.invalidate_rkey = rkey;
	WANT(!ibv_post_send(s.qp[0], &wr, &bad));
	return done(0).status;
}

static enum ibv_wc_status invalidate(int i, uint32_t k)
{
	struct ibv_send_wr wr = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = k}, *bad;
	WANT(!ibv_post_send(s.qp[i], &wr, &bad));
	struct ibv_wc wc = done(i);
	WANT(wc.status != IBV_WC_SUCCESS || wc.opcode == IBV_WC_LOCAL_INV);
	return wc.status;
}

static void fill(void)
{
	for (int i = 0; i < SIZE; i++)
		mem[0][i] = (uint8_t)(i * 7 + i / 251), mem[1][i] = 0xee;
}

static struct ibv_sge piece(int i, uint32_t off, uint32_t n)
{
	return (struct ibv_sge){(uintptr_t)mem[i] + off, n, mr[i]->lkey};
}

/* Pieces of odd lengths in any order: a WRITE scatters, a READ gathers, and nothing
 * else is touched. */
static void lists(void)
{
	struct mlx5dv_mkey *k = key(3, 0);
	struct ibv_sge p[] = {piece(1, 5000, 101), piece(1, 17, 200), piece(1, 40000, 7001)};
	static uint8_t want[SIZE];
	fill();
	memset(want, 0xee, SIZE);
	memcpy(want + 5000, mem[0], 101);
	memcpy(want + 17, mem[0] + 101, 200);
	memcpy(want + 40000, mem[0] + 301, 7001);
	list(1, k, ALL, 3, p);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 7302, k->rkey, 0) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[1], want, SIZE));
	WANT(op(IBV_WR_RDMA_READ, mr[0]->lkey, (uintptr_t)mem[0] + 30000, 7002, k->rkey, 300) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[0] + 30000, mem[0] + 300, 7002));
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 2, k->rkey, 7301) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
	WANT(!mlx5dv_destroy_mkey(k));
}

/* A column of one matrix becomes a column of another by one WRITE, and a row by one
 * SEND; a whole matrix is transposed. */
static void matrix(void)
{
	enum { ROWS = 100, COLS = 48 };
	struct mlx5dv_mkey *from = key(2, 0), *to = key(2, 0), *t = key(COLS, 0);
	uint32_t *a = (uint32_t *)mem[0], *b = (uint32_t *)mem[1];
	fill();
	column(0, from, 5, ROWS, COLS);
	column(1, to, 9, ROWS, COLS);
	WANT(op(IBV_WR_RDMA_WRITE, from->lkey, 0, 4 * ROWS, to->rkey, 0) == IBV_WC_SUCCESS);
	for (int r = 0; r < ROWS; r++)
		for (int c = 0; c < COLS; c++)
			WANT(b[r * COLS + c] == (c == 9 ? a[r * COLS + 5] : 0xeeeeeeee));
	struct ibv_sge into = {0, 4 * ROWS, to->lkey};
	struct ibv_recv_wr rr = {.wr_id = 77, .sg_list = &into, .num_sge = 1}, *bad;
	WANT(!ibv_post_recv(s.qp[1], &rr, &bad));
	WANT(op(IBV_WR_SEND, mr[0]->lkey, (uintptr_t)mem[0], 4 * ROWS, 0, 0) == IBV_WC_SUCCESS);
	struct ibv_wc wc = done(1);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 77 && wc.byte_len == 4 * ROWS);
	for (int r = 0; r < ROWS; r++)
		WANT(b[r * COLS + 9] == a[r]);

	/* in each round one word for every row of the transposed matrix */
	struct mlx5dv_mr_interleaved d[COLS];
	for (int c = 0; c < COLS; c++)
		d[c] = (struct mlx5dv_mr_interleaved){
			.addr = (uintptr_t)(b + c * ROWS), .bytes_count = 4, .lkey = mr[1]->lkey};
	begin(1, 3);
	mlx5dv_wr_mr_interleaved(dv[1], t, ALL, ROWS, COLS, d);
	configured(1);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 4 * ROWS * COLS, t->rkey, 0) == IBV_WC_SUCCESS);
	for (int r = 0; r < ROWS; r++)
		for (int c = 0; c < COLS; c++)
			WANT(b[c * ROWS + r] == a[r * COLS + c]);
	WANT(!mlx5dv_destroy_mkey(from) && !mlx5dv_destroy_mkey(to) && !mlx5dv_destroy_mkey(t));
}

/* A key of a key and a region: the lower key is in use, and accesses reach all bytes. */
static void nested(void)
{
	struct mlx5dv_mkey *low = key(2, 0), *high = key(2, 0), *own = key(2, 0);
	struct ibv_sge p[] = {piece(1, 100, 50), piece(1, 1000, 50)};
	fill();
	list(1, low, ALL, 2, p);
	struct ibv_sge q[] = {{30, 40, low->lkey}, piece(1, 3000, 60)};
	list(1, high, ALL, 2, q);
	WANT(mlx5dv_destroy_mkey(low) == EBUSY && ibv_dereg_mr(mr[1]) == EBUSY);
	struct ibv_sge o[] = {piece(0, 777, 33), piece(0, 222, 67)};
	list(0, own, ALL, 2, o);
	WANT(op(IBV_WR_RDMA_WRITE, own->lkey, 0, 100, high->rkey, 0) == IBV_WC_SUCCESS);
	uint8_t want[100];
	memcpy(want, mem[0] + 777, 33);
	memcpy(want + 33, mem[0] + 222, 67);
	WANT(!memcmp(mem[1] + 130, want, 20) && !memcmp(mem[1] + 1000, want + 20, 20) && !memcmp(mem[1] + 3000, want + 40, 60));
	WANT(op(IBV_WR_RDMA_READ, own->lkey, 0, 100, high->rkey, 0) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[0] + 777, want, 33) && !memcmp(mem[0] + 222, want + 33, 67));
	WANT(invalidate(1, low->lkey) == IBV_WC_MW_BIND_ERR); /* another key uses it */
	reconnect();
	WANT(!mlx5dv_destroy_mkey(high) && !mlx5dv_destroy_mkey(low) && !mlx5dv_destroy_mkey(own));
}

/* A key is changed in place: its bytes, its rights, or both. The program need not wait for
 * that before it posts a request that uses the key. */
static void again(void)
{
	struct mlx5dv_mkey *k = key(4, 0);
	struct mlx5dv_mkey_conf_attr none = {0};
	struct ibv_sge first = piece(1, 0, 64), second = piece(1, 512, 64), local = piece(0, 64, 64);
	fill();
	begin(1, 1); /* first the rights, bytes later */
	mlx5dv_wr_mkey_configure(dv[1], k, 1, &none);
	mlx5dv_wr_set_mkey_access_flags(dv[1], ALL);
	configured(1);
	begin(1, 2);
	mlx5dv_wr_mkey_configure(dv[1], k, 1, &none);
	mlx5dv_wr_set_mkey_layout_list(dv[1], 1, &first);
	configured(1);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 64, k->rkey, 0) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[1], mem[0], 64) && mem[1][512] == 0xee);
	begin(1, 3);
	mlx5dv_wr_mkey_configure(dv[1], k, 1, &none);
	mlx5dv_wr_set_mkey_layout_list(dv[1], 1, &second);
	configured(1);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0] + 64, 64, k->rkey, 0) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[1], mem[0], 64) && !memcmp(mem[1] + 512, mem[0] + 64, 64));

	/* configured and used in one list of requests, unsignaled but for the last */
	ibv_wr_start(x[0]);
	x[0]->wr_flags = IBV_SEND_INLINE;
	mlx5dv_wr_mr_list(dv[0], k, ALL, 1, &local);
	x[0]->wr_flags = 0;
	ibv_wr_rdma_write(x[0], mr[1]->rkey, (uintptr_t)mem[1] + 2048);
	ibv_wr_set_sge(x[0], k->lkey, 0, 64);
	ibv_wr_local_inv(x[0], k->lkey);
	x[0]->wr_flags = IBV_SEND_INLINE;
	mlx5dv_wr_mkey_configure(dv[0], k, 2, &none);
	mlx5dv_wr_set_mkey_layout_list(dv[0], 1, &second);
	mlx5dv_wr_set_mkey_access_flags(dv[0], IBV_ACCESS_REMOTE_WRITE);
	x[0]->wr_flags = IBV_SEND_SIGNALED;
	x[0]->wr_id = 4;
	ibv_wr_rdma_write(x[0], k->rkey, 0);
	ibv_wr_set_sge(x[0], mr[0]->lkey, (uintptr_t)mem[0], 64);
	WANT(!ibv_wr_complete(x[0]));
	struct ibv_wc wc = done(0);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 4);
	WANT(!memcmp(mem[1] + 2048, mem[0] + 64, 64) && !memcmp(mem[1] + 512, mem[0], 64));

	/* only the rights: no more WRITEs */
	begin(1, 5);
	mlx5dv_wr_mkey_configure(dv[1], k, 1, &none);
	mlx5dv_wr_set_mkey_access_flags(dv[1], IBV_ACCESS_REMOTE_READ);
	configured(1);
	WANT(op(IBV_WR_RDMA_READ, mr[0]->lkey, (uintptr_t)mem[0] + 256, 64, k->rkey, 0) == IBV_WC_SUCCESS);
	WANT(!memcmp(mem[0] + 256, mem[0], 64));
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 64, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
	WANT(!mlx5dv_destroy_mkey(k));
}

/* A key that is not configured, or destroyed, gives no access, neither to the program nor to
 * its peer. */
static void gone(void)
{
	struct mlx5dv_mkey *k = key(1, 0), *r = key(1, MLX5DV_MKEY_INIT_ATTR_FLAGS_REMOTE_INVALIDATE);
	struct ibv_sge p = piece(1, 0, 64), o = piece(0, 0, 64);
	struct ibv_recv_wr rr = {.wr_id = 88}, *bad;
	fill();
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 8, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR); /* new */
	reconnect();
	list(1, k, ALL, 1, &p);
	WANT(invalidate(1, k->lkey) == IBV_WC_SUCCESS);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 8, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
	WANT(op(IBV_WR_RDMA_READ, mr[0]->lkey, (uintptr_t)mem[0], 8, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
	list(0, k, ALL, 1, &o);
	begin(0, 6);
	x[0]->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_local_inv(x[0], k->lkey);
	WANT(!ibv_wr_complete(x[0]) && done(0).status == IBV_WC_SUCCESS);
	WANT(op(IBV_WR_RDMA_WRITE, k->lkey, 0, 8, mr[1]->rkey, (uintptr_t)mem[1]) == IBV_WC_LOC_PROT_ERR);
	reconnect();

	/* a peer may invalidate a key that allows it, and no other */
	list(1, r, ALL, 1, &p);
	WANT(!ibv_post_recv(s.qp[1], &rr, &bad));
	WANT(op(IBV_WR_SEND_WITH_INV, 0, 0, 0, r->rkey, 0) == IBV_WC_SUCCESS);
	struct ibv_wc wc = done(1);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wc_flags & IBV_WC_WITH_INV && wc.invalidated_rkey == r->rkey);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 8, r->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
	list(1, k, ALL, 1, &p);
	WANT(!ibv_post_recv(s.qp[1], &rr, &bad));
	WANT(op(IBV_WR_SEND_WITH_INV, 0, 0, 0, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
	WANT(done(1).status == IBV_WC_LOC_ACCESS_ERR);
	reconnect();
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 64, k->rkey, 0) == IBV_WC_SUCCESS);
	uint32_t was = k->rkey;
	WANT(!mlx5dv_destroy_mkey(k) && !mlx5dv_destroy_mkey(r) && mlx5dv_destroy_mkey(r) == EINVAL);
	WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 64, was, 0) == IBV_WC_REM_ACCESS_ERR);
	reconnect();
}

/* A wrong configuration completes with an error, and the key is then not configured. */
static void wrong(void)
{
	struct mlx5dv_mkey *k = key(2, 0);
	struct ibv_mr *only_read = ibv_reg_mr(s.pd, mem[0], 64, 0);
	WANT(only_read);
	struct ibv_sge bad[] = {piece(1, SIZE - 8, 9), {(uintptr_t)mem[1], 8, mr[1]->lkey ^ 0x100}, {0, 8, k->lkey},
				{(uintptr_t)mem[0], 8, only_read->lkey}};
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
		begin(1, 7);
		mlx5dv_wr_mr_list(dv[1], k, ALL, 1, &bad[i]);
		WANT(!ibv_wr_complete(x[1]));
		struct ibv_wc wc = done(1);
		WANT(wc.status == IBV_WC_MW_BIND_ERR && wc.wr_id == 7);
		reconnect();
		WANT(op(IBV_WR_RDMA_WRITE, mr[0]->lkey, (uintptr_t)mem[0], 8, k->rkey, 0) == IBV_WC_REM_ACCESS_ERR);
		reconnect();
	}
	WANT(!ibv_dereg_mr(only_read) && !mlx5dv_destroy_mkey(k));
}

/* start makes the objects, in a context of its own. */
static void start(void)
{
	struct ibv_context *ctx = open_first();
	WANT(mlx5dv_is_supported(ctx->device));
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	WANT(pd);
	s = connect_made(ctx, pd, mlx5_qp);
	for (int i = 0; i < 2; i++) {
		WANT((x[i] = ibv_qp_to_qp_ex(s.qp[i])) && (dv[i] = mlx5dv_qp_ex_from_ibv_qp_ex(x[i])));
		WANT(mr[i] = ibv_reg_mr(pd, mem[i], SIZE, rights));
	}
}

/* Keys of keys that a program does not destroy end with its context: the device, which
 * another context keeps open, has room for a few regions and keys only. */
static void left(void)
{
	for (int i = 0; i < 20; i++) {
		start();
		struct mlx5dv_mkey *k[4];
		struct ibv_sge p = piece(0, 0, 64);
		for (int i = 0; i < 4; i++) {
			list(0, k[i] = key(1, 0), ALL, 1, &p);
			p = (struct ibv_sge){0, 64, k[i]->lkey};
		}
		WANT(!ibv_close_device(s.ctx));
	}
}

int main(int argc, char **argv)
{
	(void)argv;
	struct ibv_context *keep = open_first();
	if (argc > 1)
		rights |= IBV_ACCESS_ON_DEMAND;
	for (int i = 0; i < 2; i++)
		WANT(mem[i] = malloc(SIZE));
	left();
	start();
	lists();
	matrix();
	nested();
	again();
	gone();
	wrong();
	WANT(!ibv_dereg_mr(mr[0]) && !ibv_dereg_mr(mr[1]));
	close_self(&s);
	WANT(!ibv_close_device(keep));
	puts("ok");
	return 0;
}
