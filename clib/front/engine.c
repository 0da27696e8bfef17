/*
 * The engine, and when there is one.
 *
 *  1. Nothing happens when the library is loaded but a note for fork(): a program
 *     that never calls a verb gets no thread and no Go runtime.
 *  2. The first verb that needs the engine loads it, from the directory that this
 *     library lies in, or from where VERBENA_ENGINE points.
 *  3. A child of fork() has the memory of its parent's engine and none of its
 *     threads: that engine is dead to it. The child's first verb loads another one,
 *     a copy of the file in memory: the loader would give it the same one again.
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
static struct engine *current;				     /* also read without the lock */
static bool forked;					     /* an engine was loaded before a fork */

static struct vbe_front front_functions = {0, vb_on_cq_event, vb_on_async_event};

/* Nobody may be loading while memory is copied. */
static void before_fork(void) { pthread_mutex_lock(&loading); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&loading); }

/* is_engines tells whether a descriptor is a socket by which others know the
 * parent: with a name of ours, or the port of RoCE. */
static bool is_engines(int fd)
{
	enum { ROCE_PORT = 4791 };
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
		if (a.any.sa_family == AF_UNIX && !memcmp(a.un.sun_path, "\0verbena/", 9))
			return true;
		if (!peer && ((a.any.sa_family == AF_INET && a.in.sin_port == htons(ROCE_PORT)) ||
			      (a.any.sa_family == AF_INET6 && a.in6.sin6_port == htons(ROCE_PORT))))
			return true;
	}
	return false;
}

/* leave_to_parent closes the parent's sockets in a child. If the child outlived the
 * parent, the parent's address would stay taken, and its peers would wait. Only
 * calls that are allowed after fork are used. */
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
			if (d->name[0] >= '0' && d->name[0] <= '9' && fd != dir && is_engines(fd))
				close(fd);
		}
	}
	close(dir);
}

static void after_fork_in_child(void)
{
	struct engine *e = __atomic_load_n(&current, __ATOMIC_RELAXED);
	if (e) {
		leave_to_parent();
		atomic_store(&e->dead, true); /* in this process */
		__atomic_store_n(&current, NULL, __ATOMIC_RELAXED);
		forked = true;
	}
	pthread_mutex_init(&loading, NULL);
}

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* complain says why the library does not work: there is no other way to tell. */
static void complain(const char *what, const char *why)
{
	fprintf(stderr, "libibverbs (Verbena): %s: %s\n", what, why ? why : strerror(errno));
}

void vb_say(const char *why)
{
	const char *log = getenv("VERBENA_LOG");
	if (log && !strcmp(log, "1"))
		fprintf(stderr, "verbena: %s\n", why);
}

/* engine_path finds the engine's file. */
static bool engine_path(char *path, size_t size)
{
	const char *set = getenv("VERBENA_ENGINE");
	if (set && *set)
		return (size_t)snprintf(path, size, "%s", set) < size;
	Dl_info self;
	char real[PATH_MAX];
	if (!dladdr((void *)engine_path, &self) || !realpath(self.dli_fname, real))
		return false;
	char *slash = strrchr(real, '/');
	if (!slash)
		return false;
	*slash = 0;
	return (size_t)snprintf(path, size, "%s/libverbena-engine.so", real) < size;
}

/* copy makes a file in memory of the one at path, and its name. */
static int copy(const char *path, char *name, size_t size)
{
	int from = open(path, O_RDONLY | O_CLOEXEC);
	struct stat st;
	if (from < 0)
		return -1;
	int to = memfd_create("verbena-engine", MFD_CLOEXEC);
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

static bool find_functions(void *lib, struct engine *e)
{
#define X(result, name, args)                                                                                          \
	if (!(*(void **)&e->name = dlsym(lib, #name)))                                                                 \
		return false;
	VBE_FUNCTIONS(X)
#undef X
	return true;
}

/* open_engine loads the file. Its threads must not take the program's signals: one that the
 * program waits for with sigwait or signalfd, and has blocked in its own threads later,
 * would end the process. So they begin with all blocked; Go opens those that it needs.
 *
 * Deep binding keeps the program's symbols out of the engine. Sanitizers must be in there,
 * and refuse to run with it. */
static void *open_engine(const char *path)
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

/* load_at loads the engine that a file holds. path is the name by which people know it. */
static struct engine *load_at(const char *file, const char *path)
{
	void *lib = open_engine(file);
	if (!lib) {
		complain("the engine cannot be loaded", dlerror());
		return vb_fail(ENOSYS);
	}
	struct engine *e = calloc(1, sizeof *e);
	if (!e)
		return vb_fail(ENOMEM);
	/* The runtime starts in a thread of its own; the first call waits until it has. */
	if (!find_functions(lib, e) || e->vbe_version(&front_functions) != VBE_VERSION) {
		complain(path, "this is an engine of another version");
		free(e);
		return vb_fail(ENOSYS);
	}
	return e;
}

static struct engine *load(void)
{
	char path[PATH_MAX], name[64];
	if (!engine_path(path, sizeof path)) {
		complain("the engine is not found", "set VERBENA_ENGINE to the path of libverbena-engine.so");
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
	struct vb_descriptors d;
	vb_lend_descriptors(&d);
	front_functions.descriptors = d.above;
	struct engine *e = load_at(from, path);
	int err = errno;
	vb_return_descriptors(&d);
	if (fd >= 0)
		close(fd);
	if (!e)
		return vb_fail(err);
	vb_start_guard((void *)e->vbe_version);
	vb_watch_main();
	return e;
}

bool vb_has_engine(void) { return __atomic_load_n(&current, __ATOMIC_ACQUIRE); }

struct engine *vb_engine(void)
{
	struct engine *e = __atomic_load_n(&current, __ATOMIC_ACQUIRE);
	if (e)
		return e;
	pthread_mutex_lock(&loading);
	if (!(e = current) && (e = load()))
		__atomic_store_n(&current, e, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&loading);
	return e;
}
