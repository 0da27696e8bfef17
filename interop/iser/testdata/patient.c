/*
 * patient.c is preloaded into programs on libiscsi, for two faults of its iSER (1.19) that would make
 * them crash now and then:
 *
 *  1. It takes it for an error if poll returns after a second without an answer, which may happen
 *     on a busy machine.
 *  2. It does not clear the memory of a connection: the second one of a program has what was left
 *     there for pointers.
 */
#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

int poll(struct pollfd *fds, nfds_t n, int timeout)
{
	struct timespec minute = {60, 0}, given = {timeout / 1000, timeout % 1000 * 1000000};
	return ppoll(fds, n, timeout < 0 ? NULL : timeout == 1000 ? &minute : &given, NULL);
}

void *malloc(size_t n) { return calloc(1, n); }
