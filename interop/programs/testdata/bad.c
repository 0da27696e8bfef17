/*
 * Bad input: handles that are null or stale, absurd sizes, bad masks. Each gets the
 * errno that the man page names, and the program goes on.
 */
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "self.h"

#define REFUSED(call, err)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT((call) == NULL);                                                                                  \
		WANT(errno == (err));                                                                                  \
	} while (0)

/* A list of ibv_wr_* that does not fit is posted not at all; nor is one with a mistake
 * in it. */
static void lists(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct self s = {.ctx = ctx, .pd = pd};
	WANT(s.cq = ibv_create_cq(ctx, 16, NULL, NULL, 0));
	WANT(!ibv_query_gid(ctx, 1, 0, &s.gid));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex a = {
			.send_cq = s.cq,
			.recv_cq = s.cq,
			.qp_type = IBV_QPT_RC,
			.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = pd,
			.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE};
		WANT(s.qp[i] = ibv_create_qp_ex(ctx, &a));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(s.qp[0]);
	WANT(x && !ibv_qp_to_qp_ex(NULL));
	for (int n = 5; n >= 3; n--) { /* too many, all that fit, and a mistake */
		ibv_wr_start(x);
		for (int i = 0; i < n; i++) {
			x->wr_id = (uint64_t)i;
			x->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(x, 0, 0);
			if (n == 3) {
				struct ibv_sge two[2] = {{0}};
				ibv_wr_set_sge_list(x, 2, two);
			}
		}
		int err = ibv_wr_complete(x);
		WANT(n == 5 ? err == ENOMEM : n == 4 ? err == 0 : err == EINVAL);
		struct ibv_wc wc[8];
		int got = 0;
		while (n == 4 && got < 4) {
			int k = ibv_poll_cq(s.cq, 8, wc);
			WANT(k >= 0);
			got += k;
		}
		WANT(ibv_poll_cq(s.cq, 8, wc) == 0);
	}
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
}

