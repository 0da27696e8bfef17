/*
 * A dma-buf of another process, whose descriptor is opened by its path. The program writes to it and
 * reads it back again and again. It says "ended" when a WRITE ends in an access error: the buffer was
 * revoked, or its process has ended. With "fork" a child lives on beside it, and does nothing.
 */
#include <fcntl.h>
#include <unistd.h>

#include "self.h"

enum { SIZE = 64 << 10, AT = 0x7000000, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

int main(int argc, char **argv)
{
	WANT(argc > 2);
	struct self s = connect_self();
	int fd = open(argv[1], O_RDWR | O_CLOEXEC);
	WANT(fd >= 0);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(s.pd, 0, SIZE, AT, fd, ALL);
	WANT(mr && !close(fd));
	static unsigned char out[SIZE], back[SIZE];
	struct ibv_mr *o = ibv_reg_mr(s.pd, out, SIZE, ALL), *b = ibv_reg_mr(s.pd, back, SIZE, ALL);
	WANT(o && b);
	if (!strcmp(argv[2], "fork")) {
		pid_t child = fork();
		WANT(child >= 0);
		if (!child) {
			pause();
			_exit(0);
		}
		printf("child %d\n", child);
	}
	for (unsigned i = 0;; i++) {
		memset(out, 1 + i % 200, SIZE);
		enum ibv_wc_status status = write_to(&s, out, o->lkey, AT, mr->rkey, SIZE);
		if (status == IBV_WC_REM_ACCESS_ERR)
			break;
		WANT(status == IBV_WC_SUCCESS);
		/* from the buffer */
		status = write_to(&s, (void *)AT, mr->lkey, (uintptr_t)back, b->rkey, SIZE);
		if (status == IBV_WC_LOC_PROT_ERR)
			break;
		WANT(status == IBV_WC_SUCCESS && !memcmp(out, back, SIZE));
		if (i == 0)
			puts("ready");
		fflush(stdout);
	}
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(o) && !ibv_dereg_mr(b));
	close_self(&s);
	puts("ended");
	return 0;
}
