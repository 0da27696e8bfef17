/*
 * Fences by their descriptors: requests that wait for one and that signal one; a fence that was sent by
 * another process, which is killed; and what programs do with a dma-buf of verbena's as with one of the
 * kernel's: SYNC, EXPORT_SYNC_FILE, IMPORT_SYNC_FILE, SET_NAME, poll, lseek, with the kernel's errnos. The
 * buffer is device memory of this process; a child without a device uses it, too.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"
#include <verbena/verbs.h>

enum { SIZE = 3 * 4096, ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ };
enum { MINUTE = 60000 };

int dm_export(struct ibv_dm *dm) __asm__("ibv_dm_export_dmabuf_fd");

struct sync_file {
	uint32_t flags;
	int32_t fd;
};
struct file_info {
	char name[32];
	int32_t status;
	uint32_t flags, num_fences, pad;
	uint64_t fences;
};
#define IOCTL_SYNC _IOW('b', 0, uint64_t)
#define IOCTL_SET_NAME_A _IOW('b', 1, uint32_t)
#define IOCTL_SET_NAME_B _IOW('b', 1, uint64_t)
#define IOCTL_EXPORT _IOWR('b', 2, struct sync_file)
#define IOCTL_IMPORT _IOW('b', 3, struct sync_file)
#define IOCTL_FILE_INFO _IOWR('>', 4, struct file_info)
enum { READ = 1, WRITE = 2, END = 4 };

/* waits returns what poll finds of a descriptor within a time, but for POLLHUP: a fence that is signalled may
 * have that, too. */
static short waits(int fd, short events, int ms)
{
	struct pollfd p = {fd, events, 0};
	int n = poll(&p, 1, ms);
	WANT(n == (p.revents != 0));
	return p.revents & ~POLLHUP;
}

static int sync_of(int fd, uint64_t flags) { return ioctl(fd, IOCTL_SYNC, &flags); }

static int export(int fd, uint32_t flags)
{
	struct sync_file f = {flags, -1};
	return ioctl(fd, IOCTL_EXPORT, &f) ? -1 : f.fd;
}

static int import(int fd, uint32_t flags, int fence)
{
	struct sync_file f = {flags, fence};
	return ioctl(fd, IOCTL_IMPORT, &f);
}

#define FAILS(err, call)                                                                                               \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT((call) == -1 && errno == (err));                                                                  \
	} while (0)

