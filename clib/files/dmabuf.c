/*
 * Descriptors of verbena's dma-bufs, for programs that treat them as the kernel's: the ioctls SYNC,
 * SET_NAME, EXPORT_SYNC_FILE and IMPORT_SYNC_FILE, poll and lseek.
 *
 * Such a descriptor is a memory file. Its name leads to a socket of the process that has the
 * buffer (dmabuf/control.go), which may be this one, and is asked by one message for each call:
 *
 *	the kind CONTROL, a version, the ioctl's number, its flags, a name in 32 bytes;
 *	with it the descriptor, and for IMPORT_SYNC_FILE that of a fence
 *
 * The answer is an errno, and perhaps the descriptor of fences, which this process waits for itself.
 *
 * Not seen: select, epoll (which does not take memory files: EPERM), read and write, and system calls
 * that the program makes without the C library's functions.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/ioctl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "dmabuf.h"

#define PUBLIC __attribute__((visibility("default")))

/* Of linux/dma-buf.h and linux/sync_file.h, which may be older than the calls. */
#define IOCTL_SYNC _IOW('b', 0, uint64_t)
#define IOCTL_SET_NAME_A _IOW('b', 1, uint32_t)
#define IOCTL_SET_NAME_B _IOW('b', 1, uint64_t)
#define IOCTL_EXPORT_SYNC_FILE _IOWR('b', 2, struct sync_file)
#define IOCTL_IMPORT_SYNC_FILE _IOW('b', 3, struct sync_file)
#define IOCTL_FILE_INFO _IOWR('>', 4, struct file_info)
enum { SYNC_READ = 1, SYNC_WRITE = 2, SYNC_END = 4, NAME_ROOM = 32 };

struct sync_file {
	uint32_t flags;
	int32_t fd;
};

struct file_info {
	char name[32];
	int32_t status;
	uint32_t flags, num_fences, pad;
	uint64_t fences; /* the address of an array of struct fence_info */
};

struct fence_info {
	char object[32], driver[32];
	int32_t status;
	uint32_t flags;
	uint64_t when;
};

/* The messages, as in dmabuf/remote.go. */
enum { MSG_CONTROL = 14, MSG_CONTROLLED = 15, VERSION = 2 };

struct control {
	uint64_t kind, version, request, flags;
	char name[NAME_ROOM];
};

#define PREFIX "verbena-dmabuf:"
#define FENCE_PREFIX "verbena-fence:"
enum { TOKEN = 32, NAME = sizeof PREFIX - 1 + TOKEN };

int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t room);
int __ppoll_chk(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask, size_t room);
void __chk_fail(void) __attribute__((noreturn));

/* The functions that those below call: the C library's, looked up when this library is initialized. Until
 * then those below make the system call themselves. */
static int (*next_ppoll)(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask);
static int (*next_poll)(struct pollfd *fds, nfds_t n, int timeout);
static off_t (*next_lseek)(int fd, off_t off, int whence);

static dev_t memory_files; /* the device that memory files are on */
static bool known;	   /* memory_files is set */

__attribute__((constructor)) static void at_load(void)
{
	next_ppoll = (__typeof__(next_ppoll))dlsym(RTLD_NEXT, "ppoll");
	next_poll = (__typeof__(next_poll))dlsym(RTLD_NEXT, "poll");
	next_lseek = (__typeof__(next_lseek))dlsym(RTLD_NEXT, "lseek");
	struct stat st;
	int fd = memfd_create("verbena", MFD_CLOEXEC);
	if (fd >= 0 && !fstat(fd, &st)) {
		memory_files = st.st_dev;
		known = true;
	}
	if (fd >= 0)
		close(fd);
}

/* --- whose descriptor it is --- */

/* ours reports whether a descriptor is that of a dma-buf of verbena's, writes the name of the socket
 * of its process, and stores its size. It leaves errno. */
