/*
 * Threads post WRITEs and SENDs of several lengths to queue pairs of their own, while one
 * thread takes all completions from one queue, polling or by events. Each completion comes
 * once, in the order of its queue pair, and no event is missed, whether the queue is armed
 * before it is polled or afterwards.
 */
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#include "self.h"

enum { THREADS = 3, EACH = 20000, DEPTH = 8, SIZE = 8192 };

static struct flow {
	struct self s;
	struct ibv_mr *mr;
	char *buf; /* SIZE to send from, SIZE to write to, SIZE to receive in */
	uint64_t sent, received; /* completions so far; the poller's */
	uint64_t receives;	 /* receives posted; the poster's */
	atomic_ullong done;	 /* a copy of sent, for the poster */
	pthread_t thread;
} flows[THREADS];

static struct ibv_cq *cq;
static struct ibv_comp_channel *channel;

static struct ibv_qp *shared_qp(struct self *s)
{
	struct self t = *s;
	t.cq = cq;
	return plain_qp(&t);
}

static void *post_all(void *arg)
{
	struct flow *f = arg;
	static const uint32_t lengths[] = {8, 1, 64, 1000, 1024, 1025, SIZE, 8, 8};
	struct ibv_sge sge = {(uintptr_t)f->buf, 0, f->mr->lkey}, into = {(uintptr_t)f->buf + 2 * SIZE, SIZE, f->mr->lkey};
	for (uint64_t i = 0; i < EACH; i++) {
		sge.length = lengths[i % (sizeof lengths / sizeof *lengths)];
		struct ibv_send_wr wr = {.wr_id = i,
					 .sg_list = &sge,
					 .num_sge = 1,
					 .opcode = i % 5 ? IBV_WR_RDMA_WRITE : IBV_WR_SEND,
					 .send_flags = IBV_SEND_SIGNALED,
					 .wr.rdma = {(uintptr_t)f->buf + SIZE, f->mr->rkey}},
				   *bad;
		struct ibv_recv_wr rw = {.wr_id = f->receives, .sg_list = &into, .num_sge = 1}, *bad_recv;
		if (wr.opcode == IBV_WR_SEND) {
			WANT(!ibv_post_recv(f->s.qp[1], &rw, &bad_recv));
			f->receives++;
		}
		WANT(!ibv_post_send(f->s.qp[0], &wr, &bad));
		while (i + 1 - atomic_load(&f->done) >= DEPTH)
			sched_yield();
	}
	return NULL;
}

static void take(const struct ibv_wc *wc)
{
	WANT(wc->status == IBV_WC_SUCCESS);
	for (struct flow *f = flows; f < flows + THREADS; f++) {
		if (wc->qp_num == f->s.qp[0]->qp_num) {
			WANT(wc->wr_id == f->sent++);
			atomic_store(&f->done, f->sent);
			return;
		}
		if (wc->qp_num == f->s.qp[1]->qp_num) {
			WANT(wc->opcode == IBV_WC_RECV && wc->wr_id == f->received++);
			return;
		}
	}
	WANT(!"a completion of nobody");
}

static uint64_t take_all(void)
{
	struct ibv_wc wc[5];
	uint64_t n = 0;
	for (int k; (k = ibv_poll_cq(cq, 5, wc)); n += (uint64_t)k) {
		WANT(k > 0);
		for (int i = 0; i < k; i++)
			take(&wc[i]);
	}
	return n;
}

/* An event must come for a completion that was made after the last poll found nothing, both
 * before the queue was armed and after that. */
static void await_event(void)
{
	struct pollfd p = {channel->fd, POLLIN, 0};
	struct ibv_cq *of;
	void *context;
	WANT(poll(&p, 1, 60000) == 1);
	WANT(!ibv_get_cq_event(channel, &of, &context) && of == cq);
	ibv_ack_cq_events(cq, 1);
}

int main(int argc, char **argv)
{
	int armed_after = argc > 1 && !strcmp(argv[1], "armed-after");
	int by_events = armed_after || (argc > 1 && !strcmp(argv[1], "events"));
	struct ibv_context *ctx = open_first();
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	WANT(pd && (channel = ibv_create_comp_channel(ctx)) && (cq = ibv_create_cq(ctx, 4 * THREADS * DEPTH, NULL, channel, 0)));
	for (struct flow *f = flows; f < flows + THREADS; f++) {
		WANT(f->buf = calloc(3, SIZE));
		memset(f->buf, 'a' + (int)(f - flows), SIZE);
		WANT(f->mr = ibv_reg_mr(pd, f->buf, 3 * SIZE, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
		f->s = connect_made(ctx, pd, shared_qp);
	}
	for (struct flow *f = flows; f < flows + THREADS; f++)
		WANT(!pthread_create(&f->thread, NULL, post_all, f));
	uint64_t all = THREADS * (EACH + EACH / 5);
	for (uint64_t n = 0; n < all;) {
		if (by_events && !armed_after)
			WANT(!ibv_req_notify_cq(cq, 0));
		n += take_all();
		if (armed_after)
			WANT(!ibv_req_notify_cq(cq, 0));
		if (by_events && n < all)
			await_event();
	}
	for (struct flow *f = flows; f < flows + THREADS; f++) {
		WANT(!pthread_join(f->thread, NULL) && f->sent == EACH && f->received == f->receives);
		WANT(!memcmp(f->buf, f->buf + SIZE, SIZE) && !memcmp(f->buf, f->buf + 2 * SIZE, SIZE));
		WANT(!ibv_destroy_qp(f->s.qp[0]) && !ibv_destroy_qp(f->s.qp[1]) && !ibv_destroy_cq(f->s.cq) && !ibv_dereg_mr(f->mr));
		free(f->buf);
	}
	WANT(!take_all() && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
	WANT(!ibv_dealloc_pd(pd) && !ibv_close_device(ctx));
	puts("ok");
	return 0;
}