static int open_descriptors(void)
{
	DIR *d = opendir("/proc/self/fd");
	int n = 0;
	WANT(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

static struct ibv_wc next_completion(struct self *s)
{
	struct ibv_wc wc;
	int k;
	while (!(k = ibv_poll_cq(s->cq, 1, &wc)))
		;
	WANT(k == 1);
	return wc;
}

static void post_write(struct self *s, char *from, struct ibv_mr *mr, char *to)
{
	struct ibv_sge sge = {(uintptr_t)from, 16, mr->lkey};
	struct ibv_send_wr wr = {.wr_id = 2,
				 .sg_list = &sge,
				 .num_sge = 1,
				 .opcode = IBV_WR_RDMA_WRITE,
				 .send_flags = IBV_SEND_SIGNALED,
				 .wr.rdma = {(uintptr_t)to, mr->rkey}},
			   *bad;
	WANT(!ibv_post_send(s->qp[0], &wr, &bad));
}

/* requests: what is behind a wait begins when the fence is signalled, and a fence is signalled when what is
 * before it is done. wait is a descriptor that begin signals. */
static void requests(struct self *s, int wait, int begin_fd, int end)
{
	static char bytes[64];
	struct ibv_mr *mr = ibv_reg_mr(s->pd, bytes, sizeof bytes, ALL);
	WANT(mr);
	memcpy(bytes, "after the fence", 16);
	memset(bytes + 32, 0, 16);
	WANT(!verbena_post_wait_fence(s->qp[0], 1, wait, MINUTE, IBV_SEND_SIGNALED));
	post_write(s, bytes, mr, bytes + 32);
	WANT(!verbena_post_signal_fence(s->qp[0], 3, end, IBV_SEND_SIGNALED));
	struct ibv_wc wc;
	WANT(!waits(end, POLLIN, 20) && !ibv_poll_cq(s->cq, 1, &wc) && !bytes[32]);
	WANT(verbena_fence_status(s->ctx, end) == 0);
	WANT(!verbena_signal_fence(s->ctx, begin_fd, 0));
	WANT(waits(end, POLLIN, MINUTE) == POLLIN && !strcmp(bytes + 32, "after the fence"));
	WANT(verbena_fence_status(s->ctx, end) == 1);
	static const enum ibv_wc_opcode ops[] = {VERBENA_WC_WAIT_FENCE, IBV_WC_RDMA_WRITE, VERBENA_WC_SIGNAL_FENCE};
	for (uint64_t i = 0; i < 3; i++) {
		wc = next_completion(s);
		WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == i + 1 && wc.opcode == ops[i]);
	}
	WANT(!ibv_dereg_mr(mr));
}

/* refusals: what is no fence, and what a request cannot do. */
static void refusals(struct self *s)
{
	int null = open("/dev/null", O_RDWR), fence = verbena_create_fence(s->ctx);
	WANT(null >= 0 && fence >= 0 && fcntl(fence, F_GETFD) == FD_CLOEXEC);
	WANT(verbena_fence_status(s->ctx, -1) == -EBADF && verbena_fence_status(s->ctx, null) == -EINVAL);
	WANT(verbena_signal_fence(s->ctx, -1, 0) == EBADF && verbena_signal_fence(s->ctx, null, 0) == EINVAL);
	WANT(verbena_signal_fence(s->ctx, fence, -1) == EINVAL && verbena_signal_fence(s->ctx, fence, 5000) == EINVAL);
	WANT(verbena_post_wait_fence(s->qp[0], 1, -1, 0, 0) == EBADF);
	WANT(verbena_post_wait_fence(s->qp[0], 1, null, 0, 0) == EINVAL);
	WANT(verbena_post_wait_fence(s->qp[0], 1, fence, 0, IBV_SEND_INLINE) == EINVAL);
	WANT(verbena_post_signal_fence(s->qp[0], 1, -1, 0) == EBADF);
	WANT(verbena_post_signal_fence(s->qp[0], 1, null, 0) == EINVAL);
	WANT(verbena_post_signal_fence(s->qp[0], 1, fence, 1 << 20) == EINVAL);
	WANT(!verbena_signal_fence(s->ctx, fence, ENOSPC) && verbena_fence_status(s->ctx, fence) == -ENOSPC);
	WANT(verbena_signal_fence(s->ctx, fence, 0) == EINVAL); /* once only */
	WANT(verbena_post_signal_fence(s->qp[0], 1, fence, 0) == EINVAL);
	close(null);
	close(fence);
}

/* send_fd and receive_fd pass a descriptor through a socket. */
static void send_fd(int to, int fd)
{
	char room[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec v = {"x", 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	*CMSG_FIRSTHDR(&m) = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(sizeof fd)};
	memcpy(CMSG_DATA(CMSG_FIRSTHDR(&m)), &fd, sizeof fd);
	WANT(sendmsg(to, &m, 0) == 1);
}

static int receive_fd(int from)
{
	char room[CMSG_SPACE(sizeof(int))], x;
	struct iovec v = {&x, 1};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
	int fd;
	WANT(recvmsg(from, &m, 0) == 1 && CMSG_FIRSTHDR(&m));
	memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
	return fd;
}

/* killed: a request waits for a fence of another process, which is killed. */
static void killed(struct self *s)
{
	int pair[2];
	WANT(!socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair));
	pid_t child = fork();
	WANT(child >= 0);
	if (!child) {
		char number[16];
		snprintf(number, sizeof number, "%d", pair[1]);
		execl("/proc/self/exe", "fence", "holder", number, NULL);
		_exit(1);
	}
	close(pair[1]);
	int fence = receive_fd(pair[0]);
	WANT(!waits(fence, POLLIN, 0) && verbena_fence_status(s->ctx, fence) == 0);
	WANT(verbena_signal_fence(s->ctx, fence, 0) == EINVAL); /* it is not ours */
	WANT(!verbena_post_wait_fence(s->qp[0], 1, fence, MINUTE, IBV_SEND_SIGNALED));
	struct ibv_wc wc;
	WANT(!waits(fence, POLLIN, 20) && !ibv_poll_cq(s->cq, 1, &wc));
	WANT(!kill(child, SIGKILL) && waitpid(child, NULL, 0) == child);
	wc = next_completion(s);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 1);
	WANT(waits(fence, POLLIN, MINUTE) == POLLIN && verbena_fence_status(s->ctx, fence) == -EOWNERDEAD);
	close(fence);
	close(pair[0]);
}

