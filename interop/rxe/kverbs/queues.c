/*
 * The queues of kverbs: completion queues, shared receive queues and address handles,
 * queue pairs, and the requests that are posted to them.
 */
#include <arpa/inet.h>
#include <poll.h>
#include <rdma/rdma_user_rxe.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "kverbs.h"

#define MAX_SGE 32 /* pieces of a request */

/* ---- queues ---- */

static int parse_gid(const char *s, union ibv_gid *g)
{
	if (!s || strlen(s) != 32)
		return -1;
	for (int i = 0; i < 16; i++) {
		unsigned b;
		if (sscanf(s + 2 * i, "%2x", &b) != 1)
			return -1;
		g->raw[i] = b;
	}
	return 0;
}

void do_chan(void)
{
	SLOT(chans);
	MADE(chans, ibv_create_comp_channel(ctx), "create_comp_channel");
	ok("%s", "");
}

void do_cq(void)
{
	SLOT(cqs);
	struct ibv_comp_channel *ch = NULL;
	if (str("chan")) {
		FIND(found, chans, "chan");
		ch = found;
	}
	MADE(cqs, ibv_create_cq(ctx, num("cqe", 16), NULL, ch, 0), "create_cq");
	ok("cqe=%d", cqs[id]->cqe);
}

void do_arm(void)
{
	FIND(cq, cqs, "id");
	done(ibv_req_notify_cq(cq, num("solicited", 0)), "req_notify_cq");
}

/* event waits for a completion event, and acknowledges it. */
void do_event(void)
{
	FIND(ch, chans, "chan");
	struct pollfd p = {.fd = ch->fd, .events = POLLIN};
	if (poll(&p, 1, num("ms", 0)) <= 0) {
		ok("n=0");
		return;
	}
	struct ibv_cq *cq;
	void *context;
	if (ibv_get_cq_event(ch, &cq, &context)) {
		fail(errno, "get_cq_event");
		return;
	}
	ibv_ack_cq_events(cq, 1);
	ok("n=1");
}

static uint64_t now_ms(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000ull + t.tv_nsec / 1000000;
}

/* poll polls one completion, and waits for it up to "ms" milliseconds. */
void do_poll(void)
{
	FIND(cq, cqs, "id");
	uint64_t end = now_ms() + num("ms", 0);
	struct ibv_wc wc;
	int n;
	for (unsigned tries = 0; !(n = ibv_poll_cq(cq, 1, &wc)); tries++) {
		if (now_ms() >= end) {
			ok("n=0");
			return;
		}
		if (tries > 16) { /* the device needs the processor */
			struct timespec t = {.tv_nsec = 50000};
			nanosleep(&t, NULL);
		}
	}
	if (n < 0) {
		fail(errno ? errno : EIO, "poll_cq");
		return;
	}
	/* imm and inv are the same field; the flags say which one it is */
	ok("n=1 id=%llu status=%d op=%d flags=%u len=%u imm=%u inv=%u qpn=%u src=%u vendor=%u",
	   (unsigned long long)wc.wr_id, wc.status, wc.opcode, wc.wc_flags, wc.byte_len, ntohl(wc.imm_data),
	   wc.invalidated_rkey, wc.qp_num, wc.src_qp, wc.vendor_err);
}

void do_srq(void)
{
	SLOT(srqs);
	FIND(pd, pds, "pd");
	struct ibv_srq_init_attr a = {.attr = {.max_wr = num("wr", 16), .max_sge = num("sge", 1)}};
	MADE(srqs, ibv_create_srq(pd, &a), "create_srq");
	ok("%s", "");
}

void do_ah(void)
{
	SLOT(ahs);
	FIND(pd, pds, "pd");
	struct ibv_ah_attr a = {
		.is_global = 1,
		.port_num = num("port", 1),
		.grh = {.sgid_index = num("sgid", 0), .hop_limit = num("hop", 64), .traffic_class = num("tclass", 0),
			.flow_label = num("flow", 0)},
	};
	if (parse_gid(str("gid"), &a.grh.dgid)) {
		fail(EINVAL, "gid");
		return;
	}
	MADE(ahs, ibv_create_ah(pd, &a), "create_ah");
	ok("%s", "");
}

