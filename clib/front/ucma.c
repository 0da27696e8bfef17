/*
 * The connection manager's file, for the distribution's librdmacm.so.1 (gotpatch.c).
 *
 * librdmacm opens /dev/infiniband/rdma_cm once for each event channel. It writes commands to
 * it, and each answer is stored in the program's memory, at an address in the command,
 * before write returns. It never reads. Its program polls the descriptor for events, and may
 * set O_NONBLOCK.
 *
 *  1. vb_cm_open makes an eventfd and a channel of the backend, which keeps a duplicate of it.
 *     The eventfd is readable while there are events. So poll, epoll and select, O_NONBLOCK
 *     and signals are the kernel's own business.
 *  2. vb_cm_write copies the command, calls the backend once, and copies the answer to the
 *     program. If GET_EVENT finds no event, it reads the eventfd, and waits there if it must.
 *  3. Memory of the program is accessed by system calls, so that a bad address is EFAULT; not
 *     that on the stack of the caller, where librdmacm has its commands and answers.
 *  4. All calls for other files become system calls. The C library's functions may be
 *     replaced by a library that calls librdmacm itself (librspreload).
 *
 * Numbers, lengths and errnos are those of Linux, drivers/infiniband/core/ucma.c.
 *
 * A child of fork() has its parent's descriptors, but neither its backend nor its ids: a
 * command for one of those is ENOENT. When the child makes an id on such a channel, the
 * channel gets an eventfd and a channel of the child's backend.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <rdma/rdma_user_cm.h>

#include "front.h"
#include "ucma.h"

#define NODE "/dev/infiniband/rdma_cm"

/* Commands that only newer headers have. */
enum { RESOLVE_IB_SERVICE = 23, WRITE_CM_EVENT = 24, COMMANDS = 25 };

/* Bytes of commands. The kernel reads all of a command, whatever length its header states,
 * except for the two whose last part is optional: of these it reads as much as is stated, and
 * at least the first number. */
struct command {
	uint16_t size, least;
	uint8_t response; /* where the address for the answer is, plus one; 0: there is no answer */
};
#define HAS(field_at) ((field_at) + 1)
static const struct command commands[COMMANDS] = {
	[RDMA_USER_CM_CMD_CREATE_ID] = {24, 24, HAS(8)},
	[RDMA_USER_CM_CMD_DESTROY_ID] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_BIND_IP] = {40, 40, 0},
	[RDMA_USER_CM_CMD_RESOLVE_IP] = {64, 64, 0},
	[RDMA_USER_CM_CMD_RESOLVE_ROUTE] = {8, 8, 0},
	[RDMA_USER_CM_CMD_QUERY_ROUTE] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_CONNECT] = {288, 280, 0},
	[RDMA_USER_CM_CMD_LISTEN] = {8, 8, 0},
	[RDMA_USER_CM_CMD_ACCEPT] = {296, 288, 0},
	[RDMA_USER_CM_CMD_REJECT] = {264, 264, 0},
	[RDMA_USER_CM_CMD_DISCONNECT] = {4, 4, 0},
	[RDMA_USER_CM_CMD_INIT_QP_ATTR] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_GET_EVENT] = {8, 8, HAS(0)},
	[RDMA_USER_CM_CMD_SET_OPTION] = {24, 24, 0},
	[RDMA_USER_CM_CMD_NOTIFY] = {8, 8, 0},
	[RDMA_USER_CM_CMD_JOIN_IP_MCAST] = {48, 48, HAS(0)},
	[RDMA_USER_CM_CMD_LEAVE_MCAST] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_MIGRATE_ID] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_QUERY] = {16, 16, HAS(0)},
	[RDMA_USER_CM_CMD_BIND] = {136, 136, 0},
	[RDMA_USER_CM_CMD_RESOLVE_ADDR] = {272, 272, 0},
	[RDMA_USER_CM_CMD_JOIN_MCAST] = {152, 152, HAS(0)},
	[RESOLVE_IB_SERVICE] = {88, 88, 0},
	[WRITE_CM_EVENT] = {320, 320, 0},
};

