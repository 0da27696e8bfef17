/*
 * dma-bufs of device memory, registered by their descriptors: what is refused and with which
 * errno, in the kernel's order; traffic; and that the memory is revoked when it is freed.
 * The argument says what the device does with dma-bufs: dynamic, pinned, hidden, or storm.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "self.h"
#include "newer.h"
#include <verbena/verbs.h>

enum { SIZE = 3 * 4096, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

#define REFUSED(err, ...)                                                                                              \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT(!ibv_reg_dmabuf_mr(s.pd, __VA_ARGS__) && errno == (err));                                         \
	} while (0)

int main(int argc, char **argv)
{
	struct self s = connect_self();
	const char *how = argc > 1 ? argv[1] : "dynamic";
	struct ibv_alloc_dm_attr a = {.length = SIZE};
	struct ibv_dm *dm = ibv_alloc_dm(s.ctx, &a);
	WANT(dm);
	int fd = dm_export(dm);
	WANT(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
	if (!strcmp(how, "hidden")) { /* as a device without dma-bufs */
		REFUSED(EOPNOTSUPP, 0, 0, 0, -1, 0);
		puts("ok");
		return 0;
	}

	/* How NCCL, libfabric and UCX ask whether there are dma-bufs. */
	REFUSED(EBADF, 0, 0, 0, -1, 0);
	REFUSED(EBADF, 0, 4096, 0, -1, ALL);
	/* What is looked at before the descriptor. */
	REFUSED(EINVAL, 8, 4096, 16, -1, ALL);
	REFUSED(EINVAL, 0, 4096, 0, -1, ALL | IBV_ACCESS_ON_DEMAND);
	REFUSED(EINVAL, 0, 4096, 0, -1, ALL | IBV_ACCESS_MW_BIND);
	REFUSED(EINVAL, 0, 4096, 0, -1, ALL | IBV_ACCESS_ZERO_BASED);
	REFUSED(EINVAL, 0, 4096, 0, -1, IBV_ACCESS_REMOTE_WRITE);
	REFUSED(EINVAL, 4096, SIZE_MAX - 100, 4096, -1, ALL);
	/* What is looked at after it. */
	int other = open("/dev/null", O_RDONLY), memory = memfd_create("not a dma-buf", MFD_CLOEXEC);
	WANT(other >= 0 && memory >= 0 && !ftruncate(memory, SIZE));
	REFUSED(EINVAL, 0, 4096, 0, other, ALL);
	REFUSED(EINVAL, 0, 4096, 0, memory, ALL);
	REFUSED(EINVAL, 0, 0, 0, fd, ALL);
	REFUSED(EINVAL, 4096, SIZE, 4096, fd, ALL);
	REFUSED(EINVAL, 1 << 20, 4096, 1 << 20, fd, ALL);

	if (!strcmp(how, "pinned")) { /* device memory cannot be pinned */
		REFUSED(EOPNOTSUPP, 0, 4096, 0, fd, ALL);
		puts("ok");
		return 0;
	}

	/* The descriptor may be closed at once. The region begins in the middle of the buffer. */
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(s.pd, 4096, 8192, 0x7000000, fd, ALL);
	WANT(mr && mr->addr == (void *)4096 && mr->length == 8192 && mr->lkey && mr->rkey);
	static char bytes[4096], back[16];
	struct ibv_mr *plain = ibv_reg_mr(s.pd, bytes, sizeof bytes, ALL);
	WANT(plain);
	strcpy(bytes, "into the buffer");
	WANT(write_to(&s, bytes, plain->lkey, 0x7000000 + 100, mr->rkey, 16) == IBV_WC_SUCCESS);
	WANT(!ibv_memcpy_from_dm(back, dm, 4096 + 100, 16) && !strcmp(back, bytes));
	/* and out of it again */
	WANT(write_to(&s, (void *)(0x7000000 + 100), mr->lkey, (uintptr_t)bytes + 200, plain->rkey, 16) == IBV_WC_SUCCESS);
	WANT(!strcmp(bytes + 200, bytes));

	/* It can be prefetched: with an exporter that had moved it, it would be mapped then. */
	struct ibv_sge part = {0x7000000, 4096, mr->lkey};
	WANT(!ibv_advise_mr(s.pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &part, 1));
	part.addr -= 4096;
	WANT(ibv_advise_mr(s.pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &part, 1) == EFAULT);

	/* ibv_rereg_mr does not take it, ibv_rereg_mr_fd does. */
	errno = 0;
	WANT(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL) == IBV_REREG_MR_ERR_INPUT && errno == EINVAL);
	WANT(ibv_rereg_mr_fd(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)0, 4096, IBV_MR_FD_DMABUF, -1, 0) ==
		     IBV_REREG_MR_ERR_INPUT && errno == EBADF);
	WANT(ibv_rereg_mr_fd(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)0, 4096, (enum ibv_mr_fd_type)7, fd, 0) ==
		     IBV_REREG_MR_ERR_INPUT && errno == EOPNOTSUPP);
	WANT(!ibv_rereg_mr_fd(mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL, (void *)64, 4096,
			      IBV_MR_FD_DMABUF, fd, ALL));
	WANT(mr->addr == (void *)64 && mr->length == 4096);
	strcpy(bytes, "second");
	WANT(write_to(&s, bytes, plain->lkey, 64, mr->rkey, 7) == IBV_WC_SUCCESS);
	WANT(!ibv_memcpy_from_dm(back, dm, 64, 8) && !strcmp(back, "second"));
	/* A region of plain memory becomes one of a dma-buf. */
	struct ibv_mr *turned = ibv_reg_mr(s.pd, bytes, sizeof bytes, ALL);
	WANT(turned && !ibv_rereg_mr_fd(turned, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)4096, 4096, IBV_MR_FD_DMABUF, fd, 0));
	WANT(write_to(&s, bytes, plain->lkey, 4096, turned->rkey, 7) == IBV_WC_SUCCESS && !ibv_dereg_mr(turned));

	/* By ibv_reg_mr_ex and ibv_reg_mr_fd. */
	struct attr x = {.length = 4096, .access = ALL, .mask = MASK_FD | MASK_FD_OFFSET | MASK_IOVA, .fd = fd, .fd_offset = 4096, .iova = 0x8000};
	struct ibv_mr *ex = reg_mr_ex(s.pd, &x);
	WANT(ex && ex->addr == (void *)4096 && write_to(&s, bytes, plain->lkey, 0x8000, ex->rkey, 7) == IBV_WC_SUCCESS);
	for (int missing = 0; missing < 2; missing++) {
		struct attr y = x;
		y.mask &= ~(uint64_t)(missing ? MASK_FD_OFFSET : MASK_IOVA);
		WANT(!reg_mr_ex(s.pd, &y) && errno == EINVAL);
	}
	x.mask |= MASK_ADDR;
	WANT(!reg_mr_ex(s.pd, &x) && errno == EINVAL);
	x.mask = MASK_ADDR | MASK_FD_OFFSET;
	WANT(!reg_mr_ex(s.pd, &x) && errno == EINVAL);
	struct ibv_mr *seed = ibv_reg_mr_fd(s.pd, (void *)4096, 4096, IBV_MR_FD_DMABUF, fd, ALL);
	WANT(seed && !ibv_dereg_mr(seed) && !ibv_dereg_mr(ex));

	/* A descriptor with a number that is another file's by now. */
	int again = dup(fd);
	WANT(again >= 0 && dup2(other, again) == again);
	REFUSED(EINVAL, 0, 4096, 0, again, ALL);
	close(fd);
	REFUSED(EBADF, 0, 4096, 0, fd, ALL);

	/* Ordinary buffers have no dma-buf. */
	void *buf;
	WANT(alloc_buf(s.pd, 4096, &buf));
	errno = 0;
	WANT(buf_export(buf) == -1 && errno == ENODATA);
	free_buf(buf);

	/* When the device memory is freed, the region has none. Its key stays until ibv_dereg_mr. */
	WANT(write_to(&s, bytes, plain->lkey, 64, mr->rkey, 7) == IBV_WC_SUCCESS);
	WANT(!ibv_free_dm(dm));
	WANT(write_to(&s, bytes, plain->lkey, 64, mr->rkey, 7) == IBV_WC_REM_ACCESS_ERR);
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(plain));
	close_self(&s);
	puts("ok");
	return 0;
}
