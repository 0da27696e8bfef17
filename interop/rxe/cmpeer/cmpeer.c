/*
 * cmpeer: connects by librdmacm, and prints what the connection manager reports. It does what no
 * program of rdmacm-utils does: it refuses requests, has a backlog that it can leave full, and shows
 * private data.
 *
 *	cmpeer connect ADDR PORT COUNT TEXT		makes COUNT requests at once, with TEXT as private data
 *	cmpeer reject ADDR PORT COUNT TEXT		listens, and refuses COUNT requests with TEXT
 *	cmpeer accept ADDR PORT COUNT TEXT BACKLOG	listens, waits for a line of input before it looks at
 *							any request, and accepts COUNT of them with TEXT
 *	cmpeer native ADDR PEER				binds and resolves addresses of family AF_IB, for each port
 *							space; a line for each call has its outcome
 *
 * Lines of output:
 *
 *	listening					requests may come
 *	asked						all requests are sent
 *	request len=56 private=TEXT
 *	rejected status=28 len=148 private=TEXT
 *	established len=196 private=TEXT		the client's; the server's has neither
 *	unreachable status=-110
 *	disconnected
 *
 * The client ends connections when all its requests have an answer. Both end when nothing is left to
 * wait for, with status 0 if nothing unexpected has come.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <infiniband/ib.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <rdma/rdma_cma.h>

enum { RESOLVE_MS = 5000 };

static struct rdma_event_channel *channel;
static int count;
static const char *text;

static void give_up(const char *what)
{
	perror(what);
	exit(1);
}

static void check(int failed, const char *what)
{
	if (failed)
		give_up(what);
}

/* next waits for an event. The caller acknowledges it. */
static struct rdma_cm_event *next(void)
{
	struct rdma_cm_event *e;
	check(rdma_get_cm_event(channel, &e), "rdma_get_cm_event");
	return e;
}

static void unexpected(struct rdma_cm_event *e)
{
	fprintf(stderr, "cmpeer: unexpected %s, status %d\n", rdma_event_str(e->event), e->status);
	exit(1);
}

/* private prints private data up to its first zero, and the length of all of it. */
static void private(struct rdma_cm_event *e)
{
	const char *data = e->param.conn.private_data;
	int len = e->param.conn.private_data_len;
	printf(" len=%d private=%.*s\n", len, data ? (int)strnlen(data, len) : 0, data ? data : "");
}

static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
	};
	check(rdma_create_qp(id, NULL, &attr), "rdma_create_qp");
}

static struct rdma_conn_param param(void)
{
	return (struct rdma_conn_param){
		.private_data = text,
		.private_data_len = strlen(text),
		.responder_resources = 1,
		.initiator_depth = 1,
		.retry_count = 7,
		.rnr_retry_count = 7,
	};
}

static void destroy(struct rdma_cm_id *id)
{
	if (id->qp)
		rdma_destroy_qp(id);
	check(rdma_destroy_id(id), "rdma_destroy_id");
}

/* await waits for an event of a type on an id, and for no other. */
static void await(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = next();
	if (e->event != type)
		unexpected(e);
	check(rdma_ack_cm_event(e), "rdma_ack_cm_event");
}

