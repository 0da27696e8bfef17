/*
 * Re-registration, and how it fails: the returned number says which region is valid, errno
 * why.
 */
#include <sys/mman.h>

#include "self.h"

#define PAGE 4096

enum { rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_MW_BIND };

/* still checks that the region is unchanged. */
static void still(struct self *s, struct ibv_mr *mr, char *p)
{
	WANT(mr->addr == p && mr->length == PAGE);
	WANT(write_to(s, p, mr->lkey, (uintptr_t)p + 100, mr->rkey, 8) == IBV_WC_SUCCESS);
}

static void bind_window(struct self *s, struct ibv_mw *mw, struct ibv_mr *mr, uint64_t length)
{
	struct ibv_mw_bind b = {.send_flags = IBV_SEND_SIGNALED,
				.bind_info = {mr, (uintptr_t)mr->addr, length, IBV_ACCESS_REMOTE_WRITE}};
	struct ibv_wc wc;
	int k;
	WANT(!ibv_bind_mw(s->qp[0], mw, &b));
	while ((k = ibv_poll_cq(s->cq, 1, &wc)) == 0)
		;
	WANT(k == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_BIND_MW);
}

#define REFUSED(err, ...)                                                                                              \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		int is = ibv_rereg_mr(mr, __VA_ARGS__);                                                                \
		WANT(is == IBV_REREG_MR_ERR_INPUT || is == IBV_REREG_MR_ERR_DONT_FORK_NEW); /* the old one is valid */ \
		WANT(errno == (err));                                                                                  \
		still(&s, mr, p);                                                                                      \
	} while (0)

int main(void)
{
	struct self s = connect_self();
	char *p = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(p != MAP_FAILED && !munmap(p + 2 * PAGE, PAGE));
	struct ibv_mr *mr = ibv_reg_mr(s.pd, p, PAGE, rights);
	WANT(mr);
	still(&s, mr, p);

	REFUSED(EINVAL, 0, NULL, NULL, 0, 0);
	REFUSED(EINVAL, IBV_REREG_MR_CHANGE_PD, NULL, NULL, 0, 0);
	REFUSED(EINVAL, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, p, 0, 0);
	REFUSED(EINVAL, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_REMOTE_WRITE);
	REFUSED(EFAULT, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, p + PAGE, 2 * PAGE, 0);

	struct ibv_mw *mw = ibv_alloc_mw(s.pd, IBV_MW_TYPE_1);
	WANT(mw);
	bind_window(&s, mw, mr, 100);
	REFUSED(EBUSY, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, rights);
	bind_window(&s, mw, mr, 0);
	WANT(!ibv_dealloc_mw(mw));

	WANT(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS, NULL, p + PAGE, PAGE,
			   rights | IBV_ACCESS_ON_DEMAND));
	still(&s, mr, p + PAGE);
	WANT(!ibv_dereg_mr(mr));
	close_self(&s);
	puts("ok");
	return 0;
}
