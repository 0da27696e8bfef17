/*
 * A process of an address that others share, of which something has ended. It opens a device, and
 * prints the number of a queue pair. Then, by its argument:
 *
 *   thread  its main thread ends by pthread_exit. Another thread goes on to use the device, and
 *           prints "used" for each line that it reads; it ends with its input.
 *   parent  it forks, and ends. The child prints "child" and lives until its input ends, without
 *           a verb.
 *   raw     the same, with a child that the library does not notice: clone(2), not fork(3)
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "self.h"

static struct self self;

static void say(const char *what)
{
	puts(what);
	fflush(stdout);
}

static void *go_on(void *unused)
{
	(void)unused;
	char path[64], text[512], line[64], *state;
	snprintf(path, sizeof path, "/proc/%d/task/%d/stat", getpid(), getpid());
	do { /* until the main thread has ended */
		FILE *f = fopen(path, "r");
		WANT(f && fgets(text, sizeof text, f) && (state = strrchr(text, ')')));
		fclose(f);
	} while (state[2] != 'Z');
	do {
		use_self(&self);
		say("used");
	} while (fgets(line, sizeof line, stdin));
	_exit(0);
}

int main(int argc, char **argv)
{
	WANT(argc == 2);
	self = connect_self();
	use_self(&self);
	printf("number %u\n", self.qp[0]->qp_num);
	fflush(stdout);
	if (!strcmp(argv[1], "thread")) {
		pthread_t t;
		WANT(!pthread_create(&t, NULL, go_on, NULL));
		pthread_exit(NULL);
	}
	int alive[2]; /* a pipe that the parent has open for writing until it has ended */
	WANT(!pipe(alive));
	long child = strcmp(argv[1], "raw") ? fork() : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
	WANT(child >= 0);
	if (child)
		_exit(0);
	close(alive[1]);
	char c;
	if (read(alive[0], &c, 1) != 0 || write(1, "child\n", 6) != 6)
		_exit(1);
	while (read(0, &c, 1) > 0)
		;
	_exit(0);
}
