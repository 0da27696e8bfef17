/*
 * A program that changes its title: it writes over its arguments and its environment, where
 * ps reads them, and has no other environment. It does so before its first verb. The device
 * is still the one that the environment asked for when the program was started, also in a
 * child.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

extern char **environ;

/* set_title overwrites all strings from the first argument to the last variable. */
static void set_title(char **argv)
{
	char *end = argv[0];
	for (char **a = argv; *a && *a == end; a++)
		end += strlen(end) + 1;
	for (char **e = environ; *e && *e == end; e++)
		end += strlen(end) + 1;
	WANT(end - argv[0] > 200);
	memset(argv[0], 'x', (size_t)(end - argv[0] - 1));
	WANT(!clearenv());
}

/* check opens the device. Its address and its limit are what was set. */
static void check(struct in_addr want)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	union ibv_gid gid;
	struct ibv_device_attr attr;
	WANT(list && n == 1);
	struct ibv_context *ctx = ibv_open_device(list[0]);
	WANT(ctx && !ibv_query_gid(ctx, 1, 0, &gid) && !ibv_query_device(ctx, &attr));
	WANT(!memcmp(gid.raw + 12, &want, 4) && gid.raw[10] == 0xff);
	WANT(attr.max_qp == 5);
	ibv_free_device_list(list);
	WANT(!ibv_close_device(ctx));
}

int main(int argc, char **argv)
{
	struct in_addr want;
	int status;
	const char *addr = getenv("VERBENA_ADDR"), *limits = getenv("VERBENA_LIMITS");
	WANT(argc && addr && limits && inet_pton(AF_INET, addr, &want) && !strcmp(limits, "qp=5"));
	set_title(argv);
	check(want);
	pid_t child = fork();
	if (!child) {
		check(want);
		_exit(0);
	}
	WANT(child > 0 && waitpid(child, &status, 0) == child && !status);
	puts("ok");
	return 0;
}
