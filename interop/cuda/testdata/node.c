/*
 * A node: one end of the traffic. The functions of common.h make an order of their arguments; obey carries it out, in
 * this process or in the one that a socket leads to, and the answer comes back the same way.
 *
 *   1. what a node of this process has: its objects
 *   2. what it does for each order
 *   3. how orders get to it
 *   4. the functions of common.h
 */
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <infiniband/mlx5dv.h>

#include "common.h"

enum { MAX_MEMORY = 32, MAX_QUEUE = 32, QKEY = 0x1234 };

enum what {
	OPEN_MEMORY, FREE_MEMORY, CLOSE_MEMORY, FILL, CHECK, SET, REREG,
	OPEN_QUEUE, CONNECT, CLOSE_QUEUE, POST, RECEIVE, AWAIT, AWAIT_RECEIVE,
	OPEN_WINDOW, OPEN_MKEY, CLOSE_MKEY,
	TRAFFIC, USABLE, MAKE_CONTEXT, DESTROY_CONTEXT,
};

/* A piece and a request with the numbers of regions, which mean something in the node's process. */
struct part {
	int id;
	uint32_t n;
	uint64_t off;
};

struct work {
	struct request r; /* but its pieces */
	struct part part[MAX_SGE];
};

struct order {
	enum what what;
	int id, other; /* of a region or a queue pair */
	int kind, way, flags;
	uint64_t off, n, round;
	uint32_t skip;
	uint32_t qpn;
	union ibv_gid gid;
	struct work work;
	int queue[8], queues;
	bool by_cas;
	double seconds;
};

struct answer {
	int err;
	int id;
	uint64_t addr, size;
	uint32_t lkey, rkey, qpn;
	union ibv_gid gid;
	int64_t bad; /* the first wrong byte, or -1 */
	unsigned char found;
	struct outcome out;
};

/* ---- 1. objects ---- */

struct pair {
	struct ibv_qp *qp;
	struct ibv_cq *send, *receive;
	struct ibv_srq *srq;
	struct ibv_ah *ah;
	int flags;
	uint64_t posted;
};

struct node {
	int socket; /* -1: in this process */
	pid_t pid;
	int64_t err;
	pthread_t thread; /* of an order that was begun, if local */
	struct order begun;
	struct answer result;

	struct ibv_context *ctx;
	struct ibv_pd *pd;
	union ibv_gid gid;
	struct memory memory[MAX_MEMORY];
	struct pair pair[MAX_QUEUE];
	struct mlx5dv_mkey *mkey[MAX_MEMORY];
	int memories, pairs, mkeys;
	CUcontext context; /* besides the primary one */
	unsigned char *scratch;
	size_t scratch_size;
};

struct node *nodes[4];
static struct ibv_context *shared; /* the device of this process */

static struct node *new_node(int socket, pid_t pid)
{
	struct node *at = (struct node *)calloc(1, sizeof *at);
	WANT(at);
	at->socket = socket;
	at->pid = pid;
	return at;
}

/* local_node makes a node of this process, with a protection domain of its own. */
struct node *local_node(void)
{
	struct node *at = new_node(-1, 0);
	if (!shared) {
		int n;
		struct ibv_device **list = ibv_get_device_list(&n);
		WANT(list && n > 0);
		WANT(shared = ibv_open_device(list[0]));
		ibv_free_device_list(list);
	}
	at->ctx = shared;
	WANT(at->pd = ibv_alloc_pd(at->ctx));
	WANT(!ibv_query_gid(at->ctx, 1, 0, &at->gid));
	return at;
}

/* scratch returns host memory for n bytes. */
static unsigned char *scratch(struct node *at, size_t n)
{
	if (n > at->scratch_size) {
		free(at->scratch);
		at->scratch_size = n;
		WANT(at->scratch = (unsigned char *)malloc(n));
	}
	return at->scratch;
}

/* ---- 2. what a node does ---- */

