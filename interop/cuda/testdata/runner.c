/*
 * Cases are run one after the other. Each has a process of its own, the worker, which is started by fork and exec from a
 * process that never calls CUDA; so are the worker's peers, before the worker calls CUDA. The runner reads from a pipe
 * why a case failed, and kills all of its processes after the time limit.
 *
 * The program is started again in two ways:
 *
 *   --worker NAME PIPE           runs one case
 *   --peer NAME PIPE SOCKET      is another process of that case, and takes orders from the socket
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <fnmatch.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>

#include "common.h"

enum { SKIPPED = 77, MAX_PEERS = 3 };

static int report = -1; /* the pipe to the runner */

/* end_case tells the runner why the case ends, and ends the process. */
static void end_case(char how, int status, const char *format, va_list args)
{
	char line[900];
	int n = snprintf(line, sizeof line, "%c", how);
	n += vsnprintf(line + n, sizeof line - (size_t)n - 1, format, args);
	if (n > (int)sizeof line - 2)
		n = sizeof line - 2;
	for (int i = 0; i < n; i++)
		if (line[i] == '\n')
			line[i] = ' ';
	line[n++] = '\n';
	if (report < 0 || write(report, line, (size_t)n) != n)
		fprintf(stderr, "%s", line);
	_exit(status);
}

void failed(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	end_case('F', 1, format, args);
	_exit(1);
}

void skipped(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	end_case('S', SKIPPED, format, args);
	_exit(1);
}

void cuda_ok(CUresult r, const char *call, const char *file, int line)
{
	const char *name = "?";
	if (r == CUDA_SUCCESS)
		return;
	cuGetErrorName(r, &name);
	failed("%s:%d: %s is %d, %s", file, line, call, (int)r, name);
}

/* start_again runs this program with other arguments, in a new process. */
static pid_t start_again(const char *const *args, const struct test *t, int keep, int also)
{
	const pid_t parent = getpid();
	pid_t pid = fork();
	if (pid)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (getppid() != parent)
		_exit(1);
	if (!strcmp(args[1], "--worker"))
		setpgid(0, 0); /* its peers are killed with it */
	fcntl(keep, F_SETFD, 0);
	if (also >= 0)
		fcntl(also, F_SETFD, 0);
	if (t->env[0])
		setenv(t->env[0], t->env[1], 1);
	execv("/proc/self/exe", (char *const *)args);
	_exit(127);
}

/* work runs a case, in its worker. */
static void work(const struct test *t)
{
	int sockets[MAX_PEERS];
	pid_t pids[MAX_PEERS];
	WANT(t->peers <= MAX_PEERS);
	for (int i = 0; i < t->peers; i++) {
		int ends[2];
		char pipe_fd[16], socket_fd[16];
		WANT(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends));
		snprintf(pipe_fd, sizeof pipe_fd, "%d", report);
		snprintf(socket_fd, sizeof socket_fd, "%d", ends[1]);
		const char *args[] = {"peer", "--peer", t->name, pipe_fd, socket_fd, NULL};
		pids[i] = start_again(args, t, report, ends[1]);
		WANT(pids[i] > 0 && !close(ends[1]));
		sockets[i] = ends[0];
	}
	nodes_start(t->peers, sockets, pids);
	t->run(t);
	fflush(NULL);
	_exit(0); /* peers end when their sockets are closed */
}

