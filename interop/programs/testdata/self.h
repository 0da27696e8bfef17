/*
 * Two queue pairs of one process, connected to each other, and the few requests that the
 * programs here need. A WANT that fails ends the program.
 */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <infiniband/verbs.h>

#define WANT(cond)                                                                                                     \
	do {                                                                                                           \
		if (!(cond)) {                                                                                         \
			fprintf(stderr, "%s:%d: not so: %s (errno %d, %s)\n", __FILE__, __LINE__, #cond, errno,       \
				strerror(errno));                                                                      \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

struct self {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp[2];
	union ibv_gid gid;
};

static struct ibv_context *open_first(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	WANT(list && n > 0);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	WANT(ctx);
	ibv_free_device_list(list);
	return ctx;
}

/* TIMEOUT is how long a requester waits for an answer before it repeats: 4.096 us << TIMEOUT. */
#ifndef TIMEOUT
#define TIMEOUT 14
#endif

/* connect_to connects a queue pair to a peer. */
static void connect_to(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT,
				.port_num = 1,
				.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
	WANT(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	a = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR,
				 .path_mtu = IBV_MTU_1024,
				 .dest_qp_num = peer,
				 .rq_psn = 7,
				 .max_dest_rd_atomic = 1,
				 .min_rnr_timer = 12,
				 .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
	WANT(!ibv_modify_qp(qp, &a,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	a = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .sq_psn = 7, .timeout = TIMEOUT, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
	WANT(!ibv_modify_qp(qp, &a,
			    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				    IBV_QP_MAX_QP_RD_ATOMIC));
}

static void to_rts(struct self *s, int i) { connect_to(s->qp[i], s->qp[!i]->qp_num, s->gid); }

static struct ibv_qp *plain_qp(struct self *s)
{
	struct ibv_qp_init_attr a = {
		.send_cq = s->cq,
		.recv_cq = s->cq,
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
	return ibv_create_qp(s->pd, &a);
}

/* connect_made connects two queue pairs that a function makes, in an existing context and
 * protection domain. */
static struct self connect_made(struct ibv_context *ctx, struct ibv_pd *pd, struct ibv_qp *(*make)(struct self *))
{
	struct self s = {.ctx = ctx, .pd = pd};
	WANT(!ibv_query_gid(ctx, 1, 0, &s.gid));
	WANT(s.cq = ibv_create_cq(ctx, 64, NULL, NULL, 0));
	for (int i = 0; i < 2; i++)
		WANT(s.qp[i] = make(&s));
	to_rts(&s, 0);
	to_rts(&s, 1);
	return s;
}

static struct self connect_in(struct ibv_context *ctx, struct ibv_pd *pd) { return connect_made(ctx, pd, plain_qp); }

static struct self connect_self(void)
{
	struct ibv_context *ctx = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	WANT(pd);
	return connect_in(ctx, pd);
}

static void close_self(struct self *s)
{
	WANT(!ibv_destroy_qp(s->qp[0]) && !ibv_destroy_qp(s->qp[1]) && !ibv_destroy_cq(s->cq));
	WANT(!ibv_dealloc_pd(s->pd) && !ibv_close_device(s->ctx));
}

/* write_to posts a WRITE and returns its status. */
static enum ibv_wc_status write_to(struct self *s, void *from, uint32_t lkey, uint64_t to, uint32_t rkey, uint32_t n)
{
	struct ibv_sge sge = {(uintptr_t)from, n, lkey};
	struct ibv_send_wr wr = {.wr_id = 42,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .opcode = IBV_WR_RDMA_WRITE,
				 .send_flags = IBV_SEND_SIGNALED,
				 .wr.rdma = {to, rkey}},
			   *bad;
	struct ibv_wc wc;
	int k;
	WANT(!ibv_post_send(s->qp[0], &wr, &bad));
	while (!(k = ibv_poll_cq(s->cq, 1, &wc)))
		;
	WANT(k == 1 && wc.wr_id == 42);
	return wc.status;
}

/* use_self registers memory, writes one half into the other, and compares them. */
static void use_self(struct self *s)
{
	enum { N = 70000 };
	char *buf = malloc(2 * N);
	WANT(buf);
	for (int i = 0; i < N; i++)
		buf[i] = (char)(i * 7), buf[N + i] = 0;
	struct ibv_mr *mr = ibv_reg_mr(s->pd, buf, 2 * N, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	WANT(mr);
	WANT(write_to(s, buf, mr->lkey, (uintptr_t)buf + N, mr->rkey, N) == IBV_WC_SUCCESS);
	WANT(!memcmp(buf, buf + N, N));
	WANT(!ibv_dereg_mr(mr));
	free(buf);
}
