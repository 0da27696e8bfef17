/*
 * kverbs: standard verbs by hand, over a pipe.
 *
 * A line on standard input is a request, a line on standard output its answer:
 *
 *     > open dev=rxe0
 *     < ok
 *     > mem id=0 size=4096
 *     < ok addr=0x7f2a10000000
 *
 * A request is a word and any number of key=value pairs; numbers are decimal, or
 * hexadecimal with 0x. An answer is "ok" and pairs, or "err" with an errno and
 * words. Objects are named by the caller, by small numbers ("id"), one space of
 * numbers for each kind. The end of the input ends the program, and with it
 * everything that it opened.
 *
 * It uses nothing but libibverbs (do_flush excepted) and decides nothing, so that
 * the program at the other end of the pipe can do to a device what no ready-made
 * tool does.
 *
 * Stages: read a line, split it (args), find the command (table at the end),
 * answer.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_user_rxe.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define MAX_ID 1024   /* objects of each kind */
#define MAX_SGE 32    /* pieces of a request */
#define MAX_PEEK 16384 /* bytes shown as text */
#define MAX_LINE 65536
#define MAX_ARGS 64

/* ---- arguments and answers ---- */

static struct {
	int n;
	char *key[MAX_ARGS], *value[MAX_ARGS];
} args;

static const char *str(const char *key)
{
	for (int i = 0; i < args.n; i++)
		if (!strcmp(args.key[i], key))
			return args.value[i];
	return NULL;
}

static uint64_t num(const char *key, uint64_t otherwise)
{
	const char *s = str(key);
	return s ? strtoull(s, NULL, 0) : otherwise;
}

