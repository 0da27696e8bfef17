/* How long the first ibv_get_device_list takes: milliseconds. */
#include <time.h>

#include "self.h"

int main(void)
{
	struct timespec a, b;
	int n;
	clock_gettime(CLOCK_MONOTONIC, &a);
	struct ibv_device **list = ibv_get_device_list(&n);
	clock_gettime(CLOCK_MONOTONIC, &b);
	WANT(list && n > 0);
	ibv_free_device_list(list);
	printf("%.1f\n", (double)(b.tv_sec - a.tv_sec) * 1e3 + (double)(b.tv_nsec - a.tv_nsec) / 1e6);
	return 0;
}
