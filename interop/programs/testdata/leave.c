/*
 * A program whose main thread calls pthread_exit, after verbs: the process ends with the last
 * of the program's own threads, as without the library, and signals reach those that are
 * left. The argument says which thread is left:
 *
 *   nobody   none: the process ends at once
 *   worker   a thread that uses verbs, and ends after the main thread
 *   term     a thread that never ends: SIGTERM ends the process
 *   sigwait  a thread that has blocked SIGTERM and waits for it
 *   blocked  a thread that has blocked SIGTERM and does not wait for it, and ends
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "self.h"

static const char *what;
static struct self self;
static int ready[2]; /* a pipe: the program writes a letter for each thing that it has done */
static pthread_key_t key; /* with a destructor */

static void at_exit(void) { WANT(write(ready[1], "x", 1) == 1); }
static void destroyed(void *k) { WANT(k == &key && write(ready[1], "d", 1) == 1); }

/* await_main waits until the main thread has ended. */
static void await_main(void)
{
	char path[64], line[512], *state;
	snprintf(path, sizeof path, "/proc/%d/task/%d/stat", getpid(), getpid());
	do {
		FILE *f = fopen(path, "r");
		WANT(f && fgets(line, sizeof line, f) && (state = strrchr(line, ')')));
		fclose(f);
	} while (state[2] != 'Z');
}

static void *left(void *unused)
{
	(void)unused;
	sigset_t set;
	int got;
	sigemptyset(&set);
	sigaddset(&set, SIGTERM);
	if (!strcmp(what, "sigwait") || !strcmp(what, "blocked"))
		WANT(!pthread_sigmask(SIG_BLOCK, &set, NULL));
	await_main();
	if (!strcmp(what, "worker"))
		use_self(&self);
	WANT(write(ready[1], "r", 1) == 1);
	if (!strcmp(what, "term"))
		for (;;)
			pause();
	if (!strcmp(what, "sigwait"))
		WANT(!sigwait(&set, &got) && got == SIGTERM);
	if (!strcmp(what, "blocked")) {
		do
			WANT(!sigpending(&set));
		while (!sigismember(&set, SIGTERM));
	}
	return NULL;
}

static void program(void)
{
	self = connect_self();
	use_self(&self);
	WANT(!atexit(at_exit));
	WANT(!pthread_key_create(&key, destroyed) && !pthread_setspecific(key, &key));
	pthread_t t;
	if (strcmp(what, "nobody"))
		WANT(!pthread_create(&t, NULL, left, NULL));
	pthread_exit(NULL);
}

/* next reads the program's next letter: 0 when it has ended. */
static char next(void)
{
	char c = 0;
	WANT(read(ready[0], &c, 1) >= 0);
	return c;
}

int main(int argc, char **argv)
{
	WANT(argc == 2);
	what = argv[1];
	WANT(!pipe(ready));
	pid_t pid = fork();
	WANT(pid >= 0);
	if (!pid) {
		close(ready[0]);
		program();
	}
	close(ready[1]);
	WANT(next() == 'd'); /* first the destructors of the main thread */
	if (strcmp(what, "nobody"))
		WANT(next() == 'r');
	int signalled = !strcmp(what, "term") || !strcmp(what, "sigwait") || !strcmp(what, "blocked");
	if (signalled)
		WANT(!kill(pid, SIGTERM));
	int status, killed = !strcmp(what, "term");
	WANT(next() == (killed ? 0 : 'x')); /* exit handlers are called */
	WANT(waitpid(pid, &status, 0) == pid);
	if (killed)
		WANT(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
	else
		WANT(WIFEXITED(status) && !WEXITSTATUS(status));
	puts("ok");
	return 0;
}
