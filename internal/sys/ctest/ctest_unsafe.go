//go:build cgo

package ctest

/*
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

struct ct_stack {
	pthread_t thread;
	pthread_mutex_t mu;
	pthread_cond_t cond;
	char *at;
	size_t size;
	int end;
};

// ct_hold keeps an array of the wanted size on the thread's stack until ct_end sets end.
static void *ct_hold(void *arg)
{
	struct ct_stack *s = arg;
	char hole[s->size];

	memset(hole, 0, s->size);
	pthread_mutex_lock(&s->mu);
	s->at = hole;
	pthread_cond_broadcast(&s->cond);
	while (!s->end)
		pthread_cond_wait(&s->cond, &s->mu);
	pthread_mutex_unlock(&s->mu);
	return NULL;
}

static struct ct_stack *ct_start(size_t size)
{
	pthread_attr_t attr;
	struct ct_stack *s = calloc(1, sizeof *s);

	if (s == NULL)
		return NULL;
	s->size = size;
	pthread_mutex_init(&s->mu, NULL);
	pthread_cond_init(&s->cond, NULL);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, size + (256 << 10));
	if (pthread_create(&s->thread, &attr, ct_hold, s) != 0) {
		free(s);
		return NULL;
	}
	pthread_attr_destroy(&attr);
	pthread_mutex_lock(&s->mu);
	while (s->at == NULL)
		pthread_cond_wait(&s->cond, &s->mu);
	pthread_mutex_unlock(&s->mu);
	return s;
}

static void ct_end(struct ct_stack *s)
{
	pthread_mutex_lock(&s->mu);
	s->end = 1;
	pthread_cond_broadcast(&s->cond);
	pthread_mutex_unlock(&s->mu);
	pthread_join(s->thread, NULL);
	free(s);
}

// ct_fork forks, and the child writes over its copy of some memory, gives pages of
// it back, and ends. It returns the child's exit status, or -1.
static int ct_fork(char *at, size_t size)
{
	int status;
	pid_t pid = fork();

	if (pid < 0)
		return -1;
	if (pid == 0) {
		memset(at, 0x5a, size);
		char *p = malloc(1 << 20);
		free(p);
		_exit(at[size - 1] == 0x5a ? 0 : 1);
	}
	while (waitpid(pid, &status, 0) < 0)
		;
	return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
*/
import "C"

import (
	"fmt"
	"unsafe"
)

// Malloc returns zeroed memory of the C heap. It is sound to make a slice of it
// until it is freed.
func Malloc(n uint64) (b []byte, free func()) {
	p := C.calloc(1, C.size_t(n))
	if p == nil {
		panic("ctest: no memory")
	}
	return unsafe.Slice((*byte)(p), n), func() { C.free(p) }
}

// Stack returns zeroed memory on the stack of a C thread. free ends the thread.
func Stack(n uint64) (b []byte, free func()) {
	s := C.ct_start(C.size_t(n))
	if s == nil {
		panic("ctest: no thread")
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(s.at)), n), func() { C.ct_end(s) }
}

// Fork forks, as a C program does. The child writes all over b, in its own copy
// if that is private, and ends; Fork waits for it.
func Fork(b []byte) error {
	if status := C.ct_fork((*C.char)(unsafe.Pointer(unsafe.SliceData(b))), C.size_t(len(b))); status != 0 {
		return fmt.Errorf("the child of a fork: status %d", status)
	}
	return nil
}