enum { MAX_OPTION = 4096, MAX_IN = 320 + MAX_OPTION, MAX_OUT = 1024 };

/* --- channels by descriptor --- */

struct channel {
	struct backend *backend; /* NULL: the descriptor is no channel */
	uint64_t handle;	 /* the backend's */
	dev_t rdev;
};

enum { CHUNK = 256, CHUNKS = 4096 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct channel *chunks[CHUNKS];

/* channel_locked returns the place of a descriptor; NULL: there is none, and make is not set
 * or memory is short. */
static struct channel *channel_locked(int fd, bool make)
{
	if (fd < 0 || fd / CHUNK >= CHUNKS)
		return NULL;
	struct channel **c = &chunks[fd / CHUNK];
	if (!*c && make)
		*c = calloc(CHUNK, sizeof **c);
	return *c ? &(*c)[fd % CHUNK] : NULL;
}

/* find copies the channel of a descriptor, and reports whether it has one. */
static bool find(int fd, struct channel *to)
{
	pthread_mutex_lock(&lock);
	struct channel *c = channel_locked(fd, false);
	bool found = c && c->backend;
	if (found)
		*to = *c;
	pthread_mutex_unlock(&lock);
	return found;
}

/* set makes a descriptor a channel, or none, and copies what it was before. */
static bool set(int fd, struct channel now, struct channel *before)
{
	pthread_mutex_lock(&lock);
	struct channel *c = channel_locked(fd, now.backend != NULL);
	*before = c ? *c : (struct channel){0};
	if (c)
		*c = now;
	pthread_mutex_unlock(&lock);
	return c;
}

static bool is_ours(const struct channel *c)
{
	return !atomic_load_explicit(&c->backend->dead, memory_order_relaxed);
}

/* end closes the backend's side of a channel, unless that is the parent process's. */
static void end(const struct channel *c)
{
	if (c->backend && is_ours(c))
		c->backend->vbe_cm_close(c->handle);
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void) { pthread_mutex_init(&lock, NULL); }

/* The C library's own read, a point at which a thread can be cancelled, as write is. */
static ssize_t (*libc_read)(int, void *, size_t);

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
	void *libc = dlopen("libc.so.6", RTLD_LAZY | RTLD_NOLOAD);
	*(void **)&libc_read = libc ? dlsym(libc, "read") : NULL;
}

/* When a process ends, the kernel destroys its ids, and their peers hear of it. */
__attribute__((destructor)) static void at_exit(void)
{
	struct backend *b = NULL;
	pthread_mutex_lock(&lock);
	for (int i = 0; i < CHUNKS && !b; i++)
		for (int j = 0; chunks[i] && j < CHUNK && !b; j++)
			if (chunks[i][j].backend && is_ours(&chunks[i][j]))
				b = chunks[i][j].backend;
	pthread_mutex_unlock(&lock);
	if (b)
		b->vbe_cm_close(VBE_CM_ALL);
}

/* --- memory of the program --- */

/* through copies by a pipe: where the kernel does not allow process_vm_readv, also a pipe
 * returns EFAULT for bad addresses. n is at most that of a page. */
static int through(void *to, const void *from, size_t n)
{
	int p[2], err = 0;
	if (syscall(SYS_pipe2, p, O_CLOEXEC | O_NONBLOCK))
		return errno;
	if (syscall(SYS_write, p[1], from, n) != (long)n || syscall(SYS_read, p[0], to, n) != (long)n)
		err = EFAULT;
	syscall(SYS_close, p[0]);
	syscall(SYS_close, p[1]);
	return err;
}

/* The stack of this thread: from low to top; top is 0 until stack_of_thread was called. A
 * thread whose stack is not known has an empty one. */
static __thread uintptr_t stack_low, stack_top;

/* Of the main thread's stack, which can grow, so much is taken to be nothing else. The kernel
 * maps nothing closer to its top than 128 MiB. */
