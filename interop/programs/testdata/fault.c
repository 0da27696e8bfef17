/*
 * Memory of a region is unmapped, in a program with a SIGSEGV handler of its own. The
 * request completes with an error; the program's handler is called for the program's own
 * faults, before and after, and for none of the backend's.
 *
 * argv[1] says when the handler is installed: early, late or never.
 */
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include "self.h"

static sigjmp_buf back;
static volatile int faults;

static void on_fault(int sig)
{
	(void)sig;
	faults++;
	siglongjmp(back, 1);
}

static void install(void)
{
	struct sigaction a = {.sa_handler = on_fault};
	WANT(!sigaction(SIGSEGV, &a, NULL) && !sigaction(SIGBUS, &a, NULL));
}

/* map_guarded maps n bytes above memory without rights. When they are unmapped, they leave a
 * hole of that size, into which the large mappings of other threads do not fit. */
static char *map_guarded(size_t n)
{
	enum { GUARD = 64 << 10 };
	char *p = mmap(NULL, GUARD + n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(p != MAP_FAILED && !mprotect(p, GUARD, PROT_NONE));
	return p + GUARD;
}

static void own_fault(volatile char *gone)
{
	int before = faults;
	if (!sigsetjmp(back, 1))
		*gone = 1;
	WANT(faults == before + 1);
}

int main(int argc, char **argv)
{
	enum { N = 64 << 10 };
	const char *when = argc > 1 ? argv[1] : "never";
	if (!strcmp(when, "early"))
		install();
	struct self s = connect_self();
	if (!strcmp(when, "late"))
		install();
	use_self(&s);

	char *p = map_guarded(2 * N);
	char *target = malloc(N);
	struct ibv_mr *mr = ibv_reg_mr(s.pd, p, 2 * N, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	struct ibv_mr *tr = ibv_reg_mr(s.pd, target, N, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	WANT(mr && tr);
	WANT(write_to(&s, p, mr->lkey, (uintptr_t)target, tr->rkey, N) == IBV_WC_SUCCESS);
	if (strcmp(when, "never"))
		own_fault(NULL);
	WANT(!munmap(p, N));
	int before = faults;
	enum ibv_wc_status status = write_to(&s, p, mr->lkey, (uintptr_t)target, tr->rkey, N);
	printf("from memory that is gone: %s\n", ibv_wc_status_str(status));
	WANT(status == IBV_WC_LOC_PROT_ERR);
	WANT(faults == before); /* the program's handler was not called */
	if (strcmp(when, "never")) {
		own_fault(p);
		own_fault(NULL);
	}
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(tr));
	close_self(&s);

	/* The other side: a peer writes to memory that is gone. */
	s = connect_self();
	p = map_guarded(N);
	mr = ibv_reg_mr(s.pd, p, N, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	tr = ibv_reg_mr(s.pd, target, N, IBV_ACCESS_LOCAL_WRITE);
	WANT(mr && tr && !munmap(p, N));
	status = write_to(&s, target, tr->lkey, (uintptr_t)p, mr->rkey, N);
	printf("to memory that is gone: %s\n", ibv_wc_status_str(status));
	WANT(status == IBV_WC_REM_OP_ERR || status == IBV_WC_REM_ACCESS_ERR);
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(tr));
	close_self(&s);
	puts("ok");
	return 0;
}