static void ok(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void ok(const char *format, ...)
{
	va_list ap;
	va_start(ap, format);
	fputs("ok", stdout);
	if (*format)
		putchar(' ');
	vprintf(format, ap);
	putchar('\n');
	va_end(ap);
}

/* err answers with an errno, which verbs return, or leave in errno. */
static void err(int code, const char *what)
{
	printf("err %d %s: %s\n", code, what, strerror(code));
}

/* done answers to a verb that returns an errno. */
static void done(int code, const char *what)
{
	if (code)
		err(code < 0 ? errno : code, what);
	else
		ok("%s", "");
}

/* ---- objects ---- */

struct mem {
	uint8_t *p;
	size_t size;
};

static struct ibv_context *ctx;
static struct mem mems[MAX_ID];
static struct ibv_pd *pds[MAX_ID];
static struct ibv_mr *mrs[MAX_ID];
static struct ibv_mw *mws[MAX_ID];
static struct ibv_comp_channel *chans[MAX_ID];
static struct ibv_cq *cqs[MAX_ID];
static struct ibv_srq *srqs[MAX_ID];
static struct ibv_qp *qps[MAX_ID];
static struct ibv_ah *ahs[MAX_ID];

/* slot finds a free place for a new object, named by id. */
#define SLOT(table)                                            \
	uint64_t id = num("id", 0);                            \
	if (id >= MAX_ID || (table)[id]) {                     \
		err(id >= MAX_ID ? ERANGE : EEXIST, "id");     \
		return;                                        \
	}

/* FIND finds an object that is there, named by key. */
#define FIND(var, table, key)                                  \
	typeof((table)[0]) var = NULL;                         \
	if (num(key, 0) < MAX_ID)                              \
		var = (table)[num(key, 0)];                    \
	if (!var) {                                            \
		err(ENOENT, key);                              \
		return;                                        \
	}

/* MADE keeps a new object, or tells why there is none. */
#define MADE(table, object, what)                              \
	if (!((table)[id] = (object))) {                       \
		err(errno, what);                              \
		return;                                        \
	}

/* GONE destroys the object that "id" names. */
#define GONE(table, destroy)                                   \
	FIND(x, table, "id");                                  \
	int rc = destroy(x);                                   \
	if (!rc)                                               \
		(table)[num("id", 0)] = NULL;                  \
	done(rc, #destroy)

/* ---- device ---- */

static void do_open(void)
{
	int n = 0;
	const char *name = str("dev");
	struct ibv_device **list = ibv_get_device_list(&n);
	if (ctx || !list) {
		err(ctx ? EBUSY : errno, "open");
		return;
	}
	for (int i = 0; i < n && !ctx; i++)
		if (!name || !strcmp(ibv_get_device_name(list[i]), name))
			ctx = ibv_open_device(list[i]);
	ibv_free_device_list(list);
	done(ctx ? 0 : ENODEV, "open");
}

static void do_port(void)
{
	struct ibv_port_attr a;
	int rc = ibv_query_port(ctx, num("port", 1), &a);
	if (rc)
		err(rc, "query_port");
	else
		ok("state=%d mtu=%d max_mtu=%d gids=%d max_msg=%u", a.state, a.active_mtu, a.max_mtu,
		   a.gid_tbl_len, a.max_msg_sz);
}

static void do_device(void)
{
	struct ibv_device_attr_ex x = {0};
	int rc = ibv_query_device_ex(ctx, NULL, &x);
	struct ibv_device_attr a = x.orig_attr;
	if (rc)
		err(rc, "query_device");
	else
		ok("fw=%s max_qp=%d max_qp_wr=%d max_sge=%d max_cq=%d max_mr=%d max_mw=%d max_srq=%d "
		   "max_rd_atomic=%d atomic=%d caps=0x%llx",
		   *a.fw_ver ? a.fw_ver : "-", a.max_qp, a.max_qp_wr, a.max_sge, a.max_cq, a.max_mr, a.max_mw,
		   a.max_srq, a.max_qp_rd_atom, a.atomic_cap,
		   (unsigned long long)(x.device_cap_flags_ex ? x.device_cap_flags_ex : a.device_cap_flags));
}

static void do_gid(void)
{
	union ibv_gid g;
	if (ibv_query_gid(ctx, num("port", 1), num("index", 0), &g)) {
		err(errno ? errno : EINVAL, "query_gid");
		return;
	}
	char s[33];
	for (int i = 0; i < 16; i++)
		sprintf(s + 2 * i, "%02x", g.raw[i]);
	ok("gid=%s", s);
}

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

/* async waits for an asynchronous event. */
static void do_async(void)
{
	struct pollfd p = {.fd = ctx->async_fd, .events = POLLIN};
	if (poll(&p, 1, num("ms", 0)) <= 0) {
		ok("n=0");
		return;
	}
	struct ibv_async_event e;
	if (ibv_get_async_event(ctx, &e)) {
		err(errno, "get_async_event");
		return;
	}
	ibv_ack_async_event(&e);
	ok("n=1 type=%d", e.event_type);
}

/* ---- memory ---- */

static void do_mem(void)
{
	uint64_t id = num("id", 0), size = num("size", 4096);
	if (id >= MAX_ID || mems[id].p) {
		err(EEXIST, "id");
		return;
	}
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) {
		err(errno, "mmap");
		return;
	}
	mems[id].p = p;
	mems[id].size = size;
	ok("addr=%p", p);
}

/* bytes finds a range of a memory; NULL if it is not inside. */
static uint8_t *bytes(uint64_t off, uint64_t len)
{
	uint64_t id = num("mem", 0);
	if (id >= MAX_ID || !mems[id].p || off > mems[id].size || len > mems[id].size - off)
		return NULL;
	return mems[id].p + off;
}

static void do_free_mem(void)
{
	uint64_t id = num("id", 0);
	if (id >= MAX_ID || !mems[id].p) {
		err(ENOENT, "id");
		return;
	}
	munmap(mems[id].p, mems[id].size);
	mems[id].p = NULL;
	ok("%s", "");
}

/* The pattern: byte i of a seed's endless row of bytes. */
static uint64_t pattern_word(uint64_t seed, uint64_t i)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + i;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* do_pattern writes the pattern, or finds the first byte that is not of it. */
static void do_pattern(int check)
{
	uint64_t off = num("off", 0), len = num("len", 0), seed = num("seed", 0), start = num("start", 0);
	uint8_t *p = bytes(off, len);
	if (!p) {
		err(EFAULT, "range");
		return;
	}
	uint64_t w = 0, have = UINT64_MAX; /* the word at hand */
	for (uint64_t i = 0; i < len; i++) {
		uint64_t at = start + i;
		if (at / 8 != have) {
			have = at / 8;
			w = pattern_word(seed, have);
		}
		uint8_t want = w >> 8 * (at % 8);
		if (!check) {
			p[i] = want;
		} else if (p[i] != want) {
			ok("at=%llu found=%u want=%u", (unsigned long long)i, p[i], want);
			return;
		}
	}
	ok("at=-1");
}

static void do_fill(void) { do_pattern(0); }
static void do_check(void) { do_pattern(1); }

static void do_peek(void)
{
	uint64_t len = num("len", 0);
	uint8_t *p = bytes(num("off", 0), len);
	if (!p || len > MAX_PEEK) {
		err(EFAULT, "range");
		return;
	}
	fputs("ok data=", stdout);
	for (uint64_t i = 0; i < len; i++)
		printf("%02x", p[i]);
	putchar('\n');
}

static void do_poke(void)
{
	const char *data = str("data");
	uint64_t len = data ? strlen(data) / 2 : 0;
	uint8_t *p = bytes(num("off", 0), len);
	if (!p) {
		err(EFAULT, "range");
		return;
	}
	for (uint64_t i = 0; i < len; i++) {
		unsigned b = 0;
		sscanf(data + 2 * i, "%2x", &b);
		p[i] = b;
	}
	ok("%s", "");
}

static void do_pd(void)
{
	SLOT(pds);
	MADE(pds, ibv_alloc_pd(ctx), "alloc_pd");
	ok("%s", "");
}

static void do_mr(void)
{
	SLOT(mrs);
	FIND(pd, pds, "pd");
	uint64_t len = num("len", 0);
	uint8_t *p = bytes(num("off", 0), len);
	if (!p) {
		err(EFAULT, "range");
		return;
	}
	MADE(mrs, ibv_reg_mr(pd, p, len, num("access", 0)), "reg_mr");
	ok("addr=%p lkey=%u rkey=%u", (void *)p, mrs[id]->lkey, mrs[id]->rkey);
}

static void do_mw(void)
{
	SLOT(mws);
	FIND(pd, pds, "pd");
	MADE(mws, ibv_alloc_mw(pd, num("type", 2) == 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2), "alloc_mw");
	ok("rkey=%u", mws[id]->rkey);
}

/* bind_mw is the verb, for windows of type 1: it tells the new rkey at once. */
static void do_bind_mw(void)
{
	FIND(qp, qps, "qp");
	FIND(mw, mws, "mw");
	FIND(mr, mrs, "mr");
	struct ibv_mw_bind bind = {
		.wr_id = num("id", 0), .send_flags = num("flags", IBV_SEND_SIGNALED),
		.bind_info = {.mr = mr, .addr = num("raddr", 0), .length = num("len", 0), .mw_access_flags = num("access", 0)}};
	int rc = ibv_bind_mw(qp, mw, &bind);
	if (rc)
		err(rc, "bind_mw");
	else
		ok("rkey=%u", mw->rkey);
}

/* ---- queues ---- */

static void do_chan(void)
{
	SLOT(chans);
	MADE(chans, ibv_create_comp_channel(ctx), "create_comp_channel");
	ok("%s", "");
}

static void do_cq(void)
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

static void do_arm(void)
{
	FIND(cq, cqs, "id");
	done(ibv_req_notify_cq(cq, num("solicited", 0)), "req_notify_cq");
}

/* event waits for a completion event, and acknowledges it. */
static void do_event(void)
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
		err(errno, "get_cq_event");
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

/* poll takes one completion, waiting for it up to "ms". */
static void do_poll(void)
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
		if (tries > 16) { /* leave the processor to the device, which needs it */
			struct timespec t = {.tv_nsec = 50000};
			nanosleep(&t, NULL);
		}
	}
	if (n < 0) {
		err(errno ? errno : EIO, "poll_cq");
		return;
	}
	/* imm and inv are two readings of one field; the flags tell which counts */
	ok("n=1 id=%llu status=%d op=%d flags=%u len=%u imm=%u inv=%u qpn=%u src=%u vendor=%u",
	   (unsigned long long)wc.wr_id, wc.status, wc.opcode, wc.wc_flags, wc.byte_len, ntohl(wc.imm_data),
	   wc.invalidated_rkey, wc.qp_num, wc.src_qp, wc.vendor_err);
}

