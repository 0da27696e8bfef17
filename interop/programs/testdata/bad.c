/*
 * Bad input: handles that are null or stale, absurd sizes, bad masks. Each gets the
 * errno that the man page names, and the program goes on.
 *
 * First known cases. Then random calls, from a seed, on a few objects; the program keeps
 * account of which object uses which, and so knows which calls must fail.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "self.h"

#define REFUSED(call, err)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT((call) == NULL);                                                                                  \
		WANT(errno == (err));                                                                                  \
	} while (0)

/* Of a list by ibv_wr_* that does not fit, or has a mistake in it, nothing is posted. */
static void lists(struct ibv_context *ctx, struct ibv_pd *pd)
{
	struct self s = {.ctx = ctx, .pd = pd};
	WANT(s.cq = ibv_create_cq(ctx, 16, NULL, NULL, 0));
	WANT(!ibv_query_gid(ctx, 1, 0, &s.gid));
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr_ex a = {
			.send_cq = s.cq,
			.recv_cq = s.cq,
			.qp_type = IBV_QPT_RC,
			.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
			.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
			.pd = pd,
			.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE};
		WANT(s.qp[i] = ibv_create_qp_ex(ctx, &a));
	}
	to_rts(&s, 0);
	to_rts(&s, 1);
	struct ibv_qp_ex *x = ibv_qp_to_qp_ex(s.qp[0]);
	WANT(x && !ibv_qp_to_qp_ex(NULL));
	for (int n = 5; n >= 3; n--) { /* too many, all that fit, and a mistake */
		ibv_wr_start(x);
		for (int i = 0; i < n; i++) {
			x->wr_id = (uint64_t)i;
			x->wr_flags = IBV_SEND_SIGNALED;
			ibv_wr_rdma_write(x, 0, 0);
			if (n == 3) {
				struct ibv_sge two[2] = {{0}};
				ibv_wr_set_sge_list(x, 2, two);
			}
		}
		int err = ibv_wr_complete(x);
		WANT(n == 5 ? err == ENOMEM : n == 4 ? err == 0 : err == EINVAL);
		struct ibv_wc wc[8];
		int got = 0;
		while (n == 4 && got < 4) {
			int k = ibv_poll_cq(s.cq, 8, wc);
			WANT(k >= 0);
			got += k;
		}
		WANT(ibv_poll_cq(s.cq, 8, wc) == 0);
	}
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_qp(s.qp[1]) && !ibv_destroy_cq(s.cq));
}

