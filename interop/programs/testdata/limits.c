/*
 * Limits of the process: verbs do not change them, and fail with an errno where one is
 * reached. The argument chooses a case:
 *
 *   same     the limit on descriptors is the same afterwards, also for a child
 *   full     no descriptor is free at the first verb
 *   later    none is free when a device is opened
 *   space    there is little address space
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

enum { SOFT = 256 };

/* take opens descriptors until none is free, and returns how many it got. */
static int take(int fd[SOFT])
{
	int n = 0;
	while (n < SOFT && (fd[n] = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
		n++;
	WANT(n > 0 && n < SOFT && errno == EMFILE);
	return n;
}

static void give(const int *fd, int n)
{
	while (n > 0)
		WANT(!close(fd[--n]));
}

static void same(struct rlimit want)
{
	struct self s = connect_self();
	use_self(&s);
	struct rlimit now;
	WANT(!getrlimit(RLIMIT_NOFILE, &now) && now.rlim_cur == want.rlim_cur && now.rlim_max == want.rlim_max);
	char line[64];
	FILE *child = popen("ulimit -n", "r");
	WANT(child && fgets(line, sizeof line, child) && atoi(line) == SOFT && !pclose(child));
	pid_t pid = fork(); /* it loads a backend of its own, which must not change the limit either */
	WANT(pid >= 0);
	if (!pid) {
		struct self c = connect_self();
		WANT(!getrlimit(RLIMIT_NOFILE, &now) && now.rlim_cur == want.rlim_cur);
		close_self(&c);
		_exit(0);
	}
	int status;
	WANT(waitpid(pid, &status, 0) == pid && !status);
	close_self(&s);

	/* A limit that the program sets later stays. */
	want.rlim_cur = SOFT / 2;
	WANT(!setrlimit(RLIMIT_NOFILE, &want));
	s = connect_self();
	WANT(!getrlimit(RLIMIT_NOFILE, &now) && now.rlim_cur == want.rlim_cur);
	close_self(&s);
}

static void full(void)
{
	int fd[SOFT], n = take(fd), devices;
	errno = 0;
	WANT(!ibv_get_device_list(&devices) && errno == EMFILE);
	give(fd, n);
	struct self s = connect_self();
	use_self(&s);
	close_self(&s);
}

static void later(void)
{
	int fd[SOFT], devices;
	struct ibv_device **list = ibv_get_device_list(&devices);
	WANT(list && devices > 0);
	int n = take(fd);
	for (int free = 0; free < n; free++) { /* opening fails with an errno, */
		errno = 0;
		struct ibv_context *ctx = ibv_open_device(list[0]);
		if (ctx) { /* until enough are free */
			WANT(free > 0 && !ibv_close_device(ctx));
			n -= free;
			break;
		}
		WANT(errno == EMFILE);
		WANT(!close(fd[n - 1 - free]));
		WANT(free < 64);
	}
	give(fd, n);
	struct self s = connect_self();
	use_self(&s);
	close_self(&s);
	ibv_free_device_list(list);
}

static void space(void)
{
	struct rlimit limit, old;
	int devices;
	WANT(!getrlimit(RLIMIT_AS, &old));
	for (rlim_t mib = 64; mib <= 2048; mib += 248) { /* the backend alone needs 2048 */
		limit = (struct rlimit){mib << 20, old.rlim_max};
		WANT(!setrlimit(RLIMIT_AS, &limit));
		errno = 0;
		WANT(!ibv_get_device_list(&devices) && errno == ENOMEM);
	}
	WANT(!setrlimit(RLIMIT_AS, &old));
	struct self s = connect_self();
	use_self(&s);
	close_self(&s);
}

int main(int argc, char **argv)
{
	WANT(argc == 2);
	struct rlimit limit;
	WANT(!getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_max > 2048);
	limit.rlim_cur = SOFT;
	WANT(!setrlimit(RLIMIT_NOFILE, &limit));
	if (!strcmp(argv[1], "same"))
		same(limit);
	else if (!strcmp(argv[1], "full"))
		full();
	else if (!strcmp(argv[1], "later"))
		later();
	else if (!strcmp(argv[1], "space"))
		space();
	else
		return 2;
	puts("ok");
	return 0;
}
