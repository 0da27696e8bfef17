/*
 * Registers the dma-buf that is descriptor 3, and prints what ibv_reg_dmabuf_mr answers: "registered", or
 * the name of the errno.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <infiniband/verbs.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *ctx = list && *list ? ibv_open_device(*list) : NULL;
	struct ibv_pd *pd = ctx ? ibv_alloc_pd(ctx) : NULL;
	if (!pd) {
		perror("no protection domain");
		return 1;
	}
	errno = 0;
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(pd, 0, 4096, 0, 3, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ);
	puts(mr ? "registered" : strerrorname_np(errno));
	if (mr)
		ibv_dereg_mr(mr);
	return ibv_dealloc_pd(pd) || ibv_close_device(ctx);
}
