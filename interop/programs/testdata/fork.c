/*
 * A program that forks before the first verb, with a context open, with a protection domain,
 * with connected queue pairs, and afterwards. All processes go on: the parent with its
 * objects, a child with its parent's context and domain, with objects of its own, or with
 * regions of its parent that it imports.
 */
#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"
#include "newer.h"

static void await(pid_t child)
{
	int status;
	WANT(child > 0 && waitpid(child, &status, 0) == child);
	WANT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* import_parents imports the parent's region in its child, which has other bytes at that
 * address. */
static void import_parents(struct ibv_context *ctx, struct ibv_pd *pd, struct ibv_mr *mr, char *buf)
{
	int parents = dup(ctx->cmd_fd), own;
	WANT(!strcmp(buf, "parent"));
	strcpy(buf, "child");
	struct ibv_context *there = ibv_import_device(parents);
	WANT(there && there != ctx);
	struct ibv_pd *domain = ibv_import_pd(there, pd->handle);
	WANT(domain);
	struct ibv_mr *far = ibv_import_mr(domain, mr->handle);
	char got[16] = "";
	struct ibv_mr *near = ibv_reg_mr(domain, got, sizeof got, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	WANT(far && near);
	struct self s = connect_in(there, domain);
	WANT(write_to(&s, buf, far->lkey, (uintptr_t)got, near->rkey, 7) == IBV_WC_SUCCESS && !strcmp(got, "parent"));
	WANT(!ibv_dereg_mr(near));
	ibv_unimport_mr(far);
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
	ibv_unimport_pd(domain);
	WANT(!ibv_close_device(there));
	/* When the child has used its parent's context, cmd_fd names the child's own one. */
	WANT((pd = ibv_alloc_pd(ctx)) && (own = dup(ctx->cmd_fd)) >= 0);
	WANT(ibv_import_device(own) == ctx && !ibv_close_device(ctx) && !ibv_dealloc_pd(pd));
}

/* sockets counts the sockets by which other processes import the dma-bufs of this one. */
static int sockets(void)
{
	static const char name[] = "\0verbena-dmabuf:";
	int count = 0;
	DIR *fds = opendir("/proc/self/fd");
	WANT(fds);
	for (struct dirent *d; (d = readdir(fds));) {
		struct sockaddr_un a = {0};
		socklen_t n = sizeof a;
		count += !getsockname(atoi(d->d_name), (void *)&a, &n) && !memcmp(a.sun_path, name, sizeof name - 1);
	}
	closedir(fds);
	return count;
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
	char *shared = strdup("parent");
	struct ibv_mr *mr = ibv_reg_mr(pd, shared, 7, IBV_ACCESS_LOCAL_WRITE);
	WANT(mr);
	if (!(child = fork())) { /* with a region: it stays the parent's, and can be imported */
		import_parents(ctx, pd, mr, shared);
		_exit(0);
	}
	await(child);
	WANT(!strcmp(shared, "parent") && !ibv_dereg_mr(mr));
	struct ibv_alloc_dm_attr length = {.length = 4096};
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &length);
	WANT(dm);
	int exported = dm_export(dm);
	WANT(exported >= 0 && sockets() == 1);
	if (!(child = fork())) { /* with a dma-buf: its importers would not notice the parent's end */
		WANT(sockets() == 0);
		_exit(0);
	}
	await(child);
	WANT(sockets() == 1 && !close(exported) && !ibv_free_dm(dm));
	if (!(child = fork())) { /* with queue pairs: the child has its parent's domain, but not these */
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
	use_self(&s); /* the child has destroyed only its own copies */
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
