/*
 * librdmacm.so.1: all of its symbols exist, and fail, since there is no connection manager.
 * The first call prints that.
 */
#include "refuse.h"

static void say(const char *verb)
{
	static int said;
	if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
		fprintf(stderr,
			"librdmacm (Verbena): %s: there is no connection manager yet; programs that exchange addresses "
			"by themselves work\n",
			verb);
}

#define REFUSE_CM(name)                                                                                                \
	PUBLIC long name(void)                                                                                         \
	{                                                                                                              \
		say(#name);                                                                                            \
		errno = EOPNOTSUPP;                                                                                    \
		return -1;                                                                                             \
	}

REFUSE_CM(rdma_create_id)
REFUSE_CM(rdma_destroy_id)
REFUSE_CM(rdma_bind_addr)
REFUSE_CM(rdma_resolve_addr)
REFUSE_CM(rdma_resolve_route)
REFUSE_CM(rdma_create_qp)
REFUSE_CM(rdma_create_qp_ex)
REFUSE_CM(rdma_connect)
REFUSE_CM(rdma_listen)
REFUSE_CM(rdma_accept)
REFUSE_CM(rdma_reject)
REFUSE_CM(rdma_notify)
REFUSE_CM(rdma_disconnect)
REFUSE_CM(rdma_get_cm_event)
REFUSE_CM(rdma_ack_cm_event)
REFUSE_CM(rdma_join_multicast)
REFUSE_CM(rdma_join_multicast_ex)
REFUSE_CM(rdma_leave_multicast)
REFUSE_CM(rdma_set_option)
REFUSE_CM(rdma_migrate_id)
REFUSE_CM(rdma_getaddrinfo)
REFUSE_CM(rdma_get_request)
REFUSE_CM(rdma_create_ep)
REFUSE_CM(rdma_create_srq)
REFUSE_CM(rdma_create_srq_ex)
REFUSE_CM(rdma_establish)
REFUSE_CM(rdma_init_qp_attr)
REFUSE_CM(rdma_get_remote_ece)
REFUSE_CM(rdma_reject_ece)
REFUSE_CM(rdma_set_local_ece)
REFUSE_CM(rdma_query_addrinfo)
REFUSE_CM(rdma_resolve_addrinfo)
REFUSE_CM(rdma_write_cm_event)
REFUSE_CM(rsocket)
REFUSE_CM(rbind)
REFUSE_CM(rlisten)
REFUSE_CM(raccept)
REFUSE_CM(rconnect)
REFUSE_CM(rshutdown)
REFUSE_CM(rclose)
REFUSE_CM(rrecv)
REFUSE_CM(rrecvfrom)
REFUSE_CM(rrecvmsg)
REFUSE_CM(rsend)
REFUSE_CM(rsendto)
REFUSE_CM(rsendmsg)
REFUSE_CM(rread)
REFUSE_CM(rreadv)
REFUSE_CM(rwrite)
REFUSE_CM(rwritev)
REFUSE_CM(rpoll)
REFUSE_CM(rselect)
REFUSE_CM(rgetpeername)
REFUSE_CM(rgetsockname)
REFUSE_CM(rsetsockopt)
REFUSE_CM(rgetsockopt)
REFUSE_CM(rfcntl)
REFUSE_CM(riomap)
REFUSE_CM(riounmap)
REFUSE_CM(riowrite)
REFUSE_CM(repoll_create)
REFUSE_CM(repoll_ctl)
REFUSE_CM(repoll_wait)

REFUSE_VOID(rdma_destroy_event_channel)
REFUSE_VOID(rdma_destroy_qp)
REFUSE_VOID(rdma_freeaddrinfo)
REFUSE_VOID(rdma_destroy_ep)
REFUSE_VOID(rdma_destroy_srq)

PUBLIC void *rdma_create_event_channel(void)
{
	say("rdma_create_event_channel");
	errno = EOPNOTSUPP;
	return NULL;
}

/* An empty list: some programs do not expect NULL here. */
PUBLIC void **rdma_get_devices(int *num)
{
	if (num)
		*num = 0;
	return calloc(1, sizeof(void *));
}

PUBLIC void rdma_free_devices(void **list) { free(list); }

PUBLIC uint16_t rdma_get_src_port(void) { return 0; }
PUBLIC uint16_t rdma_get_dst_port(void) { return 0; }
PUBLIC const char *rdma_event_str(int event)
{
	(void)event;
	return "UNKNOWN EVENT";
}