static void known_cases(void)
{
	struct self s = connect_self();
	char buf[64];
	lists(s.ctx, s.pd);

	/* null */
	REFUSED(ibv_open_device(NULL), EINVAL);
	REFUSED(ibv_alloc_pd(NULL), EINVAL);
	REFUSED(ibv_create_cq(NULL, 1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_comp_channel(NULL), EINVAL);
	REFUSED(ibv_create_qp(NULL, NULL), EINVAL);
	REFUSED(ibv_create_srq(s.pd, NULL), EINVAL);
	REFUSED(ibv_create_ah(s.pd, NULL), EINVAL);
	WANT(ibv_close_device(NULL) == EINVAL && ibv_dealloc_pd(NULL) == EINVAL && ibv_dereg_mr(NULL) == EINVAL);
	WANT(ibv_destroy_cq(NULL) == EINVAL && ibv_destroy_qp(NULL) == EINVAL && ibv_destroy_srq(NULL) == EINVAL);
	WANT(ibv_destroy_ah(NULL) == EINVAL && ibv_destroy_comp_channel(NULL) == EINVAL);
	WANT(ibv_modify_qp(NULL, NULL, 0) == EINVAL && ibv_query_qp(NULL, NULL, 0, NULL) == EINVAL);

	/* absurd */
	REFUSED(ibv_create_cq(s.ctx, 0, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, -1, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, 0x7fffffff, NULL, NULL, 0), EINVAL);
	REFUSED(ibv_create_cq(s.ctx, 1, NULL, NULL, 99), EINVAL);
	WANT(ibv_resize_cq(s.cq, -5) == EINVAL && ibv_resize_cq(s.cq, 0x7fffffff) == EINVAL);
	struct ibv_qp_init_attr a = {.send_cq = s.cq, .recv_cq = s.cq, .qp_type = IBV_QPT_RC};
	a.cap.max_send_wr = UINT32_MAX;
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){.max_recv_sge = 100000};
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){.max_inline_data = UINT32_MAX};
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.cap = (struct ibv_qp_cap){0};
	a.qp_type = (enum ibv_qp_type)77;
	REFUSED(ibv_create_qp(s.pd, &a), EINVAL);
	a.qp_type = IBV_QPT_RAW_PACKET;
	REFUSED(ibv_create_qp(s.pd, &a), EOPNOTSUPP);
	struct ibv_srq_init_attr sa = {.attr = {.max_wr = UINT32_MAX, .max_sge = 1}};
	REFUSED(ibv_create_srq(s.pd, &sa), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, 0, 0), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, SIZE_MAX, IBV_ACCESS_LOCAL_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, sizeof buf, IBV_ACCESS_REMOTE_WRITE), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, buf, sizeof buf, 1 << 15), EINVAL);
	REFUSED(ibv_reg_mr(s.pd, (void *)4096, 4096, 0), EFAULT);

	/* masks and states */
	struct ibv_qp_attr qa = {.qp_state = IBV_QPS_RTR};
	WANT(ibv_modify_qp(s.qp[0], &qa, IBV_QP_STATE | 1 << 30) == EINVAL);
	qa.qp_state = (enum ibv_qp_state)99;
	WANT(ibv_modify_qp(s.qp[0], &qa, IBV_QP_STATE) == EINVAL);
	struct ibv_srq_attr la = {0};
	sa.attr = (struct ibv_srq_attr){.max_wr = 4, .max_sge = 1};
	struct ibv_srq *srq = ibv_create_srq(s.pd, &sa);
	WANT(srq && ibv_modify_srq(srq, &la, 1 << 20) == EINVAL);
	union ibv_gid gid;
	WANT(ibv_query_gid(s.ctx, 1, 9999, &gid) == -1 && ibv_query_gid(s.ctx, 7, 0, &gid) == -1);
	struct ibv_port_attr pa;
	WANT(ibv_query_port(s.ctx, 0, &pa) == EINVAL && ibv_query_port(s.ctx, 200, &pa) == EINVAL);

	/* requests */
	struct ibv_sge sge = {(uintptr_t)buf, sizeof buf, 0xdead};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 5000, .opcode = IBV_WR_SEND}, *bad = NULL;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL && bad == &wr);
	wr.num_sge = -1;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	wr.num_sge = 1;
	wr.opcode = (enum ibv_wr_opcode)99;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	wr.opcode = IBV_WR_SEND;
	wr.send_flags = IBV_SEND_INLINE; /* a queue pair that asks for no inline data takes 64 bytes */
	sge.length = 65;
	WANT(ibv_post_send(s.qp[0], &wr, &bad) == EINVAL);
	sge.length = sizeof buf;
	struct ibv_recv_wr rr[20], *rbad = NULL;
	for (int i = 0; i < 20; i++)
		rr[i] = (struct ibv_recv_wr){.wr_id = (uint64_t)i, .next = i < 19 ? &rr[i + 1] : NULL};
	WANT(ibv_post_recv(s.qp[0], rr, &rbad) == ENOMEM && rbad == &rr[16]);
	struct ibv_wc wc;
	WANT(ibv_poll_cq(s.cq, -1, &wc) < 0 && ibv_poll_cq(s.cq, 0, &wc) == 0);

	/* in use, and stale */
	WANT(ibv_dealloc_pd(s.pd) == EBUSY && ibv_destroy_cq(s.cq) == EBUSY);
	struct ibv_comp_channel *ch = ibv_create_comp_channel(s.ctx);
	WANT(ch && !fcntl(ch->fd, F_SETFL, O_NONBLOCK));
	struct ibv_cq *cq = ibv_create_cq(s.ctx, 4, NULL, ch, 0), *got;
	void *cookie;
	WANT(cq && ibv_destroy_comp_channel(ch) == EBUSY);
	WANT(ibv_get_cq_event(ch, &got, &cookie) == -1 && errno == EAGAIN);
	WANT(!ibv_destroy_cq(cq) && ibv_destroy_cq(cq) == EINVAL && ibv_poll_cq(cq, 1, &wc) < 0);
	WANT(!ibv_destroy_comp_channel(ch) && ibv_destroy_comp_channel(ch) == EINVAL);
	WANT(!ibv_destroy_srq(srq) && ibv_destroy_srq(srq) == EINVAL);
	WANT(!fcntl(s.ctx->async_fd, F_SETFL, O_NONBLOCK));
	struct ibv_async_event ev;
	WANT(ibv_get_async_event(s.ctx, &ev) == -1 && errno == EAGAIN);
	struct ibv_qp *qp = s.qp[1];
	use_self(&s); /* everything still works */
	WANT(!ibv_destroy_qp(qp) && ibv_destroy_qp(qp) == EINVAL && ibv_post_recv(qp, rr, &rbad) == EINVAL);
	WANT(!ibv_destroy_qp(s.qp[0]) && !ibv_destroy_cq(s.cq) && !ibv_dealloc_pd(s.pd));
	WANT(ibv_dealloc_pd(s.pd) == EINVAL && !ibv_close_device(s.ctx) && ibv_close_device(s.ctx) == EINVAL);
	REFUSED(ibv_alloc_pd(s.ctx), EINVAL);
}