/* ---- queue pairs ---- */

/* create_extended makes a queue pair for the requests that ibv_post_send does not
 * support: do_atomic_write and do_flush. */
static struct ibv_qp *create_extended(struct ibv_pd *pd, const struct ibv_qp_init_attr *a)
{
	struct ibv_qp_init_attr_ex x = {
		.send_cq = a->send_cq,
		.recv_cq = a->recv_cq,
		.srq = a->srq,
		.cap = a->cap,
		.qp_type = a->qp_type,
		.sq_sig_all = a->sq_sig_all,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_ATOMIC_WRITE,
	};
	return ibv_create_qp_ex(ctx, &x);
}

void do_qp(void)
{
	SLOT(qps);
	FIND(pd, pds, "pd");
	FIND(scq, cqs, "scq");
	FIND(rcq, cqs, "rcq");
	const char *type = str("type");
	struct ibv_qp_init_attr a = {
		.send_cq = scq,
		.recv_cq = rcq,
		.qp_type = !type || !strcmp(type, "RC") ? IBV_QPT_RC : !strcmp(type, "UC") ? IBV_QPT_UC : IBV_QPT_UD,
		.sq_sig_all = num("sigall", 0),
		.cap = {.max_send_wr = num("swr", 16), .max_recv_wr = num("rwr", 16), .max_send_sge = num("ssge", 1),
			.max_recv_sge = num("rsge", 1), .max_inline_data = num("inline", 0)},
	};
	if (str("srq")) {
		FIND(srq, srqs, "srq");
		a.srq = srq;
	}
	MADE(qps, num("ex", 0) ? create_extended(pd, &a) : ibv_create_qp(pd, &a), "create_qp");
	ok("qpn=%u", qps[id]->qp_num);
}

void do_init(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = num("port", 1), .qp_access_flags = num("access", 0),
				.qkey = num("qkey", 0)};
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	mask |= qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	done(ibv_modify_qp(qp, &a, mask), "to INIT");
}

void do_rtr(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = num("mtu", IBV_MTU_1024),
		.dest_qp_num = num("dqpn", 0),
		.rq_psn = num("psn", 0),
		.max_dest_rd_atomic = num("rd", 16),
		.min_rnr_timer = num("rnr", 12),
		.ah_attr = {.is_global = 1,
			    .port_num = num("port", 1),
			    .grh = {.sgid_index = num("sgid", 0), .hop_limit = num("hop", 64),
				    .traffic_class = num("tclass", 0)}},
	};
	int mask = IBV_QP_STATE;
	if (qp->qp_type != IBV_QPT_UD) {
		if (parse_gid(str("gid"), &a.ah_attr.grh.dgid)) {
			fail(EINVAL, "gid");
			return;
		}
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	done(ibv_modify_qp(qp, &a, mask), "to RTR");
}

void do_rts(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = num("psn", 0),
		.timeout = num("timeout", 14),
		.retry_cnt = num("retry", 7),
		.rnr_retry = num("rnr", 7),
		.max_rd_atomic = num("rd", 16),
	};
	int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
	done(ibv_modify_qp(qp, &a, mask), "to RTS");
}

/* state moves to a state that needs nothing else: 0 is RESET, 6 is ERR. */
void do_state(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {.qp_state = num("state", IBV_QPS_ERR)};
	done(ibv_modify_qp(qp, &a, IBV_QP_STATE), "to a state");
}

void do_query(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	int rc = ibv_query_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &i);
	if (rc)
		fail(rc, "query_qp");
	else
		ok("state=%d sq_psn=%u rq_psn=%u", a.qp_state, a.sq_psn, a.rq_psn);
}

/* ---- requests ---- */

