/*
 * Threads that are cancelled in verbs: at any instruction (PTHREAD_CANCEL_ASYNCHRONOUS), or
 * at cancellation points, of which a post or a poll has none. No lock stays locked: the next
 * thread uses the same queues.
 *
 * Arguments: "async" or "deferred", a seed for how long each thread runs, and how many. Or "late":
 * then a thread gets the signal of a cancellation that many times while it is in verbs, as if it
 * had entered them after the canceller had seen its type.
 */
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
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

/* The C library's signal of pthread_cancel. */
#define SIGCANCEL 32

static volatile pid_t tid;

static void *work_until(void *stop)
{
	tid = (pid_t)syscall(SYS_gettid);
	for (; !*(volatile int *)stop; rounds++) {
		WANT(!ibv_req_notify_cq(s.cq, 0));
		post();
		poll_some();
	}
	return NULL;
}

static void *wait_here(void *unused)
{
	pause();
	return unused;
}

struct kernel_sigaction { /* the C library hides its own signals from sigaction(2) */
	void *handler;
	unsigned long flags;
	void *restorer;
	unsigned long mask;
};

/* late sends the signal to a thread that is not cancelled: the handler looks and returns. It
 * must not run on a goroutine's stack, which has no room for it. */
static void late(int n)
{
	pthread_t t;
	volatile int stop = 0;
	struct kernel_sigaction a;
	WANT(!pthread_create(&t, NULL, wait_here, NULL) && !pthread_cancel(t) && !pthread_join(t, NULL)); /* installs the handler */
	WANT(!syscall(SYS_rt_sigaction, SIGCANCEL, NULL, &a, sizeof a.mask) && a.handler && a.flags & SA_ONSTACK);
	WANT(!pthread_create(&t, NULL, work_until, (void *)&stop));
	while (rounds < 100)
		;
	for (int i = 0; i < n; i++)
		WANT(!syscall(SYS_tgkill, getpid(), tid, SIGCANCEL));
	stop = 1;
	WANT(!pthread_join(t, NULL));
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
	int is_late = !strcmp(argv[1], "late");
	if (is_late)
		late(atoi(argv[3]));
	for (int i = 0; i < atoi(argv[3]) && !is_late; i++) {
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
