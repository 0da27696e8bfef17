/*
 * The names of the engine's threads. The front tells by them whose threads are left when
 * the program's main thread has ended (../front/threads.c), and people see them in top -H.
 *
 * A thread has the name of the one that starts it, which may be a thread of the program in
 * a verb. So scripts/clib.sh has the linker give all calls of pthread_create in the engine,
 * those of the Go runtime, to this function.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "call.h"

/* Not there, and not needed, where the linker was not told so. */
int __real_pthread_create(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) __attribute__((weak));

struct start {
	void *(*run)(void *);
	void *arg;
};

static void *named(void *p)
{
	struct start s = *(struct start *)p;
	free(p);
	prctl(PR_SET_NAME, VBE_THREAD);
	return s.run(s.arg);
}

int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*run)(void *), void *arg)
{
	struct start *s = malloc(sizeof *s);
	if (!s)
		return EAGAIN;
	*s = (struct start){run, arg};
	int err = __real_pthread_create(t, attr, named, s);
	if (err)
		free(s);
	return err;
}
