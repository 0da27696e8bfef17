/*
 * Prints what the library returns without a device: names, and rates by all of their
 * numbers.
 */
#include <stdio.h>

#include <infiniband/verbs.h>

int main(void)
{
	for (int i = -1; i < 40; i++) {
		printf("node %d %s\n", i, ibv_node_type_str((enum ibv_node_type)(i < 0 ? 0 : i)));
		printf("port %d %s\n", i, ibv_port_state_str((enum ibv_port_state)i));
		printf("event %d %s\n", i, ibv_event_type_str((enum ibv_event_type)i));
		printf("status %d %s\n", i, ibv_wc_status_str((enum ibv_wc_status)i));
		int mbps = ibv_rate_to_mbps((enum ibv_rate)i);
		printf("rate %d %d %d %d\n", i, ibv_rate_to_mult((enum ibv_rate)i), mbps, mbps_to_ibv_rate(mbps));
	}
	for (int i = -2; i < 1000; i++)
		printf("mult %d %d, mbps %d %d\n", i, mult_to_ibv_rate(i), i, mbps_to_ibv_rate(i));
	return 0;
}