static void do_srq(void)
{
	SLOT(srqs);
	FIND(pd, pds, "pd");
	struct ibv_srq_init_attr a = {.attr = {.max_wr = num("wr", 16), .max_sge = num("sge", 1)}};
	MADE(srqs, ibv_create_srq(pd, &a), "create_srq");
	ok("%s", "");
}

static void do_ah(void)
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
		err(EINVAL, "gid");
		return;
	}
	MADE(ahs, ibv_create_ah(pd, &a), "create_ah");
	ok("%s", "");
}

/* ---- queue pairs ---- */

/* create_extended makes a queue pair for the requests that ibv_post_send does not
 * know: do_atomic_write and do_flush. */
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

static void do_qp(void)
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

static void do_init(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_INIT, .port_num = num("port", 1), .qp_access_flags = num("access", 0),
				.qkey = num("qkey", 0)};
	int mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
	mask |= qp->qp_type == IBV_QPT_UD ? IBV_QP_QKEY : IBV_QP_ACCESS_FLAGS;
	done(ibv_modify_qp(qp, &a, mask), "to INIT");
}

static void do_rtr(void)
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
			err(EINVAL, "gid");
			return;
		}
		mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	}
	if (qp->qp_type == IBV_QPT_RC)
		mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
	done(ibv_modify_qp(qp, &a, mask), "to RTR");
}

