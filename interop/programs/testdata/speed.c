/*
 * Prints how many nanoseconds a WRITE of 8 bytes takes from post to poll, between two queue
 * pairs of one process, the best of several rounds. The argument is how many requests share
 * one post. If it is 0, the time is that of a call that enters the backend and does next to
 * nothing there: arming a queue.
 */
#include <time.h>

#include "self.h"

enum { ROUNDS = 20, EACH = 20000, MOST = 32 };

static double since(const struct timespec *a)
{
	struct timespec b;
	clock_gettime(CLOCK_MONOTONIC, &b);
	return ((double)(b.tv_sec - a->tv_sec) * 1e9 + (double)(b.tv_nsec - a->tv_nsec)) / EACH;
}

static double calls(struct ibv_context *ctx)
{
	struct ibv_comp_channel *ch = ibv_create_comp_channel(ctx);
	WANT(ch);
	struct ibv_cq *cq = ibv_create_cq(ctx, 1, NULL, ch, 0);
	WANT(cq);
	double best = 1e9;
	for (int r = 0; r < ROUNDS; r++) {
		struct timespec a;
		clock_gettime(CLOCK_MONOTONIC, &a);
		for (int i = 0; i < EACH; i++)
			WANT(!ibv_req_notify_cq(cq, 0));
		double ns = since(&a);
		if (ns < best)
			best = ns;
	}
	WANT(!ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(ch));
	return best;
}

int main(int argc, char **argv)
{
	int list = argc > 1 ? atoi(argv[1]) : 1;
	WANT(list >= 0 && list <= 16);
	struct self s = connect_self();
	if (!list) {
		printf("%.0f\n", calls(s.ctx));
		close_self(&s);
		return 0;
	}
	static char buf[128];
	struct ibv_mr *mr = ibv_reg_mr(s.pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	WANT(mr);
	struct ibv_sge sge = {(uintptr_t)buf, 8, mr->lkey};
	struct ibv_send_wr wr[MOST], *bad;
	for (int i = 0; i < list; i++)
		wr[i] = (struct ibv_send_wr){.sg_list = &sge,
					     .num_sge = 1,
					     .opcode = IBV_WR_RDMA_WRITE,
					     .send_flags = IBV_SEND_SIGNALED,
					     .next = i < list - 1 ? &wr[i + 1] : NULL,
					     .wr.rdma = {(uintptr_t)buf + 64, mr->rkey}};
	double best = 1e9;
	for (int r = 0; r < ROUNDS; r++) {
		struct timespec a;
		clock_gettime(CLOCK_MONOTONIC, &a);
		for (int i = 0; i < EACH; i += list) {
			struct ibv_wc wc[MOST];
			WANT(!ibv_post_send(s.qp[0], wr, &bad));
			for (int n = 0; n < list;) {
				int k = ibv_poll_cq(s.cq, list - n, wc);
				WANT(k >= 0);
				for (int j = 0; j < k; j++)
					WANT(wc[j].status == IBV_WC_SUCCESS);
				n += k;
			}
		}
		double ns = since(&a);
		if (ns < best)
			best = ns;
	}
	WANT(!ibv_dereg_mr(mr));
	close_self(&s);
	printf("%.0f\n", best);
	return 0;
}