static void do_connect(struct sockaddr *to)
{
	struct rdma_cm_id **ids = calloc(count, sizeof *ids);
	int *up = calloc(count, sizeof *up);
	struct rdma_conn_param p = param();
	int ups = 0;
	if (!ids || !up)
		give_up("calloc");
	for (int i = 0; i < count; i++) {
		check(rdma_create_id(channel, &ids[i], &up[i], RDMA_PS_TCP), "rdma_create_id");
		check(rdma_resolve_addr(ids[i], NULL, to, RESOLVE_MS), "rdma_resolve_addr");
		await(RDMA_CM_EVENT_ADDR_RESOLVED);
		check(rdma_resolve_route(ids[i], RESOLVE_MS), "rdma_resolve_route");
		await(RDMA_CM_EVENT_ROUTE_RESOLVED);
		make_qp(ids[i]);
	}
	for (int i = 0; i < count; i++)
		check(rdma_connect(ids[i], &p), "rdma_connect");
	printf("asked\n");
	for (int answers = 0; answers < count; answers++) {
		struct rdma_cm_event *e = next();
		switch (e->event) {
		case RDMA_CM_EVENT_ESTABLISHED:
			*(int *)e->id->context = 1;
			ups++;
			printf("established");
			private(e);
			break;
		case RDMA_CM_EVENT_REJECTED:
			printf("rejected status=%d", e->status);
			private(e);
			break;
		case RDMA_CM_EVENT_UNREACHABLE:
			printf("unreachable status=%d\n", e->status);
			break;
		default:
			unexpected(e);
		}
		check(rdma_ack_cm_event(e), "rdma_ack_cm_event");
	}
	for (int i = 0; i < count; i++)
		if (up[i])
			check(rdma_disconnect(ids[i]), "rdma_disconnect");
	while (ups > 0) {
		struct rdma_cm_event *e = next();
		if (e->event == RDMA_CM_EVENT_DISCONNECTED) {
			printf("disconnected\n");
			ups--;
		} else if (e->event != RDMA_CM_EVENT_TIMEWAIT_EXIT) {
			unexpected(e);
		}
		check(rdma_ack_cm_event(e), "rdma_ack_cm_event");
	}
	for (int i = 0; i < count; i++)
		destroy(ids[i]);
	free(ids);
	free(up);
}

/* take handles an event of a listener's connection, and reports whether it was the last of it. */
static int take(struct rdma_cm_event *e, int refuse)
{
	struct rdma_conn_param p = param();
	struct rdma_cm_id *id = e->id;
	enum rdma_cm_event_type type = e->event;
	switch (type) {
	case RDMA_CM_EVENT_CONNECT_REQUEST:
		printf("request");
		private(e);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
		printf("established\n");
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		printf("disconnected\n");
		break;
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		break;
	default:
		unexpected(e);
	}
	check(rdma_ack_cm_event(e), "rdma_ack_cm_event");
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST && refuse) {
		check(rdma_reject(id, text, strlen(text)), "rdma_reject");
		destroy(id);
		return 1;
	}
	if (type == RDMA_CM_EVENT_CONNECT_REQUEST) {
		make_qp(id);
		check(rdma_accept(id, &p), "rdma_accept");
	} else if (type == RDMA_CM_EVENT_DISCONNECTED) {
		check(rdma_disconnect(id), "rdma_disconnect");
		destroy(id);
		return 1;
	}
	return 0;
}

