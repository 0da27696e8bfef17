/*
 * One event, one list of completions: a list ends before a completion whose own event
 * has not been taken, so that every event finds one. What came before the arming,
 * and what raised an event that was taken, is in the list.
 */
#include <fcntl.h>

#include "self.h"

static struct ibv_cq_ex *cq;
static struct ibv_comp_channel *ch;

/* list reads a list of completions and wants so many of them. */
static void list(int want)
{
	struct ibv_poll_cq_attr attr = {0};
	int n = 0, r = ibv_start_poll(cq, &attr);
	WANT(r == (want ? 0 : ENOENT));
	for (; !r; r = ibv_next_poll(cq), n++)
		WANT(cq->status == IBV_WC_SUCCESS && ibv_wc_read_completion_ts(cq));
	WANT(r == ENOENT && n == want);
	if (want)
		ibv_end_poll(cq);
}

/* take takes an event, or wants that there is none. */
static void take(int want)
{
	struct ibv_cq *of;
	void *cookie;
	errno = 0;
	int r = ibv_get_cq_event(ch, &of, &cookie);
	WANT(want ? !r && of == ibv_cq_ex_to_cq(cq) : r == -1 && errno == EAGAIN);
	if (want)
		ibv_ack_cq_events(of, 1);
}

static void arm(void) { WANT(!ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), 0)); }

int main(void)
{
	struct self s = {.ctx = open_first()};
	WANT(s.pd = ibv_alloc_pd(s.ctx));
	WANT(!ibv_query_gid(s.ctx, 1, 0, &s.gid));
	WANT((ch = ibv_create_comp_channel(s.ctx)) && !fcntl(ch->fd, F_SETFL, O_NONBLOCK));
	struct ibv_cq_init_attr_ex ca = {.cqe = 64, .channel = ch, .wc_flags = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP};
	WANT(cq = ibv_create_cq_ex(s.ctx, &ca));
	s.cq = ibv_cq_ex_to_cq(cq);
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr a = {.send_cq = s.cq,
					     .recv_cq = s.cq,
					     .qp_type = IBV_QPT_RC,
					     .cap = {.max_send_wr = 16, .max_send_sge = 1}};
		WANT(s.qp[i] = ibv_create_qp(s.pd, &a));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
#define WRITE() WANT(!ibv_post_send(s.qp[0], &wr, &bad)) /* within a process it completes at once */

	WRITE(); /* nobody has armed the queue: no event */
	take(0);
	list(1);

	arm();
	WRITE();
	WRITE();
	take(1); /* of the first */
	take(0);
	arm();
	WRITE(); /* raises the next event */
	WRITE();
	list(2); /* what was there when the queue was armed */
	take(1);
	list(2);
	list(0);
	take(0);

	arm();
	WRITE();
	WRITE();
	take(1);
	arm();
	WRITE();
	take(1); /* both events are taken: all of it is one list */
	list(3);
	list(0);

	arm();
	WRITE(); /* whoever polls without taking events finds it all the same */
	list(1);
	list(0);
	take(1);
	close_self(&s);
	WANT(!ibv_destroy_comp_channel(ch));
	puts("ok");
	return 0;
}
