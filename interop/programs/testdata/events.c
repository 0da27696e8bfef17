/*
 * One event, one list of completions: a list (ibv_start_poll to ibv_end_poll) ends before a
 * completion whose event has not been taken, so that there is a completion for every event.
 * Completions whose event was taken, and those without one, are in the list.
 *
 * Arming raises the event of the first completion that is not polled and has raised none.
 */
#include <fcntl.h>

#include "self.h"

static struct ibv_cq_ex *cq;
static struct ibv_comp_channel *ch;

/* list polls a list of completions, which must have want of them. */
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

/* take takes an event; if want is 0, there must be none. */
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

static void arm_for(int solicited) { WANT(!ibv_req_notify_cq(ibv_cq_ex_to_cq(cq), solicited)); }
static void arm(void) { arm_for(0); }

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
					     .cap = {.max_send_wr = 64, .max_send_sge = 1, .max_recv_wr = 16}};
		WANT(s.qp[i] = ibv_create_qp(s.pd, &a));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED}, *bad;
	struct ibv_send_wr msg = {.opcode = IBV_WR_SEND};
	struct ibv_recv_wr recv = {0}, *bad_recv;
#define WRITE() WANT(!ibv_post_send(s.qp[0], &wr, &bad)) /* within a process it completes at once */
#define SEND(flags)                                                                                                    \
	WANT(!ibv_post_recv(s.qp[1], &recv, &bad_recv) && (msg.send_flags = (flags), !ibv_post_send(s.qp[0], &msg, &bad)))

	WRITE(); /* the queue is not armed: no event */
	take(0);
	list(1);
	list(0);

	WRITE();
	arm(); /* the completion is there: one event, at once */
	take(1);
	take(0);
	arm(); /* the completion has raised its event already */
	take(0);
	list(1);
	WRITE(); /* the queue is still armed */
	take(1);
	list(1);
	list(0);

	arm();
	WRITE();
	WRITE();
	take(1); /* of the first */
	take(0);
	arm(); /* of the second, at once */
	WRITE();
	WRITE();
	list(1);
	take(1);
	list(3); /* the queue was not armed: no more events */
	list(0);
	take(0);

	arm();
	WRITE();
	take(1);
	arm();
	WRITE(); /* raises the next event */
	WRITE();
	list(1); /* the completion that was there when the queue was armed */
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
	take(1); /* both events are taken: all completions are one list */
	list(3);
	list(0);

	arm();
	WRITE(); /* a program that polls without taking events gets it all the same */
	list(1);
	list(0);
	take(1);

	WRITE();
	SEND(0);
	arm_for(1); /* neither is solicited */
	take(0);
	SEND(IBV_SEND_SOLICITED);
	take(1);
	list(3);
	SEND(0);
	SEND(IBV_SEND_SOLICITED);
	SEND(IBV_SEND_SOLICITED);
	arm_for(1); /* the second is */
	list(1);
	take(1);
	take(0);
	arm_for(1); /* and the third */
	list(1);
	take(1);
	take(0);
	list(1);
	list(0);

	for (int i = 0; i < 2; i++) { /* more than the ring has room for: the last ones are not in it */
		for (int k = 0; k < 130; k++)
			WRITE();
		SEND(IBV_SEND_SOLICITED);
		arm_for(1);
		if (i)
			list(130);
		take(1);
		take(0);
		list(i ? 1 : 131);
		list(0);
	}

	struct ibv_sge nowhere = {1, 8, 0};
	struct ibv_wc wc;
	wr.sg_list = &nowhere;
	wr.num_sge = 1;
	SEND(0);
	WRITE();
	arm_for(1); /* a failed completion counts as solicited */
	take(1);
	take(0);
	WANT(ibv_poll_cq(s.cq, 1, &wc) == 1 && wc.status == IBV_WC_SUCCESS);
	WANT(ibv_poll_cq(s.cq, 1, &wc) == 1 && wc.status == IBV_WC_LOC_PROT_ERR);
	WANT(ibv_poll_cq(s.cq, 1, &wc) == 0);
	close_self(&s);
	WANT(!ibv_destroy_comp_channel(ch));
	puts("ok");
	return 0;
}
