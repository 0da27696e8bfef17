/*
 * The end of a program whose main thread calls pthread_exit. The C library ends the process
 * with its last thread; the backend's threads never end, so the process would go on without
 * a thread of the program's own. SIGTERM could not end it either: the backend's threads
 * block all signals of the program.
 *
 *  1. The names of the backend's threads begin with VBE_THREADS.
 *  2. When the main thread calls pthread_exit, main_ended is called, after the program's
 *     destructors. If no other thread of the program is left, it ends the process as the
 *     C library would have: exit(0).
 *  3. Otherwise it starts a thread that waits for the others, and then does the same.
 *
 * Signals need no care: while the program has a thread, that one gets them.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "front.h"

/* How often the waiting thread looks whether the other thread still exists: before Linux
 * 6.9 the kernel reports no end of a thread. */
enum { LOOK_MS = 200 };

static pthread_key_t key;
static bool has_key;

/* is_programs reports whether a thread exists and is the program's. The main thread stays
 * listed, as a zombie, when it has ended. The kernel's threads for io_uring do not count. */
static bool is_programs(const char *tid)
{
	char path[64], line[256] = "";
	snprintf(path, sizeof path, "/proc/self/task/%.20s/stat", tid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno != ENOENT && errno != ESRCH; /* out of descriptors, for one: the thread may exist */
	ssize_t n = read(fd, line, sizeof line - 1);
	bool gone = n < 0 && errno == ESRCH;
	close(fd);
	char *name = n > 0 ? strchr(line, '(') : NULL, *end = n > 0 ? strrchr(line, ')') : NULL;
	if (!name || !end || end < name || !end[1] || !end[2])
		return !gone;
	*end = 0;
	name++;
	char state = end[2];
	return state != 'Z' && state != 'X' && strncmp(name, VBE_THREADS, strlen(VBE_THREADS)) &&
	       strncmp(name, "iou-", 4);
}

/* another looks for a thread of the program other than the caller, and writes its ID to tid.
 * It reports whether there is one; also if it cannot look, and then tid is "". */
static bool another(char tid[32])
{
	char own[32];
	snprintf(own, sizeof own, "%d", (int)gettid());
	tid[0] = 0;
	DIR *dir = opendir("/proc/self/task");
	if (!dir)
		return true;
	bool found = false;
	for (struct dirent *d; !found && (d = readdir(dir));)
		if (d->d_name[0] != '.' && strcmp(d->d_name, own) && is_programs(d->d_name)) {
			snprintf(tid, 32, "%.31s", d->d_name);
			found = true;
		}
	closedir(dir);
	return found;
}

static void *await_others(void *unused)
{
	(void)unused;
	prctl(PR_SET_NAME, VBE_THREAD);
	char tid[32];
	while (another(tid))
		do
			nanosleep(&(struct timespec){.tv_nsec = LOOK_MS * 1000000L}, NULL);
		while (tid[0] && is_programs(tid));
	exit(0);
}

static void start_waiting(void)
{
	pthread_t t;
	pthread_attr_t attr;
	sigset_t all, old;
	if (pthread_attr_init(&attr))
		return;
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	if (pthread_create(&t, &attr, await_others, NULL))
		vb_say("the main thread has ended, and no thread could be started to end the process with the program's last one");
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	pthread_attr_destroy(&attr);
}

/* main_ended is the destructor of key: it is called when the main thread ends and the process
 * does not. It lets the program's destructors run first: the C library calls a destructor
 * whose value is set again, up to PTHREAD_DESTRUCTOR_ITERATIONS times. */
static void main_ended(void *round)
{
	char tid[32];
	if ((uintptr_t)round < PTHREAD_DESTRUCTOR_ITERATIONS) {
		pthread_setspecific(key, (void *)((uintptr_t)round + 1));
		return;
	}
	if (gettid() != getpid() || !vb_has_backend())
		return;
	if (another(tid))
		start_waiting();
	else
		exit(0);
}

void vb_watch_main(void)
{
	if (has_key && gettid() == getpid() && !pthread_getspecific(key))
		pthread_setspecific(key, (void *)1);
}

__attribute__((constructor)) static void at_load(void)
{
	has_key = !pthread_key_create(&key, main_ended);
	vb_watch_main();
}