/* --- at random --- */

enum kind { PD, MR, CQ, CHANNEL, QP, SRQ, AH, MW, DM, TD, XRCD, KINDS };

struct object {
	enum kind kind;
	void *p;
	int live, uses, xrc, parent;
	struct object *on[5]; /* the objects that it uses */
};

enum { OBJECTS = 400, DEEP = 8 };

static struct object all[OBJECTS];
static int num;
static uint64_t state;
static struct ibv_context *ctx, *closed;
static struct ibv_device_attr limits;
static char memory[1 << 16];
static long done, refused; /* calls */

static uint32_t any(void) /* splitmix64 */
{
	uint64_t z = (state += 0x9e3779b97f4a7c15);
	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
	z = (z ^ z >> 27) * 0x94d049bb133111eb;
	return (uint32_t)((z ^ z >> 31) >> 16);
}

static uint32_t below(uint32_t n) { return any() % n; }
static int often(void) { return below(4) != 0; }

/* odd returns a number that is often an edge case. */
static uint64_t odd(void)
{
	static const uint64_t odds[] = {0, 1, 2, 15, 16, 17, 255, 4096, 65535, 1 << 20, 0x7fffffff, 0x80000000, UINT32_MAX,
					1ULL << 32, 1ULL << 48, INT64_MAX, UINT64_MAX, UINT64_MAX - 4095};
	return below(5) ? odds[below(sizeof odds / sizeof *odds)] : any();
}

/* A randomly chosen object, mostly a live one. */
struct choice {
	struct object *o;
	void *p;
	int good;
};

static struct choice choose(enum kind kind, int null_too)
{
	struct choice c = {0};
	if (null_too && !below(8))
		return c;
	int live = below(6) != 0;
	for (int tries = 0; tries < 200 && num; tries++) {
		struct object *o = &all[below((uint32_t)num)];
		if (o->kind == kind && o->p && o->live == live)
			return (struct choice){o, o->p, o->live};
	}
	return c;
}

/* made checks and notes the object that a verb has returned. If bad, the verb must have
 * failed; if sure, it must have succeeded. */
static struct object *made(enum kind kind, void *p, int bad, int sure, const char *verb)
{
	int err = errno;
	done++;
	if (!p) {
		refused++;
		if (sure || (err != EINVAL && err != EFAULT && err != ENOMEM && err != EOPNOTSUPP && err != EAGAIN))
			fprintf(stderr, "%s: %s\n", verb, strerror(err));
		WANT(!sure);
		WANT(err == EINVAL || err == EFAULT || err == ENOMEM || err == EOPNOTSUPP || err == EAGAIN);
		return NULL;
	}
	if (bad)
		fprintf(stderr, "%s should have refused\n", verb);
	WANT(!bad);
	struct object *o = NULL;
	for (int i = 0; i < num; i++)
		if (all[i].p == p) /* the memory of a destroyed object is reused */
			all[i].p = NULL;
	for (int i = 0; i < num && !o; i++)
		if (!all[i].p || (num == OBJECTS && !all[i].live))
			o = &all[i];
	if (!o)
		o = &all[num++];
	WANT(o < all + OBJECTS);
	*o = (struct object){.kind = kind, .p = p, .live = 1};
	return o;
}

static void uses(struct object *o, struct object *what)
{
	if (!o || !what)
		return;
	for (int i = 0;; i++)
		if (!o->on[i]) {
			o->on[i] = what;
			what->uses++;
			return;
		}
}

/* returned checks an errno that a verb has returned; bad and sure as for made. */
static void returned(int r, int bad, int sure, const char *verb)
{
	done++;
	refused += r != 0;
	int known = r == 0 || r == EINVAL || r == EFAULT || r == ENOMEM || r == EOPNOTSUPP || r == ENOENT || r == EPERM;
	if ((bad && r != EINVAL) || (sure && r) || !known)
		fprintf(stderr, "%s returned %d (%s)\n", verb, r, strerror(r));
	WANT(!(bad && r != EINVAL) && !(sure && r) && known);
}

static int unmake(enum kind kind, void *p)
{
	switch (kind) {
	case PD:
		return ibv_dealloc_pd(p);
	case MR:
		return ibv_dereg_mr(p);
	case CQ:
		return ibv_destroy_cq(p);
	case CHANNEL:
		return ibv_destroy_comp_channel(p);
	case QP:
		return ibv_destroy_qp(p);
	case SRQ:
		return ibv_destroy_srq(p);
	case AH:
		return ibv_destroy_ah(p);
	case MW:
		return ibv_dealloc_mw(p);
	case DM:
		return ibv_free_dm(p);
	case TD:
		return ibv_dealloc_td(p);
	default:
		return ibv_close_xrcd(p);
	}
}

