/*
 * Import across processes. The "owner" process exports memory. The "user" process imports it
 * and makes queue pairs in the imported domain. This process is the "peer" of these queue
 * pairs, and tells the others what to do.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

enum { N = 6 << 20, SHIFT = 3, ACCESS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };

/* --- messages, with a descriptor if fd is not -1 --- */

struct msg {
	int64_t what, a[6];
	int fd;
};

static void put(int sock, struct msg m)
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof m.fd)];
	} c = {.head = {.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof m.fd)}};
	struct iovec v = {&m, sizeof m};
	struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1};
	if (m.fd >= 0) {
		memcpy(CMSG_DATA(&c.head), &m.fd, sizeof m.fd);
		h.msg_control = &c;
		h.msg_controllen = sizeof c;
	}
	WANT(sendmsg(sock, &h, MSG_NOSIGNAL) == sizeof m);
}

static struct msg get(int sock)
{
	struct msg m;
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(sizeof m.fd)];
	} c;
	struct iovec v = {&m, sizeof m};
	struct msghdr h = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
	if (recvmsg(sock, &h, 0) != sizeof m) /* the other process has ended */
		exit(2);
	m.fd = -1;
	if (h.msg_controllen)
		memcpy(&m.fd, CMSG_DATA(&c.head), sizeof m.fd);
	return m;
}

struct proc {
	pid_t pid;
	int sock;
};

#define TELL(p, ...) put((p)->sock, (struct msg){__VA_ARGS__})
#define ASK(p, ...) (TELL(p, __VA_ARGS__), get((p)->sock))
#define ASK_NUM(p, ...) ASK(p, __VA_ARGS__).a[0]

/* --- for all processes --- */

static unsigned char pattern(uint64_t i, int64_t seed) { return (unsigned char)(i * 131 + (i >> 8) * 7 + (uint64_t)seed * 29); }

static void fill(char *b, uint64_t off, uint64_t n, int64_t seed)
{
	for (uint64_t i = off; i < off + n; i++)
		b[i] = (char)pattern(i, seed);
}

static int is_filled(const char *b, uint64_t off, uint64_t n, int64_t seed)
{
	for (uint64_t i = off; i < off + n; i++)
		if ((unsigned char)b[i] != pattern(i, seed))
			return 0;
	return 1;
}

struct end {
	struct ibv_context *ctx;
	struct ibv_pd *pd;
	struct ibv_mr *mr;
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2]; /* to the peer, a queue each */
	union ibv_gid gid;
	char *buf;
};

static void make_qps(struct end *e)
{
	WANT(!ibv_query_gid(e->ctx, 1, 0, &e->gid));
	for (int i = 0; i < 2; i++) {
		WANT(e->cq[i] = ibv_create_cq(e->ctx, 64, NULL, NULL, 0));
		struct self s = {.cq = e->cq[i], .pd = e->pd};
		WANT(e->qp[i] = plain_qp(&s));
	}
}

static void destroy_qps(struct end *e)
{
	for (int i = 0; i < 2; i++)
		WANT(!ibv_destroy_qp(e->qp[i]) && !ibv_destroy_cq(e->cq[i]));
}

static void post(struct end *e, int q, enum ibv_wr_opcode op, uint64_t addr, uint32_t n, uint32_t lkey, uint64_t to, uint32_t rkey)
{
	struct ibv_sge sge = {addr, n, lkey};
	struct ibv_send_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1, .opcode = op, .send_flags = IBV_SEND_SIGNALED, .wr.rdma = {to, rkey}}, *bad;
	WANT(!ibv_post_send(e->qp[q], &wr, &bad));
}

static void post_recv(struct end *e, uint64_t addr, uint32_t n, uint32_t lkey)
{
	struct ibv_sge sge = {addr, n, lkey};
	struct ibv_recv_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1}, *bad;
	WANT(!ibv_post_recv(e->qp[0], &wr, &bad));
}

