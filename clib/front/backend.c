/*
 * Loading the backend.
 *
 *  1. When this library is loaded, it registers fork handlers and a destructor for the end
 *     of the main thread (threads.c), and no more: a program that never calls a verb gets
 *     no thread and no Go runtime.
 *  2. The first verb that needs the backend loads it, from the directory that this
 *     library lies in, or from where VERBENA_BACKEND points.
 *  3. A child of fork() has the memory of its parent's backend and none of its threads:
 *     that backend is dead. The child's first verb loads another one, from a copy of the
 *     file in memory: for the same file the loader would return the dead one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "front.h"

static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct backend *current;				     /* also read without the lock */
static bool forked;					     /* this process inherited a dead backend */

static struct vbe_front front_functions = {0, NULL, vb_on_cq_event, vb_on_async_event};

/* No thread may be loading the backend while fork() copies memory. */
static void before_fork(void) { pthread_mutex_lock(&loading); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&loading); }

/* is_backends reports whether a descriptor is a socket of the parent's backend, by which
 * other processes know it: one with a name of ours, or with the port of RoCE. */
static bool is_backends(int fd)
{
	enum { ROCE_PORT = 4791 };
	/* of devices, of importers of dma-bufs, and of handles of GPU memory */
	static const char *const names[] = {"verbena/", "verbena-dmabuf:", "verbena-gpu:"};
	union {
		struct sockaddr any;
		struct sockaddr_un un;
		struct sockaddr_in in;
		struct sockaddr_in6 in6;
	} a;
	for (int peer = 0; peer < 2; peer++) {
		socklen_t n = sizeof a;
		memset(&a, 0, sizeof a);
		if (peer ? getpeername(fd, &a.any, &n) : getsockname(fd, &a.any, &n))
			continue;
		for (size_t i = 0; a.any.sa_family == AF_UNIX && i < sizeof names / sizeof *names; i++)
			if (!a.un.sun_path[0] && !strncmp(a.un.sun_path + 1, names[i], strlen(names[i])))
				return true;
		if (!peer && ((a.any.sa_family == AF_INET && a.in.sin_port == htons(ROCE_PORT)) ||
			      (a.any.sa_family == AF_INET6 && a.in6.sin6_port == htons(ROCE_PORT))))
			return true;
	}
	return false;
}

/* leave_to_parent closes the parent's sockets in a child. If the child kept them and
 * outlived the parent, the parent's address would stay taken and its peers would wait. It
 * makes only calls that are allowed after fork in a process with threads. */
static void leave_to_parent(void)
{
	char buf[4096];
	int dir = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir < 0)
		return;
	for (long n; (n = syscall(SYS_getdents64, dir, buf, sizeof buf)) > 0;) {
		for (long at = 0; at < n;) {
			struct {
				uint64_t ino, off;
				uint16_t len;
				uint8_t type;
				char name[];
			} *d = (void *)(buf + at);
			at += d->len;
			int fd = 0;
			for (const char *c = d->name; *c >= '0' && *c <= '9'; c++)
				fd = 10 * fd + *c - '0';
			if (d->name[0] >= '0' && d->name[0] <= '9' && fd != dir && is_backends(fd))
				close(fd);
		}
	}
	close(dir);
}

static void after_fork_in_child(void)
{
	struct backend *b = __atomic_load_n(&current, __ATOMIC_RELAXED);
	if (b) {
		leave_to_parent();
		atomic_store(&b->dead, true); /* in this process */
		__atomic_store_n(&current, NULL, __ATOMIC_RELAXED);
		forked = true;
	}
	pthread_mutex_init(&loading, NULL);
}

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* complain prints why the library does not work: the errno of a verb does not say that. */
static void complain(const char *what, const char *why)
{
	fprintf(stderr, "libibverbs (Verbena): %s: %s\n", what, why ? why : strerror(errno));
}

void vb_say(const char *why)
{
	const char *log = vb_setting("VERBENA_LOG");
	if (log && !strcmp(log, "1"))
		fprintf(stderr, "verbena: %s\n", why);
}

/* backend_path finds the backend's file. */
static bool backend_path(char *path, size_t size)
{
	const char *set = vb_setting("VERBENA_BACKEND");
	if (set && *set)
		return (size_t)snprintf(path, size, "%s", set) < size;
	Dl_info self;
	char real[PATH_MAX];
	if (!dladdr((void *)backend_path, &self) || !realpath(self.dli_fname, real))
		return false;
	char *slash = strrchr(real, '/');
	if (!slash)
		return false;
	*slash = 0;
	return (size_t)snprintf(path, size, "%s/libverbena-backend.so", real) < size;
}