/* Destroying: EBUSY for an object in use, EINVAL for one that is destroyed. */
static void destroy(struct choice c, enum kind kind)
{
	int want = !c.good ? EINVAL : c.o->uses ? EBUSY : 0, r = unmake(kind, c.p);
	done++;
	refused += r != 0;
	if (r != want)
		fprintf(stderr, "destroying kind %d: %d, not %d\n", kind, r, want);
	WANT(r == want);
	if (r)
		return;
	c.o->live = 0;
	for (int i = 0; i < 5 && c.o->on[i]; i++)
		c.o->on[i]->uses--;
	memset(c.o->on, 0, sizeof c.o->on);
}

static struct ibv_context *context(int *good)
{
	uint32_t n = below(10);
	*good = n > 1;
	return n == 0 ? NULL : n == 1 ? closed : ctx;
}

static void make_domain(void)
{
	int good;
	struct ibv_context *c = context(&good);
	errno = 0;
	made(PD, ibv_alloc_pd(c), !good, good, "ibv_alloc_pd");
	struct choice td = choose(TD, 1), pd = choose(PD, 1);
	struct ibv_parent_domain_init_attr a = {.pd = pd.p, .td = td.p, .comp_mask = often() ? 0 : (uint32_t)odd()};
	int bad = !pd.good || pd.o->parent || (td.p && !td.good) || a.comp_mask & ~IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
	struct object *o = made(PD, ibv_alloc_parent_domain(ctx, &a), bad, !bad, "ibv_alloc_parent_domain");
	if (o)
		o->parent = 1;
	uses(o, pd.o);
	uses(o, o ? td.o : NULL);
	struct ibv_td_init_attr t = {.comp_mask = often() ? 0 : (uint32_t)odd()};
	made(TD, ibv_alloc_td(ctx, &t), t.comp_mask != 0, !t.comp_mask, "ibv_alloc_td");
}

static void make_region(void)
{
	struct choice pd = choose(PD, 1);
	const unsigned int plain = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
	unsigned int access = often() ? any() & plain : any();
	int unknown = access & ~(unsigned int)(0x3ff | IBV_ACCESS_OPTIONAL_RANGE);
	int rights = !(access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC)) || access & IBV_ACCESS_LOCAL_WRITE;
	uint64_t offset = below(sizeof memory), length = often() ? 1 + below((uint32_t)(sizeof memory - offset)) : odd();
	int inside = length && length <= sizeof memory - offset, wide = length > UINT64_MAX - (uintptr_t)memory - offset;
	errno = 0;
	struct object *o = made(MR, ibv_reg_mr(pd.p, memory + offset, length, (int)access),
				!pd.good || unknown || !rights || !length || wide,
				pd.good && inside && !(access & ~plain) && rights, "ibv_reg_mr");
	uses(o, pd.o);
	uint64_t iova = odd();
	errno = 0;
	o = made(MR, ibv_reg_mr_iova(pd.p, memory, sizeof memory, iova, IBV_ACCESS_LOCAL_WRITE), !pd.good || iova > UINT64_MAX - sizeof memory + 1,
		 pd.good && iova < 1ULL << 48, "ibv_reg_mr_iova");
	uses(o, pd.o);
	struct choice dm = choose(DM, 1);
	if (!pd.p) /* functions in the header dereference it */
		return;
	errno = 0;
	o = made(MR, ibv_alloc_null_mr(pd.p), !pd.good, pd.good, "ibv_alloc_null_mr");
	uses(o, pd.o);
	access = IBV_ACCESS_LOCAL_WRITE | (often() ? IBV_ACCESS_ZERO_BASED : 0);
	offset = often() ? 0 : odd();
	length = often() ? 64 : odd();
	if (dm.p) {
		o = made(MR, ibv_reg_dm_mr(pd.p, dm.p, offset, length, access),
			 !pd.good || !dm.good || !(access & IBV_ACCESS_ZERO_BASED) || offset > 64 || length > 64 - offset,
			 pd.good && dm.good && access & IBV_ACCESS_ZERO_BASED && !offset && length == 64, "ibv_reg_dm_mr");
		uses(o, pd.o);
		uses(o, o ? dm.o : NULL);
	}
	enum ibv_mw_type type = (enum ibv_mw_type)below(5);
	int kind = type == IBV_MW_TYPE_1 || type == IBV_MW_TYPE_2;
	o = made(MW, ibv_alloc_mw(pd.p, type), !pd.good || !kind, pd.good && kind, "ibv_alloc_mw");
	uses(o, pd.o);
}

