/*
 * One side of a connection by librdmacm whose queue pair is the program's own, which offers or
 * answers options of a vendor (ECE):
 *
 *   ece accept IP PORT VENDOR OPTIONS   listens, gets a request, and accepts it
 *   ece ask IP PORT VENDOR OPTIONS      asks for a connection
 *
 * It prints its events, and the peer's options when it gets to know them.
 */
#define _GNU_SOURCE
#include <netdb.h>
#include <rdma/rdma_cma.h>

#include "self.h"

static struct rdma_event_channel *channel;

static struct rdma_cm_id *next(enum rdma_cm_event_type *type)
{
	struct rdma_cm_event *e;
	WANT(!rdma_get_cm_event(channel, &e));
	struct rdma_cm_id *id = e->id;
	*type = e->event;
	printf("%s %d\n", rdma_event_str(e->event), e->status);
	WANT(!rdma_ack_cm_event(e));
	return id;
}

static struct rdma_cm_id *want(enum rdma_cm_event_type wanted)
{
	enum rdma_cm_event_type type;
	struct rdma_cm_id *id = next(&type);
	WANT(type == wanted);
	return id;
}

static struct ibv_qp *make_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr a = {.qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
	struct ibv_pd *pd = ibv_alloc_pd(id->verbs);
	struct ibv_qp *qp = NULL;
	a.send_cq = a.recv_cq = ibv_create_cq(id->verbs, 2, NULL, NULL, 0);
	WANT(pd && a.send_cq && (qp = ibv_create_qp(pd, &a)));
	return qp;
}

static void print_remote(struct rdma_cm_id *id)
{
	struct ibv_ece e = {0};
	WANT(!rdma_get_remote_ece(id, &e));
	printf("the peer has %#x %#x\n", e.vendor_id, e.options);
}

static void to(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr a = {.qp_state = state};
	int mask;
	WANT(!rdma_init_qp_attr(id, &a, &mask) && !ibv_modify_qp(qp, &a, mask));
}

int main(int argc, char **argv)
{
	struct addrinfo *ai;
	struct rdma_cm_id *id, *listener = NULL;
	struct rdma_conn_param p = {.retry_count = 7, .rnr_retry_count = 7};
	enum rdma_cm_event_type type;
	setvbuf(stdout, NULL, _IOLBF, 0);
	WANT(argc == 6 && !getaddrinfo(argv[2], argv[3], NULL, &ai));
	struct ibv_ece ece = {.vendor_id = (uint32_t)strtoul(argv[4], NULL, 0), .options = (uint32_t)strtoul(argv[5], NULL, 0)};
	int asks = !strcmp(argv[1], "ask");
	WANT((channel = rdma_create_event_channel()));
	WANT(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	if (asks) {
		WANT(!rdma_resolve_addr(id, NULL, ai->ai_addr, 2000));
		want(RDMA_CM_EVENT_ADDR_RESOLVED);
		WANT(!rdma_resolve_route(id, 2000));
		want(RDMA_CM_EVENT_ROUTE_RESOLVED);
	} else {
		listener = id;
		WANT(!rdma_bind_addr(listener, ai->ai_addr) && !rdma_listen(listener, 4));
		printf("listening\n");
		id = want(RDMA_CM_EVENT_CONNECT_REQUEST);
		print_remote(id);
	}
	struct ibv_qp *qp = make_qp(id);
	p.qp_num = qp->qp_num;
	if (ece.vendor_id)
		WANT(!rdma_set_local_ece(id, &ece));
	to(id, qp, IBV_QPS_INIT);
	if (asks) {
		WANT(!rdma_connect(id, &p));
		next(&type);
		if (type != RDMA_CM_EVENT_CONNECT_RESPONSE)
			return 0;
		print_remote(id);
	}
	to(id, qp, IBV_QPS_RTR);
	to(id, qp, IBV_QPS_RTS);
	WANT(asks ? !rdma_establish(id) : !rdma_accept(id, &p));
	if (!asks)
		want(RDMA_CM_EVENT_ESTABLISHED);
	want(RDMA_CM_EVENT_DISCONNECTED);
	WANT(!rdma_disconnect(id));
	struct ibv_cq *cq = qp->recv_cq;
	struct ibv_pd *pd = qp->pd;
	WANT(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	WANT(!rdma_destroy_id(id) && (asks || !rdma_destroy_id(listener)));
	freeaddrinfo(ai);
	rdma_destroy_event_channel(channel);
	printf("ok\n");
	return 0;
}