/* copy copies the file at path into memory. It returns a descriptor, or -1, and writes a
 * name for the loader. */
static int copy(const char *path, char *name, size_t size)
{
	int from = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;
	if (from < 0)
		return -1;
	int to = memfd_create("verbena-backend", MFD_CLOEXEC);
	if (to < 0 || fstat(from, &st)) {
		close(from);
		if (to >= 0)
			close(to);
		return -1;
	}
	off_t at = 0;
	while (at < st.st_size) {
		ssize_t n = sendfile(to, from, &at, (size_t)(st.st_size - at));
		if (n <= 0) {
			close(from);
			close(to);
			return -1;
		}
	}
	close(from);
	snprintf(name, size, "/proc/self/fd/%d", to);
	return to;
}

static bool find_functions(void *lib, struct backend *b)
{
#define X(result, name, args)                                                                                          \
	if (!(*(void **)&b->name = dlsym(lib, #name)))                                                                 \
		return false;
	VBE_FUNCTIONS(X)
#undef X
	return true;
}

/* open_backend loads the file. The backend's threads must not receive the program's signals: a
 * signal that the program waits for with sigwait or signalfd, and blocks in its own threads
 * only later, would end the process. So the backend's threads start with all signals blocked;
 * the Go runtime unblocks those that it needs.
 *
 * Deep binding keeps the program's symbols out of the backend. A sanitizer must replace
 * symbols there, and refuses to run with deep binding. */
static void *open_backend(const char *path)
{
	static const char *const sanitizers[] = {"__asan_init", "__tsan_init", "__msan_init", "__hwasan_init"};
	int flags = RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND;
	for (size_t i = 0; i < sizeof sanitizers / sizeof *sanitizers; i++)
		if (dlsym(RTLD_DEFAULT, sanitizers[i]))
			flags &= ~RTLD_DEEPBIND;
	sigset_t all, old;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	void *lib = dlopen(path, flags);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return lib;
}

/* load_at loads the backend from a file. path is its name in messages. */
static struct backend *load_at(const char *file, const char *path)
{
	void *lib = open_backend(file);
	if (!lib) {
		complain("the backend cannot be loaded", dlerror());
		return vb_fail(ENOSYS);
	}
	struct backend *b = calloc(1, sizeof *b);
	if (!b)
		return vb_fail(ENOMEM);
	/* The Go runtime starts in a thread of its own; the first call waits for that. */
	if (!find_functions(lib, b) || b->vbe_version(&front_functions) != VBE_VERSION) {
		complain(path, "this is a backend of another version");
		free(b);
		return vb_fail(ENOSYS);
	}
	return b;
}

static struct backend *load(void)
{
	char path[PATH_MAX], name[64];
	if (!backend_path(path, sizeof path)) {
		complain("the backend is not found", "set VERBENA_BACKEND to the path of libverbena-backend.so");
		return vb_fail(ENOSYS);
	}
	const char *from = path;
	int fd = -1, room = vb_check_room();
	if (room)
		return vb_fail(room);
	if (forked) {
		if ((fd = copy(path, name, sizeof name)) < 0) {
			complain(path, NULL);
			return vb_fail(ENOSYS);
		}
		from = name;
	}
	char *settings = vb_settings();
	if (!settings) {
		if (fd >= 0)
			close(fd);
		return vb_fail(ENOMEM);
	}
	vb_prepare_cancel();
	struct vb_descriptors d;
	vb_lend_descriptors(&d);
	front_functions.descriptors = d.above;
	front_functions.settings = settings;
	struct vb_filled filled;
	vb_fill_below_program(&filled);
	struct backend *b = load_at(from, path);
	int err = errno;
	vb_empty_below_program(&filled);
	free(settings);
	vb_return_descriptors(&d);
	if (fd >= 0)
		close(fd);
	if (!b)
		return vb_fail(err);
	vb_start_guard((void *)b->vbe_version);
	vb_watch_main();
	return b;
}

struct backend *vb_loaded_backend(void) { return __atomic_load_n(&current, __ATOMIC_ACQUIRE); }
bool vb_has_backend(void) { return vb_loaded_backend(); }

struct backend *vb_backend(void)
{
	struct backend *b = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
	if (b)
		return b;
	pthread_mutex_lock(&loading);
	if (!(b = current) && (b = load()))
		__atomic_store_n(&current, b, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&loading);
	return b;
}

/* A program that leaves its devices to the end of the process, as those on librdmacm do, gets its
 * counters too. */
__attribute__((destructor)) static void at_exit(void)
{
	struct backend *b = vb_loaded_backend();
	const char *stats = vb_setting("VERBENA_STATS");
	if (b && !b->dead && stats && *stats)
		b->vbe_write_stats();
}