static void describe(struct node *at, int id, struct answer *a)
{
	struct memory *m = &at->memory[id];
	a->id = id;
	a->addr = m->addr;
	a->size = m->size;
	if (m->mr) {
		a->lkey = m->mr->lkey;
		a->rkey = m->mr->rkey;
	}
}

static void open_memory(struct node *at, const struct order *o, struct answer *a)
{
	WANT(at->memories < MAX_MEMORY);
	int id = at->memories++;
	errno = 0;
	a->err = memory_open(&at->memory[id], at->pd, (enum kind)o->kind, (enum way)o->way, o->n, o->flags);
	if (a->err && !at->memory[id].mr)
		memory_free(&at->memory[id]);
	describe(at, id, a);
}

static void check(struct node *at, const struct order *o, struct answer *a)
{
	unsigned char *p = scratch(at, o->n);
	memory_get(&at->memory[o->id], o->off, p, o->n);
	a->bad = pattern_check(p, o->n, o->round);
	if (a->bad >= 0)
		a->found = p[a->bad];
}

static void fill(struct node *at, const struct order *o)
{
	unsigned char *p = scratch(at, o->n);
	pattern_fill(p, o->n, o->round);
	memory_put(&at->memory[o->id], o->off, p, o->n);
}

static void rereg(struct node *at, const struct order *o, struct answer *a)
{
	struct memory *m = &at->memory[o->id], *to = &at->memory[o->other];
	errno = 0;
	if (ibv_rereg_mr(m->mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, (void *)(uintptr_t)to->addr, to->size, 0)) {
		a->err = errno ? errno : EIO;
		return;
	}
	to->mr = m->mr;
	m->mr = NULL;
	describe(at, o->other, a);
}

static void open_queue(struct node *at, const struct order *o, struct answer *a)
{
	WANT(at->pairs < MAX_QUEUE);
	struct pair *p = &at->pair[a->id = at->pairs++];
	struct ibv_srq_init_attr srq = {.attr = {.max_wr = DEPTH, .max_sge = MAX_SGE}};
	struct ibv_qp_init_attr_ex init = {
		.qp_type = o->flags & QP_UD ? IBV_QPT_UD : IBV_QPT_RC,
		.cap = {.max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = MAX_SGE, .max_recv_sge = MAX_SGE},
		.comp_mask = IBV_QP_INIT_ATTR_PD,
		.pd = at->pd,
	};
	p->flags = o->flags;
	WANT(p->send = ibv_create_cq(at->ctx, DEPTH, NULL, NULL, 0));
	WANT(p->receive = ibv_create_cq(at->ctx, DEPTH, NULL, NULL, 0));
	init.send_cq = p->send;
	init.recv_cq = p->receive;
	if (o->flags & QP_SRQ) {
		WANT(p->srq = ibv_create_srq(at->pd, &srq));
		init.srq = p->srq;
	}
	if (o->flags & QP_MLX5) {
		struct mlx5dv_qp_init_attr own = {
			.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS | MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS,
			.create_flags = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE,
			.send_ops_flags = MLX5DV_QP_EX_WITH_MR_LIST | MLX5DV_QP_EX_WITH_MR_INTERLEAVED,
		};
		init.cap.max_inline_data = 512; /* of the requests that configure keys */
		init.comp_mask |= IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
		init.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_READ | IBV_QP_EX_WITH_SEND;
		p->qp = mlx5dv_create_qp(at->ctx, &init, &own);
	} else {
		p->qp = ibv_create_qp_ex(at->ctx, &init);
	}
	WANT(p->qp);
	a->qpn = p->qp->qp_num;
	a->gid = at->gid;
}