static bool ours(int fd, char *name, off_t *size)
{
	int err = errno;
	struct stat st;
	char path[32], link[128];
	bool is = false;
	if (!fstat(fd, &st) && S_ISREG(st.st_mode) && (!known || st.st_dev == memory_files)) {
		snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
		ssize_t n = readlink(path, link, sizeof link);
		static const char start[] = "/memfd:" PREFIX;
		enum { FROM = 7 }; /* behind /memfd: */
		is = n >= FROM + NAME && !memcmp(link, start, sizeof start - 1) &&
		     (n == FROM + NAME || link[FROM + NAME] == ' ');
		if (is) {
			memcpy(name, link + FROM, NAME);
			*size = st.st_size;
		}
	}
	errno = err;
	return is;
}

/* our_fence reports whether a descriptor is that of a fence of verbena's. */
static bool our_fence(int fd)
{
	struct sockaddr_un a;
	socklen_t n = sizeof a;
	int err = errno;
	size_t head = offsetof(struct sockaddr_un, sun_path);
	bool is = !getsockname(fd, (struct sockaddr *)&a, &n) && n > head + 1 + strlen(FENCE_PREFIX) &&
		  a.sun_family == AF_UNIX && !a.sun_path[0] &&
		  !memcmp(a.sun_path + 1, FENCE_PREFIX, strlen(FENCE_PREFIX));
	errno = err;
	return is;
}

/* --- asking its process --- */

enum { PATIENCE = 10 }; /* seconds that the other process may take */

/* exchange sends a message with descriptors and receives the answer. It returns the answer's errno, or
 * that of the failure, and stores the descriptor that came with the answer, or -1. */