static enum ibv_wc_status poll_for(struct end *e, int q)
{
	struct ibv_wc wc;
	int k;
	while (!(k = ibv_poll_cq(e->cq[q], 1, &wc)))
		;
	WANT(k == 1);
	return wc.status;
}

/* --- owner and user --- */

enum { EXPORT = 1, IMPORT, CONNECT, POST, POST_RECV, POLL, FILL, IS_FILLED, STREAM, DEREG, DEALLOC, UNIMPORT, REIMPORT, BAD, CLOSE, FORK, HIDE };

static int64_t import(struct end *e, int fd, uint32_t pd, uint32_t mr)
{
	if (!(e->ctx = ibv_import_device(fd)))
		return -errno;
	if (!(e->pd = ibv_import_pd(e->ctx, pd)) || !(e->mr = ibv_import_mr(e->pd, mr)))
		return -errno;
	WANT(!e->mr->addr && e->mr->length == N && e->mr->handle == mr && e->pd->handle == pd);
	make_qps(e);
	return 0;
}

/* stream writes and reads until a request fails, and returns its status. */
static int64_t stream(struct end *e, uint64_t addr, uint32_t n, uint64_t to, uint32_t rkey)
{
	for (int i = 0;; i++) {
		post(e, 0, i % 2 ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ, addr, n, e->mr->lkey, to, rkey);
		enum ibv_wc_status s = poll_for(e, 0);
		if (s != IBV_WC_SUCCESS)
			return s;
	}
}

static void serve(int sock)
{
	struct end e = {0};
	WANT(!prctl(PR_SET_PDEATHSIG, SIGKILL));
	for (;;) {
		struct msg m = get(sock), r = {.fd = -1};
		int64_t *a = m.a;
		switch (m.what) {
		case EXPORT: /* answers: numbers, address and keys */
			e.ctx = open_first();
			WANT((e.pd = ibv_alloc_pd(e.ctx)) && (e.buf = malloc(N + SHIFT)));
			e.buf += SHIFT;
			fill(e.buf, 0, N, 0);
			WANT(e.mr = ibv_reg_mr(e.pd, e.buf, N, ACCESS));
			r = (struct msg){0, {e.pd->handle, e.mr->handle, (intptr_t)e.buf, e.mr->lkey, e.mr->rkey}, e.ctx->cmd_fd};
			break;
		case IMPORT:
			r.a[0] = import(&e, m.fd, (uint32_t)a[0], (uint32_t)a[1]);
			if (!r.a[0])
				r.a[1] = e.mr->lkey, r.a[2] = e.mr->rkey, r.a[3] = e.qp[0]->qp_num, r.a[4] = e.qp[1]->qp_num;
			break;
		case CONNECT:
			for (int i = 0; i < 2; i++)
				connect_to(e.qp[i], (uint32_t)a[i], e.gid);
			break;
		case POST:
			post(&e, 0, (enum ibv_wr_opcode)a[0], (uint64_t)a[1], (uint32_t)a[2], e.mr->lkey, (uint64_t)a[3], (uint32_t)a[4]);
			break;
		case POST_RECV:
			post_recv(&e, (uint64_t)a[0], (uint32_t)a[1], e.mr->lkey);
			break;
		case POLL:
			r.a[0] = poll_for(&e, 0);
			break;
		case FILL:
			fill(e.buf, (uint64_t)a[0], (uint64_t)a[1], a[2]);
			break;
		case IS_FILLED:
			r.a[0] = is_filled(e.buf, (uint64_t)a[0], (uint64_t)a[1], a[2]);
			break;
		case STREAM:
			r.a[0] = stream(&e, (uint64_t)a[0], (uint32_t)a[1], (uint64_t)a[2], (uint32_t)a[3]);
			break;
		case DEREG:
			alarm(60); /* it must not wait for ever */
			r.a[0] = ibv_dereg_mr(e.mr);
			alarm(0);
			break;
		case DEALLOC:
			r.a[0] = ibv_dealloc_pd(e.pd);
			break;
		case UNIMPORT:
			ibv_unimport_mr(e.mr);
			destroy_qps(&e);
			ibv_unimport_pd(e.pd);
			WANT(!ibv_close_device(e.ctx));
			break;
		case REIMPORT: { /* import once more, and unimport */
			struct ibv_mr *mr = ibv_import_mr(e.pd, (uint32_t)a[0]);
			r.a[0] = mr ? 0 : errno;
			r.a[1] = mr && mr->lkey != e.mr->lkey && mr->length == N;
			if (mr)
				ibv_unimport_mr(mr);
			break;
		}
		case BAD:
			WANT(!ibv_import_pd(e.ctx, (uint32_t)a[0] + 77) && errno == ENOENT);
			WANT(!ibv_import_mr(e.pd, (uint32_t)a[1] + 77) && errno == ENOENT);
			WANT(!ibv_import_dm(e.ctx, 1) && errno == EOPNOTSUPP);
			WANT(ibv_rereg_mr(e.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) == IBV_REREG_MR_ERR_INPUT);
			WANT(ibv_dealloc_pd(e.pd) == EBUSY);
			break;
		case CLOSE: /* ends the imports that are left */
			WANT(!ibv_close_device(e.ctx));
			break;
		case HIDE: /* as programs with secrets do: processes that may not debug it may not import */
			WANT(!prctl(PR_SET_DUMPABLE, 0));
			break;
		case FORK: /* a child that outlives its parent, and must not keep anything of it */
			if (!fork()) {
				close(1);
				close(2);
				alarm(20);
				for (;;)
					pause();
			}
			break;
		}
		put(sock, r);
	}
}

