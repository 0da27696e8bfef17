/*
 * On-demand paging by its first verbs, which verbena/verbs.h has: query what the device
 * supports, register memory on demand, send from it, map other memory in its place, send
 * again.
 */
#include <sys/mman.h>

#include <verbena/verbs.h>

#include "self.h"

#define MB (1 << 20)

int main(void)
{
	struct self s = connect_self();
	struct ibv_odp_caps caps;
	if (ibv_query_odp_caps(s.ctx, &caps, sizeof(caps)) ||
	    !(caps.per_transport_caps.ud_odp_caps & ODP_SUPPORT_SEND))
		return 1;
	WANT(ibv_query_odp_caps(s.ctx, &caps, 1) == EINVAL);

	char *p = mmap(NULL, 10 * MB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	WANT(p != MAP_FAILED);
	struct ibv_mr *mr = ibv_reg_mr(s.pd, p, 10 * MB,
				       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_ON_DEMAND);
	WANT(mr);
	strcpy(p, "first");
	WANT(write_to(&s, p, mr->lkey, (uintptr_t)p + 5 * MB, mr->rkey, 6) == IBV_WC_SUCCESS);
	WANT(!strcmp(p + 5 * MB, "first"));

	struct ibv_prefetch_attr want = {.flags = IBV_ACCESS_LOCAL_WRITE, .addr = p + 2 * MB, .length = 2 * MB};
	WANT(!ibv_prefetch_mr(mr, &want, sizeof(want)));
	want.length = 9 * MB; /* beyond the region */
	WANT(ibv_prefetch_mr(mr, &want, sizeof(want)) == EFAULT);

	WANT(!munmap(p, 1 * MB));
	WANT(mmap(p, 1 * MB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	WANT(*p == 0);
	strcpy(p, "second");
	WANT(write_to(&s, p, mr->lkey, (uintptr_t)p + 5 * MB, mr->rkey, 7) == IBV_WC_SUCCESS);
	WANT(!strcmp(p + 5 * MB, "second"));

	/* A null region reads as zeros. */
	struct ibv_mr *null = ibv_alloc_null_mr(s.pd);
	WANT(null && null->length == SIZE_MAX);
	WANT(write_to(&s, (void *)12345, null->lkey, (uintptr_t)p + 5 * MB, mr->rkey, MB) == IBV_WC_SUCCESS);
	for (int i = 0; i < MB; i++)
		WANT(p[5 * MB + i] == 0);
	WANT(!ibv_dereg_mr(null));
	WANT(!ibv_dereg_mr(mr));
	close_self(&s);
	puts("ok");
	return 0;
}
