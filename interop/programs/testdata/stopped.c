/*
 * A UC peer in another process is stopped, and then killed or left so. Messages to it wait
 * for room, and delay neither other queue pairs nor the end of the program. Once the peer is
 * gone, they are lost, and complete.
 */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

enum { SIZE = 64 << 10, COUNT = 128 }; /* more than fits between two processes */

struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	char *buf;
};

/* open_end makes a queue pair, tells the other process its number, and connects it. */
static struct end open_end(int in, int out)
{
	struct end e = {.ctx = open_first()};
	WANT((e.pd = ibv_alloc_pd(e.ctx)) && (e.cq = ibv_create_cq(e.ctx, 2 * COUNT, NULL, NULL, 0)));
	WANT((e.buf = calloc(1, SIZE)) && (e.mr = ibv_reg_mr(e.pd, e.buf, SIZE, IBV_ACCESS_LOCAL_WRITE)));
	struct ibv_qp_init_attr a = {.send_cq = e.cq, .recv_cq = e.cq, .qp_type = IBV_QPT_UC,
				     .cap = {.max_send_wr = COUNT, .max_recv_wr = COUNT, .max_send_sge = 1, .max_recv_sge = 1}};
	WANT(e.qp = ibv_create_qp(e.pd, &a));
	uint32_t other;
	WANT(write(out, &e.qp->qp_num, 4) == 4 && read(in, &other, 4) == 4);
	union ibv_gid gid;
	WANT(!ibv_query_gid(e.ctx, 1, 0, &gid));
	struct ibv_qp_attr q = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	WANT(!ibv_modify_qp(e.qp, &q, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	q = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = other,
				 .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .hop_limit = 1}}};
	WANT(!ibv_modify_qp(e.qp, &q, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN));
	q = (struct ibv_qp_attr){.qp_state = IBV_QPS_RTS};
	WANT(!ibv_modify_qp(e.qp, &q, IBV_QP_STATE | IBV_QP_SQ_PSN));
	return e;
}

static void peer(int in, int out)
{
	WANT(!prctl(PR_SET_PDEATHSIG, SIGKILL)); /* also if it is stopped then */
	open_end(in, out);
	WANT(write(out, "r", 1) == 1);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	int to[2], from[2], status, killed = argc > 1 && !strcmp(argv[1], "killed");
	WANT(!pipe(to) && !pipe(from));
	pid_t child = fork();
	if (!child)
		peer(to[0], from[1]);
	char ready;
	struct end e = open_end(from[0], to[1]);
	WANT(read(from[0], &ready, 1) == 1 && !kill(child, SIGSTOP) && waitpid(child, &status, WUNTRACED) == child);

	struct ibv_sge sge = {(uintptr_t)e.buf, SIZE, e.mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED}, *bad;
	for (int i = 0; i < COUNT; i++, wr.wr_id++)
		WANT(!ibv_post_send(e.qp, &wr, &bad));
	struct self s = connect_in(e.ctx, e.pd); /* these are not delayed */
	use_self(&s);
	struct ibv_wc wc;
	uint64_t n = 0;
	for (int vain = 0, k; vain < 10000; vain = k ? 0 : vain + 1) {
		WANT((k = ibv_poll_cq(e.cq, 1, &wc)) >= 0);
		if (k)
			WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == n++);
	}
	WANT(n > 0 && n < COUNT && !ibv_post_send(e.qp, &wr, &bad)); /* messages that were sent have made room in the queue */
	if (killed) {
		WANT(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
		for (int k; n <= COUNT; n += (uint64_t)k) {
			WANT((k = ibv_poll_cq(e.cq, 1, &wc)) >= 0);
			WANT(!k || (wc.status == IBV_WC_SUCCESS && wc.wr_id == n));
		}
	}
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
	WANT(!ibv_destroy_qp(e.qp) && !ibv_destroy_cq(e.cq) && !ibv_dereg_mr(e.mr) && !ibv_dealloc_pd(e.pd));
	WANT(!ibv_close_device(e.ctx));
	if (!killed)
		WANT(!kill(child, SIGKILL) && waitpid(child, &status, 0) == child);
	puts("ok");
	return 0;
}