/* begin starts a process, if name is not NULL with another value of a variable. The variable
 * is set already: the backend does not see new ones. */
static struct proc begin(const char *name, const char *value)
{
	int socks[2];
	WANT(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, socks));
	pid_t pid = fork();
	if (!pid) {
		close(socks[0]);
		if (name)
			setenv(name, value, 1);
		serve(socks[1]);
	}
	close(socks[1]);
	return (struct proc){pid, socks[0]};
}

static void end(struct proc *p)
{
	int status;
	WANT(!kill(p->pid, SIGKILL) && waitpid(p->pid, &status, 0) == p->pid && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	close(p->sock);
}

/* --- the peer, and the tests --- */

static struct end peer;
static struct msg shared; /* what the owner has exported */
static uint32_t lkey, rkey;

#define ADDR ((uint64_t)shared.a[2])

static void export_from(struct proc *owner)
{
	shared = ASK(owner, .what = EXPORT, .fd = -1);
	WANT(shared.fd >= 0);
}

/* import_to has a process import what the owner has exported, and connects it to the peer. */
static void import_to(struct proc *user)
{
	if (!peer.ctx) {
		peer.ctx = open_first();
		WANT((peer.pd = ibv_alloc_pd(peer.ctx)) && (peer.buf = calloc(1, N)));
		WANT(peer.mr = ibv_reg_mr(peer.pd, peer.buf, N, ACCESS));
	} else {
		destroy_qps(&peer);
	}
	make_qps(&peer);
	struct msg r = ASK(user, .what = IMPORT, .a = {shared.a[0], shared.a[1]}, .fd = shared.fd);
	WANT(!r.a[0] && r.a[1] && r.a[2]);
	lkey = (uint32_t)r.a[1], rkey = (uint32_t)r.a[2];
	for (int i = 0; i < 2; i++)
		connect_to(peer.qp[i], (uint32_t)r.a[3 + i], peer.gid);
	ASK(user, .what = CONNECT, .a = {peer.qp[0]->qp_num, peer.qp[1]->qp_num}, .fd = -1);
}

#define PEER(off) ((uint64_t)(uintptr_t)(peer.buf + (off)))

static void move(struct proc *owner, struct proc *user, uint64_t off, uint32_t n)
{
	static int64_t seed;
	struct msg m;
	/* From the owner's memory: by the user's SEND and WRITE, and the peer's READ. */
	m = ASK(owner, .what = FILL, .a = {0, N, ++seed}, .fd = -1);
	for (int way = 0; way < 3; way++) {
		memset(peer.buf, 0xee, N);
		switch (way) {
		case 0:
			post_recv(&peer, PEER(off), n, peer.mr->lkey);
			ASK(user, .what = POST, .a = {IBV_WR_SEND, (int64_t)(ADDR + off), n}, .fd = -1);
			WANT(poll_for(&peer, 0) == IBV_WC_SUCCESS && ASK_NUM(user, .what = POLL, .fd = -1) == IBV_WC_SUCCESS);
			break;
		case 1:
			ASK(user, .what = POST, .a = {IBV_WR_RDMA_WRITE, (int64_t)(ADDR + off), n, (int64_t)PEER(off), peer.mr->rkey}, .fd = -1);
			WANT(ASK_NUM(user, .what = POLL, .fd = -1) == IBV_WC_SUCCESS);
			break;
		case 2:
			post(&peer, 1, IBV_WR_RDMA_READ, PEER(off), n, peer.mr->lkey, ADDR + off, rkey);
			WANT(poll_for(&peer, 1) == IBV_WC_SUCCESS);
			break;
		}
		WANT(is_filled(peer.buf, off, n, seed));
		WANT((!off || (unsigned char)peer.buf[off - 1] == 0xee) && (off + n == N || (unsigned char)peer.buf[off + n] == 0xee));
	}
	/* To the owner's memory: by the user's READ and receive, and the peer's WRITE. */
	for (int way = 0; way < 3; way++) {
		int64_t old = seed++;
		m = ASK(owner, .what = FILL, .a = {0, N, old}, .fd = -1);
		fill(peer.buf, 0, N, seed);
		switch (way) {
		case 0:
			ASK(user, .what = POST, .a = {IBV_WR_RDMA_READ, (int64_t)(ADDR + off), n, (int64_t)PEER(off), peer.mr->rkey}, .fd = -1);
			WANT(ASK_NUM(user, .what = POLL, .fd = -1) == IBV_WC_SUCCESS);
			break;
		case 1:
			ASK(user, .what = POST_RECV, .a = {(int64_t)(ADDR + off), n}, .fd = -1);
			post(&peer, 0, IBV_WR_SEND, PEER(off), n, peer.mr->lkey, 0, 0);
			WANT(poll_for(&peer, 0) == IBV_WC_SUCCESS && ASK_NUM(user, .what = POLL, .fd = -1) == IBV_WC_SUCCESS);
			break;
		case 2:
			post(&peer, 1, IBV_WR_RDMA_WRITE, PEER(off), n, peer.mr->lkey, ADDR + off, rkey);
			WANT(poll_for(&peer, 1) == IBV_WC_SUCCESS);
			break;
		}
		WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {(int64_t)off, n, seed}, .fd = -1));
		WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {0, (int64_t)off, old}, .fd = -1));
		WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {(int64_t)off + n, N - (int64_t)off - n, old}, .fd = -1));
	}
	(void)m;
}

