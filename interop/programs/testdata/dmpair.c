/*
 * What ib_write_bw, ib_read_bw and ib_send_bw do with --use_ib_dm_dmabuf, with every byte compared: two
 * processes, each with memory of one device, which is registered at another device by its dma-buf. The
 * argument is the operation: write, read, send.
 *
 * The client is a child of fork(), before the first verb. For each message both say over a socket that
 * their part is done.
 */
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"
#include "newer.h"

enum { SIZE = 1 << 17, ROUNDS = 50, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

struct end {
	uint32_t qpn, rkey;
};

static void say(int fd, const void *p, size_t n) { WANT(write(fd, p, n) == (ssize_t)n); }

static void hear(int fd, void *p, size_t n) { WANT(recv(fd, p, n, MSG_WAITALL) == (ssize_t)n); }

/* meet returns when the other process is here, too. */
static void meet(int fd)
{
	char c = 0;
	say(fd, &c, 1);
	hear(fd, &c, 1);
}

static void await(struct ibv_cq *cq, enum ibv_wc_opcode op, uint32_t n)
{
	struct ibv_wc wc;
	int k;
	while (!(k = ibv_poll_cq(cq, 1, &wc)))
		;
	WANT(k == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == op);
	WANT(op != IBV_WC_RECV || wc.byte_len == n);
}

static void run_side(bool client, const char *op, int fd)
{
	static const uint32_t sizes[] = {4, 4096, 4100, SIZE / 2};
	static unsigned char want[SIZE], got[SIZE], zero[SIZE];
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	WANT(list && count == 2);
	struct ibv_context *memory = ibv_open_device(list[1]);
	struct self s = {.ctx = ibv_open_device(list[0])};
	WANT(memory && s.ctx);
	struct ibv_alloc_dm_attr attr = {.length = SIZE};
	struct ibv_dm *dm = ibv_alloc_dm(memory, &attr);
	WANT(dm);
	int dmabuf = dm_export(dm);
	WANT(dmabuf >= 0);
	WANT((s.pd = ibv_alloc_pd(s.ctx)) && (s.cq = ibv_create_cq(s.ctx, 16, NULL, NULL, 0)));
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(s.pd, 0, SIZE, 0, dmabuf, ALL);
	WANT(mr && !close(dmabuf));
	WANT((s.qp[0] = plain_qp(&s)) && !ibv_query_gid(s.ctx, 1, 0, &s.gid));
	struct end mine = {s.qp[0]->qp_num, mr->rkey}, peer;
	say(fd, &mine, sizeof mine);
	hear(fd, &peer, sizeof peer);
	connect_to(s.qp[0], peer.qpn, s.gid);

	bool reads = !strcmp(op, "read"), sends = !strcmp(op, "send");
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int round = 0; round < ROUNDS; round++) {
			/* Bytes go from the first half of one memory to the second half of the other. */
			uint32_t n = sizes[i], off = (uint32_t)round * 8 % (SIZE / 2 - n + 1);
			for (uint32_t k = 0; k < n; k++)
				want[k] = (unsigned char)(k * 31 + (uint32_t)round * 7 + n + 1);
			struct ibv_sge from = {off, n, mr->lkey}, to = {SIZE / 2 + off, n, mr->lkey};
			bool source = client != reads;
			WANT(!ibv_memcpy_to_dm(dm, source ? off : SIZE / 2 + off, source ? want : zero, n));
			struct ibv_recv_wr recv = {.sg_list = &to, .num_sge = 1}, *bad_recv;
			if (sends && !client)
				WANT(!ibv_post_recv(s.qp[0], &recv, &bad_recv));
			meet(fd);
			struct ibv_send_wr wr = {.sg_list = reads ? &to : &from,
						 .num_sge = 1,
						 .opcode = sends ? IBV_WR_SEND : reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
						 .send_flags = IBV_SEND_SIGNALED,
						 .wr.rdma = {reads ? off : SIZE / 2 + off, peer.rkey}},
					   *bad;
			if (client) {
				WANT(!ibv_post_send(s.qp[0], &wr, &bad));
				await(s.cq, sends ? IBV_WC_SEND : reads ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE, n);
			} else if (sends)
				await(s.cq, IBV_WC_RECV, n);
			meet(fd);
			if (!source) {
				WANT(!ibv_memcpy_from_dm(got, dm, SIZE / 2 + off, n));
				WANT(!memcmp(got, want, n));
			}
		}
	WANT(!ibv_dereg_mr(mr) && !ibv_free_dm(dm));
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_cq(s.cq) && !ibv_dealloc_pd(s.pd));
	WANT(!ibv_close_device(s.ctx) && !ibv_close_device(memory));
	ibv_free_device_list(list);
}

int main(int argc, char **argv)
{
	int fd[2], status;
	WANT(argc == 2 && !socketpair(AF_UNIX, SOCK_STREAM, 0, fd));
	pid_t child = fork();
	WANT(child >= 0);
	if (!child) {
		close(fd[0]); /* who is alone hears nothing, and fails */
		run_side(true, argv[1], fd[1]);
		return 0;
	}
	close(fd[1]);
	run_side(false, argv[1], fd[0]);
	WANT(waitpid(child, &status, 0) == child && !status);
	puts("ok");
	return 0;
}
