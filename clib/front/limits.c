/*
 * Limits of the process while the backend is loaded. The Go runtime ends the process if a
 * limit stops it, and raises one limit that children of the program would inherit. So:
 *
 *  1. Before the backend is loaded, vb_check_room tries to get the descriptors and the
 *     address space that the runtime takes at its start. If it cannot, the verb fails.
 *  2. vb_lend_descriptors notes the limit on descriptors. The runtime raises the soft
 *     limit to one below the hard one while it starts, and the backend moves the runtime's
 *     descriptors above the program's limit, which a loop that closes "all" does not
 *     reach. The kernel's table of descriptors gets that length before there are threads:
 *     with threads the kernel waits some milliseconds until none uses the old table.
 *  3. vb_return_descriptors restores the soft limit. Descriptors above it stay open.
 *
 * vb_prepare_cancel does early what the C library would do when a thread is first cancelled: a
 * program may have no descriptor left then, and Go must know the signal.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "front.h"

/* What the runtime needs when it starts: the file of the backend, an epoll instance, an
 * eventfd, both of these once more when they are moved, and some for a moment. */
enum { DESCRIPTORS = 12 };

/* The address space that the backend takes until a device is open, and a little more.
 * Almost all of it is never used: 1.3 GiB are the runtime's, and each of some nine threads
 * has a stack of 8 MiB and 64 MiB for the C library's allocations. With less, some runs work
 * and others abort, depending on which part comes last. */
#define ADDRESS_SPACE ((size_t)2 << 30)

/* Programs close descriptors below the first number in a loop, whatever their limit is. The
 * second is the highest number to which a descriptor is moved: the kernel's table is as long
 * as the highest number, and fork copies it. */
enum { USUALLY_CLOSED = 1024, HIGHEST = 1 << 16 };

static int check_descriptors(void)
{
	int fd[DESCRIPTORS], n = 0, err = 0;
	for (; n < DESCRIPTORS && !err; n++)
		if ((fd[n] = eventfd(0, EFD_CLOEXEC)) < 0) {
			err = errno;
			break;
		}
	while (n > 0)
		close(fd[--n]);
	return err;
}

static int check_address_space(void)
{
	void *p = mmap(NULL, ADDRESS_SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return errno;
	munmap(p, ADDRESS_SPACE);
	return 0;
}

int vb_check_room(void)
{
	char why[128];
	int err = check_address_space();
	if (err) {
		snprintf(why, sizeof why, "the backend needs %zu MiB of address space: %s (ulimit -v)",
			 ADDRESS_SPACE >> 20, strerror(err));
		vb_say(why);
		return ENOMEM;
	}
	if ((err = check_descriptors())) {
		snprintf(why, sizeof why, "the backend needs %d descriptors: %s", DESCRIPTORS, strerror(err));
		vb_say(why);
	}
	return err;
}

/* lengthen_table makes the kernel's table of descriptors long enough for d->above. If it
 * cannot, the backend's move does that, which takes longer. */
static void lengthen_table(const struct vb_descriptors *d)
{
	struct rlimit more = d->limit;
	int raised = 0, fd = eventfd(0, EFD_CLOEXEC);
	if (fd < 0)
		return;
	if (d->limit.rlim_cur <= (rlim_t)d->above && d->limit.rlim_max > (rlim_t)d->above) {
		more.rlim_cur = d->above + 1;
		raised = !setrlimit(RLIMIT_NOFILE, &more);
	}
	int high = fcntl(fd, F_DUPFD_CLOEXEC, d->above);
	if (high >= 0)
		close(high);
	if (raised)
		setrlimit(RLIMIT_NOFILE, &d->limit);
	close(fd);
}

void vb_lend_descriptors(struct vb_descriptors *d)
{
	d->noted = !getrlimit(RLIMIT_NOFILE, &d->limit);
	d->above = USUALLY_CLOSED;
	if (d->noted && d->limit.rlim_cur > USUALLY_CLOSED && d->limit.rlim_cur < HIGHEST &&
	    d->limit.rlim_cur < d->limit.rlim_max)
		d->above = (int)d->limit.rlim_cur;
	if (d->noted)
		lengthen_table(d);
}

void vb_return_descriptors(const struct vb_descriptors *d)
{
	struct rlimit now;
	if (!d->noted || getrlimit(RLIMIT_NOFILE, &now))
		return;
	/* Another value is not the runtime's, but was set on purpose. */
	if (now.rlim_max == d->limit.rlim_max && now.rlim_cur == d->limit.rlim_max - 1)
		setrlimit(RLIMIT_NOFILE, &d->limit);
}

static void *wait_for_cancel(void *unused)
{
	for (;;)
		pause();
	return unused;
}

/* vb_prepare_cancel has to run before the backend is loaded.
 *
 * pthread_exit and pthread_cancel load libgcc_s when they are first called, and end the process if
 * they cannot. Where there is none, they would not find one either.
 *
 * pthread_cancel also installs the handler of its signal then, without SA_ONSTACK. That signal may
 * reach a thread inside the backend: pthread_cancel sends it if the thread's type is asynchronous,
 * and the thread may have entered a verb, which defers cancellation, between the two. On the small
 * stack of a goroutine the signal's frame would overwrite other goroutines. Go sets SA_ONSTACK
 * for handlers that it finds when it starts, and no other call installs this one again. So a
 * thread is cancelled here. */
void vb_prepare_cancel(void)
{
	pthread_t t;
	sigset_t all, old;
	int state;
	dlopen("libgcc_s.so.1", RTLD_NOW | RTLD_NODELETE);
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old); /* the thread gets none of the program's signals */
	if (!pthread_create(&t, NULL, wait_for_cancel, NULL)) {
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state); /* pthread_join is a cancellation point */
		pthread_cancel(t);
		pthread_join(t, NULL);
		pthread_setcancelstate(state, NULL);
	}
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}