static void connect_rc(struct ibv_qp *qp, uint32_t peer, union ibv_gid gid)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT,
				.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
				.port_num = 1};
	WANT(!ibv_modify_qp(qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	memset(&a, 0, sizeof a);
	a.qp_state = IBV_QPS_RTR;
	a.path_mtu = IBV_MTU_4096;
	a.dest_qp_num = peer;
	a.rq_psn = 7;
	a.max_dest_rd_atomic = 16;
	a.min_rnr_timer = 12;
	a.ah_attr.is_global = 1;
	a.ah_attr.port_num = 1;
	a.ah_attr.grh.dgid = gid;
	a.ah_attr.grh.hop_limit = 1;
	WANT(!ibv_modify_qp(qp, &a,
			    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				    IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	memset(&a, 0, sizeof a);
	a.qp_state = IBV_QPS_RTS;
	a.sq_psn = 7;
	a.timeout = 16; /* 0.27 s */
	a.retry_cnt = 7;
	a.rnr_retry = 7;
	a.max_rd_atomic = 16;
	WANT(!ibv_modify_qp(qp, &a,
			    IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				    IBV_QP_MAX_QP_RD_ATOMIC));
}

static void connect_ud(struct node *at, struct pair *p, union ibv_gid gid)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .qkey = QKEY, .port_num = 1};
	struct ibv_ah_attr ah = {.grh = {.dgid = gid, .hop_limit = 1}, .is_global = 1, .port_num = 1};
	WANT(!ibv_modify_qp(p->qp, &a, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	a.qp_state = IBV_QPS_RTR;
	WANT(!ibv_modify_qp(p->qp, &a, IBV_QP_STATE));
	a.qp_state = IBV_QPS_RTS;
	a.sq_psn = 7;
	WANT(!ibv_modify_qp(p->qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN));
	WANT(p->ah = ibv_create_ah(at->pd, &ah));
}

static void close_queue(struct pair *p)
{
	WANT(!ibv_destroy_qp(p->qp));
	WANT(!p->srq || !ibv_destroy_srq(p->srq));
	WANT(!p->ah || !ibv_destroy_ah(p->ah));
	WANT(!ibv_destroy_cq(p->send) && !ibv_destroy_cq(p->receive));
}

/* elements makes the list of pieces that libibverbs takes, and returns their number. */
static int elements(struct node *at, const struct part *parts, struct ibv_sge *sge)
{
	int n = 0;
	for (; n < MAX_SGE && parts[n].n; n++) {
		const struct part *p = &parts[n];
		if (p->id < 0) { /* an indirect key, whose addresses begin with 0 */
			sge[n] = (struct ibv_sge){p->off, p->n, at->mkey[-1 - p->id]->lkey};
			continue;
		}
		struct memory *m = &at->memory[p->id];
		WANT(m->mr);
		sge[n] = (struct ibv_sge){m->addr + p->off, p->n, m->mr->lkey};
	}
	return n;
}

static int post_work(struct node *at, struct pair *p, const struct work *w)
{
	struct ibv_sge sge[MAX_SGE];
	struct ibv_send_wr wr = {.wr_id = ++p->posted, .sg_list = sge, .opcode = w->r.opcode, .send_flags = IBV_SEND_SIGNALED | w->r.flags}, *bad;
	wr.num_sge = elements(at, w->part, sge);
	wr.imm_data = htobe32(w->r.imm);
	switch (w->r.opcode) {
	case IBV_WR_ATOMIC_FETCH_AND_ADD:
	case IBV_WR_ATOMIC_CMP_AND_SWP:
		wr.wr.atomic.remote_addr = w->r.to;
		wr.wr.atomic.rkey = w->r.rkey;
		wr.wr.atomic.compare_add = w->r.compare;
		wr.wr.atomic.swap = w->r.swap;
		break;
	case IBV_WR_SEND:
		if (p->flags & QP_UD) {
			wr.wr.ud.ah = p->ah;
			wr.wr.ud.remote_qpn = w->r.ud_qpn;
			wr.wr.ud.remote_qkey = QKEY;
		}
		break;
	default:
		wr.wr.rdma.remote_addr = w->r.to;
		wr.wr.rdma.rkey = w->r.rkey;
	}
	return ibv_post_send(p->qp, &wr, &bad);
}

static int post_receive_work(struct node *at, struct pair *p, const struct work *w)
{
	struct ibv_sge sge[MAX_SGE];
	struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = sge}, *bad;
	wr.num_sge = elements(at, w->part, sge);
	return p->srq ? ibv_post_srq_recv(p->srq, &wr, &bad) : ibv_post_recv(p->qp, &wr, &bad);
}

/* poll_until waits for a completion. It returns 0 or ETIMEDOUT. */
static int poll_until(struct ibv_cq *cq, struct ibv_wc *wc, double limit)
{
	for (unsigned i = 1;; i++) {
		int k = ibv_poll_cq(cq, 1, wc);
		WANT(k >= 0);
		if (k)
			return 0;
		if (i % 1024 == 0 && now() > limit)
			return ETIMEDOUT;
	}
}

static void note(struct outcome *out, const struct ibv_wc *wc)
{
	out->status = wc->status;
	out->opcode = wc->opcode;
	out->bytes = wc->byte_len;
	out->imm = be32toh(wc->imm_data);
}

/* wait_for waits for n completions, or the first that is an error. */
static void wait_for(struct ibv_cq *cq, uint64_t n, struct answer *a)
{
	const double limit = now() + WAIT_LIMIT;
	struct ibv_wc wc;
	for (a->out.count = 0; a->out.count < n; a->out.count++) {
		a->err = poll_until(cq, &wc, limit);
		if (a->err)
			return;
		note(&a->out, &wc);
		if (wc.status)
			return;
	}
}

static void open_window(struct node *at, const struct order *o, struct answer *a)
{
	struct pair *p = &at->pair[o->other];
	struct memory *m = &at->memory[o->id];
	struct ibv_mw *mw = ibv_alloc_mw(at->pd, IBV_MW_TYPE_2);
	WANT(mw);
	struct ibv_send_wr wr = {.wr_id = 9, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
	wr.bind_mw.mw = mw;
	wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
	wr.bind_mw.bind_info.mr = m->mr;
	wr.bind_mw.bind_info.addr = m->addr + o->off;
	wr.bind_mw.bind_info.length = o->n;
	wr.bind_mw.bind_info.mw_access_flags = (unsigned)o->flags;
	WANT(!ibv_post_send(p->qp, &wr, &bad));
	wait_for(p->send, 1, a);
	a->rkey = wr.bind_mw.rkey; /* the window lives until the process ends */
}

static void open_mkey(struct node *at, const struct order *o, struct answer *a)
{
	struct pair *p = &at->pair[o->other];
	struct ibv_sge sge[MAX_SGE];
	struct mlx5dv_mr_interleaved rows[MAX_SGE];
	struct mlx5dv_mkey_init_attr init = {.pd = at->pd, .create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, .max_entries = MAX_SGE};
	const uint32_t access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	int n = elements(at, o->work.part, sge);
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(p->qp);
	struct mlx5dv_qp_ex *dv = x ? mlx5dv_qp_ex_from_ibv_qp_ex(x) : NULL;
	WANT(dv && at->mkeys < MAX_MEMORY);
	struct mlx5dv_mkey *key = mlx5dv_create_mkey(&init);
	WANT(key);
	ibv_wr_start(x);
	x->wr_id = 8;
	x->wr_flags = IBV_SEND_SIGNALED | IBV_SEND_INLINE;
	for (int i = 0; i < n; i++) {
		a->size += sge[i].length * (o->n ? o->n : 1);
		rows[i] = (struct mlx5dv_mr_interleaved){
			.addr = sge[i].addr, .bytes_count = sge[i].length, .bytes_skip = o->skip, .lkey = sge[i].lkey};
	}
	if (o->n)
		mlx5dv_wr_mr_interleaved(dv, key, access, (uint32_t)o->n, (uint16_t)n, rows);
	else
		mlx5dv_wr_mr_list(dv, key, access, (uint16_t)n, sge);
	WANT(!ibv_wr_complete(x));
	wait_for(p->send, 1, a);
	at->mkey[at->mkeys] = key;
	a->id = -1 - at->mkeys++;
	a->lkey = key->lkey;
	a->rkey = key->rkey;
}

/* One queue pair of traffic: its requests are posted one behind the other, a few ahead. Those that add by CMP_SWAP need
 * the result of the one before. The result of a request is where its only piece is, plus 8 for each queue pair. */
struct stream {
	struct pair *p;
	struct work work;
	uint64_t posted, done, good;
};

static void run_traffic(struct node *at, const struct order *o, struct answer *a)
{
	struct stream s[8];
	const uint64_t ahead = o->by_cas ? 1 : 8;
	const bool atomic = o->work.r.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD || o->work.r.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
	const double until = now() + o->seconds;
	double limit = now() + WAIT_LIMIT;
	int busy = o->queues;
	for (int i = 0; i < o->queues; i++) {
		s[i] = (struct stream){.p = &at->pair[o->queue[i]], .work = o->work};
		if (atomic)
			s[i].work.part[0].off += 8 * (uint64_t)i;
		if (o->by_cas)
			s[i].work.r.swap = s[i].work.r.compare + 1;
	}
	while (busy) {
		busy = 0;
		for (int i = 0; i < o->queues; i++) {
			struct ibv_wc wc;
			bool over = (o->round && s[i].good >= o->round) || (o->seconds > 0 && now() > until);
			while (!over && s[i].posted - s[i].done < ahead && (!o->round || o->by_cas || s[i].posted < o->round)) {
				int err = post_work(at, s[i].p, &s[i].work);
				WANT(!err);
				s[i].posted++;
			}
			busy += s[i].posted > s[i].done;
			int k = ibv_poll_cq(s[i].p->send, 1, &wc);
			WANT(k >= 0);
			if (!k)
				continue;
			limit = now() + WAIT_LIMIT;
			note(&a->out, &wc);
			if (wc.status)
				return;
			s[i].done++;
			if (o->by_cas) {
				uint64_t was;
				memory_get(&at->memory[s[i].work.part[0].id], s[i].work.part[0].off, &was, 8);
				bool swapped = was == s[i].work.r.compare;
				s[i].good += swapped;
				s[i].work.r.compare = swapped ? was + 1 : was;
				s[i].work.r.swap = s[i].work.r.compare + 1;
			} else {
				s[i].good++;
			}
			a->out.count++;
		}
		if (now() > limit) {
			a->err = ETIMEDOUT;
			return;
		}
	}
}

static void usable(struct node *at)
{
	enum { N = 300000 };
	unsigned char *p = scratch(at, 2 * N);
	CUdeviceptr d, e;
	OK(cuCtxSynchronize());
	OK(cuMemAlloc(&d, N));
	OK(cuMemAlloc(&e, N));
	pattern_fill(p, N, 4711);
	OK(cuMemcpyHtoD(d, p, N));
	OK(cuMemcpyDtoD(e, d, N));
	OK(cuMemcpyDtoH(p + N, e, N));
	WANT(pattern_check(p + N, N, 4711) < 0);
	OK(cuMemFree(d));
	OK(cuMemFree(e));
}

static void make_context(struct node *at)
{
	CUdevice dev;
	OK(cuCtxGetDevice(&dev));
#if defined(VERBENA_CUDA_H) || CUDA_VERSION < 13000
	OK(cuCtxCreate(&at->context, 0, dev));
#else
	OK(cuCtxCreate(&at->context, NULL, 0, dev));
#endif
}

/* destroy_context destroys the context with all memory in it. */
static void destroy_context(struct node *at)
{
	CUcontext was;
	OK(cuCtxDestroy(at->context));
	OK(cuCtxGetCurrent(&was));
	WANT(was != at->context);
	cuda_start();
	for (int i = 0; i < at->memories; i++)
		at->memory[i].gone |= at->memory[i].base != 0;
}

static void obey(struct node *at, const struct order *o, struct answer *a)
{
	memset(a, 0, sizeof *a);
	a->bad = -1;
	switch (o->what) {
	case OPEN_MEMORY: open_memory(at, o, a); break;
	case FREE_MEMORY: a->err = memory_free(&at->memory[o->id]); break;
	case CLOSE_MEMORY: a->err = memory_close(&at->memory[o->id]); break;
	case FILL: fill(at, o); break;
	case CHECK: check(at, o, a); break;
	case SET: memory_put(&at->memory[o->id], o->off, &o->n, sizeof o->n); break;
	case REREG: rereg(at, o, a); break;
	case OPEN_QUEUE: open_queue(at, o, a); break;
	case CONNECT:
		if (at->pair[o->id].flags & QP_UD)
			connect_ud(at, &at->pair[o->id], o->gid);
		else
			connect_rc(at->pair[o->id].qp, o->qpn, o->gid);
		break;
	case CLOSE_QUEUE: close_queue(&at->pair[o->id]); break;
	case POST: a->err = post_work(at, &at->pair[o->id], &o->work); break;
	case RECEIVE: a->err = post_receive_work(at, &at->pair[o->id], &o->work); break;
	case AWAIT: wait_for(at->pair[o->id].send, o->n, a); break;
	case AWAIT_RECEIVE: wait_for(at->pair[o->id].receive, o->n, a); break;
	case OPEN_WINDOW: open_window(at, o, a); break;
	case OPEN_MKEY: open_mkey(at, o, a); break;
	case CLOSE_MKEY: a->err = mlx5dv_destroy_mkey(at->mkey[-1 - o->id]); break;
	case TRAFFIC: run_traffic(at, o, a); break;
	case USABLE: usable(at); break;
	case MAKE_CONTEXT: make_context(at); break;
	case DESTROY_CONTEXT: destroy_context(at); break;
	}
}

/* ---- 3. orders ---- */

static bool receive_all(int fd, void *p, size_t n) { return recv(fd, p, n, MSG_WAITALL) == (ssize_t)n; }

void nodes_serve(int socket)
{
	struct order o;
	struct answer a;
	cuda_start();
	struct node *at = local_node();
	while (receive_all(socket, &o, sizeof o)) {
		obey(at, &o, &a);
		if (send(socket, &a, sizeof a, MSG_NOSIGNAL) != sizeof a)
			break;
	}
	_exit(0);
}

void nodes_start(int peers, const int *sockets, const pid_t *pids)
{
	cuda_start();
	nodes[0] = local_node();
	if (!peers)
		nodes[1] = local_node();
	for (int i = 0; i < peers; i++)
		nodes[i + 1] = new_node(sockets[i], pids[i]);
}

static void *obey_thread(void *p)
{
	struct node *at = (struct node *)p;
	cuda_start();
	obey(at, &at->begun, &at->result);
	return NULL;
}

static void begin(struct node *at, const struct order *o)
{
	at->begun = *o;
	if (at->socket < 0)
		WANT(!pthread_create(&at->thread, NULL, obey_thread, at));
	else if (send(at->socket, o, sizeof *o, MSG_NOSIGNAL) != sizeof *o)
		failed("the other process takes no orders (%s)", strerror(errno));
}

static struct answer end(struct node *at)
{
	if (at->socket < 0)
		WANT(!pthread_join(at->thread, NULL));
	else if (!receive_all(at->socket, &at->result, sizeof at->result))
		failed("the other process has ended");
	at->err = at->result.err;
	return at->result;
}

/* order carries an order out, and waits for the answer. */
static struct answer order(struct node *at, const struct order *o)
{
	if (at->socket >= 0) {
		begin(at, o);
		return end(at);
	}
	struct answer a;
	obey(at, o, &a);
	at->err = a.err;
	return a;
}

/* done ends the case if an order was not carried out. */
static struct answer done(struct node *at, const struct order *o, const char *what)
{
	struct answer a = order(at, o);
	if (a.err)
		failed("%s: %s", what, strerror(a.err));
	return a;
}

/* ---- 4. the functions of common.h ---- */

int64_t node_error(struct node *at) { return at->err; }

static struct region region_of(struct node *at, const struct answer *a)
{
	return (struct region){.at = at, .id = a->id, .addr = a->addr, .lkey = a->lkey, .rkey = a->rkey, .size = a->size};
}

struct region region_try(struct node *at, enum kind kind, enum way way, size_t size, int access)
{
	struct order o = {.what = OPEN_MEMORY, .kind = kind, .way = way, .n = size, .flags = access};
	struct answer a = order(at, &o);
	return region_of(a.err ? NULL : at, &a);
}

struct region region_open(struct node *at, enum kind kind, enum way way, size_t size, int access)
{
	struct region r = region_try(at, kind, way, size, access);
	if (!r.at && at->err == ENOTSUP && (kind == VMM || kind == VMM_FD))
		skipped("this libcuda has no virtual memory management");
	if (!r.at)
		failed("registering %zu bytes of %s by %s: %s", size, kind_names[kind], way_names[way], strerror((int)at->err));
	return r;
}

void region_free(const struct region *r)
{
	struct order o = {.what = FREE_MEMORY, .id = r->id};
	done(r->at, &o, "freeing memory");
}

void region_close(const struct region *r)
{
	struct order o = {.what = CLOSE_MEMORY, .id = r->id};
	done(r->at, &o, "deregistering memory");
}

void region_fill(const struct region *r, size_t off, size_t n, uint64_t round)
{
	struct order o = {.what = FILL, .id = r->id, .off = off, .n = n, .round = round};
	done(r->at, &o, "filling memory");
}

static struct answer checked(const struct region *r, size_t off, size_t n, uint64_t round)
{
	struct order o = {.what = CHECK, .id = r->id, .off = off, .n = n, .round = round};
	return done(r->at, &o, "comparing memory");
}

bool region_has(const struct region *r, size_t off, size_t n, uint64_t round) { return checked(r, off, n, round).bad < 0; }

void region_check(const struct region *r, size_t off, size_t n, uint64_t round)
{
	struct answer a = checked(r, off, n, round);
	if (a.bad >= 0)
		failed("round %llu: of %zu bytes at offset %zu, byte %lld is wrong: %#x", (unsigned long long)round, n, off,
		       (long long)a.bad, a.found);
}

void region_set(const struct region *r, size_t off, uint64_t value)
{
	struct order o = {.what = SET, .id = r->id, .off = off, .n = value};
	done(r->at, &o, "setting a word");
}

struct region region_rereg(const struct region *r, const struct region *memory)
{
	struct order o = {.what = REREG, .id = r->id, .other = memory->id};
	struct answer a = done(r->at, &o, "ibv_rereg_mr");
	return region_of(r->at, &a);
}

struct queue queue_open(struct node *at, int flags)
{
	struct order o = {.what = OPEN_QUEUE, .flags = flags};
	struct answer a = done(at, &o, "making a queue pair");
	return (struct queue){.at = at, .id = a.id, .qpn = a.qpn, .gid = a.gid};
}

void queue_connect(const struct queue *q, const struct queue *to)
{
	struct order o = {.what = CONNECT, .id = q->id, .qpn = to->qpn, .gid = to->gid};
	done(q->at, &o, "connecting");
}

void queue_link(struct queue *a, struct node *from, struct queue *b, struct node *to, int flags)
{
	*a = queue_open(from, flags);
	*b = queue_open(to, flags);
	queue_connect(a, b);
	queue_connect(b, a);
}

void queue_close(const struct queue *q)
{
	struct order o = {.what = CLOSE_QUEUE, .id = q->id};
	done(q->at, &o, "destroying a queue pair");
}

static void copy_pieces(struct node *at, struct part *to, const struct piece *from)
{
	for (int i = 0; i < MAX_SGE && from[i].n; i++) {
		WANT(from[i].of->at == at);
		to[i] = (struct part){from[i].of->id, from[i].n, from[i].off};
	}
}

void post(const struct queue *q, const struct request *r)
{
	struct order o = {.what = POST, .id = q->id, .work = {.r = *r}};
	copy_pieces(q->at, o.work.part, r->piece);
	done(q->at, &o, "ibv_post_send");
}

void post_receive(const struct queue *q, const struct piece *pieces)
{
	struct order o = {.what = RECEIVE, .id = q->id};
	if (pieces)
		copy_pieces(q->at, o.work.part, pieces);
	done(q->at, &o, "ibv_post_recv");
}

static struct outcome wait_on(const struct queue *q, enum what what, int n)
{
	struct order o = {.what = what, .id = q->id, .n = (uint64_t)n};
	return done(q->at, &o, "waiting for a completion").out;
}

struct outcome await(const struct queue *q, int n) { return wait_on(q, AWAIT, n); }
struct outcome await_receive(const struct queue *q) { return wait_on(q, AWAIT_RECEIVE, 1); }

struct outcome request_on(const struct queue *q, const struct request *r)
{
	post(q, r);
	return await(q, 1);
}

void must(const struct queue *q, const struct request *r)
{
	struct outcome out = request_on(q, r);
	if (out.status)
		failed("a request with opcode %d ends with %s", r->opcode, ibv_wc_status_str((enum ibv_wc_status)out.status));
}

uint32_t window_open(const struct queue *q, const struct region *r, size_t off, size_t n, int access)
{
	struct order o = {.what = OPEN_WINDOW, .id = r->id, .other = q->id, .off = off, .n = n, .flags = access};
	WANT(q->at == r->at);
	struct answer a = done(q->at, &o, "binding a window");
	if (a.out.status)
		failed("binding a window ends with %s", ibv_wc_status_str((enum ibv_wc_status)a.out.status));
	return a.rkey;
}

struct region mkey_open(const struct queue *q, const struct piece *pieces, int repeat, uint32_t skip)
{
	struct order o = {.what = OPEN_MKEY, .other = q->id, .n = (uint64_t)repeat, .skip = skip};
	copy_pieces(q->at, o.work.part, pieces);
	struct answer a = done(q->at, &o, "making an indirect key");
	if (a.out.status)
		failed("configuring an indirect key ends with %s", ibv_wc_status_str((enum ibv_wc_status)a.out.status));
	return region_of(q->at, &a);
}

void mkey_close(const struct region *key)
{
	struct order o = {.what = CLOSE_MKEY, .id = key->id};
	done(key->at, &o, "mlx5dv_destroy_mkey");
}

void begin_traffic(struct node *at, const struct traffic *t)
{
	struct order o = {.what = TRAFFIC, .work = {.r = t->what}, .queues = t->queues, .round = t->rounds, .by_cas = t->by_cas, .seconds = t->seconds};
	copy_pieces(at, o.work.part, t->what.piece);
	for (int i = 0; i < t->queues; i++)
		o.queue[i] = t->q[i].id;
	begin(at, &o);
}

struct outcome finish(struct node *at)
{
	struct answer a = end(at);
	if (a.err)
		failed("traffic: %s", strerror(a.err));
	return a.out;
}

void node_usable(struct node *at)
{
	struct order o = {.what = USABLE};
	done(at, &o, "using CUDA");
}

void node_context(struct node *at)
{
	struct order o = {.what = MAKE_CONTEXT};
	done(at, &o, "making a context");
}

void node_destroy(struct node *at)
{
	struct order o = {.what = DESTROY_CONTEXT};
	done(at, &o, "destroying a context");
}

void node_signal(struct node *at, int sig)
{
	WANT(at->pid > 0);
	WANT(!kill(at->pid, sig));
}

void node_gone(struct node *at)
{
	int status;
	WANT(waitpid(at->pid, &status, 0) == at->pid);
}

struct ibv_context *node_verbs(struct node *at) { return at->ctx; }
struct ibv_pd *node_pd(struct node *at) { return at->pd; }
struct memory *node_memory(const struct region *r) { return &r->at->memory[r->id]; }
struct ibv_qp *node_qp(const struct queue *q) { return q->at->pair[q->id].qp; }
struct ibv_cq *node_cq(const struct queue *q) { return q->at->pair[q->id].send; }
