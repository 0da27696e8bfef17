// Two RC queue pairs and registered GPU memory, in few lines: for programs of this directory that drive verbs themselves.

#include <arpa/inet.h>
#include <cuda.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DEPTH = 64, PORT = 1 };

// name is what a peer needs to know of a queue pair.
struct name {
	uint32_t qpn, psn;
	union ibv_gid gid;
};

struct device {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	enum ibv_mtu mtu;
	int gid_index;
	union ibv_gid gid;
};

static inline void give_up(const char *what, const char *why)
{
	printf("FAIL %s: %s\n", what, why);
	fflush(stdout);
	_exit(1);
}

static inline void need(int ok, const char *what)
{
	if (!ok)
		give_up(what, strerror(errno));
}

static inline void cuda_ok(CUresult r, const char *what)
{
	const char *why = NULL;
	if (r == CUDA_SUCCESS)
		return;
	cuGetErrorString(r, &why);
	give_up(what, why ? why : "an unknown error of CUDA");
}

static inline double seconds(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec + t.tv_nsec / 1e9;
}

// open_device opens the first device, with the last of its GIDs that is set: that of RoCE v2 and IPv4, if there is one.
static inline void open_device(struct device *d)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_port_attr port;
	static const union ibv_gid none;

	need(list && list[0], "ibv_get_device_list");
	need((d->ctx = ibv_open_device(list[0])) != NULL, "ibv_open_device");
	ibv_free_device_list(list);
	need((d->pd = ibv_alloc_pd(d->ctx)) != NULL, "ibv_alloc_pd");
	need(ibv_query_port(d->ctx, PORT, &port) == 0, "ibv_query_port");
	d->mtu = port.active_mtu;
	d->gid_index = -1;
	for (int i = 0; i < port.gid_tbl_len; i++) {
		union ibv_gid gid;
		if (ibv_query_gid(d->ctx, PORT, i, &gid) == 0 && memcmp(&gid, &none, sizeof gid)) {
			d->gid_index = i;
			d->gid = gid;
			if (gid.raw[10] == 0xff && gid.raw[11] == 0xff)
				break;
		}
	}
	need(d->gid_index >= 0, "a GID");
}

static inline struct ibv_qp *make_qp(struct device *d, struct ibv_cq *cq, struct name *name)
{
	struct ibv_qp_init_attr init = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
					.cap = {.max_send_wr = DEPTH, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = PORT,
				   .qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC};
	struct ibv_qp *qp = ibv_create_qp(d->pd, &init);

	need(qp != NULL, "ibv_create_qp");
	errno = ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
	need(errno == 0, "ibv_modify_qp to INIT");
	name->qpn = qp->qp_num;
	name->psn = (qp->qp_num * 7919) & 0xffffff;
	name->gid = d->gid;
	return qp;
}

static inline void connect_qp(struct device *d, struct ibv_qp *qp, const struct name *self, const struct name *peer)
{
	struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR, .path_mtu = d->mtu, .dest_qp_num = peer->qpn, .rq_psn = peer->psn,
				  .max_dest_rd_atomic = 16, .min_rnr_timer = 12,
				  .ah_attr = {.is_global = 1, .port_num = PORT,
					      .grh = {.dgid = peer->gid, .sgid_index = d->gid_index, .hop_limit = 64}}};
	struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = self->psn,
				  .max_rd_atomic = 16};

	errno = ibv_modify_qp(qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
						IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	need(errno == 0, "ibv_modify_qp to RTR");
	errno = ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
						IBV_QP_MAX_QP_RD_ATOMIC);
	need(errno == 0, "ibv_modify_qp to RTS");
}

enum { ACCESS_ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

// register_gpu registers GPU memory by its address, or as a dma-buf, which covers whole pages of 4 KiB.
static inline struct ibv_mr *register_gpu(struct device *d, CUdeviceptr p, size_t n, int dmabuf)
{
	struct ibv_mr *mr;
	int fd = -1;

	if (!dmabuf)
		return ibv_reg_mr(d->pd, (void *)(uintptr_t)p, n, ACCESS_ALL);
	CUdeviceptr page = p & ~(CUdeviceptr)4095;
	size_t whole = (p + n - page + 4095) & ~(size_t)4095;
	cuda_ok(cuMemGetHandleForAddressRange(&fd, page, whole, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0), "cuMemGetHandleForAddressRange");
	mr = ibv_reg_dmabuf_mr(d->pd, p - page, n, (uint64_t)p, fd, ACCESS_ALL);
	int saved = errno;
	close(fd);
	errno = saved;
	return mr;
}

// poll_one waits for a completion, at most 20 s, and returns its status. Without one it is IBV_WC_GENERAL_ERR.
static inline enum ibv_wc_status poll_one(struct ibv_cq *cq, uint64_t *id)
{
	struct ibv_wc wc;
	double end = seconds() + 20;
	int n;

	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		if (seconds() > end)
			return IBV_WC_GENERAL_ERR;
	if (n < 0)
		return IBV_WC_GENERAL_ERR;
	if (id)
		*id = wc.wr_id;
	return wc.status;
}
