/*
 * Verbs of verbena/verbs.h. The argument is "alloc" (IBV_ACCESS_ALLOCATE_MR and ibv_rereg_mr with seven
 * arguments), "shared" (memory that another process registers, too), "exporter" (dma-bufs that the program
 * makes itself), or "reg only" (a device that registers dma-bufs, but not again).
 */
#define _GNU_SOURCE
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"
#include <verbena/verbs.h>

enum { N = 3 * 4096, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

#define REFUSED(err, call)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT(!(call) && errno == (err));                                                                       \
	} while (0)

static char bytes[N];

/* reaches checks that a WRITE through a region changes memory. */
static void reaches(struct self *s, struct ibv_mr *mr, char mark)
{
	struct ibv_mr *plain = ibv_reg_mr(s->pd, bytes, N, ALL);
	WANT(plain);
	memset(bytes, mark, N);
	WANT(write_to(s, bytes, plain->lkey, (uintptr_t)mr->addr, mr->rkey, (uint32_t)mr->length) == IBV_WC_SUCCESS);
	for (size_t i = 0; i < mr->length; i++)
		WANT(((char *)mr->addr)[i] == mark);
	WANT(!ibv_dereg_mr(plain));
}

static void alloc(struct self *s)
{
	enum { NEW = ALL | IBV_ACCESS_ALLOCATE_MR, BOTH = IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS };
	struct ibv_mr *mr = ibv_reg_mr(s->pd, NULL, N, NEW);
	WANT(mr && mr->addr && mr->length == N);
	for (int i = 0; i < N; i++)
		WANT(!((char *)mr->addr)[i]);
	reaches(s, mr, 1);
	REFUSED(EINVAL, ibv_reg_mr(s->pd, bytes, N, NEW));
	REFUSED(EINVAL, ibv_reg_mr(s->pd, NULL, 0, NEW));
	REFUSED(EINVAL, ibv_reg_mr(s->pd, NULL, N, NEW | IBV_ACCESS_ON_DEMAND));
	REFUSED(EINVAL, ibv_reg_mr(s->pd, NULL, N, NEW | IBV_ACCESS_ZERO_BASED));
	REFUSED(EINVAL, ibv_reg_mr_iova(s->pd, NULL, N, 4096, NEW));
	WANT(!ibv_dereg_mr(mr));

	/* The program's memory, then the library's, then the program's again. */
	struct ibv_rereg_mr_attr attr = {0}, future = {1};
	static char own[4096];
	WANT(mr = ibv_reg_mr(s->pd, own, sizeof own, ALL));
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, N, NEW, &future) == EINVAL);
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, N, (uint64_t)1 << 40, &attr) == EINVAL);
	WANT(ibv_rereg_mr(mr, BOTH, NULL, own, N, NEW, &attr) == EINVAL);
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, 0, NEW, &attr) == EINVAL);
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, N, ALL, &attr) == EINVAL);
	WANT(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, NEW, &attr) == EINVAL);
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, N, NEW | IBV_ACCESS_ON_DEMAND, NULL) == EINVAL);
	WANT(ibv_rereg_mr(NULL, BOTH, NULL, NULL, N, NEW, NULL) == EINVAL);
	WANT(mr->addr == own && mr->length == sizeof own);
	reaches(s, mr, 2); /* it is as it was */
	WANT(!ibv_rereg_mr(mr, BOTH, NULL, NULL, N, NEW, &attr));
	WANT(mr->addr && mr->addr != own && mr->length == N && !((char *)mr->addr)[N - 1]);
	reaches(s, mr, 3);
	WANT(own[0] == 2);
	WANT(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, own, sizeof own, 0, NULL));
	reaches(s, mr, 4);
	/* With six arguments it is libibverbs's. */
	errno = 0;
	WANT(ibv_rereg_mr(mr, BOTH, NULL, NULL, N, ALL) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	WANT(!ibv_rereg_mr(mr, BOTH, NULL, NULL, N, NEW) && mr->addr != own);
	reaches(s, mr, 5);
	struct ibv_pd *pd = ibv_alloc_pd(s->ctx);
	WANT(pd && !ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_PD, pd, NULL, 0, 0, NULL) && mr->pd == pd);
	WANT(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd));
}

