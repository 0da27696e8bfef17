/*
 * A library that says it is librdmacm.so.1, and lacks a function by which that speaks to the
 * connection manager's file: write. It asks for the devices when it is loaded.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <infiniband/verbs.h>

__attribute__((constructor)) static void at_load(void)
{
	int n = -1;
	struct ibv_device **list = ibv_get_device_list(&n);
	printf("librdmacm gets %s, %d devices: %s\n", list ? "a list" : "no list", n, strerror(errno));
	fflush(stdout);
	/* The other functions, which it does call. */
	struct stat st;
	int fd = open("/dev/null", O_RDWR);
	if (fd >= 0 && !fstat(fd, &st))
		close(fd);
}