static void make_memory(void)
{
	struct ibv_alloc_dm_attr a = {.length = often() ? 64 : odd(), .log_align_req = often() ? 0 : (uint32_t)odd(),
				      .comp_mask = often() ? 0 : (uint32_t)odd()};
	int plain = a.length == 64 && !a.log_align_req && !a.comp_mask;
	errno = 0;
	struct ibv_dm *dm = ibv_alloc_dm(ctx, &a);
	if (dm && a.length != 64) { /* the checks below, and in make_region, expect 64 bytes */
		WANT(a.length && !a.comp_mask && !ibv_free_dm(dm));
		return;
	}
	made(DM, dm, a.comp_mask || !a.length, plain, "ibv_alloc_dm");
	struct choice c = choose(DM, 0);
	uint64_t offset = often() ? below(80) : odd(), length = often() ? below(80) : odd();
	if (!c.p)
		return;
	int in = !(offset % 4) && !(length % 4) && length <= 64 && offset <= 64 - length;
	int r = below(2) ? ibv_memcpy_to_dm(c.p, offset, memory, length) : ibv_memcpy_from_dm(memory, c.p, offset, length);
	returned(r, !c.good, c.good && in, "ibv_memcpy_dm");
	WANT(in || r);
}

static void make_queue(void)
{
	int good;
	struct ibv_context *c = context(&good);
	errno = 0;
	struct ibv_comp_channel *p = ibv_create_comp_channel(c);
	if (made(CHANNEL, p, !good, good, "ibv_create_comp_channel"))
		WANT(!fcntl(p->fd, F_SETFL, O_NONBLOCK));
	struct choice ch = choose(CHANNEL, 1);
	int cqe = often() ? 1 + (int)below(64) : (int)odd(), vector = often() ? 0 : (int)odd();
	int fine = good && cqe >= 1 && cqe <= limits.max_cqe && !vector && (!ch.p || ch.good);
	struct object *o = made(CQ, ibv_create_cq(c, cqe, NULL, ch.p, vector), !fine, fine && cqe <= 64, "ibv_create_cq");
	uses(o, ch.o);
	struct ibv_cq_init_attr_ex x = {.cqe = often() ? 16 : (uint32_t)odd(), .channel = ch.p, .comp_vector = often() ? 0 : (uint32_t)odd(),
					.wc_flags = often() ? IBV_WC_STANDARD_FLAGS : odd(), .comp_mask = often() ? 0 : (uint32_t)odd(),
					.flags = (uint32_t)odd()};
	fine = x.cqe == 16 && !x.comp_vector && x.wc_flags == IBV_WC_STANDARD_FLAGS && !x.comp_mask && (!ch.p || ch.good);
	errno = 0;
	struct ibv_cq_ex *xp = ibv_create_cq_ex(ctx, &x);
	o = made(CQ, xp, !x.cqe || x.cqe > (uint32_t)limits.max_cqe || x.comp_vector || x.comp_mask > 3 || (ch.p && !ch.good), fine,
		 "ibv_create_cq_ex");
	uses(o, ch.o);
	struct ibv_poll_cq_attr pa = {0};
	WANT(!xp || ibv_start_poll(xp, &pa) == ENOENT);
	struct choice pd = choose(PD, 1);
	struct ibv_srq_init_attr a = {.attr = {.max_wr = often() ? DEEP : (uint32_t)odd(), .max_sge = often() ? 1 : (uint32_t)odd()}};
	fine = pd.good && a.attr.max_wr <= (uint32_t)limits.max_srq_wr && a.attr.max_sge <= (uint32_t)limits.max_srq_sge;
	o = made(SRQ, ibv_create_srq(pd.p, &a), !fine, fine && a.attr.max_wr == DEEP && a.attr.max_sge == 1, "ibv_create_srq");
	uses(o, pd.o);
}

static void make_xrc(void)
{
	const uint32_t needed = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
	struct ibv_xrcd_init_attr a = {.comp_mask = often() ? needed : (uint32_t)odd(), .fd = often() ? -1 : 9999,
				       .oflags = often() ? O_CREAT : (int)odd()};
	int fine = a.comp_mask == needed && a.fd == -1 && (a.oflags == O_CREAT || a.oflags == (O_CREAT | O_EXCL));
	errno = 0;
	struct ibv_xrcd *p = ibv_open_xrcd(ctx, &a);
	if (!p && errno == EBADF)
		WANT(a.fd == 9999);
	else
		made(XRCD, p, !fine, fine, "ibv_open_xrcd");
	struct choice x = choose(XRCD, 1), pd = choose(PD, 1), cq = choose(CQ, 1);
	struct ibv_srq_init_attr_ex sa = {.attr = {.max_wr = DEEP, .max_sge = 1},
					  .comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
						       IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ,
					  .srq_type = IBV_SRQT_XRC, .pd = pd.p, .xrcd = x.p, .cq = cq.p};
	fine = x.good && pd.good && cq.good;
	errno = 0;
	struct object *o = made(SRQ, ibv_create_srq_ex(ctx, &sa), !fine, fine, "ibv_create_srq_ex");
	if (o) {
		o->xrc = 1;
		uses(o, x.o), uses(o, pd.o), uses(o, cq.o);
	}
	struct ibv_qp_init_attr_ex qa = {.qp_type = IBV_QPT_XRC_RECV, .xrcd = x.p,
					 .comp_mask = often() ? IBV_QP_INIT_ATTR_XRCD : (uint32_t)odd()};
	fine = x.good && qa.comp_mask == IBV_QP_INIT_ATTR_XRCD;
	o = made(QP, ibv_create_qp_ex(ctx, &qa), !x.good || !(qa.comp_mask & IBV_QP_INIT_ATTR_XRCD), fine, "ibv_create_qp_ex");
	uses(o, x.o);
	struct ibv_qp_open_attr oa = {.comp_mask = (uint32_t)odd(), .qp_num = any(), .xrcd = x.p, .qp_type = (enum ibv_qp_type)odd()};
	made(QP, ibv_open_qp(ctx, &oa), 1, 0, "ibv_open_qp");
}