/* judge runs the worker of a case, prints what came of it, and returns 1 if it failed. */
static int judge(const struct test *t)
{
	int fds[2], status = 0;
	char why[1000], number[16];
	size_t n = 0;
	const int seconds = t->limit ? t->limit : CASE_LIMIT;
	const double limit = now() + seconds;
	bool late = false;
	if (pipe2(fds, O_CLOEXEC)) {
		perror("pipe2");
		exit(1);
	}
	snprintf(number, sizeof number, "%d", fds[1]);
	const char *args[] = {"worker", "--worker", t->name, number, NULL};
	fflush(stdout);
	pid_t pid = start_again(args, t, fds[1], -1);
	if (pid < 0) {
		perror("fork");
		exit(1);
	}
	setpgid(pid, pid);
	close(fds[1]);
	for (;;) { /* until all processes of the case have closed the pipe, or one has written to it */
		struct pollfd p = {.fd = fds[0], .events = POLLIN};
		double left = limit - now();
		if (left <= 0 || poll(&p, 1, (int)(left * 1000) + 1) == 0) {
			late = true;
			break;
		}
		ssize_t k = read(fds[0], why + n, sizeof why - 1 - n);
		if (k <= 0)
			break;
		n += (size_t)k;
		if (memchr(why, '\n', n))
			break;
	}
	if (late || n)
		kill(-pid, SIGKILL);
	waitpid(pid, &status, 0);
	kill(-pid, SIGKILL); /* peers of a worker that has ended */
	close(fds[0]);
	why[n] = 0;
	why[strcspn(why, "\n")] = 0;
	if (n && why[0] == 'S') {
		printf("SKIP %s: %s\n", t->name, why + 1);
		return 0;
	}
	if (n)
		printf("FAIL %s: %s\n", t->name, why + 1);
	else if (late)
		printf("FAIL %s: it has not ended after %d s\n", t->name, seconds);
	else if (status)
		printf("FAIL %s: a process ended with %s %d\n", t->name, WIFSIGNALED(status) ? "signal" : "status",
		       WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
	else {
		printf("PASS %s\n", t->name);
		return 0;
	}
	return 1;
}

static const struct test *find(const struct test *tests, int n, const char *name)
{
	for (int i = 0; i < n; i++)
		if (!strcmp(tests[i].name, name))
			return &tests[i];
	fprintf(stderr, "there is no case %s\n", name);
	exit(2);
}

/* number returns the value of a variable, or another one if it is not set. */
static uint64_t number(const char *variable, uint64_t otherwise)
{
	const char *value = getenv(variable);
	return value && *value ? strtoull(value, NULL, 0) : otherwise;
}

int run_tests(int argc, char **argv, const struct test *tests, int n)
{
	int failures = 0, names = 0;
	seed = number("VERBENA_SEED", (uint64_t)time(NULL) * 1000003 + (uint64_t)getpid());
	max_message = number("CUDA_TEST_MAX", UINT64_MAX);
	if (argc > 3 && (!strcmp(argv[1], "--worker") || !strcmp(argv[1], "--peer"))) {
		const struct test *t = find(tests, n, argv[2]);
		report = atoi(argv[3]);
		fcntl(report, F_SETFD, FD_CLOEXEC);
		if (argc > 4)
			nodes_serve(atoi(argv[4]));
		work(t);
	}
	for (int i = 1; i < argc; i++) {
		if (!strcmp(argv[i], "--list")) {
			for (int k = 0; k < n; k++)
				puts(tests[k].name);
			return 0;
		}
		if (!strcmp(argv[i], "--seed") && i + 1 < argc)
			seed = strtoull(argv[++i], NULL, 0);
		else if (!strcmp(argv[i], "--max") && i + 1 < argc)
			max_message = strtoull(argv[++i], NULL, 0);
		else
			argv[1 + names++] = argv[i];
	}
	char value[32];
	snprintf(value, sizeof value, "%llu", (unsigned long long)seed);
	setenv("VERBENA_SEED", value, 1);
	printf("seed %s\n", value);
	snprintf(value, sizeof value, "%llu", (unsigned long long)max_message);
	setenv("CUDA_TEST_MAX", value, 1);
	for (int k = 0; k < names; k++) {
		bool any = false;
		for (int i = 0; i < n; i++)
			any |= !fnmatch(argv[1 + k], tests[i].name, 0);
		if (!any) {
			printf("FAIL %s: there is no such case\n", argv[1 + k]);
			failures++;
		}
	}
	for (int i = 0; i < n; i++) {
		bool chosen = !names;
		for (int k = 0; k < names; k++)
			chosen |= !fnmatch(argv[1 + k], tests[i].name, 0);
		if (chosen)
			failures += judge(&tests[i]);
	}
	return failures != 0;
}