/* --- shared --- */

static void child(int in, int out)
{
	char handle[VERBENA_SHARE_ROOM], ready;
	WANT(read(in, handle, sizeof handle) == sizeof handle);
	struct self s = connect_self();
	struct ibv_mr *mr = verbena_reg_shared_mr(handle, s.pd, NULL, ALL);
	WANT(mr && mr->length == N && !strcmp(mr->addr, "of the parent"));
	reaches(&s, mr, 77); /* by a WRITE of the child */
	WANT(write(out, "x", 1) == 1 && read(in, &ready, 1) == 1);
	REFUSED(ENOENT, verbena_reg_shared_mr(handle, s.pd, NULL, ALL)); /* the parent's region has other memory */
	WANT(((char *)mr->addr)[5] == 78 && !ibv_dereg_mr(mr)); /* but this one is as it was */
	close_self(&s);
	_exit(0);
}

static void shared(void)
{
	int to[2], from[2], status;
	WANT(!pipe(to) && !pipe(from));
	pid_t pid = fork();
	WANT(pid >= 0);
	if (!pid)
		child(to[0], from[1]);
	struct self s = connect_self();
	char handle[VERBENA_SHARE_ROOM] = "", ready;
	struct ibv_mr *plain = ibv_reg_mr(s.pd, bytes, N, ALL), *mr = ibv_reg_mr(s.pd, NULL, N, ALL | IBV_ACCESS_ALLOCATE_MR);
	WANT(plain && mr);
	WANT(verbena_share_mr(plain, handle, sizeof handle) == EINVAL && verbena_share_mr(NULL, handle, 100) == EINVAL);
	WANT(verbena_share_mr(mr, NULL, 0) == EINVAL && verbena_share_mr(mr, handle, 3) == ENOSPC && !*handle);
	WANT(!verbena_share_mr(mr, handle, sizeof handle) && strlen(handle) > 10);
	strcpy(mr->addr, "of the parent");
	REFUSED(EINVAL, verbena_reg_shared_mr("nonsense", s.pd, NULL, ALL));
	REFUSED(EINVAL, verbena_reg_shared_mr(NULL, s.pd, NULL, ALL));
	REFUSED(EINVAL, verbena_reg_shared_mr(handle, NULL, NULL, ALL));
	REFUSED(EINVAL, verbena_reg_shared_mr(handle, s.pd, bytes, ALL));
	REFUSED(EINVAL, verbena_reg_shared_mr(handle, s.pd, NULL, ALL | IBV_ACCESS_ON_DEMAND));
	/* In this process, too: another region of the same memory. */
	struct ibv_mr *second = verbena_reg_shared_mr(handle, s.pd, NULL, 0);
	WANT(second && second->addr != mr->addr && !strcmp(second->addr, mr->addr) && second->rkey != mr->rkey);
	WANT(write(to[1], handle, sizeof handle) == sizeof handle && read(from[0], &ready, 1) == 1);
	WANT(((char *)mr->addr)[0] == 77 && ((char *)second->addr)[N - 1] == 77);
	((char *)mr->addr)[5] = 78;
	WANT(!ibv_dereg_mr(second));
	/* Other memory: it is no shared region any more. */
	WANT(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, bytes, N, 0, NULL));
	WANT(verbena_share_mr(mr, handle, sizeof handle) == EINVAL);
	WANT(write(to[1], "x", 1) == 1 && waitpid(pid, &status, 0) == pid && status == 0);
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(plain));
	close_self(&s);
}

/* --- exporter --- */