/* start_stream has the user stream, and the peer WRITE, until both have moved megabytes. */
static void start_stream(struct proc *owner, struct proc *user)
{
	fill(peer.buf, 0, N, 77);
	TELL(user, .what = STREAM, .a = {(int64_t)ADDR, 1 << 20, (int64_t)PEER(0), peer.mr->rkey}, .fd = -1);
	for (int seen = 0; !seen; seen = (int)ASK_NUM(owner, .what = IS_FILLED, .a = {0, 1 << 20, 77}, .fd = -1)) {
		post(&peer, 1, IBV_WR_RDMA_WRITE, PEER(2 << 20), 1 << 20, peer.mr->lkey, ADDR + (2 << 20), rkey);
		WANT(poll_for(&peer, 1) == IBV_WC_SUCCESS);
	}
	WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {2 << 20, 1 << 20, 77}, .fd = -1));
}

static int refused(int64_t status) { return status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR && status != IBV_WC_RETRY_EXC_ERR; }

/* peer_refused checks that the peer's accesses to the owner's memory fail and change nothing. */
static void peer_refused(enum ibv_wr_opcode op)
{
	post(&peer, 1, op, PEER(0), 100000, peer.mr->lkey, ADDR, rkey);
	WANT(poll_for(&peer, 1) == IBV_WC_REM_ACCESS_ERR);
}

