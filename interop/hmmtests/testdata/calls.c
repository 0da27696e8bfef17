// A library to preload that answers for /dev/hmm_dmirror0 to 3: the calls that a program makes. Linux's test driver of HMM,
// lib/test_hmm.c, has the contract; dmirror.c has the driver.
//
// A process has a space of its own from its first open of a device on, a child of a fork too. Its memory joins the space when
// a command names it. A file that was inherited cannot be used, since it is of the parent's memory, and a duplicate of the
// descriptor is not the device's.

#include "dmirror.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>

#undef mmap
#undef munmap
#undef madvise
#undef mremap

#define FILES 4096

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards what the library has, but for files
static struct dmirror *files[FILES];			 // by descriptor
static int *process; // 1 in a process that knows that it is one; a fork wipes it

static struct dmirror *file_of(int fd)
{
	return fd < 0 || fd >= FILES ? NULL : __atomic_load_n(&files[fd], __ATOMIC_ACQUIRE);
}

__attribute__((constructor)) static void start(void)
{
	int *p = own_mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED || own_madvise(p, PAGE, MADV_WIPEONFORK) != 0)
		abort();
	*p = 1;
	process = p;
}

// begin takes the lock. In a child of a fork it forgets what the parent has.
static void begin(void)
{
	int wiped = 0;

	if (process != NULL && __atomic_compare_exchange_n(process, &wiped, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
		pthread_mutex_init(&lock, NULL);
		own_forked();
		dm_space = NULL;
		dm_coherent = 0;
		dm_forked();
		for (int i = 0; i < FILES; i++)
			if (files[i] != NULL)
				files[i]->inherited = 1;
	}
	pthread_mutex_lock(&lock);
}

static int fail(int err)
{
	if (err == 0)
		return 0;
	errno = err;
	return -1;
}

static int open_file(int dir, const char *path, int flags, unsigned mode)
{
	static const char name[] = "/dev/hmm_dmirror";
	struct dmirror *d;
	int fd, err;

	if (strncmp(path, name, sizeof name - 1) != 0 || strlen(path) != sizeof name)
		return (int)syscall(SYS_openat, dir, path, flags, mode);
	if (path[sizeof name - 1] < '0' || path[sizeof name - 1] >= '0' + DEVICES)
		return fail(ENOENT);
	if ((d = calloc(1, sizeof *d)) == NULL)
		return fail(ENOMEM);
	d->device = path[sizeof name - 1] - '0';
	begin();
	err = dm_open();
	fd = err == 0 ? memfd_create(path + 5, flags & O_CLOEXEC ? MFD_CLOEXEC : 0) : -1;
	if (fd < 0 || fd >= FILES) {
		if (fd >= 0)
			syscall(SYS_close, fd);
		pthread_mutex_unlock(&lock);
		free(d);
		return fail(err != 0 ? err : EMFILE);
	}
	__atomic_store_n(&files[fd], d, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return fd;
}

#define MODE(last) \
	unsigned mode = 0; \
	if (last & O_CREAT || (last & O_TMPFILE) == O_TMPFILE) { \
		va_list args; \
		va_start(args, last); \
		mode = va_arg(args, unsigned); \
		va_end(args); \
	}

int open(const char *path, int flags, ...)
{
	MODE(flags)
	return open_file(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) __attribute__((alias("open")));

int openat(int dir, const char *path, int flags, ...)
{
	MODE(flags)
	return open_file(dir, path, flags, mode);
}

int openat64(int dir, const char *path, int flags, ...) __attribute__((alias("openat")));

int ioctl(int fd, unsigned long request, ...)
{
	struct dmirror *d = file_of(fd);
	unsigned long arg;
	va_list args;
	int err;

	va_start(args, request);
	arg = va_arg(args, unsigned long);
	va_end(args);
	if (d == NULL)
		return (int)syscall(SYS_ioctl, fd, request, arg);
	begin();
	err = dm_command(d, request, arg);
	pthread_mutex_unlock(&lock);
	return fail(err);
}

// change is called before the program changes mappings. Of coherent pages the kernel does not report that, since they are
// mappings of a device's memory: they come home.
static void change(void *addr, size_t bytes)
{
	uint64_t start = (uintptr_t)addr & ~(PAGE - 1), end = ((uintptr_t)addr + bytes + PAGE - 1) & ~(PAGE - 1);

	if (dm_space != NULL && dm_coherent && *process)
		dm_uncohere(start, end);
}

int munmap(void *addr, size_t bytes)
{
	change(addr, bytes);
	return own_munmap(addr, bytes);
}

int madvise(void *addr, size_t bytes, int advice)
{
	change(addr, bytes);
	return own_madvise(addr, bytes, advice);
}

void *mremap(void *addr, size_t old, size_t bytes, int flags, ...)
{
	void *to = NULL;
	va_list args;

	va_start(args, flags);
	if (flags & MREMAP_FIXED) {
		to = va_arg(args, void *);
		change(to, bytes);
	}
	va_end(args);
	change(addr, old);
	return own_mremap(addr, old, bytes, flags, to);
}

// mmap gives a mapping pages of its own, which are present, as the driver does.
void *mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t off)
{
	int own;
	void *p = MAP_FAILED;

	if (flags & MAP_FIXED)
		change(addr, bytes);
	if (flags & MAP_ANONYMOUS || file_of(fd) == NULL)
		return (void *)syscall(SYS_mmap, addr, bytes, prot, flags, fd, off);
	if ((own = memfd_create("hmm_dmirror", MFD_CLOEXEC)) < 0)
		return MAP_FAILED;
	if (ftruncate(own, (off_t)bytes) == 0)
		p = (void *)syscall(SYS_mmap, addr, bytes, prot, flags, own, 0);
	if (p != MAP_FAILED && prot & PROT_READ)
		own_madvise(p, bytes, MADV_POPULATE_READ);
	syscall(SYS_close, own);
	return p;
}

void *mmap64(void *addr, size_t bytes, int prot, int flags, int fd, off_t off) __attribute__((alias("mmap")));

// close brings home what the device has, as the driver does.
int close(int fd)
{
	struct dmirror *d = file_of(fd);

	if (d != NULL) {
		begin();
		if (!d->inherited && dm_space != NULL) {
			dm_evict(d->device);
			dm_forget(d);
		}
		__atomic_store_n(&files[fd], NULL, __ATOMIC_RELEASE);
		pthread_mutex_unlock(&lock);
		free(d);
	}
	return (int)syscall(SYS_close, fd);
}
