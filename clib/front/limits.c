/*
 * What the process may have, around the loading of the engine. The Go runtime ends the
 * process where a limit stops it, and raises one limit that children of the program
 * would inherit. So:
 *
 *  1. Before the engine is loaded, vb_check_room tries for the descriptors and the
 *     address space that the runtime takes at its start. What is not to be had is an
 *     errno of the verb that wanted the engine.
 *  2. vb_lend_descriptors notes the limit on descriptors. The runtime raises the soft
 *     limit to one below the hard one while it starts, and the engine moves the runtime's
 *     own descriptors above the program's limit, where a loop that closes "all" does not
 *     come. The kernel's table of descriptors is made that long before there are threads:
 *     with them the kernel waits some milliseconds until nobody looks at the old one.
 *  3. vb_return_descriptors sets the soft limit back. Descriptors above it stay open.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "front.h"

/* What the runtime wants when it starts: the file of the engine, an epoll instance, an
 * eventfd, both of these once more, and some that it has for a moment. */
enum { DESCRIPTORS = 12 };

/* The address space that the engine takes until a device is open, and a little more.
 * Almost all of it is never used: 1.3 GiB are the runtime's, and for each of some nine
 * threads there are a stack of 8 MiB and 64 MiB from which the C library will allocate.
 * With less, some runs go well and others abort: each of these parts takes what it finds,
 * and the last one finds nothing. */
#define ADDRESS_SPACE ((size_t)2 << 30)

/* Descriptors that programs close in a loop, whatever their limit is; and the highest
 * number to which a descriptor is moved: the kernel keeps a table as long as the highest
 * number, and fork copies it. */
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
		snprintf(why, sizeof why, "the engine needs %zu MiB of address space: %s (ulimit -v)",
			 ADDRESS_SPACE >> 20, strerror(err));
		vb_say(why);
		return ENOMEM;
	}
	if ((err = check_descriptors())) {
		snprintf(why, sizeof why, "the engine needs %d descriptors: %s", DESCRIPTORS, strerror(err));
		vb_say(why);
	}
	return err;
}

/* lengthen_table makes the kernel's table of descriptors have the number above. If it
 * cannot, the engine does, and takes longer for it. */
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
	/* Another value is somebody else's, who wanted it. */
	if (now.rlim_max == d->limit.rlim_max && now.rlim_cur == d->limit.rlim_max - 1)
		setrlimit(RLIMIT_NOFILE, &d->limit);
}
