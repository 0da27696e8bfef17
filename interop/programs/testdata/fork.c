/*
 * A program that forks before the first verb, with a context open, with a domain,
 * and in the middle of it all. Everybody goes on: the parent with what it has, a
 * child with its parent's context and domain, or with ones of its own.
 */
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

static void await(pid_t child)
{
	int status;
	WANT(child > 0 && waitpid(child, &status, 0) == child);
	WANT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static void everything(void)
{
	struct self s = connect_self();
	use_self(&s);
	close_self(&s);
}

int main(void)
{
	pid_t child;
	if (!(child = fork())) { /* before */
		everything();
		_exit(0);
	}
	await(child);

	struct ibv_context *ctx = open_first();
	if (!(child = fork())) { /* with a context: the child uses it */
		struct ibv_pd *pd = ibv_alloc_pd(ctx);
		WANT(pd);
		struct self s = connect_in(ctx, pd);
		use_self(&s);
		close_self(&s);
		_exit(0);
	}
	await(child);

	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	WANT(pd);
	struct self s = connect_in(ctx, pd);
	use_self(&s);
	if (!(child = fork())) { /* in the middle: its parent's domain, but not its queue pairs */
		struct ibv_send_wr wr = {.opcode = IBV_WR_SEND}, *bad;
		WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
		struct ibv_wc wc;
		WANT(ibv_poll_cq(s.cq, 1, &wc) < 0);
		struct self own = connect_in(ctx, pd);
		use_self(&own);
		if (!(child = fork())) { /* and a grandchild */
			everything();
			_exit(0);
		}
		await(child);
		use_self(&own);
		WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
		close_self(&own);
		_exit(0);
	}
	use_self(&s); /* both at the same time */
	await(child);
	use_self(&s); /* what the child destroyed was its own copy */
	close_self(&s);

	if (!(child = fork())) { /* after */
		everything();
		_exit(0);
	}
	await(child);
	everything();
	puts("ok");
	return 0;
}