/* errnos are those of the kernel's dma-bufs. */
static void errnos(int fd)
{
	char name[64];
	struct sync_file f = {READ, -1};
	WANT(lseek(fd, 0, SEEK_END) == SIZE && lseek(fd, 0, SEEK_SET) == 0);
	FAILS(EINVAL, lseek(fd, 0, SEEK_CUR));
	FAILS(EINVAL, lseek(fd, -1, SEEK_END));
	FAILS(EINVAL, lseek(fd, 1, SEEK_SET));
	WANT(!sync_of(fd, READ) && !sync_of(fd, READ | END) && !sync_of(fd, READ | WRITE) && !sync_of(fd, READ | WRITE | END));
	FAILS(EINVAL, sync_of(fd, 0));
	FAILS(EINVAL, sync_of(fd, END));
	FAILS(EINVAL, sync_of(fd, 8 | READ));
	FAILS(EFAULT, ioctl(fd, IOCTL_SYNC, (void *)16));
	FAILS(EINVAL, export(fd, 0));
	FAILS(EINVAL, export(fd, END));
	FAILS(EFAULT, ioctl(fd, IOCTL_EXPORT, NULL));
	FAILS(EINVAL, import(fd, 0, fd));
	FAILS(EINVAL, import(fd, READ, -1));
	FAILS(EINVAL, import(fd, READ, 1 << 20));
	FAILS(EINVAL, import(fd, READ, fd));
	FAILS(EFAULT, ioctl(fd, IOCTL_IMPORT, (void *)16));
	WANT(!ioctl(fd, IOCTL_SET_NAME_A, "a name") && !ioctl(fd, IOCTL_SET_NAME_B, "another"));
	memset(name, 'x', sizeof name);
	name[31] = 0;
	WANT(!ioctl(fd, IOCTL_SET_NAME_B, name));
	name[31] = 'x';
	name[32] = 0;
	FAILS(EINVAL, ioctl(fd, IOCTL_SET_NAME_B, name));
	FAILS(EFAULT, ioctl(fd, IOCTL_SET_NAME_B, NULL));
	FAILS(ENOTTY, ioctl(fd, _IO('b', 9)));
	FAILS(ENOTTY, ioctl(fd, _IO('q', 1)));
	WANT(waits(fd, POLLIN | POLLOUT, -1) == (POLLIN | POLLOUT));
	WANT(waits(fd, POLLPRI, 0) == 0);
	/* No fences: a file that is signalled. */
	WANT(!ioctl(fd, IOCTL_EXPORT, &f) && f.fd >= 0 && fcntl(f.fd, F_GETFD) == FD_CLOEXEC);
	struct file_info info = {.num_fences = 0};
	WANT(waits(f.fd, POLLIN, 0) == POLLIN && !ioctl(f.fd, IOCTL_FILE_INFO, &info) && info.status == 1 && info.num_fences == 1);
	close(f.fd);
	/* Other descriptors are left alone. */
	int memory = memfd_create("verbena-dmabuf:", 0);
	WANT(memory >= 0 && lseek(memory, 3, SEEK_SET) == 3 && lseek(memory, 0, SEEK_CUR) == 3);
	FAILS(ENOTTY, sync_of(memory, 0));
	FAILS(EBADF, sync_of(-1, READ));
	WANT(waits(memory, POLLIN, 0) == POLLIN);
	close(memory);
}

/* in_child does something in a child that has no device, and returns its process. */
static pid_t in_child(int (*does)(int fd), int fd)
{
	pid_t child = fork();
	WANT(child >= 0);
	if (!child)
		_exit(does(fd));
	return child;
}

static int child_errnos(int fd)
{
	errnos(fd);
	return 0;
}

static int child_syncs(int fd)
{
	WANT(!sync_of(fd, READ) && !sync_of(fd, READ | END));
	return 0;
}

static int child_polls(int fd)
{
	return waits(fd, POLLIN | POLLOUT, MINUTE) == POLLOUT ? 1 : 0;
}

/* ended waits for a child, and returns its exit status; -1 if it has not ended and wait is not set. */
static int ended(pid_t child, int wait)
{
	int status;
	pid_t got = waitpid(child, &status, wait ? 0 : WNOHANG);
	if (!got)
		return -1;
	WANT(got == child && WIFEXITED(status));
	return WEXITSTATUS(status);
}