int main(void)
{
	struct self s = connect_self();
	char buf[64];
	lists(s.ctx, s.pd);

	/* null */
	REFUSED(ibv_open_device(NULL), EINVAL);
	REFUSED(ibv_alloc_pd(NULL), EINVAL);
	REFUSED(ibv_create_cq(NULL, 1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_comp_channel(NULL), EINVAL);
	REFUSED(ibv_create_qp(NULL, NULL), EINVAL);
	REFUSED(ibv_create_srq(s.pd, NULL), EINVAL);
	REFUSED(ibv_create_ah(s.pd, NULL), EINVAL);
	WANT(ibv_close_device(NULL) == EINVAL && ibv_dealloc_pd(NULL) == EINVAL && ibv_dereg_mr(NULL) == EINVAL);
	WANT(ibv_destroy_cq(NULL) == EINVAL && ibv_destroy_qp(NULL) == EINVAL && ibv_destroy_srq(NULL) == EINVAL);
	WANT(ibv_destroy_ah(NULL) == EINVAL && ibv_destroy_comp_channel(NULL) == EINVAL);
	WANT(ibv_modify_qp(NULL, NULL, 0) == EINVAL && ibv_query_qp(NULL, NULL, 0, NULL) == EINVAL);

	/* absurd */
	REFUSED(ibv_create_cq(s.ctx, 0, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, -1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, 0x7fffffff, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, 1, NULL, NULL, 99), EINVAL);
	WANT(ibv_resize_cq(s.cq, -5) == EINVAL && ibv_resize_cq(s.cq, 0x7fffffff) == EINVAL);
	struct ibv_qp_init_attr a = {.send_cq = s.cq, .recv_cq = s.cq, .qp_type = IBV_QPT_RC};
	a.cap.max_send_wr = UINT32_MAX;
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){.max_recv_sge = 100000};
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){.max_inline_data = UINT32_MAX};
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){0};
	a.qp_type = (enum ibv_qp_type)77;
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.qp_type = IBV_QPT_RAW_PACKET;
	REFUSED(ibv_create_qp(s.pd, &a), EOPNOTSUPP);
	struct ibv_srq_init_attr sa = {.attr = {.max_wr = UINT32_MAX, .max_sge = 1}};
	REFUSED(ibv_create_srq(s.pd, &sa), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, 0, 0), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, sizeof buf, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, sizeof buf, 1 << 15), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, (void *)4096, 4096, 0), EFAULT);

	/* masks and states */
	struct ibv_qp_attr qa = {.qp_state = IBV_QPS_RTR};
	WANT(ibv_modify_qp(s.qp[0], &qa, IBV_QP_STATE | 1 << 30) == EINVAL);
	qa.qp_state = (enum ibv_qp_state)99;
	WANT(ibv_modify_qp(s.qp[0], &qa, IBV_QP_STATE) == EINVAL);
	struct ibv_srq_attr la = {0};
	sa.attr = (struct ibv_srq_attr){.max_wr = 4, .max_sge = 1};
	struct ibv_srq *srq = ibv_create_srq(s.pd, &sa);
	WANT(srq && ibv_modify_srq(srq, &la, 1 << 20) == EINVAL);
	union ibv_gid gid;
	WANT(ibv_query_gid(s.ctx, 1, 9999, &gid) == -1 && ibv_query_gid(s.ctx, 7, 0, &gid) == -1);
	struct ibv_port_attr pa;
	WANT(ibv_query_port(s.ctx, 0, &pa) == EINVAL && ibv_query_port(s.ctx, 200, &pa) == EINVAL);

	/* requests */
	struct ibv_sge sge = {(uintptr_t)buf, sizeof buf, 0xdead};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 5000, .opcode = IBV_WR_SEND}, *bad = NULL;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
	wr.num_sge = -1;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	wr.num_sge = 1;
	wr.opcode = (enum ibv_wr_opcode)99;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_INLINE; /* there is no room for inline data */
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	struct ibv_recv_wr rr[20], *rbad = NULL;
	for (int i = 0; i < 20; i++)
		rr[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)i, .next = i < 19 ? &rr[i + 1] : NULL};
	WANT(ibv_post_recv(s.qp[0], rr, &rbad) == ENOMEM && rbad == &rr[16]);
	struct ibv_wc wc;
	WANT(ibv_poll_cq(s.cq, -1, &wc) < 0 && ibv_poll_cq(s.cq, 0, &wc) == 0);

	/* in use, and stale */
	WANT(ibv_dealloc_pd(s.pd) == EBUSY && ibv_destroy_cq(s.cq) == EBUSY);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(s.ctx);
	WANT(ch && !fcntl(ch->fd, F_SETFL, O_NONBLOCK));
	struct ibv_cq *cq = ibv_create_cq(s.ctx, 4, NULL, ch, 0), *got;
	void *cookie;
	WANT(cq && ibv_destroy_comp_channel(ch) == EBUSY);
	WANT(ibv_get_cq_event(ch, &got, &cookie) == -1 && errno == EAGAIN);
	WANT(!ibv_destroy_cq(cq) && ibv_destroy_cq(cq) == EINVAL && ibv_poll_cq(cq, 1, &wc) < 0);
	WANT(!ibv_destroy_comp_channel(ch) && ibv_destroy_comp_channel(ch) == EINVAL);
	WANT(!ibv_destroy_srq(srq) && ibv_destroy_srq(srq) == EINVAL);
	WANT(!fcntl(s.ctx->async_fd, F_SETFL, O_NONBLOCK));
	struct ibv_async_event ev;
	WANT(ibv_get_async_event(s.ctx, &ev) == -1 && errno == EAGAIN);
	struct ibv_qp *qp = s.qp[1];
	use_self(&s); /* all is well after all that */
	WANT(!ibv_destroy_qp(qp) && ibv_destroy_qp(qp) == EINVAL && ibv_post_recv(qp, rr, &rbad) == EINVAL);
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_cq(s.cq) && !ibv_dealloc_pd(s.pd));
	WANT(ibv_dealloc_pd(s.pd) == EINVAL && !ibv_close_device(s.ctx) && ibv_close_device(s.ctx) == EINVAL);
	REFUSED(ibv_alloc_pd(s.ctx), EINVAL);
	puts("ok");
	return 0;
}
