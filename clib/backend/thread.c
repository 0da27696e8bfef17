/*
 * Gives the backend's threads a name. By this name the front tells them from the program's
 * threads when the main thread has ended (../front/threads.c), and people see it in top -H.
 *
 * A new thread inherits the name of its creator, which may be a thread of the program in a
 * verb. So scripts/clib.sh has the linker redirect all calls of pthread_create in the backend,
 * which are the Go runtime's, to __wrap_pthread_create.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "call.h"

/* Weak: without that linker option, as in tests, it does not exist and is not called. */
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
