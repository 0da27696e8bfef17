/*
 * Verbs for regions that rdma-core 60 and later have: ibv_reg_mr_ex, and buffers that the
 * library allocates. The header may be older or newer, so they have other names here.
 */
#include "self.h"

enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_BUF = 32, ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

struct attr { /* struct ibv_mr_init_attr */
	size_t length;
	int access;
	uint64_t mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};

struct ibv_mr *reg_mr_ex(struct ibv_pd *pd, struct attr *a) __asm__("ibv_reg_mr_ex");
void *alloc_buf(struct ibv_pd *pd, size_t size, void **buf) __asm__("ibv_alloc_buf");
void free_buf(void *buf) __asm__("ibv_free_buf");
struct ibv_mr *reg_buf_mr(struct ibv_pd *pd, void *buf, void *addr, size_t n, int access) __asm__("ibv_reg_buf_mr");

static void refused(struct ibv_pd *pd, struct attr *a, int err) { WANT(!reg_mr_ex(pd, a) && errno == err); }

int main(void)
{
	struct self s = connect_self();
	static char bytes[8192];
	void *buf;
	char *base = alloc_buf(s.pd, 8192, &buf);
	WANT(base && (uintptr_t)base % 4096 == 0);
	WANT(!alloc_buf(NULL, 1, &buf) && errno == EINVAL && !alloc_buf(s.pd, 0, &buf) && errno == EINVAL);

	/* A region at an address of its own, and one in a buffer: a WRITE from one to the other. */
	struct attr a = {.length = 4096, .access = ACCESS, .mask = MASK_ADDR | MASK_IOVA, .addr = bytes, .iova = 0x5000};
	struct ibv_mr *there = reg_mr_ex(s.pd, &a), *here = reg_buf_mr(s.pd, buf, base + 4096, 4096, ACCESS);
	WANT(there && there->addr == bytes && there->length == 4096 && here && here->addr == base + 4096);
	strcpy(base + 4096 + 100, "newer");
	WANT(write_to(&s, base + 4096 + 100, here->lkey, 0x5000 + 8, there->rkey, 6) == IBV_WC_SUCCESS);
	WANT(!strcmp(bytes + 8, "newer"));

	/* Without MASK_BUF the buffer is ignored. */
	a = (struct attr){.length = 16, .access = ACCESS, .mask = MASK_ADDR, .addr = bytes, .buf = (void *)8};
	struct ibv_mr *plain = reg_mr_ex(s.pd, &a);
	WANT(plain && !ibv_dereg_mr(plain));

	/* Bytes outside the buffer, or a buffer of another domain. */
	struct ibv_pd *other = ibv_alloc_pd(s.ctx);
	WANT(other);
	WANT(!reg_buf_mr(s.pd, buf, base + 1, 8192, ACCESS) && errno == EINVAL);
	WANT(!reg_buf_mr(s.pd, buf, base - 1, 1, ACCESS) && errno == EINVAL);
	WANT(!reg_buf_mr(s.pd, buf, base + 8193, 0, ACCESS) && errno == EINVAL);
	WANT(!reg_buf_mr(s.pd, NULL, base, 1, ACCESS) && errno == EINVAL);
	WANT(!reg_buf_mr(other, buf, base, 1, ACCESS) && errno == EINVAL);
	a = (struct attr){.length = 8193, .access = ACCESS, .mask = MASK_ADDR | MASK_BUF, .addr = base, .buf = buf};
	refused(s.pd, &a, EINVAL);

	/* No address; unknown bits; a dma-buf without its offset. */
	refused(s.pd, NULL, EINVAL);
	refused(NULL, &a, EINVAL);
	a.mask = MASK_IOVA;
	refused(s.pd, &a, EINVAL);
	a.mask = MASK_ADDR | 1 << 20;
	refused(s.pd, &a, EINVAL);
	a.mask = MASK_FD;
	refused(s.pd, &a, EINVAL);

	WANT(!ibv_dereg_mr(here) && !ibv_dereg_mr(there) && !ibv_dealloc_pd(other));
	free_buf(buf);
	free_buf(NULL);
	close_self(&s);
	puts("ok");
	return 0;
}