static void test_traffic(struct proc *owner, struct proc *user)
{
	static const struct {
		uint64_t off;
		uint32_t n;
	} moves[] = {{0, 1}, {5, 8}, {4091, 64}, {13, 200}, {1, 4097}, {777, 70001}, {4099, 5 << 20}, {0, N}};
	export_from(owner);
	import_to(user);
	for (size_t i = 0; i < sizeof moves / sizeof *moves; i++)
		move(owner, user, moves[i].off, moves[i].n);

	/* Atomics are not, and beyond the region there is nothing. */
	ASK(user, .what = BAD, .a = {shared.a[0], shared.a[1]}, .fd = -1);
	struct msg again = ASK(user, .what = REIMPORT, .a = {shared.a[1]}, .fd = -1);
	WANT(!again.a[0] && again.a[1]);
	move(owner, user, 9, 1000);
	post(&peer, 1, IBV_WR_RDMA_WRITE, PEER(0), 8, peer.mr->lkey, ADDR + N - 7, rkey);
	WANT(poll_for(&peer, 1) == IBV_WC_REM_ACCESS_ERR);

	/* Unimporting does not change the region. */
	ASK(user, .what = UNIMPORT, .fd = -1);
	WANT(!ASK_NUM(owner, .what = DEREG, .fd = -1) && !ASK_NUM(owner, .what = DEALLOC, .fd = -1));
}

/* When the owner has deregistered, no other process accesses the memory, whatever was under
 * way. */
static void test_dereg(struct proc *owner, struct proc *user)
{
	export_from(owner);
	import_to(user);
	ASK(user, .what = FORK, .fd = -1);
	ASK(owner, .what = FORK, .fd = -1);
	start_stream(owner, user);
	WANT(!ASK_NUM(owner, .what = DEREG, .fd = -1));
	ASK(owner, .what = FILL, .a = {0, N, 5}, .fd = -1);
	int64_t s = get(user->sock).a[0];
	WANT(refused(s));
	peer_refused(IBV_WR_RDMA_WRITE);
	WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {0, N, 5}, .fd = -1));
	WANT(ASK_NUM(user, .what = REIMPORT, .a = {shared.a[1]}, .fd = -1) == ENOENT);
	WANT(ASK_NUM(user, .what = DEREG, .fd = -1) == EINVAL); /* it is destroyed, and can only be unimported */
	ASK(user, .what = UNIMPORT, .fd = -1);
	WANT(!ASK_NUM(owner, .what = DEALLOC, .fd = -1));
}

