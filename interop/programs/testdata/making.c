/*
 * One side of a connection by librdmacm, up to a point where the test does something to it:
 *
 *   making request IP PORT   listens, gets a request, and waits
 *   making accept IP PORT    accepts it, and waits for the end of the connection
 *   making ask IP PORT       asks for a connection, and waits for the answer
 *
 * It prints the events that it gets, with their status, and what it receives.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netdb.h>
#include <rdma/rdma_cma.h>
#include <unistd.h>

#include "self.h"

static struct rdma_event_channel *channel;

/* next waits for an event, prints it, and returns it. */
static struct rdma_cm_event *next(void)
{
	struct rdma_cm_event *e;
	WANT(!rdma_get_cm_event(channel, &e));
	printf("%s %d\n", rdma_event_str(e->event), e->status);
	return e;
}

/* want waits for an event of a type. */
static struct rdma_cm_id *want(enum rdma_cm_event_type type)
{
	struct rdma_cm_event *e = next();
	struct rdma_cm_id *id = e->id;
	WANT(e->event == type);
	WANT(!rdma_ack_cm_event(e));
	return id;
}

static char buffer[64];
static struct ibv_mr *mr;

/* make_qp makes a queue pair with a receive. */
static void make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr a = {
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};
	a.send_cq = a.recv_cq = ibv_create_cq(id->verbs, 8, NULL, NULL, 0);
	WANT(a.send_cq && !rdma_create_qp(id, NULL, &a));
	WANT((mr = ibv_reg_mr(id->pd, buffer, sizeof buffer, IBV_ACCESS_LOCAL_WRITE)));
	struct ibv_sge s = {.addr = (uintptr_t)buffer, .length = sizeof buffer, .lkey = mr->lkey};
	struct ibv_recv_wr r = {.sg_list = &s, .num_sge = 1}, *bad;
	WANT(!ibv_post_recv(id->qp, &r, &bad));
}

/* established takes the first message. */
static void established(struct rdma_cm_id *id)
{
	struct ibv_wc wc;
	int n;
	/* A program that hears of the first data by an asynchronous event may say so. */
	WANT(rdma_notify(id, IBV_EVENT_COMM_EST) && errno == EISCONN);
	WANT(rdma_notify(id, IBV_EVENT_QP_FATAL) && errno == EINVAL);
	while (!(n = ibv_poll_cq(id->qp->recv_cq, 1, &wc)))
		;
	WANT(n == 1 && wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV);
	printf("received %.*s\n", (int)wc.byte_len, buffer);
}

static void serve(struct sockaddr *at, int accept)
{
	struct rdma_cm_id *listener, *id;
	struct rdma_conn_param p = {.responder_resources = 1, .initiator_depth = 1, .rnr_retry_count = 7};
	WANT(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	WANT(!rdma_bind_addr(listener, at) && !rdma_listen(listener, 4));
	printf("listening\n");
	id = want(RDMA_CM_EVENT_CONNECT_REQUEST);
	if (!accept)
		pause();
	make_qp(id);
	WANT(!rdma_accept(id, &p));
	printf("accepted\n");
	for (struct rdma_cm_event *e; (e = next())->event != RDMA_CM_EVENT_DISCONNECTED || rdma_ack_cm_event(e);) {
		WANT(e->event == RDMA_CM_EVENT_ESTABLISHED && e->id == id && !rdma_ack_cm_event(e));
		established(id);
	}
	WANT(!rdma_disconnect(id));
	struct ibv_cq *cq = id->qp->recv_cq;
	rdma_destroy_qp(id);
	WANT(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !rdma_destroy_id(id) && !rdma_destroy_id(listener));
	printf("ok\n");
}

static void ask(struct sockaddr *at)
{
	struct rdma_cm_id *id;
	struct rdma_conn_param p = {.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
	WANT(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	WANT(!rdma_resolve_addr(id, NULL, at, 2000));
	want(RDMA_CM_EVENT_ADDR_RESOLVED);
	WANT(!rdma_resolve_route(id, 2000));
	want(RDMA_CM_EVENT_ROUTE_RESOLVED);
	make_qp(id);
	WANT(!rdma_connect(id, &p));
	printf("asked\n");
	next();
}

int main(int argc, char **argv)
{
	struct addrinfo *ai;
	setvbuf(stdout, NULL, _IOLBF, 0);
	WANT(argc == 4 && !getaddrinfo(argv[2], argv[3], NULL, &ai));
	WANT((channel = rdma_create_event_channel()));
	if (!strcmp(argv[1], "ask"))
		ask(ai->ai_addr);
	else
		serve(ai->ai_addr, !strcmp(argv[1], "accept"));
	freeaddrinfo(ai);
	rdma_destroy_event_channel(channel);
	return 0;
}