static void exporter(struct self *s)
{
	char got[16];
	REFUSED(EINVAL, verbena_alloc_dmabuf(0, 0));
	REFUSED(EINVAL, verbena_alloc_dmabuf(N, 4)); /* more pieces than pages */
	WANT(verbena_free_dmabuf(NULL) == EINVAL && verbena_dmabuf_fd(NULL) == -1 && errno == EINVAL);
	struct verbena_dmabuf *b = verbena_alloc_dmabuf(N, 3);
	WANT(b);
	WANT(!verbena_write_dmabuf(b, 4090, "across pieces", 14) && !verbena_read_dmabuf(b, 4090, got, 14) && !strcmp(got, "across pieces"));
	WANT(verbena_write_dmabuf(b, N - 1, got, 2) == EINVAL && verbena_read_dmabuf(b, UINT64_MAX, got, 2) == EINVAL);
	WANT(verbena_read_dmabuf(b, 0, NULL, 1) == EINVAL && !verbena_read_dmabuf(b, 0, NULL, 0));
	int fd = verbena_dmabuf_fd(b);
	WANT(fd >= 0);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(s->pd, 0, N, 0x10000, fd, ALL), *plain = ibv_reg_mr(s->pd, bytes, N, ALL);
	WANT(mr && plain && !close(fd));
	int (*const acts[])(struct verbena_dmabuf *) = {verbena_move_dmabuf, verbena_evict_dmabuf, verbena_move_dmabuf};
	for (int i = 0; i < 30; i++) {
		memset(bytes, i, N);
		WANT(write_to(s, bytes, plain->lkey, 0x10000, mr->rkey, N) == IBV_WC_SUCCESS);
		WANT(!acts[i % 3](b));
		WANT(!verbena_read_dmabuf(b, 4090, got, 14) && got[0] == i && got[13] == i);
		memset(bytes, 0xdb, N);
		WANT(write_to(s, (void *)0x10000, mr->lkey, (uintptr_t)bytes, plain->rkey, N) == IBV_WC_SUCCESS);
		for (int k = 0; k < N; k++)
			WANT(bytes[k] == i);
	}
	WANT(!verbena_revoke_dmabuf(b) && verbena_move_dmabuf(b) == ENODEV && verbena_read_dmabuf(b, 0, got, 1) == ENODEV);
	WANT(write_to(s, bytes, plain->lkey, 0x10000, mr->rkey, N) == IBV_WC_REM_ACCESS_ERR);
	WANT(!verbena_free_dmabuf(b) && !ibv_dereg_mr(mr) && !ibv_dereg_mr(plain));
}

static void reg_only(struct self *s)
{
	struct verbena_dmabuf *b = verbena_alloc_dmabuf(N, 0);
	int fd = b ? verbena_dmabuf_fd(b) : -1;
	WANT(fd >= 0);
	struct ibv_mr *mr = ibv_reg_mr_fd(s->pd, NULL, N, IBV_MR_FD_DMABUF, fd, ALL), *plain = ibv_reg_mr(s->pd, bytes, N, ALL);
	WANT(mr && plain);
	errno = 0;
	WANT(ibv_rereg_mr_fd(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)4096, 4096, IBV_MR_FD_DMABUF, fd, 0) ==
		     IBV_REREG_MR_ERR_INPUT && errno == EOPNOTSUPP);
	WANT(mr->length == N && write_to(s, bytes, plain->lkey, 0, mr->rkey, N) == IBV_WC_SUCCESS);
	WANT(!ibv_rereg_mr(plain, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, bytes, 100, 0)); /* other memory can be */
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(plain) && !close(fd) && !verbena_free_dmabuf(b));
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "alloc";
	if (!strcmp(what, "shared"))
		shared(); /* it forks before the first verb */
	else {
		struct self s = connect_self();
		if (!strcmp(what, "alloc"))
			alloc(&s);
		else if (!strcmp(what, "exporter"))
			exporter(&s);
		else
			reg_only(&s);
		if (strcmp(what, "exporter")) /* whose queue pair is in error */
			close_self(&s);
	}
	puts("ok");
	return 0;
}
