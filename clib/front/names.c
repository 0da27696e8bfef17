/*
 * Functions that need no device: names, rates, and the sender of a datagram.
 */
#include <arpa/inet.h>
#include <netinet/ip.h>
#include <netinet/ip6.h>
#include <stdio.h>
#include <string.h>

#include "front.h"

#define LEN(a) (sizeof(a) / sizeof *(a))

static const char *name_of(const char *const *names, size_t n, unsigned int i)
{
	return i < n && names[i] ? names[i] : "unknown";
}

PUBLIC const char *ibv_node_type_str(enum ibv_node_type type)
{
	static const char *const names[] = {NULL,	     "InfiniBand channel adapter",
					    "InfiniBand switch", "InfiniBand router",
					    "iWARP NIC",	     "usNIC",
					    "usNIC UDP",	     "unspecified"};
	return name_of(names, LEN(names), (unsigned int)type);
}

PUBLIC const char *ibv_port_state_str(enum ibv_port_state state)
{
	static const char *const names[] = {"no state change (NOP)", "down",   "init",
					    "armed",		     "active", "active defer"};
	return name_of(names, LEN(names), (unsigned int)state);
}

PUBLIC const char *ibv_event_type_str(enum ibv_event_type event)
{
	static const char *const names[] = {"CQ error",
					    "local work queue catastrophic error",
					    "invalid request local work queue error",
					    "local access violation work queue error",
					    "communication established",
					    "send queue drained",
					    "path migrated",
					    "path migration request error",
					    "local catastrophic error",
					    "port active",
					    "port error",
					    "LID change",
					    "P_Key change",
					    "SM change",
					    "SRQ catastrophic error",
					    "SRQ limit reached",
					    "last WQE reached",
					    "client reregistration",
					    "GID table change",
					    "WQ fatal",
					    "device speed change"};
	return name_of(names, LEN(names), (unsigned int)event);
}

PUBLIC const char *ibv_wc_status_str(enum ibv_wc_status status)
{
	static const char *const names[] = {"success",
					    "local length error",
					    "local QP operation error",
					    "local EE context operation error",
					    "local protection error",
					    "Work Request Flushed Error",
					    "memory management operation error",
					    "bad response error",
					    "local access error",
					    "remote invalid request error",
					    "remote access error",
					    "remote operation error",
					    "transport retry counter exceeded",
					    "RNR retry counter exceeded",
					    "local RDD violation error",
					    "remote invalid RD request",
					    "aborted error",
					    "invalid EE context number",
					    "invalid EE context state",
					    "fatal error",
					    "response timeout error",
					    "general error",
					    "TM error",
					    "TM software rendezvous"};
	return name_of(names, LEN(names), (unsigned int)status);
}

PUBLIC const char *ibv_wr_opcode_str(enum ibv_wr_opcode opcode)
{
	static const char *const names[] = {"rdma-write", "rdma-write-with-imm", "send",     "send-with-imm",
					    "rdma-read",  "atomic-cmp-and-swp",	 "atomic-fetch-and-add",
					    "local-inv",  "bind-mw",		 "send-with-inv",
					    "tso",	  "driver1",		 NULL,	     NULL,
					    "flush",	  "atomic-write"};
	return name_of(names, LEN(names), (unsigned int)opcode);
}

/* --- rates: in multiples of 2.5 Gb/s, and in Mb/s --- */

static const struct rate {
	enum ibv_rate rate;
	int mult, mbps;
} rates[] = {
	{IBV_RATE_2_5_GBPS, 1, 2500},	 {IBV_RATE_5_GBPS, 2, 5000},	 {IBV_RATE_10_GBPS, 4, 10000},
	{IBV_RATE_20_GBPS, 8, 20000},	 {IBV_RATE_30_GBPS, 12, 30000},	 {IBV_RATE_40_GBPS, 16, 40000},
	{IBV_RATE_60_GBPS, 24, 60000},	 {IBV_RATE_80_GBPS, 32, 80000},	 {IBV_RATE_120_GBPS, 48, 120000},
	{IBV_RATE_28_GBPS, 11, 28125},	 {IBV_RATE_50_GBPS, 20, 53125},	 {IBV_RATE_400_GBPS, 160, 425000},
	{IBV_RATE_600_GBPS, 240, 637500}, {IBV_RATE_14_GBPS, -1, 14062}, {IBV_RATE_56_GBPS, -1, 56250},
	{IBV_RATE_112_GBPS, -1, 112500}, {IBV_RATE_168_GBPS, -1, 168750}, {IBV_RATE_25_GBPS, -1, 25781},
	{IBV_RATE_100_GBPS, -1, 103125}, {IBV_RATE_200_GBPS, -1, 206250}, {IBV_RATE_300_GBPS, -1, 309375},
	{(enum ibv_rate)23, 320, 850000}, {(enum ibv_rate)24, 480, 1275000}, /* only newer headers have their names */
};

