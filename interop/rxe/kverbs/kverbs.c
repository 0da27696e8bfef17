/*
 * kverbs: a program that calls the standard verbs, one by one, as it is told over a pipe.
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
 * words. The caller names objects by small numbers ("id"), which each kind of object
 * has for itself. The end of the input ends the program, and with it everything that it
 * opened.
 *
 * It uses nothing but libibverbs (do_flush excepted) and decides nothing, so that
 * the program at the other end of the pipe can do to a device what no ready-made
 * tool does.
 *
 * Stages: read a line, split it (args), find the command (table at the end),
 * answer.
 *
 * This file has the pipe, the device and memory; queues.c has queues, queue pairs and
 * requests.
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kverbs.h"

#define MAX_PEEK 16384 /* bytes shown as text */
#define MAX_LINE 65536
#define MAX_ARGS 64

/* ---- arguments and answers ---- */

static struct {
	int n;
	char *key[MAX_ARGS], *value[MAX_ARGS];
} args;

const char *str(const char *key)
{
	for (int i = 0; i < args.n; i++)
		if (!strcmp(args.key[i], key))
			return args.value[i];
	return NULL;
}

uint64_t num(const char *key, uint64_t otherwise)
{
	const char *s = str(key);
	return s ? strtoull(s, NULL, 0) : otherwise;
}

void ok(const char *format, ...)
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

void fail(int code, const char *what)
{
	printf("err %d %s: %s\n", code, what, strerror(code));
}

void done(int code, const char *what)
{
	if (code)
		fail(code < 0 ? errno : code, what);
	else
		ok("%s", "");
}

/* ---- objects ---- */

static struct mem {
	uint8_t *p;
	size_t size;
} mems[MAX_ID];

struct ibv_context *ctx;
struct ibv_pd *pds[MAX_ID];
struct ibv_mr *mrs[MAX_ID];
struct ibv_mw *mws[MAX_ID];
struct ibv_comp_channel *chans[MAX_ID];
struct ibv_cq *cqs[MAX_ID];
struct ibv_srq *srqs[MAX_ID];
struct ibv_qp *qps[MAX_ID];
struct ibv_ah *ahs[MAX_ID];

/* ---- device ---- */

static void do_open(void)
{
	int n = 0;
	const char *name = str("dev");
	struct ibv_device **list = ibv_get_device_list(&n);
	if (ctx || !list) {
		fail(ctx ? EBUSY : errno, "open");
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
		fail(rc, "query_port");
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
		fail(rc, "query_device");
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
		fail(errno ? errno : EINVAL, "query_gid");
		return;
	}
	char s[33];
	for (int i = 0; i < 16; i++)
		sprintf(s + 2 * i, "%02x", g.raw[i]);
	ok("gid=%s", s);
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
		fail(errno, "get_async_event");
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
		fail(EEXIST, "id");
		return;
	}
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED) {
		fail(errno, "mmap");
		return;
	}
	mems[id].p = p;
	mems[id].size = size;
	ok("addr=%p", p);
}

/* bytes returns a range of the memory "mem"; NULL if it is not inside. */
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
		fail(ENOENT, "id");
		return;
	}
	munmap(mems[id].p, mems[id].size);
	mems[id].p = NULL;
	ok("%s", "");
}

static void do_discard(void)
{
	uint64_t id = num("id", 0);
	if (id >= MAX_ID || !mems[id].p) {
		fail(ENOENT, "id");
		return;
	}
	if (madvise(mems[id].p, mems[id].size, MADV_DONTNEED)) {
		fail(errno, "madvise");
		return;
	}
	ok("%s", "");
}

uint64_t pattern_word(uint64_t seed, uint64_t i)
{
	uint64_t x = seed * 0x9e3779b97f4a7c15u + i;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* do_pattern writes the pattern, or looks for the first byte that differs from it. */
static void do_pattern(int check)
{
	uint64_t off = num("off", 0), len = num("len", 0), seed = num("seed", 0), start = num("start", 0);
	uint8_t *p = bytes(off, len);
	if (!p) {
		fail(EFAULT, "range");
		return;
	}
	uint64_t w = 0, have = UINT64_MAX; /* word number have of the pattern */
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
		fail(EFAULT, "range");
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
		fail(EFAULT, "range");
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
		fail(EFAULT, "range");
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

/* bind_mw is the verb, for windows of type 1: it returns the new rkey at once. */
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
		fail(rc, "bind_mw");
	else
		ok("rkey=%u", mw->rkey);
}

/* ---- the end of objects ---- */

/* GONE destroys the object that "id" names. */
#define GONE(table, destroy)                                   \
	FIND(x, table, "id");                                  \
	int rc = destroy(x);                                   \
	if (!rc)                                               \
		(table)[num("id", 0)] = NULL;                  \
	done(rc, #destroy)

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

/* clear destroys all objects, users before what they use. */
static void do_clear(void)
{
	SWEEP(mws, ibv_dealloc_mw); /* first: the queue pair of a bound window cannot be destroyed */
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
	{"async", do_async},	   {"mem", do_mem},		  {"free_mem", do_free_mem},
	{"discard", do_discard},	{"fill", do_fill},
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
			fail(ENOSYS, word);
		else if (!ctx && commands[i].run != do_open)
			fail(ENODEV, "open a device first");
		else
			commands[i].run();
		fflush(stdout);
	}
	return 0;
}
