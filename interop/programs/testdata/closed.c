/*
 * A program that, as daemons do, closes all descriptors that it has not opened itself, after
 * its first verbs; then it opens others, and goes on. The backend must not end the process.
 *
 * Arguments: what it does before ("list" or "open" devices), and the number below which it
 * closes descriptors, 0 for the limit of the process.
 */
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "self.h"

enum { PAIRS = 64 };

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	WANT(argc == 3);
	int open = !strcmp(argv[1], "open"), end = atoi(argv[2]), n;
	struct rlimit limit;
	WANT(!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_max > 2048);
	limit.rlim_cur = 1536;
	WANT(!setrlimit(RLIMIT_NOFILE, &limit));

	struct self s;
	struct ibv_device **list = NULL;
	if (open)
		s = connect_self(), use_self(&s);
	else
		WANT((list = ibv_get_device_list(&n)) && n > 0);
	if (!end)
		end = (int)sysconf(_SC_OPEN_MAX);
	for (int fd = 3; fd < end; fd++)
		close(fd);

	/* The program reuses the numbers. What the backend finds there is no epoll instance and
	 * no eventfd. */
	int pair[PAIRS][2];
	for (int i = 0; i < PAIRS; i++)
		WANT(!socketpair(AF_UNIX, SOCK_DGRAM, 0, pair[i]));
	/* The Go runtime polls its descriptors every ten milliseconds, and in verbs. */
	for (double until = now() + 1; now() < until;) {
		int k;
		struct ibv_device **again = ibv_get_device_list(&k);
		WANT(again && k > 0);
		ibv_free_device_list(again);
	}
	if (list)
		ibv_free_device_list(list);
	puts("ok");
	fflush(stdout);
	_exit(0);
}