/* find finds a rate by one of its three numbers; the other two are 0. */
static const struct rate *find(enum ibv_rate rate, int mult, int mbps)
{
	for (const struct rate *r = rates; r < rates + LEN(rates); r++)
		if ((rate && r->rate == rate) || (mult > 0 && r->mult == mult) || (mbps > 0 && r->mbps == mbps))
			return r;
	return NULL;
}

PUBLIC int ibv_rate_to_mult(enum ibv_rate rate)
{
	const struct rate *r = find(rate, 0, 0);
	return r ? r->mult : -1;
}

PUBLIC int ibv_rate_to_mbps(enum ibv_rate rate)
{
	const struct rate *r = find(rate, 0, 0);
	return r ? r->mbps : -1;
}

PUBLIC enum ibv_rate mult_to_ibv_rate(int mult)
{
	const struct rate *r = find(0, mult, 0);
	return r ? r->rate : IBV_RATE_MAX;
}

PUBLIC enum ibv_rate mbps_to_ibv_rate(int mbps)
{
	const struct rate *r = find(0, 0, mbps);
	return r ? r->rate : IBV_RATE_MAX;
}

/* --- the sender of a datagram --- */

/* addresses finds source and destination in the routing header: that of IPv6, or
 * an IPv4 header in its second half (IBA A17.4.5.2). */
static bool addresses(const struct ibv_grh *grh, union ibv_gid *from, union ibv_gid *to, uint8_t *tclass, uint32_t *flow)
{
	const struct ip *v4 = (const struct ip *)((const uint8_t *)grh + 20);
	uint32_t first = ntohl(grh->version_tclass_flow);
	if (first >> 28 == 6) {
		*from = grh->sgid;
		*to = grh->dgid;
		*tclass = (uint8_t)(first >> 20);
		*flow = first & 0xfffff;
		return true;
	}
	if (v4->ip_v != 4 || v4->ip_hl != 5)
		return false;
	memset(from, 0, sizeof *from);
	memset(to, 0, sizeof *to);
	from->raw[10] = from->raw[11] = to->raw[10] = to->raw[11] = 0xff;
	memcpy(from->raw + 12, &v4->ip_src, 4);
	memcpy(to->raw + 12, &v4->ip_dst, 4);
	*tclass = v4->ip_tos;
	*flow = 0;
	return true;
}

PUBLIC int ibv_init_ah_from_wc(struct ibv_context *context, uint8_t port, struct ibv_wc *wc, struct ibv_grh *grh,
			       struct ibv_ah_attr *attr)
{
	union ibv_gid from, to, mine;
	uint8_t tclass;
	uint32_t flow;
	if (!live_context(context) || !wc || !attr || !grh || !(wc->wc_flags & IBV_WC_GRH) ||
	    !addresses(grh, &from, &to, &tclass, &flow)) {
		errno = EINVAL;
		return -1;
	}
	memset(attr, 0, sizeof *attr);
	for (int i = 0; i < 256 && !ibv_query_gid(context, port, i, &mine); i++) {
		if (memcmp(&mine, &to, sizeof mine))
			continue;
		attr->grh.sgid_index = (uint8_t)i;
		attr->grh.dgid = from;
		attr->grh.hop_limit = 64;
		attr->grh.traffic_class = tclass;
		attr->grh.flow_label = flow;
		attr->is_global = 1;
		attr->sl = wc->sl;
		attr->port_num = port;
		return 0;
	}
	errno = EINVAL;
	return -1;
}

PUBLIC struct ibv_ah *ibv_create_ah_from_wc(struct ibv_pd *pd, struct ibv_wc *wc, struct ibv_grh *grh, uint8_t port)
{
	struct ibv_ah_attr attr;
	if (!LIVE(vb_pd, PD, pd))
		return vb_fail(EINVAL);
	return ibv_init_ah_from_wc(pd->context, port, wc, grh, &attr) ? NULL : ibv_create_ah(pd, &attr);
}

/* --- fork --- */

/* Memory is not pinned: fork needs no help. */
PUBLIC int ibv_fork_init(void) { return 0; }
PUBLIC enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

/* Helpers for providers, which old programs may call. */
PUBLIC int ibv_dontfork_range(void *base, size_t size)
{
	(void)base;
	(void)size;
	return 0;
}

PUBLIC int ibv_dofork_range(void *base, size_t size)
{
	(void)base;
	(void)size;
	return 0;
}
