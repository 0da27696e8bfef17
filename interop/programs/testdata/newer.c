/*
 * Verbs for regions that rdma-core 60 and later have: ibv_reg_mr_ex, buffers that the
 * library allocates, and DMA handles. The header may be older or newer, so they have other names
 * here.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include "self.h"
#include "newer.h"

enum { ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE };

struct hint { /* struct ibv_dmah_init_attr */
	uint32_t mask, cpu_id;
	uint8_t ph, mem_type;
};
enum { CPU_ID = 1, PH = 2, MEM_TYPE = 4, STEERS = CPU_ID | MEM_TYPE };

void *alloc_dmah(struct ibv_context *ctx, struct hint *h) __asm__("ibv_alloc_dmah");
int dealloc_dmah(void *dmah) __asm__("ibv_dealloc_dmah");

static void refused(struct ibv_pd *pd, struct attr *a, int err) { WANT(!reg_mr_ex(pd, a) && errno == err); }

/* no_hint wants a DMA handle to be refused. */
static void no_hint(struct ibv_context *ctx, struct hint h, int err)
{
	errno = 0;
	WANT(!alloc_dmah(ctx, &h) && errno == err);
}

static void hints(struct self *s)
{
	static char bytes[8192];
	cpu_set_t all, one;
	WANT(!sched_getaffinity(0, sizeof all, &all));
	uint32_t cpu = 0;
	while (!CPU_ISSET(cpu, &all))
		cpu++;
	no_hint(s->ctx, (struct hint){.mask = PH, .ph = 4}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = 0}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = STEERS, .cpu_id = cpu}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = PH | CPU_ID, .cpu_id = cpu}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = PH | MEM_TYPE}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = PH | 8}, EOPNOTSUPP);
	no_hint(s->ctx, (struct hint){.mask = PH | STEERS, .cpu_id = cpu, .mem_type = 2}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = PH | STEERS, .cpu_id = 0xffff}, EINVAL);
	no_hint(s->ctx, (struct hint){.mask = PH | STEERS, .cpu_id = UINT32_MAX}, EINVAL);
	no_hint(NULL, (struct hint){.mask = PH}, EINVAL);
	WANT(!alloc_dmah(s->ctx, NULL) && errno == EINVAL && dealloc_dmah(NULL) == EINVAL);

	/* A processor on which this thread may not run. */
	uint32_t other = cpu + 1;
	while (other < CPU_SETSIZE && !CPU_ISSET(other, &all))
		other++;
	CPU_ZERO(&one);
	CPU_SET(cpu, &one);
	if (other < CPU_SETSIZE) {
		WANT(!sched_setaffinity(0, sizeof one, &one));
		no_hint(s->ctx, (struct hint){.mask = PH | STEERS, .cpu_id = other}, EPERM);
		WANT(!sched_setaffinity(0, sizeof all, &all));
	}

	void *plain = alloc_dmah(s->ctx, &(struct hint){.mask = PH, .ph = 3});
	void *steered = alloc_dmah(s->ctx, &(struct hint){.mask = PH | STEERS, .ph = 1, .cpu_id = cpu, .mem_type = 1});
	WANT(plain && steered);
	struct attr a = {.length = 4096, .access = ACCESS, .mask = MASK_ADDR | MASK_DMAH, .addr = bytes, .dmah = plain};
	struct ibv_mr *from = reg_mr_ex(s->pd, &a);
	a.addr = bytes + 4096, a.dmah = steered;
	struct ibv_mr *to = reg_mr_ex(s->pd, &a);
	WANT(from && to);
	strcpy(bytes, "hinted");
	WANT(write_to(s, bytes, from->lkey, (uintptr_t)bytes + 4096, to->rkey, 7) == IBV_WC_SUCCESS && !strcmp(bytes + 4096, "hinted"));
	a.access |= IBV_ACCESS_ON_DEMAND;
	refused(s->pd, &a, EOPNOTSUPP);
	a.access = ACCESS, a.dmah = NULL;
	refused(s->pd, &a, EINVAL);
	WANT(dealloc_dmah(plain) == EBUSY && dealloc_dmah(steered) == EBUSY);
	WANT(!ibv_dereg_mr(to) && !dealloc_dmah(steered) && dealloc_dmah(plain) == EBUSY);
	a.dmah = steered; /* it is gone */
	refused(s->pd, &a, EINVAL);
	WANT(dealloc_dmah(steered) == EINVAL);
	/* A registration that fails does not keep the handle busy. */
	WANT(!ibv_dereg_mr(from));
	a.dmah = plain, a.addr = (void *)(intptr_t)-4096, a.length = 8192;
	refused(s->pd, &a, EINVAL);
	WANT(!dealloc_dmah(plain));
}

/* Buffers of a parent domain that allows unprotected memory are dma-bufs. */
static void shared_buffers(struct self *s)
{
	struct ibv_parent_domain_init_attr init = {.pd = s->pd, .comp_mask = 1 << 2};
	struct ibv_pd *parent = ibv_alloc_parent_domain(s->ctx, &init);
	void *buf;
	char *base = parent ? alloc_buf(parent, 8192 + 1, &buf) : NULL;
	WANT(base && (uintptr_t)base % 4096 == 0 && base[8192] == 0);
	struct ibv_mr *here = reg_buf_mr(parent, buf, base + 100, 8000, ACCESS), *there = reg_buf_mr(parent, buf, base + 8100, 92, ACCESS);
	WANT(here && there && here->addr == (void *)100);
	strcpy(base + 200, "a dma-buf");
	WANT(write_to(s, base + 200, here->lkey, (uintptr_t)base + 8150, there->rkey, 10) == IBV_WC_SUCCESS);
	WANT(!strcmp(base + 8150, "a dma-buf"));
	WANT(!reg_buf_mr(s->pd, buf, base, 1, ACCESS) && errno == EINVAL);
	WANT(!reg_buf_mr(parent, buf, base + 8192, 2, ACCESS) && errno == EINVAL);
	struct attr a = {.length = 1, .access = ACCESS, .mask = MASK_ADDR | MASK_BUF | MASK_IOVA, .addr = base, .buf = buf};
	refused(parent, &a, EINVAL);
	a.mask = MASK_ADDR | MASK_BUF | MASK_FD_OFFSET;
	refused(parent, &a, EINVAL);

	/* The descriptor is the caller's, and outlives the buffer. */
	int fd = buf_export(buf), again = buf_export(buf);
	WANT(fd >= 0 && again > fd && fcntl(fd, F_GETFD) == FD_CLOEXEC && !close(again));
	WANT(!ibv_dereg_mr(there) && !ibv_dereg_mr(here));
	free_buf(buf);
	struct ibv_mr *kept = ibv_reg_dmabuf_mr(s->pd, 0, 8192, 0, fd, ACCESS);
	WANT(kept && !close(fd) && !ibv_dereg_mr(kept) && !ibv_dealloc_pd(parent));
	init.comp_mask = 1 << 3;
	WANT(!ibv_alloc_parent_domain(s->ctx, &init) && errno == EOPNOTSUPP);
}

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
	refused(s.pd, &a, EOPNOTSUPP);
	a.mask = MASK_FD;
	refused(s.pd, &a, EINVAL);

	WANT(!ibv_dereg_mr(here) && !ibv_dereg_mr(there) && !ibv_dealloc_pd(other));
	free_buf(buf);
	free_buf(NULL);
	WANT(buf_export(NULL) == -1 && errno == EINVAL);
	hints(&s);
	shared_buffers(&s);
	close_self(&s);
	puts("ok");
	return 0;
}
