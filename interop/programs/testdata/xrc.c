/*
 * An XRC target is opened by its number. In another context of the process that gives the
 * same queue pair, which lives until both have destroyed it. In another process it is
 * refused.
 */
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

static struct ibv_xrcd *domain(struct ibv_context *ctx, int fd)
{
	struct ibv_xrcd_init_attr a = {.comp_mask = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
				       .fd = fd,
				       .oflags = O_CREAT};
	struct ibv_xrcd *x = ibv_open_xrcd(ctx, &a);
	WANT(x);
	return x;
}

static struct ibv_qp *open_by(struct ibv_context *ctx, struct ibv_xrcd *x, uint32_t number, int err)
{
	struct ibv_qp_open_attr a = {.comp_mask = IBV_QP_OPEN_ATTR_NUM | IBV_QP_OPEN_ATTR_XRCD |
						  IBV_QP_OPEN_ATTR_TYPE | IBV_QP_OPEN_ATTR_CONTEXT,
				     .qp_num = number,
				     .xrcd = x,
				     .qp_context = &a,
				     .qp_type = IBV_QPT_XRC_RECV};
	errno = 0;
	struct ibv_qp *q = ibv_open_qp(ctx, &a);
	WANT(err ? !q && errno == err : q && q->qp_num == number && q->qp_context == &a);
	return q;
}

/* A child has a device of its own, on the same address. */
static void from_another_process(int fd, int numbers)
{
	uint32_t number;
	WANT(read(numbers, &number, sizeof number) == sizeof number);
	struct ibv_context *ctx = open_first();
	struct ibv_xrcd *x = domain(ctx, fd);
	open_by(ctx, x, number, EOPNOTSUPP);
	open_by(ctx, x, 0, EINVAL);
	WANT(!ibv_close_xrcd(x) && !ibv_close_device(ctx));
}

int main(void)
{
	char name[] = "/tmp/verbena-xrc-XXXXXX";
	int fd = mkstemp(name), numbers[2], status;
	WANT(fd >= 0 && !unlink(name) && !pipe(numbers));
	pid_t child = fork();
	if (!child) {
		from_another_process(fd, numbers[0]);
		return 0;
	}
	struct self s = {.ctx = open_first()};
	struct ibv_context *other = open_first();
	struct ibv_xrcd *mine = domain(s.ctx, fd), *theirs = domain(other, fd), *strange = domain(other, -1);
	WANT((s.pd = ibv_alloc_pd(s.ctx)) && (s.cq = ibv_create_cq(s.ctx, 16, NULL, NULL, 0)));
	WANT(!ibv_query_gid(s.ctx, 1, 0, &s.gid));
	struct ibv_qp_init_attr_ex a = {.qp_type = IBV_QPT_XRC_RECV, .comp_mask = IBV_QP_INIT_ATTR_XRCD, .xrcd = mine};
	struct ibv_qp *made = ibv_create_qp_ex(s.ctx, &a);
	struct ibv_qp_init_attr b = {.send_cq = s.cq, .qp_type = IBV_QPT_XRC_SEND, .cap = {.max_send_wr = 4, .max_send_sge = 1}};
	WANT(made && (s.qp[0] = ibv_create_qp(s.pd, &b)));

	WANT(write(numbers[1], &made->qp_num, sizeof made->qp_num) == sizeof made->qp_num);
	WANT(waitpid(child, &status, 0) == child && !status);

	open_by(other, strange, made->qp_num, EINVAL);
	open_by(other, theirs, s.qp[0]->qp_num, EINVAL);
	open_by(s.ctx, theirs, made->qp_num, EINVAL); /* a domain of another context */
	struct ibv_qp_open_attr bad = {.comp_mask = IBV_QP_OPEN_ATTR_NUM, .qp_num = made->qp_num};
	WANT(!ibv_open_qp(s.ctx, &bad) && errno == EINVAL);
	bad.comp_mask = 1 << 20;
	WANT(!ibv_open_qp(s.ctx, &bad) && errno == EOPNOTSUPP);
	s.qp[1] = open_by(other, theirs, made->qp_num, 0);
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_qp_attr qa;
	struct ibv_qp_init_attr ia;
	WANT(!ibv_query_qp(made, &qa, IBV_QP_STATE, &ia) && qa.qp_state == IBV_QPS_RTS);
	WANT(!ibv_destroy_qp(made) && ibv_destroy_qp(made) == EINVAL && !ibv_close_xrcd(mine));
	WANT(ibv_close_xrcd(theirs) == EBUSY);

	/* It still works in the context that has it open. */
	struct ibv_pd *pd = ibv_alloc_pd(other);
	struct ibv_cq *cq = ibv_create_cq(other, 4, NULL, NULL, 0);
	struct ibv_srq_init_attr_ex sa = {.attr = {.max_wr = 4, .max_sge = 1},
					  .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
						       IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
					  .srq_type = IBV_SRQT_XRC,
					  .pd = pd,
					  .xrcd = theirs,
					  .cq = cq};
	struct ibv_srq *srq = ibv_create_srq_ex(other, &sa);
	struct ibv_recv_wr rr = {.wr_id = 5}, *rbad;
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *wbad;
	WANT(srq && !ibv_get_srq_num(srq, &wr.qp_type.xrc.remote_srqn) && !ibv_post_srq_recv(srq, &rr, &rbad));
	WANT(!ibv_post_send(s.qp[0], &wr, &wbad));
	struct ibv_wc wc;
	for (int n; !(n = ibv_poll_cq(cq, 1, &wc));)
		WANT(n >= 0);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 5 && wc.qp_num == s.qp[1]->qp_num);

	uint32_t number = s.qp[1]->qp_num;
	WANT(!ibv_destroy_qp(s.qp[1]));
	open_by(other, theirs, number, EINVAL);
	WANT(!ibv_destroy_srq(srq) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	WANT(!ibv_close_xrcd(theirs) && !ibv_close_xrcd(strange) && !ibv_close_device(other));
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_cq(s.cq) && !ibv_dealloc_pd(s.pd) && !ibv_close_device(s.ctx));
	puts("ok");
	return 0;
}