/* fences of a buffer: a writer's and a reader's. */
static void buffer_fences(struct self *s, int fd)
{
	int writer = verbena_create_fence(s->ctx), reader = verbena_create_fence(s->ctx);
	WANT(writer >= 0 && reader >= 0);
	WANT(!import(fd, READ, reader));
	WANT(waits(fd, POLLIN | POLLOUT, 0) == POLLIN); /* readers do not wait for readers */
	WANT(!import(fd, WRITE, writer));
	WANT(waits(fd, POLLIN | POLLOUT, 10) == 0);
	int for_reader = export(fd, READ), for_writer = export(fd, READ | WRITE);
	WANT(for_reader >= 0 && for_writer >= 0 && !waits(for_reader, POLLIN, 0) && !waits(for_writer, POLLIN, 0));
	struct file_info info = {.num_fences = 0};
	WANT(!ioctl(for_reader, IOCTL_FILE_INFO, &info) && info.status == 0);

	pid_t syncs = in_child(child_syncs, fd), polls = in_child(child_polls, fd);
	usleep(20000);
	WANT(ended(syncs, 0) == -1 && ended(polls, 0) == -1);
	/* poll of it beside others: one of these is ready. */
	int event = eventfd(1, EFD_CLOEXEC);
	struct pollfd both[] = {{fd, POLLIN, 0}, {event, POLLIN, 0}, {-1, POLLIN, 7}, {1 << 20, POLLIN, 0}};
	WANT(poll(both, 4, MINUTE) == 2 && !both[0].revents && both[1].revents == POLLIN && both[3].revents == POLLNVAL);
	close(event);

	/* A request waits for what readers wait for. */
	WANT(!verbena_post_wait_fence(s->qp[0], 9, for_reader, MINUTE, IBV_SEND_SIGNALED));
	struct ibv_wc wc;
	WANT(!waits(for_reader, POLLIN, 20) && !ibv_poll_cq(s->cq, 1, &wc));
	WANT(!verbena_signal_fence(s->ctx, writer, EIO)); /* that it has failed is not the reader's business */
	WANT(ended(syncs, 1) == 0 && ended(polls, 1) == 0);
	wc = next_completion(s);
	WANT(wc.status == IBV_WC_SUCCESS && wc.wr_id == 9);
	WANT(waits(for_reader, POLLIN, MINUTE) == POLLIN && !waits(for_writer, POLLIN, 0));
	FAILS(EFAULT, ioctl(for_reader, IOCTL_FILE_INFO, &info)); /* it has num_fences 1, and no room for them */
	info.num_fences = 0;
	WANT(!ioctl(for_reader, IOCTL_FILE_INFO, &info) && info.status == -EIO);
	WANT(waits(fd, POLLIN | POLLOUT, 0) == POLLIN);
	WANT(!sync_of(fd, READ) && !sync_of(fd, READ | END));
	close(reader); /* the buffer has it: it is pending still */
	WANT(!waits(for_writer, POLLIN, 20));
	close(writer);
	close(for_reader);
	close(for_writer);
}

int main(int argc, char **argv)
{
	if (argc > 2 && !strcmp(argv[1], "holder")) { /* of killed: it sends a fence and waits for its end */
		int fence = verbena_create_fence(open_first());
		WANT(fence >= 0);
		send_fd(atoi(argv[2]), fence);
		for (;;)
			pause();
	}
	struct self s = connect_self();
	refusals(&s);

	/* Fences of our own, and eventfds. The descriptors of both are closed afterwards: nothing is left. */
	for (int i = 0; i < 20; i++) {
		int begin = verbena_create_fence(s.ctx), end = verbena_create_fence(s.ctx);
		WANT(begin >= 0 && end >= 0);
		requests(&s, begin, begin, end);
		close(begin);
		close(end);
		int event = eventfd(0, EFD_CLOEXEC), after = eventfd(0, EFD_CLOEXEC);
		WANT(event >= 0 && after >= 0);
		requests(&s, event, event, after);
		close(event);
		close(after);
	}
	killed(&s);

	struct ibv_alloc_dm_attr a = {.length = SIZE};
	struct ibv_dm *dm = ibv_alloc_dm(s.ctx, &a);
	WANT(dm);
	int fd = dm_export(dm);
	WANT(fd >= 0);
	errnos(fd);
	WANT(ended(in_child(child_errnos, fd), 1) == 0); /* from a process that has no device */
	int before = open_descriptors();
	for (int i = 0; i < 20; i++)
		errnos(fd);
	WANT(open_descriptors() <= before + 8); /* some of the engine's own may come */
	buffer_fences(&s, fd);

	/* A wait that takes too long fails, and what is behind it is flushed. */
	int never = verbena_create_fence(s.ctx), flushed = verbena_create_fence(s.ctx);
	WANT(!verbena_post_wait_fence(s.qp[0], 1, never, 10, IBV_SEND_SIGNALED));
	WANT(!verbena_post_signal_fence(s.qp[0], 2, flushed, IBV_SEND_SIGNALED));
	struct ibv_wc wc = next_completion(&s);
	WANT(wc.wr_id == 1 && wc.status == IBV_WC_RESP_TIMEOUT_ERR);
	wc = next_completion(&s);
	WANT(wc.wr_id == 2 && wc.status == IBV_WC_WR_FLUSH_ERR);
	WANT(waits(flushed, POLLIN, MINUTE) == POLLIN && verbena_fence_status(s.ctx, flushed) == -ECANCELED);
	WANT(verbena_fence_status(s.ctx, never) == 0);
	close(never);
	close(flushed);
	close(fd);
	WANT(!ibv_free_dm(dm));
	close_self(&s);
	puts("ok");
	return 0;
}
