/*
 * Four threads of one process that spin, each on a completion queue of its own: together they
 * would take every processor of a small machine. The process has two devices, which talk by
 * packets.
 *
 *   spin pairs N  two requesters at the first device SEND, one message at a time, to two
 *                 responders at the second, which take them and post receives again
 *   spin each N   four requesters at the first device WRITE, one at a time, into memory of the
 *                 second, of which nobody polls the completion queue
 *
 * Each requester completes N requests, and each responder N receives. The program prints how
 * many requests all completed in a second, and when the first and the last requester ended.
 */
#include <pthread.h>
#include <time.h>

#define TIMEOUT 19 /* on a busy machine a thread waits long for a processor */
#include "self.h"

enum { SPINNERS = 4, RECEIVES = 8, SIZE = 8 };

static uint64_t rounds;
static int with_responders;
static pthread_barrier_t ready;

static struct spinner {
	struct self s; /* its first queue pair alone */
	struct ibv_mr *mr;
	uint64_t words[2]; /* what is sent, and where something arrives */
	struct spinner *peer;
	uint64_t done, micros;
	pthread_t thread;
} requesters[SPINNERS], responders[SPINNERS];

static uint64_t micros(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* open_spinner makes the queue pair of a thread. */
static void open_spinner(struct spinner *p, struct ibv_context *ctx, struct ibv_pd *pd)
{
	p->s.ctx = ctx, p->s.pd = pd;
	WANT(!ibv_query_gid(ctx, 1, 0, &p->s.gid));
	WANT(p->s.cq = ibv_create_cq(ctx, 64, NULL, NULL, 0));
	WANT(p->s.qp[0] = plain_qp(&p->s));
	WANT(p->mr = ibv_reg_mr(pd, p->words, sizeof p->words, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
}

static void close_spinner(struct spinner *p)
{
	WANT(!ibv_destroy_qp(p->s.qp[0]) && !ibv_destroy_cq(p->s.cq) && !ibv_dereg_mr(p->mr));
}

static void receive_one(struct spinner *p)
{
	struct ibv_sge sge = {(uintptr_t)&p->words[1], SIZE, p->mr->lkey};
	struct ibv_recv_wr wr = {.sg_list = &sge, .num_sge = 1}, *bad;
	WANT(!ibv_post_recv(p->s.qp[0], &wr, &bad));
}

/* take spins until there is a completion. */
static void take(struct spinner *p, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc;
	int n;
	while (!(n = ibv_poll_cq(p->s.cq, 1, &wc)))
		;
	if (n == 1 && wc.status != IBV_WC_SUCCESS)
		fprintf(stderr, "after %lu: %s\n", p->done, ibv_wc_status_str(wc.status));
	WANT(n == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == opcode);
	p->done++;
}

static void *request(void *arg)
{
	struct spinner *p = arg;
	enum ibv_wr_opcode op = with_responders ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
	struct ibv_sge sge = {(uintptr_t)&p->words[0], SIZE, p->mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED}, *bad;
	if (op == IBV_WR_RDMA_WRITE)
		wr.wr.rdma.remote_addr = (uintptr_t)&p->peer->words[1], wr.wr.rdma.rkey = p->peer->mr->rkey;
	pthread_barrier_wait(&ready);
	uint64_t began = micros();
	for (uint64_t i = 1; i <= rounds; i++) {
		p->words[0] = i;
		WANT(!ibv_post_send(p->s.qp[0], &wr, &bad));
		take(p, op == IBV_WR_SEND ? IBV_WC_SEND : IBV_WC_RDMA_WRITE);
	}
	p->micros = micros() - began;
	return NULL;
}

static void *respond(void *arg)
{
	struct spinner *p = arg;
	pthread_barrier_wait(&ready);
	for (uint64_t i = 0; i < rounds; i++) {
		take(p, IBV_WC_RECV);
		receive_one(p);
	}
	return NULL;
}

int main(int argc, char **argv)
{
	WANT(argc == 3 && (rounds = strtoull(argv[2], NULL, 10)));
	with_responders = !strcmp(argv[1], "pairs");
	WANT(with_responders || !strcmp(argv[1], "each"));
	int n = with_responders ? SPINNERS / 2 : SPINNERS, devices;
	struct ibv_device **list = ibv_get_device_list(&devices);
	struct ibv_context *ctx[2];
	struct ibv_pd *pd[2];
	WANT(list && devices == 2);
	for (int i = 0; i < 2; i++)
		WANT((ctx[i] = ibv_open_device(list[i])) && (pd[i] = ibv_alloc_pd(ctx[i])));
	ibv_free_device_list(list);
	WANT(!pthread_barrier_init(&ready, NULL, SPINNERS));
	for (int i = 0; i < n; i++) {
		struct spinner *a = &requesters[i], *b = &responders[i];
		open_spinner(a, ctx[0], pd[0]);
		open_spinner(b, ctx[1], pd[1]);
		a->peer = b, b->peer = a;
		connect_to(a->s.qp[0], b->s.qp[0]->qp_num, b->s.gid);
		connect_to(b->s.qp[0], a->s.qp[0]->qp_num, a->s.gid);
		for (int k = 0; with_responders && k < RECEIVES; k++)
			receive_one(b);
	}
	for (int i = 0; with_responders && i < n; i++)
		WANT(!pthread_create(&responders[i].thread, NULL, respond, &responders[i]));
	for (int i = 0; i < n; i++)
		WANT(!pthread_create(&requesters[i].thread, NULL, request, &requesters[i]));
	uint64_t first = UINT64_MAX, last = 0;
	for (int i = 0; i < n; i++) {
		struct spinner *a = &requesters[i], *b = &responders[i];
		WANT(!pthread_join(a->thread, NULL) && a->done == rounds);
		WANT(!with_responders || (!pthread_join(b->thread, NULL) && b->done == rounds));
		WANT(b->words[1] == rounds);
		first = a->micros < first ? a->micros : first;
		last = a->micros > last ? a->micros : last;
	}
	printf("%.0f requests/s, the first requester in %.2f s, the last in %.2f s\n",
	       (double)n * (double)rounds * 1e6 / (double)last, (double)first / 1e6, (double)last / 1e6);
	for (int i = 0; i < n; i++)
		close_spinner(&requesters[i]), close_spinner(&responders[i]);
	for (int i = 0; i < 2; i++)
		WANT(!ibv_dealloc_pd(pd[i]) && !ibv_close_device(ctx[i]));
	puts("ok");
	return 0;
}
