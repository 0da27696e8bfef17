/*
 * Verbs that no tool here calls: queries of GIDs and of the order of data, moderation; an
 * aborted list of requests; and verbs that this device refuses.
 */
#include "self.h"

enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

static void gids(struct self *s)
{
	struct ibv_gid_entry e, table[300];
	struct ibv_port_attr port;
	WANT(!ibv_query_port(s->ctx, 1, &port) && port.gid_tbl_len > 0);
	WANT(!ibv_query_gid_ex(s->ctx, 1, 0, &e, 0));
	WANT(!memcmp(&e.gid, &s->gid, sizeof s->gid) && e.port_num == 1 && e.gid_index == 0);
	WANT(e.gid_type == IBV_GID_TYPE_ROCE_V2 && e.ndev_ifindex > 0);
	WANT(ibv_query_gid_ex(s->ctx, 1, 0, &e, 1) == EOPNOTSUPP); /* flags */
	WANT(ibv_query_gid_ex(s->ctx, 2, 0, &e, 0) == EINVAL);
	WANT(ibv_query_gid_ex(s->ctx, 1, (uint32_t)port.gid_tbl_len, &e, 0) == EINVAL);
	ssize_t n = ibv_query_gid_table(s->ctx, table, 300, 0);
	WANT(n > 0 && n <= 300 && !memcmp(&table[0].gid, &s->gid, sizeof s->gid));
	WANT(ibv_query_gid_table(s->ctx, table, 300, 1) == -EOPNOTSUPP);
	WANT(ibv_query_gid_table(s->ctx, table, (size_t)n - 1, 0) == -EINVAL); /* too small */
}

static void orders(struct self *s)
{
	/* The answer is always that data is not in order. */
	for (uint32_t flags = 0; flags < 8; flags++)
		for (int op = IBV_WR_RDMA_WRITE; op <= IBV_WR_RDMA_READ; op++)
			WANT(!ibv_query_qp_data_in_order(s->qp[0], (enum ibv_wr_opcode)op, flags));
	WANT(!ibv_query_qp_data_in_order(NULL, IBV_WR_RDMA_WRITE, 0));

	struct ibv_modify_cq_attr m = {.attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = {4, 10}};
	int moderate = ibv_modify_cq(s->cq, &m);
	WANT(moderate == 0 || moderate == EOPNOTSUPP);
	m.attr_mask = 1 << 10;
	int unknown = ibv_modify_cq(s->cq, &m);
	WANT(unknown == EINVAL || unknown == EOPNOTSUPP);
}

static struct ibv_qp *extended(struct self *s)
{
	struct ibv_qp_init_attr_ex a = {.send_cq = s->cq,
					.recv_cq = s->cq,
					.qp_type = IBV_QPT_RC,
					.pd = s->pd,
					.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
					.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
					.cap = {.max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	return ibv_create_qp_ex(s->ctx, &a);
}

static void write_ex(struct ibv_qp_ex *q, uint64_t id, struct ibv_mr *mr, char *from, char *to)
{
	q->wr_id = id;
	q->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(q, mr->rkey, (uintptr_t)to);
	ibv_wr_set_sge(q, mr->lkey, (uintptr_t)from, 8);
}

/* An aborted list moves no bytes, makes no completions, and takes no room in the queue. */
static void aborted(struct self *s)
{
	static char buf[64] = "one-----two-----";
	struct ibv_mr *mr = ibv_reg_mr(s->pd, buf, sizeof buf, ACCESS);
	struct self t = connect_made(s->ctx, s->pd, extended);
	struct ibv_qp_ex *q = ibv_qp_to_qp_ex(t.qp[0]);
	struct ibv_wc wc;
	WANT(mr && q);
	for (int i = 0; i < 10; i++) {
		ibv_wr_start(q);
		for (int k = 0; k < 4; k++)
			write_ex(q, 1, mr, buf, buf + 32);
		ibv_wr_abort(q);
	}
	ibv_wr_start(q);
	write_ex(q, 2, mr, buf + 8, buf + 48);
	WANT(!ibv_wr_complete(q));
	while (!ibv_poll_cq(t.cq, 1, &wc))
		;
	WANT(wc.wr_id == 2 && wc.status == IBV_WC_SUCCESS && !buf[32] && !memcmp(buf + 48, buf + 8, 8));
	WANT(!ibv_poll_cq(t.cq, 1, &wc));
	/* A list with one request too many is refused as a whole. */
	ibv_wr_start(q);
	for (int k = 0; k < 5; k++)
		write_ex(q, 3, mr, buf, buf + 32);
	WANT(ibv_wr_complete(q) == ENOMEM && !ibv_poll_cq(t.cq, 1, &wc) && !buf[32]);
	WANT(!ibv_destroy_qp(t.qp[0]) && !ibv_destroy_qp(t.qp[1]) && !ibv_destroy_cq(t.cq) && !ibv_dereg_mr(mr));
}

static void refusals(struct self *s)
{
	struct ibv_flow_attr flow = {.type = IBV_FLOW_ATTR_NORMAL, .size = sizeof flow, .port = 1};
	struct ibv_wq_init_attr wq = {.wq_type = IBV_WQT_RQ, .max_wr = 1, .max_sge = 1, .pd = s->pd, .cq = s->cq};
	struct ibv_rwq_ind_table_init_attr ind = {0};
	struct ibv_counters_init_attr counters = {0};
	struct ibv_ece ece = {0};
	errno = 0;
	WANT(!ibv_create_flow(s->qp[0], &flow) && errno == EOPNOTSUPP);
	WANT(!ibv_create_wq(s->ctx, &wq) && errno == EOPNOTSUPP);
	WANT(!ibv_create_rwq_ind_table(s->ctx, &ind) && errno == EOPNOTSUPP);
	WANT(!ibv_create_counters(s->ctx, &counters) && errno == EOPNOTSUPP);
	WANT(ibv_query_ece(s->qp[0], &ece) == EOPNOTSUPP && ibv_set_ece(s->qp[0], &ece) == EOPNOTSUPP);
}

int main(void)
{
	WANT(ibv_inc_rkey(0x123456ff) == 0x12345600 && ibv_inc_rkey(0x12345600) == 0x12345601);
	WANT((ibv_flow_label_to_udp_sport(0) & 0xc000) == 0xc000); /* RFC 6335: a dynamic port */
	WANT(!ibv_fork_init());
	enum ibv_fork_status forks = ibv_is_fork_initialized();
	WANT(forks == IBV_FORK_UNNEEDED || forks == IBV_FORK_ENABLED);
	struct self s = connect_self();
	gids(&s);
	orders(&s);
	aborted(&s);
	refusals(&s);
	close_self(&s);
	puts("ok");
	return 0;
}
