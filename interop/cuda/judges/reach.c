// A shared object for Python. It registers memory of the GPU that Python has allocated, and writes and reads it by two
// queue pairs of this process that are connected to each other.
//
// Functions return 0, or -1 with the reason in reach_why.

#include "pair.h"

static struct device dev;
static struct ibv_cq *cq;
static struct ibv_qp *qp[2];
static unsigned char *host;
static struct ibv_mr *host_mr;
static size_t host_size;
static char why[256];

const char *reach_why(void) { return why; }

static int refuse(const char *what, const char *reason)
{
	snprintf(why, sizeof why, "%s: %s", what, reason);
	return -1;
}

// reach_open makes the queue pairs, and host memory of n bytes, which it returns. What cannot be had ends the process.
void *reach_open(size_t n)
{
	struct name names[2];

	open_device(&dev);
	need((cq = ibv_create_cq(dev.ctx, 4 * DEPTH, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	for (int i = 0; i < 2; i++)
		qp[i] = make_qp(&dev, cq, &names[i]);
	for (int i = 0; i < 2; i++)
		connect_qp(&dev, qp[i], &names[i], &names[1 - i]);
	host_size = n;
	need(posix_memalign((void **)&host, 4096, n) == 0, "posix_memalign");
	memset(host, 0, n);
	need((host_mr = ibv_reg_mr(dev.pd, host, n, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr of host memory");
	return host;
}

// reach_register registers n bytes of the GPU, and returns the region.
struct ibv_mr *reach_register(uint64_t p, size_t n, int dmabuf)
{
	struct ibv_mr *mr = register_gpu(&dev, p, n, dmabuf);
	if (!mr)
		refuse(dmabuf ? "ibv_reg_dmabuf_mr" : "ibv_reg_mr", strerror(errno));
	return mr;
}

int reach_deregister(struct ibv_mr *mr)
{
	int err = ibv_dereg_mr(mr);
	return err ? refuse("ibv_dereg_mr", strerror(err)) : 0;
}

// reach_move writes the host's bytes into the region, or reads the region's into the host's memory.
int reach_move(struct ibv_mr *mr, uint64_t p, size_t n, int read)
{
	struct ibv_sge sge = {.addr = (uintptr_t)host, .length = (uint32_t)n, .lkey = host_mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
				 .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {.remote_addr = p, .rkey = mr->rkey}}, *bad;

	if (n > host_size)
		return refuse("reach_move", "more than there is host memory");
	int err = ibv_post_send(qp[0], &wr, &bad);
	if (err)
		return refuse("ibv_post_send", strerror(err));
	enum ibv_wc_status status = poll_one(cq, NULL);
	return status == IBV_WC_SUCCESS ? 0 : refuse(read ? "READ" : "WRITE", ibv_wc_status_str(status));
}