static void do_rts(void)
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
static void do_state(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a = {.qp_state = num("state", IBV_QPS_ERR)};
	done(ibv_modify_qp(qp, &a, IBV_QP_STATE), "to a state");
}

static void do_query(void)
{
	FIND(qp, qps, "id");
	struct ibv_qp_attr a;
	struct ibv_qp_init_attr i;
	int rc = ibv_query_qp(qp, &a, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_RQ_PSN, &i);
	if (rc)
		err(rc, "query_qp");
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

static void do_send(void)
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
		err(EINVAL, i == n ? "op" : "sge");
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
		wr.bind_mw.mw->rkey = wr.bind_mw.rkey; /* left to the program, and what the next bind is checked against */
	done(rc, "post_send");
}

/* begin opens a list of extended requests, with one of them announced. */
static struct ibv_qp_ex *begin(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(qp);
	ibv_wr_start(x);
	x->wr_id = id;
	x->wr_flags = num("flags", IBV_SEND_SIGNALED);
	return x;
}

/* atomic_write stores the 8 bytes that the one sge names. */
static void do_atomic_write(void)
{
	FIND(qp, qps, "qp");
	struct ibv_sge sge[MAX_SGE];
	if (parse_sges(sge) != 1 || sge->length != 8) {
		err(EINVAL, "sge");
		return;
	}
	struct ibv_qp_ex *x = begin(qp, num("id", 0));
	ibv_wr_atomic_write(x, num("rkey", 0), num("raddr", 0), (void *)(uintptr_t)sge->addr);
	done(ibv_wr_complete(x), "wr_complete");
}

/* find_wqe finds the entry with an id in the queues that this process shares with
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

/* flush makes the kernel send a FLUSH. libibverbs has had a call for it for a
 * shorter time than the kernel, so this writes it as the kernel reads it
 * (rdma_user_rxe.h): over a WRITE that stands in the queue and that the kernel has
 * not been told of. The id by which that is found appears nowhere else. */
