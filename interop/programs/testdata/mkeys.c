/*
 * Indirect keys between two processes: the child writes into, reads from and sends to rows in
 * its parent's memory. At the end the key is invalidated, and the child is refused.
 */
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <infiniband/mlx5dv.h>

#include "self.h"

enum {
	ROWS = 1000,
	ROW = 100,  /* bytes of each row that the key has */
	SKIP = 61,  /* bytes behind each row that it does not have */
	LEN = ROWS * ROW,
	SIZE = ROWS * (ROW + SKIP),
	ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
};

static int talk; /* to the other process */
static struct ibv_context *ctx;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct mlx5dv_mkey *rows, *halves;
static struct ibv_mr *mr;
static uint8_t *mem;

/* swap exchanges n bytes with the other process. Each waits for the other. */
static void swap(const void *mine, void *theirs, size_t n)
{
	WANT(send(talk, mine, n, MSG_NOSIGNAL) == (ssize_t)n && recv(talk, theirs, n, MSG_WAITALL) == (ssize_t)n);
}

static void meet(void)
{
	char a = 'x', b;
	swap(&a, &b, 1);
}

static struct ibv_wc done(void)
{
	struct ibv_wc wc;
	int n;
	while (!(n = ibv_poll_cq(cq, 1, &wc)))
		;
	WANT(n == 1);
	return wc;
}

static struct mlx5dv_mkey *key(void)
{
	struct mlx5dv_mkey_init_attr a = {pd, MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, 4};
	struct mlx5dv_mkey *k = mlx5dv_create_mkey(&a);
	WANT(k);
	return k;
}

/* keys makes two keys: of the rows, and of all memory with its halves swapped. */
static void keys(void)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
	struct mlx5dv_qp_ex *dv = mlx5dv_qp_ex_from_ibv_qp_ex(x);
	struct mlx5dv_mr_interleaved r = {(uintptr_t)mem, ROW, SKIP, mr->lkey};
	struct ibv_sge h[2] = {{(uintptr_t)mem + LEN / 2, LEN / 2, mr->lkey}, {(uintptr_t)mem, LEN / 2, mr->lkey}};
	rows = key();
	halves = key();
	ibv_wr_start(x);
	x->wr_flags = IBV_SEND_INLINE;
	mlx5dv_wr_mr_interleaved(dv, rows, ALL, ROWS, 1, &r);
	x->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
	mlx5dv_wr_mr_list(dv, halves, ALL, 2, h);
	WANT(!ibv_wr_complete(x) && done().status == IBV_WC_SUCCESS);
}

static void start(void)
{
	struct peer {
		uint32_t qpn;
		union ibv_gid gid;
	} me, other;
	ctx = open_first();
	WANT((pd = ibv_alloc_pd(ctx)) && (cq = ibv_create_cq(ctx, 16, NULL, NULL, 0)) && (mem = malloc(SIZE)));
	struct ibv_qp_init_attr_ex a = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1},
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd};
	struct mlx5dv_qp_init_attr own = {.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
					  .send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST | MLX5DV_QP_EX_WITH_MR_INTERLEAVED};
	WANT((qp = mlx5dv_create_qp(ctx, &a, &own)) && (mr = ibv_reg_mr(pd, mem, SIZE, IBV_ACCESS_LOCAL_WRITE)));
	WANT(!ibv_query_gid(ctx, 1, 0, &me.gid));
	me.qpn = qp->qp_num;
	swap(&me, &other, sizeof me);
	connect_to(qp, other.qpn, other.gid);
	keys();
}

/* value returns byte i of a stream. */
static uint8_t value(int i) { return (uint8_t)(i * 13 + i / 256); }

static void fill(int shift)
{
	for (int i = 0; i < SIZE; i++)
		mem[i] = shift < 0 ? 0xee : value(i + shift);
}

/* is_rows reports whether the rows contain a stream whose halves are swapped, and all other
 * bytes are unchanged. */
static int is_rows(int shift)
{
	for (int i = 0; i < SIZE; i++) {
		int row = i / (ROW + SKIP), in = i % (ROW + SKIP), n = row * ROW + in;
		uint8_t want = in < ROW ? value((n + LEN / 2) % LEN + shift) : 0xee;
		if (mem[i] != want)
			return 0;
	}
	return 1;
}

static void parent(void)
{
	struct ibv_sge sge = {0, LEN, rows->lkey};
	struct ibv_recv_wr rr = {.sg_list = &sge, .num_sge = 1}, *rbad;
	struct ibv_send_wr inv = {.opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rows->lkey}, *bad;
	uint32_t k[2] = {rows->rkey, halves->rkey}, none[2];
	fill(-1);
	swap(k, none, sizeof k);
	meet(); /* the child has written and read */
	WANT(is_rows(0));
	fill(-1);
	WANT(!ibv_post_recv(qp, &rr, &rbad));
	meet(); /* the child may send */
	struct ibv_wc wc = done();
	WANT(wc.status == IBV_WC_SUCCESS && wc.byte_len == LEN && is_rows(5));
	WANT(!ibv_post_send(qp, &inv, &bad) && done().status == IBV_WC_SUCCESS);
	meet(); /* the key is invalidated */
	meet();
	WANT(is_rows(5));
}

static enum ibv_wc_status op(enum ibv_wr_opcode code, uint32_t lkey, uint32_t rkey)
{
	struct ibv_sge sge = {0, LEN, lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = code, .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {0, rkey}}, *bad;
	WANT(!ibv_post_send(qp, &wr, &bad));
	return done().status;
}

static void child(void)
{
	uint32_t k[2], none[2] = {0};
	swap(none, k, sizeof k);
	fill(0);
	WANT(op(IBV_WR_RDMA_WRITE, halves->lkey, k[0]) == IBV_WC_SUCCESS);
	fill(-1);
	WANT(op(IBV_WR_RDMA_READ, rows->lkey, k[0]) == IBV_WC_SUCCESS && is_rows(0));
	meet();
	fill(5);
	meet();
	WANT(op(IBV_WR_SEND, halves->lkey, 0) == IBV_WC_SUCCESS);
	meet();
	WANT(op(IBV_WR_RDMA_WRITE, halves->lkey, k[0]) == IBV_WC_REM_ACCESS_ERR);
	meet();
}

int main(void)
{
	int ends[2], status;
	WANT(!socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	pid_t pid = fork();
	WANT(pid >= 0);
	talk = ends[pid == 0];
	close(ends[pid != 0]);
	start();
	pid ? parent() : child();
	WANT(!mlx5dv_destroy_mkey(rows) && !mlx5dv_destroy_mkey(halves) && !ibv_dereg_mr(mr));
	WANT(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	free(mem);
	if (pid) {
		WANT(waitpid(pid, &status, 0) == pid && status == 0);
		puts("ok");
	}
	return 0;
}
