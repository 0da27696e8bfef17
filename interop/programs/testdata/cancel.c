/*
 * Threads that are cancelled in verbs: at any instruction (PTHREAD_CANCEL_ASYNCHRONOUS), or
 * at cancellation points, of which a post or a poll has none. No lock stays locked: the next
 * thread uses the same queues.
 *
 * Arguments: "async" or "deferred", a seed for how long each thread runs, and how many.
 */
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include "self.h"

static struct self s;
static struct ibv_comp_channel *channel;
static struct ibv_mr *mr;
static char buf[64];
static int type;
static volatile unsigned rounds; /* of the thread that runs */

static void post(void)
{
	struct ibv_sge sge = {(uintptr_t)buf, 8, mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				 .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {(uintptr_t)buf + 8, mr->rkey}}, *bad;
	int r = ibv_post_send(s.qp[0], &wr, &bad);
	WANT(!r || r == ENOMEM); /* cancelled threads have left requests in the queue */
}

static void poll_some(void)
{
	struct ibv_wc wc[4];
	WANT(ibv_poll_cq(s.cq, 4, wc) >= 0);
}

static void *work(void *unused)
{
	(void)unused;
	WANT(!pthread_setcanceltype(type, NULL));
	for (;; rounds++) {
		WANT(!ibv_req_notify_cq(s.cq, 0)); /* completions raise events, in the poster's thread */
		post();
		poll_some();
		pthread_testcancel();
	}
	return NULL;
}

int main(int argc, char **argv)
{
	WANT(argc == 4);
	type = strcmp(argv[1], "async") ? PTHREAD_CANCEL_DEFERRED : PTHREAD_CANCEL_ASYNCHRONOUS;
	uint64_t number = strtoull(argv[2], NULL, 10);
	unsigned short seed[3] = {(unsigned short)number, (unsigned short)(number >> 16), (unsigned short)(number >> 32)};
	fprintf(stderr, "VERBENA_SEED=%s repeats it\n", argv[2]);
	alarm(60); /* ends the program if a lock stays locked */
	s = connect_self();
	WANT((channel = ibv_create_comp_channel(s.ctx)) != NULL);
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
	WANT(s.cq = ibv_create_cq(s.ctx, 64, NULL, channel, 0));
	for (int i = 0; i < 2; i++)
		WANT(s.qp[i] = plain_qp(&s));
	to_rts(&s, 0);
	to_rts(&s, 1);
	WANT(mr = ibv_reg_mr(s.pd, buf, sizeof buf, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE));
	for (int i = 0; i < atoi(argv[3]); i++) {
		pthread_t t;
		void *end;
		rounds = 0;
		WANT(!pthread_create(&t, NULL, work, NULL));
		for (unsigned until = 1 + (unsigned)(nrand48(seed) % 50); rounds < until;)
			;
		WANT(!pthread_cancel(t) && !pthread_join(t, &end) && end == PTHREAD_CANCELED);
		post(); /* no lock is locked */
		poll_some();
	}
	puts("ok");
	fflush(stdout);
	_exit(0);
}