static void do_flush(void)
{
	FIND(qp, qps, "qp");
	static uint64_t last = 0x9d3c61f2a7b84e05;
	uint64_t mark = last = pattern_word(last, now_ms());
	struct ibv_qp_ex *x = begin(qp, mark);
	ibv_wr_rdma_write(x, num("rkey", 0), num("raddr", 0));
	struct rxe_send_wqe *wqe = find_wqe(mark);
	if (!wqe || wqe->wr.opcode != IBV_WR_RDMA_WRITE) {
		ibv_wr_abort(x);
		err(ENOENT, "the entry of the send queue");
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
static void do_recv(void)
{
	struct ibv_sge sge[MAX_SGE];
	struct ibv_recv_wr *bad, wr = {.wr_id = num("id", 0), .sg_list = sge, .num_sge = parse_sges(sge)};
	if (wr.num_sge < 0) {
		err(EINVAL, "sge");
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

/* ---- the end of objects ---- */

static void do_destroy_qp(void) { GONE(qps, ibv_destroy_qp); }
static void do_destroy_cq(void) { GONE(cqs, ibv_destroy_cq); }
static void do_destroy_ah(void) { GONE(ahs, ibv_destroy_ah); }
static void do_dereg_mr(void) { GONE(mrs, ibv_dereg_mr); }
static void do_dealloc_mw(void) { GONE(mws, ibv_dealloc_mw); }

#define SWEEP(table, destroy)                                  \
	for (int i = 0; i < MAX_ID; i++)                       \
		if ((table)[i]) {                              \
			int rc = destroy((table)[i]);          \
			if (rc) {                              \
				done(rc, #destroy);            \
				return;                        \
			}                                      \
			(table)[i] = NULL;                     \
		}

/* clear destroys everything but the device, users before what they use. */
static void do_clear(void)
{
	SWEEP(mws, ibv_dealloc_mw); /* a bound one keeps its queue pair */
	SWEEP(qps, ibv_destroy_qp);
	SWEEP(ahs, ibv_destroy_ah);
	SWEEP(srqs, ibv_destroy_srq);
	SWEEP(cqs, ibv_destroy_cq);
	SWEEP(chans, ibv_destroy_comp_channel);
	SWEEP(mrs, ibv_dereg_mr);
	SWEEP(pds, ibv_dealloc_pd);
	for (int i = 0; i < MAX_ID; i++)
		if (mems[i].p) {
			munmap(mems[i].p, mems[i].size);
			mems[i].p = NULL;
		}
	ok("%s", "");
}

/* ---- the loop ---- */

static const struct {
	const char *name;
	void (*run)(void);
} commands[] = {
	{"open", do_open},	   {"port", do_port},		  {"device", do_device},	{"gid", do_gid},
	{"async", do_async},	   {"mem", do_mem},		  {"free_mem", do_free_mem},	{"fill", do_fill},
	{"check", do_check},	   {"peek", do_peek},		  {"poke", do_poke},		{"pd", do_pd},
	{"mr", do_mr},		   {"mw", do_mw},		  {"chan", do_chan},		{"cq", do_cq},
	{"arm", do_arm},	   {"event", do_event},		  {"poll", do_poll},		{"srq", do_srq},
	{"ah", do_ah},		   {"qp", do_qp},		  {"init", do_init},		{"rtr", do_rtr},
	{"rts", do_rts},	   {"state", do_state},		  {"query", do_query},		{"send", do_send},
	{"recv", do_recv},	   {"destroy_qp", do_destroy_qp}, {"destroy_cq", do_destroy_cq}, {"destroy_ah", do_destroy_ah},
	{"dereg_mr", do_dereg_mr}, {"dealloc_mw", do_dealloc_mw}, {"clear", do_clear},
	{"atomic_write", do_atomic_write}, {"flush", do_flush},
	{"bind_mw", do_bind_mw},
};

int main(void)
{
	static char line[MAX_LINE];
	setvbuf(stdout, NULL, _IOFBF, MAX_LINE);
	while (fgets(line, sizeof line, stdin)) {
		char *save = NULL, *word = strtok_r(line, " \n", &save);
		if (!word)
			continue;
		args.n = 0;
		for (char *a; args.n < MAX_ARGS && (a = strtok_r(NULL, " \n", &save));) {
			char *eq = strchr(a, '=');
			if (eq)
				*eq = 0;
			args.key[args.n] = a;
			args.value[args.n++] = eq ? eq + 1 : "1";
		}
		size_t i, n = sizeof commands / sizeof *commands;
		for (i = 0; i < n && strcmp(word, commands[i].name); i++)
			;
		if (i == n)
			err(ENOSYS, word);
		else if (!ctx && commands[i].run != do_open)
			err(ENODEV, "open a device first");
		else
			commands[i].run();
		fflush(stdout);
	}
	return 0;
}