/* parse_sges reads "addr:length:lkey,…". */
static int parse_sges(struct ibv_sge *sge)
{
	const char *s = str("sge");
	int n = 0;
	while (s && *s) {
		unsigned long long addr, len, key;
		int used;
		if (n == MAX_SGE || sscanf(s, "%lli:%lli:%lli%n", (long long *)&addr, (long long *)&len,
					   (long long *)&key, &used) != 3)
			return -1;
		sge[n++] = (struct ibv_sge){.addr = addr, .length = len, .lkey = key};
		s += used;
		if (*s == ',')
			s++;
	}
	return n;
}

static const struct {
	const char *name;
	enum ibv_wr_opcode op;
} opcodes[] = {
	{"send", IBV_WR_SEND},
	{"send_imm", IBV_WR_SEND_WITH_IMM},
	{"send_inv", IBV_WR_SEND_WITH_INV},
	{"write", IBV_WR_RDMA_WRITE},
	{"write_imm", IBV_WR_RDMA_WRITE_WITH_IMM},
	{"read", IBV_WR_RDMA_READ},
	{"cas", IBV_WR_ATOMIC_CMP_AND_SWP},
	{"fadd", IBV_WR_ATOMIC_FETCH_AND_ADD},
	{"local_inv", IBV_WR_LOCAL_INV},
	{"bind", IBV_WR_BIND_MW},
};

void do_send(void)
{
	FIND(qp, qps, "qp");
	struct ibv_sge sge[MAX_SGE];
	struct ibv_send_wr wr = {.wr_id = num("id", 0), .sg_list = sge, .num_sge = parse_sges(sge),
				 .send_flags = num("flags", IBV_SEND_SIGNALED)};
	const char *op = str("op");
	size_t i, n = sizeof opcodes / sizeof *opcodes;
	for (i = 0; i < n && (!op || strcmp(op, opcodes[i].name)); i++)
		;
	if (i == n || wr.num_sge < 0) {
		fail(EINVAL, i == n ? "op" : "sge");
		return;
	}
	wr.opcode = opcodes[i].op;
	switch (wr.opcode) {
	case IBV_WR_SEND_WITH_IMM:
	case IBV_WR_RDMA_WRITE_WITH_IMM:
		wr.imm_data = htonl(num("imm", 0));
		break;
	case IBV_WR_SEND_WITH_INV:
	case IBV_WR_LOCAL_INV:
		wr.invalidate_rkey = num("inv", 0);
		break;
	case IBV_WR_BIND_MW: {
		FIND(mw, mws, "mw");
		FIND(mr, mrs, "mr");
		wr.bind_mw.mw = mw;
		wr.bind_mw.rkey = num("rkey", 0);
		wr.bind_mw.bind_info = (struct ibv_mw_bind_info){
			.mr = mr, .addr = num("raddr", 0), .length = num("len", 0), .mw_access_flags = num("access", 0)};
		break;
	}
	default:
		break;
	}
	if (qp->qp_type == IBV_QPT_UD) {
		FIND(ah, ahs, "ah");
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = num("rqpn", 0);
		wr.wr.ud.remote_qkey = num("qkey", 0);
	} else if (wr.opcode == IBV_WR_ATOMIC_CMP_AND_SWP || wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = num("raddr", 0);
		wr.wr.atomic.rkey = num("rkey", 0);
		wr.wr.atomic.compare_add = num("compare", 0);
		wr.wr.atomic.swap = num("swap", 0);
	} else {
		wr.wr.rdma.remote_addr = num("raddr", 0);
		wr.wr.rdma.rkey = num("rkey", 0);
	}
	struct ibv_send_wr *bad;
	int rc = ibv_post_send(qp, &wr, &bad);
	if (!rc && wr.opcode == IBV_WR_BIND_MW)
		wr.bind_mw.mw->rkey = wr.bind_mw.rkey; /* the program must set it, and the next bind is checked against it */
	done(rc, "post_send");
}