static void do_listen(struct sockaddr *at, int backlog, int refuse)
{
	struct rdma_cm_id *listener;
	char line[16];
	check(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id");
	check(rdma_bind_addr(listener, at), "rdma_bind_addr");
	check(rdma_listen(listener, backlog), "rdma_listen");
	printf("listening\n");
	if (!refuse && !fgets(line, sizeof line, stdin))
		give_up("no line of input");
	for (int left = count; left > 0;)
		left -= take(next(), refuse);
	destroy(listener);
}

/* native_addr makes an address of family AF_IB: the GID of an IP address, NULL for none, and a service id. */
static struct sockaddr_ib native_addr(const char *ip, uint64_t service, uint64_t mask)
{
	struct sockaddr_ib a = {.sib_family = AF_IB, .sib_pkey = htons(0xffff), .sib_sid = htobe64(service), .sib_sid_mask = htobe64(mask)};
	uint8_t *gid = (uint8_t *)&a.sib_addr;
	if (!ip || inet_pton(AF_INET6, ip, gid) == 1)
		return a;
	gid[10] = gid[11] = 0xff;
	if (inet_pton(AF_INET, ip, gid + 12) != 1)
		give_up(ip);
	return a;
}

static int outcome(int result) { return result ? errno : 0; }

static void do_native(const char *own, const char *peer)
{
	static const int spaces[] = {RDMA_PS_TCP, RDMA_PS_UDP, RDMA_PS_IB, RDMA_PS_IPOIB};
	static const uint64_t services[] = {0, RDMA_IB_IP_PS_TCP, RDMA_IB_IP_PS_TCP + 7300, RDMA_IB_IP_PS_UDP + 7300, RDMA_IB_PS_IB + 7300, 0x1234567};
	static const uint64_t masks[] = {0, ~0xffffULL, ~0ULL};
	for (unsigned s = 0; s < sizeof spaces / sizeof *spaces; s++)
		for (unsigned v = 0; v < sizeof services / sizeof *services; v++)
			for (unsigned m = 0; m < sizeof masks / sizeof *masks; m++)
				for (int what = 0; what < 4; what++) {
					struct rdma_cm_id *id;
					struct sockaddr_ib a = native_addr(what == 0 ? NULL : what == 1 ? own : peer, services[v], masks[m]);
					struct sockaddr_storage ip = {.ss_family = AF_INET};
					printf("%s ps=%#x service=%#llx mask=%#llx:", (const char *[]){"bind any", "bind own", "resolve", "resolve from ip"}[what],
					       spaces[s], (unsigned long long)services[v], (unsigned long long)masks[m]);
					check(rdma_create_id(channel, &id, NULL, spaces[s]), "rdma_create_id");
					if (what < 2) {
						int bound = outcome(rdma_bind_addr(id, (struct sockaddr *)&a));
						printf(" %d", bound);
						if (!bound)
							printf(" listen %d", outcome(rdma_listen(id, 1)));
					} else {
						int resolving = outcome(rdma_resolve_addr(id, what == 2 ? NULL : (struct sockaddr *)&ip, (struct sockaddr *)&a, RESOLVE_MS));
						printf(" %d", resolving);
						if (!resolving) {
							struct rdma_cm_event *e = next();
							printf(" %s %d", rdma_event_str(e->event), e->status);
							int resolved = e->event == RDMA_CM_EVENT_ADDR_RESOLVED;
							check(rdma_ack_cm_event(e), "rdma_ack_cm_event");
							if (resolved)
								printf(" route %d", outcome(rdma_resolve_route(id, RESOLVE_MS)));
						}
					}
					printf("\n");
					check(rdma_destroy_id(id), "rdma_destroy_id");
				}
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 4 && !strcmp(argv[1], "native")) {
		if (!(channel = rdma_create_event_channel()))
			give_up("rdma_create_event_channel");
		do_native(argv[2], argv[3]);
		rdma_destroy_event_channel(channel);
		return 0;
	}
	struct addrinfo hints = {.ai_flags = AI_NUMERICHOST}, *addr;
	int connecting = argc == 6 && !strcmp(argv[1], "connect");
	int rejecting = argc == 6 && !strcmp(argv[1], "reject");
	int accepting = argc == 7 && !strcmp(argv[1], "accept");
	if (!connecting && !rejecting && !accepting) {
		fprintf(stderr, "usage: %s connect|reject ADDR PORT COUNT TEXT\n       %s accept ADDR PORT COUNT TEXT BACKLOG\n       %s native ADDR PEER\n", argv[0],
			argv[0], argv[0]);
		return 2;
	}
	count = atoi(argv[4]);
	text = argv[5];
	if (getaddrinfo(argv[2], argv[3], &hints, &addr)) {
		fprintf(stderr, "cmpeer: %s port %s is no address\n", argv[2], argv[3]);
		return 2;
	}
	channel = rdma_create_event_channel();
	if (!channel)
		give_up("rdma_create_event_channel");
	if (connecting)
		do_connect(addr->ai_addr);
	else
		do_listen(addr->ai_addr, accepting ? atoi(argv[6]) : 0, rejecting);
	rdma_destroy_event_channel(channel);
	freeaddrinfo(addr);
	return 0;
}