static void make_pair(void)
{
	static const enum ibv_qp_type types[] = {IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_SEND, IBV_QPT_RAW_PACKET,
						 IBV_QPT_XRC_RECV, (enum ibv_qp_type)77};
	uint32_t t = below(7);
	struct choice pd = choose(PD, 1), send = choose(CQ, 1), recv = choose(CQ, 1), srq = choose(SRQ, 1);
	if (below(2))
		srq = (struct choice){0};
	struct ibv_qp_init_attr a = {.send_cq = send.p, .recv_cq = recv.p, .srq = srq.p, .qp_type = types[t],
				     .cap = {.max_send_wr = DEEP, .max_recv_wr = DEEP, .max_send_sge = 1, .max_recv_sge = 1}};
	int odd_cap = !often();
	if (odd_cap)
		a.cap = (struct ibv_qp_cap){(uint32_t)odd(), (uint32_t)odd(), (uint32_t)odd(), (uint32_t)odd(), (uint32_t)odd()};
	int receives = t != 3;
	int bad = t > 3 || !pd.good || !send.good || (receives && !recv.good) || (receives && srq.p && !srq.good) ||
		  (receives && srq.good && (srq.o->xrc || t == 1)) || a.cap.max_send_wr > (uint32_t)limits.max_qp_wr ||
		  a.cap.max_send_sge > (uint32_t)limits.max_sge;
	errno = 0;
	struct object *o = made(QP, ibv_create_qp(pd.p, &a), bad, !bad && !odd_cap, "ibv_create_qp");
	uses(o, pd.o), uses(o, o ? send.o : NULL);
	if (receives && o) {
		uses(o, recv.o), uses(o, srq.o);
	}
	union ibv_gid gid;
	struct ibv_ah_attr ah = {.is_global = often(), .port_num = often() ? 1 : (uint8_t)odd()};
	WANT(!ibv_query_gid(ctx, 1, 0, &gid));
	ah.grh = (struct ibv_global_route){.dgid = gid, .sgid_index = often() ? 0 : (uint8_t)odd(), .flow_label = (uint32_t)odd(),
					   .hop_limit = (uint8_t)any(), .traffic_class = (uint8_t)any()};
	int fine = pd.good && ah.is_global && ah.port_num == 1 && !ah.grh.sgid_index;
	o = made(AH, ibv_create_ah(pd.p, &ah), !fine, fine, "ibv_create_ah");
	uses(o, pd.o);
}