enum { MAX_STACK = 8 << 20 };

static COLD void stack_of_thread(void)
{
	pthread_attr_t attr;
	void *low;
	size_t size;
	stack_low = stack_top = 1;
	int err = errno;
	if (!pthread_getattr_np(pthread_self(), &attr)) {
		if (!pthread_attr_getstack(&attr, &low, &size)) {
			stack_top = (uintptr_t)low + size;
			stack_low = size > MAX_STACK ? stack_top - MAX_STACK : (uintptr_t)low;
		}
		pthread_attr_destroy(&attr);
	}
	errno = err;
}

/* in_callers_frames reports whether memory is on this thread's stack, above the frame of this
 * function. Functions return to the frames there, so they can be read and written. A thread
 * that has switched to a stack of its own is not in its frames. */
static bool in_callers_frames(uint64_t at, size_t n)
{
	uintptr_t frame = (uintptr_t)__builtin_frame_address(0);
	if (!stack_top)
		stack_of_thread();
	return frame >= stack_low && at > frame && at < stack_top && n <= stack_top - at;
}

/* copy copies between this library's memory and the program's. It returns 0 or EFAULT; other
 * errnos if the copy could not be tried. */
static int copy(void *ours, uint64_t program, size_t n, bool out)
{
	struct iovec local = {ours, n}, remote = {(void *)(uintptr_t)program, n};
	void *theirs = remote.iov_base;
	if (!n)
		return 0;
	if (in_callers_frames(program, n)) {
		memcpy(out ? theirs : ours, out ? ours : theirs, n);
		return 0;
	}
	long r = syscall(out ? SYS_process_vm_writev : SYS_process_vm_readv, getpid(), &local, 1L, &remote, 1L, 0L);
	if (r == (long)n)
		return 0;
	if (r >= 0 || errno == EFAULT)
		return EFAULT;
	for (size_t done = 0, some; done < n; done += some) {
		some = n - done < 4096 ? n - done : 4096;
		int err = out ? through((char *)theirs + done, (char *)ours + done, some)
			      : through((char *)ours + done, (char *)theirs + done, some);
		if (err)
			return err;
	}
	return 0;
}

/* --- the functions in librdmacm's table --- */

/* rdev_of tells whether a path is the file. The device number is that of the kernel's own
 * node, if there is one: where the kernel has a connection manager, librdmacm compares it
 * with the number that the kernel has told it. It then tries /dev/char, too, where it opens
 * nothing else. */
static bool rdev_of(const char *path, dev_t *rdev)
{
	unsigned int major, minor;
	int n = 0;
	struct stat st;
	if (!strcmp(path, NODE)) {
		bool node = !syscall(SYS_newfstatat, AT_FDCWD, NODE, &st, 0) && S_ISCHR(st.st_mode);
		*rdev = node ? st.st_rdev : makedev(10, 0); /* misc devices have major number 10 */
		return true;
	}
	if (sscanf(path, "/dev/char/%u:%u%n", &major, &minor, &n) == 2 && n && !path[n]) {
		*rdev = makedev(major, minor);
		return true;
	}
	return false;
}

/* start makes the backend's side of a channel. It returns 0 or an errno. */
static int start(struct channel *c, int fd)
{
	struct backend *b = vb_backend();
	int64_t h = b ? b->vbe_cm_open(fd) : -ENODEV;
	if (h < 0)
		return (int)-h;
	c->backend = b;
	c->handle = (uint64_t)h;
	return 0;
}

static int open_channel(int flags, dev_t rdev)
{
	struct channel now = {.rdev = rdev}, before;
	int fd = eventfd(0, (flags & O_CLOEXEC ? EFD_CLOEXEC : 0) | (flags & O_NONBLOCK ? EFD_NONBLOCK : 0));
	if (fd < 0)
		return -1;
	int err = start(&now, fd);
	if (!err && !set(fd, now, &before)) {
		end(&now);
		err = ENOMEM;
	}
	if (err) {
		syscall(SYS_close, fd);
		errno = err;
		return -1;
	}
	end(&before); /* the program has closed that descriptor by itself */
	return fd;
}