/* Destroying an import destroys the original. */
static void test_destroy(struct proc *owner, struct proc *user)
{
	export_from(owner);
	import_to(user);
	ASK(owner, .what = FILL, .a = {0, N, 5}, .fd = -1);
	WANT(ASK_NUM(user, .what = DEALLOC, .fd = -1) == EBUSY && ASK_NUM(owner, .what = DEALLOC, .fd = -1) == EBUSY);
	WANT(!ASK_NUM(user, .what = DEREG, .fd = -1));
	WANT(ASK_NUM(owner, .what = DEREG, .fd = -1) == EINVAL);
	peer_refused(IBV_WR_RDMA_WRITE);
	WANT(ASK_NUM(owner, .what = IS_FILLED, .a = {0, N, 5}, .fd = -1));
	WANT(ASK_NUM(user, .what = DEALLOC, .fd = -1) == EBUSY); /* queue pairs are in it */
	ASK(user, .what = CLOSE, .fd = -1);
	WANT(!ASK_NUM(owner, .what = DEALLOC, .fd = -1)); /* closing ended the import, not the domain */
}

static void test_owner_killed(struct proc *owner, struct proc *user)
{
	export_from(owner);
	import_to(user);
	start_stream(owner, user);
	end(owner);
	int64_t s = get(user->sock).a[0];
	WANT(refused(s));
	peer_refused(IBV_WR_RDMA_READ);
	WANT(!ASK_NUM(user, .what = DEREG, .fd = -1)); /* the original has ended with its process */
	ASK(user, .what = CLOSE, .fd = -1);
}

static void test_user_killed(struct proc *owner, struct proc *user)
{
	import_to(user);
	ASK(user, .what = FORK, .fd = -1);
	start_stream(owner, user);
	end(user);
	WANT(!ASK_NUM(owner, .what = DEREG, .fd = -1));
}

static int64_t import_by(struct proc *user, int fd)
{
	return ASK_NUM(user, .what = IMPORT, .a = {shared.a[0], shared.a[1]}, .fd = fd);
}

static void test_refused(struct proc *owner, struct proc *user, struct proc *elsewhere, struct proc *loop)
{
	int pipes[2], wrong = memfd_create("wrong", MFD_CLOEXEC);
	WANT(!pipe(pipes) && wrong >= 0);
	WANT(import_by(user, pipes[0]) == -EINVAL && import_by(user, wrong) == -EINVAL);
	WANT(dprintf(wrong, "verbena 127.0.0.1/1-0#00\n") > 0);
	WANT(import_by(user, wrong) == -EINVAL); /* there is no such process */
	export_from(owner);
	WANT(import_by(elsewhere, shared.fd) == -ENODEV);
	ASK(owner, .what = HIDE, .fd = -1);
	WANT(import_by(user, shared.fd) == (geteuid() ? -EACCES : 0));
	ASK(owner, .what = CLOSE, .fd = -1);
	WANT(import_by(user, shared.fd) == -EINVAL); /* the context is closed */
	export_from(loop);
	WANT(import_by(user, shared.fd) == -EOPNOTSUPP);
}

enum { OTHERS = 6 };

int main(int argc, char **argv)
{
	/* All are started before the first verb: none inherits another's backend. */
	struct proc owner = begin(NULL, NULL), user = begin(NULL, NULL), others[OTHERS];
	for (int i = 0; i < OTHERS; i++)
		others[i] = begin(NULL, NULL);
	struct proc elsewhere = begin("VERBENA_ADDR", "127.78.255.254"), loop = begin("VERBENA_LINK", "loop");
	WANT(argc == 2);
	if (!strcmp(argv[1], "traffic"))
		test_traffic(&owner, &user);
	else if (!strcmp(argv[1], "dereg"))
		test_dereg(&owner, &user);
	else if (!strcmp(argv[1], "destroy"))
		test_destroy(&owner, &user);
	else if (!strcmp(argv[1], "owner killed"))
		test_owner_killed(&owner, &user);
	else if (!strcmp(argv[1], "user killed"))
		for (int i = 0; i < OTHERS; i += 2) {
			export_from(&others[i]);
			test_user_killed(&others[i], &others[i + 1]);
		}
	else if (!strcmp(argv[1], "refused"))
		test_refused(&owner, &user, &elsewhere, &loop);
	else
		WANT(!"a test of that name");
	puts("ok");
	return 0;
}
