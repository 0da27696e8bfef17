/*
 * Imports of contexts, protection domains, regions and device memory within the process. An
 * import is another object for the same thing: destroying one destroys the thing, and the
 * others can only be unimported. (From another process: imports.c.)
 */
#include <fcntl.h>
#include <unistd.h>

#include "self.h"

static int is_open(int fd) { return fcntl(fd, F_GETFD) >= 0; }

int main(void)
{
	int pipes[2];
	WANT(!pipe(pipes));
	struct self s = connect_self();

	/* Descriptors that are not a context's. */
	WANT(!ibv_import_device(-1) && errno == EBADF);
	WANT(!ibv_import_device(pipes[0]) && errno == EINVAL);

	/* The descriptor belongs to the import, which ends with ibv_close_device. */
	int fd = dup(s.ctx->cmd_fd);
	struct ibv_context *ctx = ibv_import_device(fd);
	WANT(ctx);
	struct ibv_context *other = open_first();
	enum { N = 4096 };
	char *buf = calloc(2, N);
	int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	struct ibv_mr *mr = ibv_reg_mr(s.pd, buf, 2 * N, access);
	struct ibv_alloc_dm_attr da = {.length = 64};
	struct ibv_dm *dm = ibv_alloc_dm(s.ctx, &da);
	WANT(mr && dm);

	WANT(!ibv_import_pd(ctx, 0xfffff) && errno == ENOENT && !ibv_import_pd(other, s.pd->handle) && errno == ENOENT);
	WANT(!ibv_import_mr(s.pd, s.pd->handle + 77) && errno == ENOENT && !ibv_import_dm(ctx, 0) && errno == ENOENT);
	WANT(!ibv_import_pd(NULL, s.pd->handle) && errno == EINVAL && !ibv_import_mr(NULL, mr->handle) && errno == EINVAL);
	struct ibv_pd *pd = ibv_import_pd(ctx, s.pd->handle);
	WANT(pd && pd->handle == s.pd->handle);
	struct ibv_mr *same = ibv_import_mr(pd, mr->handle);
	WANT(same && same->lkey == mr->lkey && same->rkey == mr->rkey && same->length == 2 * N && !same->addr);
	struct ibv_dm *device = ibv_import_dm(ctx, dm->handle);
	uint64_t word = 42, seen = 0;
	WANT(device && !ibv_memcpy_to_dm(device, 8, &word, 8) && !ibv_memcpy_from_dm(&seen, dm, 8, 8) && seen == 42);

	/* Queue pairs of the imported domain use regions of the first one. */
	struct self t = connect_in(ctx, pd);
	strcpy(buf, "imported");
	WANT(write_to(&t, buf, same->lkey, (uintptr_t)buf + N, mr->rkey, 9) == IBV_WC_SUCCESS && !strcmp(buf + N, buf));
	WANT(ibv_dealloc_pd(pd) == EBUSY);
	WANT(!ibv_destroy_qp(t.qp[0]) && !ibv_destroy_qp(t.qp[1]) && !ibv_destroy_cq(t.cq));

	/* Unimporting does not change the thing. */
	struct ibv_mr *third = ibv_import_mr(pd, mr->handle);
	WANT(third);
	ibv_unimport_mr(third);
	WANT(write_to(&s, buf, mr->lkey, (uintptr_t)buf + N, mr->rkey, 9) == IBV_WC_SUCCESS);

	/* Destroying an import destroys the thing; the others can only be unimported. */
	WANT(!ibv_dereg_mr(same) && ibv_dereg_mr(mr) == EINVAL && !ibv_import_mr(pd, mr->handle) && errno == ENOENT);
	ibv_unimport_mr(mr);
	WANT(!ibv_free_dm(device) && ibv_memcpy_from_dm(&seen, dm, 8, 8) == EINVAL);
	ibv_unimport_dm(dm);
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
	WANT(!ibv_dealloc_pd(pd) && !ibv_alloc_mw(s.pd, IBV_MW_TYPE_1) && errno == EINVAL);
	ibv_unimport_pd(s.pd);
	ibv_unimport_pd(NULL);
	WANT(is_open(fd) && !ibv_close_device(ctx) && !is_open(fd) && is_open(s.ctx->cmd_fd));
	fd = dup(s.ctx->cmd_fd);
	WANT(!ibv_close_device(s.ctx) && ibv_close_device(s.ctx) == EINVAL);
	WANT(!ibv_import_device(fd) && errno == EINVAL && is_open(fd)); /* the context is closed */
	WANT(!ibv_close_device(other) && !ibv_import_device(fd) && errno == EINVAL);
	puts("ok");
	return 0;
}