/* Attributes and states: all masks. */
static void change(void)
{
	struct choice q = choose(QP, 1), s = choose(SRQ, 1), c = choose(CQ, 1), m = choose(MR, 1), pd = choose(PD, 1);
	struct ibv_qp_attr a = {.qp_state = (enum ibv_qp_state)below(9), .cur_qp_state = (enum ibv_qp_state)below(9),
				.path_mtu = (enum ibv_mtu)below(8), .port_num = (uint8_t)below(3), .pkey_index = (uint16_t)below(2),
				.qp_access_flags = any() & 0xf, .qkey = any(), .dest_qp_num = any(), .timeout = (uint8_t)any(),
				.ah_attr = {.is_global = often(), .port_num = (uint8_t)below(3)}};
	struct ibv_qp_init_attr ia;
	int mask = often() ? IBV_QP_STATE | (int)(any() & 0x1fffff) : (int)any();
	returned(ibv_modify_qp(q.p, often() ? &a : NULL, mask), !q.good, 0, "ibv_modify_qp");
	if (q.good && below(2)) { /* from here all states can be reached again */
		a.qp_state = IBV_QPS_RESET;
		returned(ibv_modify_qp(q.p, &a, IBV_QP_STATE), 0, 1, "ibv_modify_qp to RESET");
		a = (struct ibv_qp_attr){.qp_state = IBV_QPS_INIT, .port_num = 1};
		(void)ibv_modify_qp(q.p, &a, IBV_QP_STATE | IBV_QP_PORT | IBV_QP_PKEY_INDEX | IBV_QP_ACCESS_FLAGS);
	}
	returned(ibv_query_qp(q.p, &a, mask, &ia), !q.good, q.good, "ibv_query_qp");
	struct ibv_srq_attr sa = {.max_wr = (uint32_t)odd(), .srq_limit = (uint32_t)odd()};
	mask = often() ? IBV_SRQ_LIMIT : (int)any() & ~IBV_SRQ_MAX_WR; /* not its size */
	returned(ibv_modify_srq(s.p, &sa, mask), !s.good || mask & ~IBV_SRQ_LIMIT, 0, "ibv_modify_srq");
	returned(ibv_query_srq(s.p, &sa), !s.good, s.good, "ibv_query_srq");
	WANT(!s.good || sa.max_wr == DEEP || sa.max_wr > 0);
	int cqe = often() ? 64 : (int)odd();
	returned(ibv_resize_cq(c.p, cqe), !c.good || cqe < 1 || cqe > limits.max_cqe, c.good && cqe == 64, "ibv_resize_cq");
	int flags = below(2) ? 0 : (int)(any() & ~7u) | 8; /* none, or unknown ones */
	WANT(ibv_rereg_mr(m.p, flags, pd.p, memory, 64, 0) == IBV_REREG_MR_ERR_INPUT);
	WANT(m.good || ibv_rereg_mr(m.p, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT);
	union ibv_gid gid = {.raw = {[10] = 0xff, 0xff, 10, 1, 2, 3}}; /* no group */
	returned(ibv_attach_mcast(q.p, often() ? &gid : NULL, 0), 1, 0, "ibv_attach_mcast");
	returned(ibv_detach_mcast(q.p, often() ? &gid : NULL, 0), 1, 0, "ibv_detach_mcast");
}

static void ask(void)
{
	int good, index = (int)odd();
	struct ibv_context *c = context(&good);
	uint8_t port = (uint8_t)odd();
	union ibv_gid gid;
	__be16 key;
	struct ibv_device_attr da;
	struct ibv_port_attr pa;
	returned(ibv_query_device(c, &da), !good, good, "ibv_query_device");
	WANT(ibv_query_gid(c, port, index, &gid) == (good && port == 1 && !index ? 0 : -1));
	WANT(ibv_query_pkey(c, port, index, &key) == (good && port == 1 && !index ? 0 : -1));
	WANT(ibv_get_pkey_index(c, port, htons(0x1234)) == -1);
	if (c) /* the header dereferences it */
		returned(ibv_query_port(c, port, &pa), !good || port != 1, good && port == 1, "ibv_query_port");
	struct ibv_async_event ev;
	errno = 0;
	if (!ibv_get_async_event(c, &ev))
		ibv_ack_async_event(&ev);
	else
		WANT(errno == (good ? EAGAIN : EINVAL));
	errno = 0;
	struct ibv_dm *dm = ibv_import_dm(c, 0xfffff);
	WANT(!dm && errno == (good ? ENOENT : EINVAL));
	errno = 0;
	struct ibv_pd *pd = ibv_import_pd(c, (uint32_t)odd() | 1u << 19);
	WANT(!pd && errno == (good ? ENOENT : EINVAL));
	struct choice p = choose(PD, 1);
	errno = 0;
	struct ibv_mr *mr = ibv_import_mr(p.p, 0xfffff);
	WANT(!mr && errno == (p.good ? ENOENT : EINVAL));
	struct ibv_wc wc = {.wc_flags = often() ? IBV_WC_GRH : 0};
	struct ibv_grh grh;
	for (size_t i = 0; i < sizeof grh; i++)
		((uint8_t *)&grh)[i] = (uint8_t)any();
	struct ibv_ah_attr ah;
	WANT(ibv_init_ah_from_wc(c, port, &wc, below(4) ? &grh : NULL, &ah) == -1);
	WANT(!ibv_create_ah_from_wc(p.p, &wc, &grh, port));
	struct choice s = choose(SRQ, 0);
	uint32_t number;
	if (s.p)
		returned(ibv_get_srq_num(s.p, &number), !s.good, s.good && s.o->xrc, "ibv_get_srq_num");
}

/* Requests: queue pairs that are not ready refuse most of them; none may crash. */
static void post(void)
{
	struct choice q = choose(QP, 0), s = choose(SRQ, 0), c = choose(CQ, 0), ah = choose(AH, 1), mw = choose(MW, 0), pd = choose(PD, 0);
	struct choice mr = choose(MR, 1);
	struct ibv_sge sge[2] = {{(uintptr_t)memory, below(64), any()}, {odd(), (uint32_t)odd(), any()}};
	int num_sge = often() ? 1 : (int)odd();
	if (num_sge > 2)
		num_sge = 1 << 20; /* more than any queue takes: refused before sge is read */
	struct ibv_send_wr wr = {.sg_list = often() ? sge : NULL, .num_sge = num_sge, .opcode = (enum ibv_wr_opcode)below(20),
				 .send_flags = often() ? any() & (IBV_SEND_SIGNALED | IBV_SEND_FENCE) : any() & ~(unsigned int)IBV_SEND_INLINE,
				 .wr = {.rdma = {odd(), any()}}}, *bad = NULL;
	if (wr.opcode == IBV_WR_BIND_MW)
		wr.bind_mw.mw = mw.p, wr.bind_mw.bind_info.mr = mr.p;
	if (q.p && ((struct ibv_qp *)q.p)->qp_type == IBV_QPT_UD)
		wr.wr.ud.ah = ah.p;
	if (q.p) {
		int r = ibv_post_send(q.p, &wr, &bad);
		returned(r, !q.good, 0, "ibv_post_send");
		WANT(!r || bad == &wr);
		struct ibv_recv_wr rr = {.sg_list = wr.sg_list, .num_sge = num_sge}, *rbad = NULL;
		r = ibv_post_recv(q.p, &rr, &rbad);
		returned(r, !q.good, 0, "ibv_post_recv");
		WANT(!r || rbad == &rr);
		if (s.p) {
			r = ibv_post_srq_recv(s.p, &rr, &rbad);
			returned(r, !s.good || num_sge < 0 || num_sge > 2 || (num_sge && !rr.sg_list), 0, "ibv_post_srq_recv");
		}
		struct ibv_mw_bind bind = {.send_flags = any(), .bind_info = {.mr = mr.p, .addr = odd(), .length = odd(), .mw_access_flags = any()}};
		if (mw.p) {
			r = ibv_bind_mw(q.p, mw.p, &bind);
			returned(r, 0, 0, "ibv_bind_mw");
			WANT(r || (q.good && mw.good));
		}
	}
	if (pd.p) /* no region has the random keys */
		returned(ibv_advise_mr(pd.p, (enum ibv_advise_mr_advice)below(6), any() & 3, often() ? sge : NULL, below(3)), !pd.good, 0,
			 "ibv_advise_mr");
	struct ibv_wc wc[4];
	struct ibv_cq *got;
	void *cookie;
	if (c.p) {
		int n = often() ? 4 : -(int)below(5), k = ibv_poll_cq(c.p, n, wc);
		WANT(c.good && n >= 0 ? k >= 0 && k <= n : k < 0);
		int r = ibv_req_notify_cq(c.p, (int)below(2));
		returned(r, !c.good || !c.o->on[0], c.good && c.o->on[0], "ibv_req_notify_cq");
	}
	struct choice ch = choose(CHANNEL, 1);
	if (ibv_get_cq_event(ch.p, &got, &cookie)) {
		WANT(errno == (ch.good ? EAGAIN : EINVAL));
	} else {
		WANT(ch.good && got->channel == ch.p);
		ibv_ack_cq_events(got, 1);
	}
}

static void at_random(uint64_t seed, int rounds)
{
	static void (*const acts[])(void) = {make_domain, make_region, make_memory, make_queue, make_xrc, make_pair,
					     change,	  ask,	       post,	    change,	ask,	  post};
	state = seed;
	closed = open_first();
	WANT(!ibv_close_device(closed));
	ctx = open_first();
	WANT(!ibv_query_device(ctx, &limits) && !fcntl(ctx->async_fd, F_SETFL, O_NONBLOCK));
	for (int i = 0; i < rounds; i++) {
		int live = 0;
		for (int k = 0; k < num; k++)
			live += all[k].live;
		uint32_t act = live > OBJECTS / 2 ? UINT32_MAX : below(20); /* if there are many: destroy one */
		if (act < sizeof acts / sizeof *acts)
			acts[act]();
		else {
			enum kind kind = (enum kind)below(KINDS);
			int header = kind == MW || kind == DM || kind == TD || kind == XRCD; /* it dereferences the pointer */
			struct choice c = choose(kind, !header);
			if (c.p || !header)
				destroy(c, kind);
		}
	}
	/* All objects can be destroyed, users before what they use. */
	for (int left = 1; left;) {
		left = 0;
		for (int k = 0; k < num; k++)
			if (all[k].live && !all[k].uses) {
				destroy((struct choice){&all[k], all[k].p, 1}, all[k].kind);
				left = 1;
			}
	}
	for (int k = 0; k < num; k++)
		WANT(!all[k].live);
	WANT(!ibv_close_device(ctx));
	printf("%ld calls, %ld refused\n", done, refused);
}

int main(int argc, char **argv)
{
	uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
	fprintf(stderr, "seed %llu\n", (unsigned long long)seed); /* before anything can fail */
	known_cases();
	at_random(seed, argc > 2 ? atoi(argv[2]) : 3000);
	puts("ok");
	return 0;
}