/* begin starts a list of requests by ibv_wr_*, and sets the id and flags of the first. */
static struct ibv_qp_ex *begin(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(x);
	x->wr_id = id;
	x->wr_flags = num("flags", IBV_SEND_SIGNALED);
	return x;
}

/* atomic_write stores the 8 bytes of its only sge. */
void do_atomic_write(void)
{
	FIND(qp, qps, "qp");
	struct ibv_sge sge[MAX_SGE];
	if (parse_sges(sge) != 1 || sge->length != 8) {
		fail(EINVAL, "sge");
		return;
	}
	struct ibv_qp_ex *x = begin(qp, num("id", 0));
	ibv_wr_atomic_write(x, num("rkey", 0), num("raddr", 0), (void *)(uintptr_t)sge->addr);
	done(ibv_wr_complete(x), "wr_complete");
}

/* find_wqe finds the request with an id in the queues that this process shares with
 * the kernel. It returns NULL unless there is exactly one. */
static struct rxe_send_wqe *find_wqe(uint64_t id)
{
	struct rxe_send_wqe *found = NULL;
	char line[512];
	int n = 0;
	FILE *maps = fopen("/proc/self/maps", "r");
	while (maps && fgets(line, sizeof line, maps)) {
		uintptr_t from, to;
		if (!strstr(line, "/dev/infiniband/uverbs") || sscanf(line, "%lx-%lx rw-s", &from, &to) != 2)
			continue;
		for (; from + sizeof *found <= to; from += sizeof id)
			if (*(uint64_t *)from == id) {
				found = (struct rxe_send_wqe *)from;
				n++;
			}
	}
	if (maps)
		fclose(maps);
	return n == 1 ? found : NULL;
}

/* flush makes the kernel send a FLUSH. The kernel had it before libibverbs, so this
 * writes the request in the kernel's form (rdma_user_rxe.h): over a WRITE that is in the
 * queue, and that ibv_wr_complete has not yet passed to the kernel. A random id finds
 * that WRITE. */
void do_flush(void)
{
	FIND(qp, qps, "qp");
	static uint64_t last = 0x9d3c61f2a7b84e05;
	uint64_t mark = last = pattern_word(last, now_ms());
	struct ibv_qp_ex *x = begin(qp, mark);
	ibv_wr_rdma_write(x, num("rkey", 0), num("raddr", 0));
	struct rxe_send_wqe *wqe = find_wqe(mark);
	if (!wqe || wqe->wr.opcode != IBV_WR_RDMA_WRITE) {
		ibv_wr_abort(x);
		fail(ENOENT, "the entry of the send queue");
		return;
	}
	struct flush { /* a part of struct rxe_send_wr, since Linux 6.2 */
		__aligned_u64 addr;
		__u32 length, rkey;
		__u8 type, level;
	} *f = (struct flush *)&wqe->wr.wr;
	wqe->wr.wr_id = num("id", 0);
	wqe->wr.opcode = 14; /* IB_UVERBS_WR_FLUSH */
	memset(f, 0, sizeof *f);
	f->addr = num("raddr", 0);
	f->rkey = num("rkey", 0);
	f->type = num("type", 0);
	f->level = num("level", 0);
	f->length = wqe->dma.length = wqe->dma.resid = num("len", 0);
	done(ibv_wr_complete(x), "wr_complete");
}

/* recv posts a receive to the queue pair "qp" or to the shared queue "srq". */
void do_recv(void)
{
	struct ibv_sge sge[MAX_SGE];
	struct ibv_recv_wr *bad, wr = {.wr_id = num("id", 0), .sg_list = sge, .num_sge = parse_sges(sge)};
	if (wr.num_sge < 0) {
		fail(EINVAL, "sge");
		return;
	}
	if (str("srq")) {
		FIND(srq, srqs, "srq");
		done(ibv_post_srq_recv(srq, &wr, &bad), "post_srq_recv");
		return;
	}
	FIND(qp, qps, "qp");
	done(ibv_post_recv(qp, &wr, &bad), "post_recv");
}