int vb_cm_open(const char *path, int flags, ...)
{
	VB_WHOLE;
	va_list args;
	va_start(args, flags);
	mode_t mode = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(args, mode_t) : 0;
	va_end(args);
	int err = errno;
	dev_t rdev;
	if (rdev_of(path, &rdev))
		return open_channel(flags, rdev);
	errno = err;
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

int vb_cm_fstat(int fd, struct stat *st)
{
	struct channel c;
	if (syscall(SYS_fstat, fd, st))
		return -1;
	if (find(fd, &c)) {
		st->st_mode = S_IFCHR | 0666;
		st->st_rdev = c.rdev;
	}
	return 0;
}

int vb_cm_fxstat(int version, int fd, struct stat *st)
{
	(void)version; /* on the processors that there are, all have this structure */
	return vb_cm_fstat(fd, st);
}

int vb_cm_close(int fd)
{
	VB_WHOLE;
	struct channel before;
	set(fd, (struct channel){0}, &before);
	end(&before);
	return (int)syscall(SYS_close, fd);
}

/* --- commands --- */

static uint32_t number_at(const uint8_t *body, int at)
{
	uint32_t n;
	memcpy(&n, body + at, sizeof n);
	return n;
}

static uint64_t address_at(const uint8_t *body, int at)
{
	uint64_t a;
	memcpy(&a, body + at, sizeof a);
	return a;
}

/* renew gives this child of fork() a channel of its own in the place of its parent's. */
static int renew(int fd, struct channel *c)
{
	int flags = fcntl(fd, F_GETFL), own = fcntl(fd, F_GETFD);
	if (flags < 0 || own < 0)
		return errno;
	int fresh = eventfd(0, EFD_CLOEXEC | (flags & O_NONBLOCK ? EFD_NONBLOCK : 0));
	if (fresh < 0)
		return errno;
	struct channel now = {.rdev = c->rdev}, before;
	int err = start(&now, fresh);
	if (!err && syscall(SYS_dup3, fresh, fd, own & FD_CLOEXEC ? O_CLOEXEC : 0) < 0)
		err = errno;
	syscall(SYS_close, fresh);
	if (err) {
		end(&now);
		return err;
	}
	set(fd, now, &before);
	*c = now;
	return 0;
}

/* undo reverses a command whose answer could not be stored, as far as the kernel does. */
static void undo(const struct channel *c, uint32_t cmd, const uint8_t *out)
{
	bool join = cmd == RDMA_USER_CM_CMD_JOIN_IP_MCAST || cmd == RDMA_USER_CM_CMD_JOIN_MCAST;
	if (!join && cmd != RDMA_USER_CM_CMD_CREATE_ID)
		return;
	struct rdma_ucm_destroy_id body = {.id = number_at(out, 0)};
	struct rdma_ucm_destroy_id_resp resp;
	c->backend->vbe_cm_command(c->handle, join ? RDMA_USER_CM_CMD_LEAVE_MCAST : RDMA_USER_CM_CMD_DESTROY_ID,
				   (uint8_t *)&body, sizeof body, (uint8_t *)&resp, sizeof resp, 0);
}

/* execute executes a command, with its body, and stores the answer. It returns a length or a
 * negative errno. aux is what the backend needs besides the body. */
static int64_t execute(const struct channel *c, uint32_t cmd, uint8_t *body, uint32_t len, uint32_t room, int64_t aux)
{
	uint8_t out[MAX_OUT];
	if (cmd == RDMA_USER_CM_CMD_MIGRATE_ID) {
		struct channel from;
		int fd = (int)number_at(body, 12);
		if (!find(fd, &from))
			return fcntl(fd, F_GETFD) < 0 ? -ENOENT : -EINVAL;
		if (from.backend != c->backend)
			return -ENOENT; /* the parent process's */
		aux = (int64_t)from.handle;
	}
	if (cmd == RDMA_USER_CM_CMD_SET_OPTION) {
		uint32_t n = number_at(body, 20);
		if (n > MAX_OPTION)
			return -EINVAL;
		if (!copy(body + len, address_at(body, 0), n, false)) /* otherwise the backend misses it */
			len += n;
	}
	int64_t n = c->backend->vbe_cm_command(c->handle, cmd, body, len, out, room < MAX_OUT ? room : MAX_OUT, aux);
	if (n <= 0 || !commands[cmd].response)
		return n;
	int err = copy(out, address_at(body, commands[cmd].response - 1), (size_t)n, true);
	if (err)
		undo(c, cmd, out);
	return -err;
}

/* get_event executes GET_EVENT. An event that is there is taken at once. Otherwise it reads the
 * eventfd, which waits for one, and tells the backend so. If another thread was faster, it
 * waits again.
 *
 * An event that cannot be stored stays. So, where storing may fail, it is tried with zeros
 * before the event is taken. */
static int64_t get_event(int fd, const struct channel *c, uint8_t *body, uint32_t room)
{
	char zero[sizeof(struct rdma_ucm_event_resp)] = {0};
	const uint64_t to = address_at(body, 0);
	const size_t n = room < sizeof zero ? room : sizeof zero;
	if (room < offsetof(struct rdma_ucm_event_resp, reserved))
		return -ENOSPC;
	const bool sure = in_callers_frames(to, n);
	for (bool has_read = false;;) {
		if (sure || has_read) {
			int64_t got = execute(c, RDMA_USER_CM_CMD_GET_EVENT, body, 8, room, has_read);
			if (got != -EAGAIN)
				return got;
		}
		uint64_t count;
		ssize_t r = libc_read ? libc_read(fd, &count, sizeof count) : syscall(SYS_read, fd, &count, sizeof count);
		if (r < 0)
			return -errno;
		has_read = true;
		int err = sure ? 0 : copy(zero, to, n, true);
		if (err) {
			count = 1;
			if (syscall(SYS_write, fd, &count, sizeof count) < 0)
				return -errno;
			return -err;
		}
	}
}

/* command executes what was written, and returns 0 or a negative errno. */
static int64_t command(int fd, struct channel *c, uint64_t buf, size_t n)
{
	uint8_t body[MAX_IN];
	struct rdma_ucm_cmd_hdr h;
	if (n < sizeof h)
		return -EINVAL;
	int err = copy(&h, buf, sizeof h, false);
	if (err)
		return -err;
	if (h.cmd >= COMMANDS || h.in + sizeof h > n)
		return -EINVAL;
	const struct command *k = &commands[h.cmd];
	if (!k->size)
		return -ENOSYS;
	if (h.in < k->least && k->least < k->size)
		return -EINVAL;
	uint32_t len = k->least < k->size && h.in < k->size ? h.in : k->size;
	if ((err = copy(body, buf + sizeof h, len, false)))
		return -err;
	if (!is_ours(c)) {
		if (h.cmd != RDMA_USER_CM_CMD_CREATE_ID && h.cmd != RDMA_USER_CM_CMD_MIGRATE_ID)
			return h.cmd == RDMA_USER_CM_CMD_GET_EVENT ? -EINVAL : -ENOENT;
		if ((err = renew(fd, c)))
			return -err;
	}
	return h.cmd == RDMA_USER_CM_CMD_GET_EVENT ? get_event(fd, c, body, h.out) : execute(c, h.cmd, body, len, h.out, 0);
}

ssize_t vb_cm_write(int fd, const void *buf, size_t n)
{
	VB_WHOLE;
	struct channel c;
	if (!find(fd, &c))
		return syscall(SYS_write, fd, buf, n);
	int err = errno;
	int64_t r = command(fd, &c, (uintptr_t)buf, n);
	if (r < 0) {
		errno = (int)-r;
		return -1;
	}
	errno = err;
	return (ssize_t)n;
}