static int exchange(int s, const struct control *msg, const int *fds, int n, int *got)
{
	union {
		char room[CMSG_SPACE(2 * sizeof(int))];
		struct cmsghdr align;
	} extra = {0};
	struct iovec to = {(void *)msg, sizeof *msg};
	struct msghdr m = {.msg_iov = &to, .msg_iovlen = 1, .msg_control = extra.room,
			   .msg_controllen = CMSG_SPACE((size_t)n * sizeof(int))};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN((size_t)n * sizeof(int));
	memcpy(CMSG_DATA(c), fds, (size_t)n * sizeof(int));
	ssize_t r;
	while ((r = sendmsg(s, &m, MSG_NOSIGNAL)) < 0 && errno == EINTR)
		;
	if (r < 0)
		return errno == EBADF ? EINVAL : errno == EAGAIN ? ETIMEDOUT : errno == EPIPE ? ENODEV : errno;

	uint64_t answer[2] = {0};
	struct iovec from = {answer, sizeof answer};
	m = (struct msghdr){.msg_iov = &from, .msg_iovlen = 1, .msg_control = extra.room, .msg_controllen = sizeof extra.room};
	while ((r = recvmsg(s, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
		;
	if (r < 0)
		return errno == EAGAIN ? ETIMEDOUT : errno == ECONNRESET ? ENODEV : errno;
	for (c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		for (size_t i = 0; i < count; i++) {
			int fd;
			memcpy(&fd, CMSG_DATA(c) + i * sizeof fd, sizeof fd);
			if (*got < 0)
				*got = fd;
			else
				close(fd);
		}
	}
	if (r == 0)
		return ENODEV;
	if (m.msg_flags & MSG_CTRUNC)
		return EMFILE;
	if (r != sizeof answer || answer[0] != MSG_CONTROLLED || answer[1] > 4095)
		return EPROTO;
	return (int)answer[1];
}

/* ask asks the process of a buffer. fence is a descriptor to send, or -1. It returns an errno, ENODEV if the
 * process has ended, and stores the descriptor that came with the answer, or -1. */
static int ask(int fd, const char *name, const struct control *msg, int fence, int *got)
{
	struct sockaddr_un a = {.sun_family = AF_UNIX};
	socklen_t n = offsetof(struct sockaddr_un, sun_path) + 1 + NAME; /* its first byte is zero: an abstract name */
	struct timeval limit = {.tv_sec = PATIENCE};
	int fds[2] = {fd, fence}, r, cancel;
	*got = -1;
	memcpy(a.sun_path + 1, name, NAME);
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* ioctl is no cancellation point */
	int s = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	if (s < 0) {
		r = errno;
	} else {
		setsockopt(s, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
		setsockopt(s, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
		while ((r = connect(s, (struct sockaddr *)&a, n)) && errno == EINTR)
			;
		if (r)
			r = errno == EAGAIN ? ETIMEDOUT : ENODEV;
		else
			r = exchange(s, msg, fds, fence < 0 ? 1 : 2, got);
		close(s);
	}
	pthread_setcancelstate(cancel, NULL);
	if (r && *got >= 0) {
		close(*got);
		*got = -1;
	}
	return r;
}

static struct control control(uint64_t request, uint64_t flags)
{
	return (struct control){.kind = MSG_CONTROL, .version = VERSION, .request = request, .flags = flags};
}

/* --- ioctl --- */

/* from_program copies what an ioctl's argument points to. It reports whether that is mapped. */
static bool from_program(void *to, const void *from, size_t n)
{
	struct iovec here = {to, n}, there = {(void *)from, n};
	ssize_t r = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
	if (r < 0 && (errno == ENOSYS || errno == EPERM)) { /* a sandbox */
		memcpy(to, from, n);
		return true;
	}
	return r == (ssize_t)n;
}

/* to_program copies to what an ioctl's argument points to. */
static bool to_program(void *to, const void *from, size_t n)
{
	struct iovec here = {(void *)from, n}, there = {to, n};
	ssize_t r = process_vm_writev(getpid(), &here, 1, &there, 1, 0);
	if (r < 0 && (errno == ENOSYS || errno == EPERM)) {
		memcpy(to, from, n);
		return true;
	}
	return r == (ssize_t)n;
}

/* await waits until a fence is signalled. It returns 0 or EINTR. */
static int await(int fence)
{
	struct pollfd p = {.fd = fence, .events = POLLIN};
	int r = next_poll ? next_poll(&p, 1, -1) : (int)syscall(SYS_ppoll, &p, 1, NULL, NULL, 0);
	return r < 0 ? errno : 0;
}

static int do_sync(int fd, const char *name, const void *arg)
{
	uint64_t flags;
	if (!from_program(&flags, arg, sizeof flags))
		return EFAULT;
	if (flags & ~(uint64_t)(SYNC_READ | SYNC_WRITE | SYNC_END) || !(flags & (SYNC_READ | SYNC_WRITE)))
		return EINVAL;
	struct control msg = control(0, flags);
	int fence, r = ask(fd, name, &msg, -1, &fence);
	if (fence >= 0) {
		if (!r)
			r = await(fence);
		close(fence);
	}
	return r;
}

static int do_set_name(int fd, const char *name, const char *text)
{
	struct control msg = control(1, 0);
	int got;
	for (int i = 0; i < NAME_ROOM; i++) { /* byte by byte: what follows the end may not be mapped */
		if (!from_program(msg.name + i, text + i, 1))
			return EFAULT;
		if (!msg.name[i]) {
			int r = ask(fd, name, &msg, -1, &got);
			if (got >= 0)
				close(got);
			return r;
		}
	}
	return EINVAL;
}

static int do_sync_file(int fd, const char *name, bool exports, void *arg)
{
	struct sync_file f;
	if (!from_program(&f, arg, sizeof f))
		return EFAULT;
	if (f.flags & ~(uint32_t)(SYNC_READ | SYNC_WRITE) || !f.flags)
		return EINVAL;
	if (!exports && f.fd < 0)
		return EINVAL;
	struct control msg = control(exports ? 2 : 3, f.flags);
	int got, r = ask(fd, name, &msg, exports ? -1 : f.fd, &got);
	if (r || !exports) {
		if (got >= 0)
			close(got);
		return r;
	}
	if (got < 0)
		return EPROTO;
	f.fd = got;
	if (!to_program(arg, &f, sizeof f)) {
		close(got);
		return EFAULT;
	}
	return 0;
}

/* fence_status returns the status of a fence of verbena's, as a sync file has it: 1 if it is signalled, 0 if it
 * is pending, and otherwise the negative errno. */
static int fence_status(int fd)
{
	enum { MAGIC = 0x434e4656 };
	uint32_t status[2] = {0};
	ssize_t n = recv(fd, status, sizeof status, MSG_PEEK | MSG_DONTWAIT);
	if (n < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	if (n == 0)
		return -EOWNERDEAD;
	if (n != sizeof status || status[0] != MAGIC || status[1] > 4095)
		return -EPROTO;
	return status[1] ? -(int)status[1] : 1;
}

static int do_file_info(int fd, void *arg)
{
	struct file_info f;
	if (!from_program(&f, arg, sizeof f))
		return EFAULT;
	if (f.flags || f.pad)
		return EINVAL;
	int status = fence_status(fd);
	if (f.num_fences) {
		struct fence_info one = {.object = "fence", .driver = "verbena", .status = status};
		if (!to_program((void *)(uintptr_t)f.fences, &one, sizeof one))
			return EFAULT;
	}
	memset(f.name, 0, sizeof f.name);
	memcpy(f.name, "verbena", sizeof "verbena");
	f.status = status;
	f.num_fences = 1;
	return to_program(arg, &f, sizeof f) ? 0 : EFAULT;
}

bool verbena_dmabuf_ioctl(int fd, unsigned long request, void *arg, int *result)
{
	char name[NAME];
	off_t size;
	int err = errno, r;
	if (_IOC_TYPE(request) == '>' && request == IOCTL_FILE_INFO) {
		if (!our_fence(fd))
			return false;
		r = do_file_info(fd, arg);
	} else {
		if (_IOC_TYPE(request) != 'b' || !ours(fd, name, &size))
			return false;
		switch (request) {
		case IOCTL_SYNC:
			r = do_sync(fd, name, arg);
			break;
		case IOCTL_SET_NAME_A:
		case IOCTL_SET_NAME_B:
			r = do_set_name(fd, name, arg);
			break;
		case IOCTL_EXPORT_SYNC_FILE:
		case IOCTL_IMPORT_SYNC_FILE:
			r = do_sync_file(fd, name, request == IOCTL_EXPORT_SYNC_FILE, arg);
			break;
		default:
			r = ENOTTY;
		}
	}
	*result = r ? -1 : 0;
	errno = r ? r : err;
	return true;
}

/* --- poll --- */

/* A memory file is always ready, for all that is asked for. So the C library's function is called first, and
 * only if descriptors are ready as memory files are is it looked whether they are ours. Then it is called
 * once more, with descriptors of the buffers' fences in their place. */

enum { LIKE_A_FILE = POLLIN | POLLOUT | POLLRDNORM | POLLWRNORM };

static bool like_a_file(const struct pollfd *p)
{
	return p->revents & LIKE_A_FILE && p->revents == (p->events & LIKE_A_FILE);
}

static int wait_for(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
	struct timespec t = timeout ? *timeout : (struct timespec){0}; /* the system call changes it */
	if (next_ppoll)
		return next_ppoll(fds, n, timeout ? &t : NULL, mask);
	return (int)syscall(SYS_ppoll, fds, n, timeout ? &t : NULL, mask, 8);
}

/* stand_in stores the descriptor of the fences that an event of a buffer waits for. */
static void stand_in(struct pollfd *to, int fd, const char *name, uint64_t flags)
{
	struct control msg = control(2, flags);
	int fence;
	(void)ask(fd, name, &msg, -1, &fence);
	*to = (struct pollfd){.fd = fence, .events = POLLIN};
}

/* ready reports whether fences are signalled. If there are none, as those of a process that has ended,
 * nobody waits for them. */
static bool ready(const struct pollfd *p) { return p->fd < 0 || p->revents; }

static int poll_fences(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
	/* Of each buffer two more entries: what POLLIN waits for, and what POLLOUT does. */
	size_t count = 0;
	for (nfds_t i = 0; i < n; i++)
		count += like_a_file(&fds[i]);
	struct pollfd *all = calloc(n + 2 * count, sizeof *all);
	nfds_t *of = calloc(count, sizeof *of);
	size_t found = 0, still = 0;
	bool none = false; /* some buffer has no fences to wait for */
	if (!all || !of) {
		free(all);
		free(of);
		errno = ENOMEM;
		return -1;
	}
	for (nfds_t i = 0; i < n; i++) {
		char name[NAME];
		off_t size;
		all[i] = (struct pollfd){.fd = fds[i].fd, .events = fds[i].events};
		if (!like_a_file(&fds[i]) || !ours(fds[i].fd, name, &size))
			continue;
		struct pollfd *in = &all[n + 2 * found], *out = in + 1;
		*in = *out = (struct pollfd){.fd = -1};
		if (fds[i].events & POLLIN)
			stand_in(in, fds[i].fd, name, SYNC_READ);
		if (fds[i].events & POLLOUT)
			stand_in(out, fds[i].fd, name, SYNC_WRITE);
		none |= (fds[i].events & POLLIN && in->fd < 0) || (fds[i].events & POLLOUT && out->fd < 0);
		all[i].fd = -1;
		of[found++] = i;
	}
	struct timespec now = {0};
	int r = wait_for(all, n + 2 * found, none ? &now : timeout, mask), err = errno;
	if (r >= 0) {
		for (nfds_t i = 0; i < n; i++)
			fds[i].revents = all[i].revents;
		for (size_t k = 0; k < found; k++) {
			struct pollfd *to = &fds[of[k]], *in = &all[n + 2 * k], *out = in + 1;
			if (to->events & POLLIN && ready(in))
				to->revents |= POLLIN;
			if (to->events & POLLOUT && ready(out))
				to->revents |= POLLOUT;
		}
		for (nfds_t i = 0; i < n; i++)
			still += fds[i].revents != 0;
		r = (int)still;
	}
	for (size_t k = 0; k < 2 * found; k++)
		if (all[n + k].fd >= 0)
			close(all[n + k].fd);
	free(all);
	free(of);
	errno = err;
	return r;
}

/* has_buffer reports whether one of the descriptors that poll has found ready is a buffer's. */
static bool has_buffer(const struct pollfd *fds, nfds_t n)
{
	char name[NAME];
	off_t size;
	for (nfds_t i = 0; i < n; i++)
		if (like_a_file(&fds[i]) && ours(fds[i].fd, name, &size))
			return true;
	return false;
}

PUBLIC int ppoll(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask)
{
	int r = wait_for(fds, n, timeout, mask);
	return r > 0 && has_buffer(fds, n) ? poll_fences(fds, n, timeout, mask) : r;
}

PUBLIC int poll(struct pollfd *fds, nfds_t n, int timeout)
{
	struct timespec t = {.tv_sec = timeout / 1000, .tv_nsec = timeout % 1000 * 1000000L};
	struct timespec *limit = timeout < 0 ? NULL : &t;
	int r = next_poll ? next_poll(fds, n, timeout) : wait_for(fds, n, limit, NULL);
	return r > 0 && has_buffer(fds, n) ? poll_fences(fds, n, limit, NULL) : r;
}

/* Programs that were built with _FORTIFY_SOURCE call these. */
PUBLIC int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t room)
{
	if (room / sizeof *fds < n)
		__chk_fail();
	return poll(fds, n, timeout);
}

PUBLIC int __ppoll_chk(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask, size_t room)
{
	if (room / sizeof *fds < n)
		__chk_fail();
	return ppoll(fds, n, timeout, mask);
}

/* --- lseek --- */

PUBLIC off_t lseek(int fd, off_t off, int whence)
{
	char name[NAME];
	off_t size;
	if (ours(fd, name, &size)) { /* as the kernel's: it tells the size, and no more */
		if ((whence == SEEK_END || whence == SEEK_SET) && off == 0)
			return whence == SEEK_END ? size : 0;
		errno = EINVAL;
		return -1;
	}
	return next_lseek ? next_lseek(fd, off, whence) : (off_t)syscall(SYS_lseek, fd, off, whence);
}

PUBLIC off64_t lseek64(int fd, off64_t off, int whence) __attribute__((alias("lseek")));
