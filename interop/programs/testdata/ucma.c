/*
 * The connection manager's file, by the write that the distribution's librdmacm has in its
 * table: bad lengths, ids and addresses; a child of fork with its parent's channel; librdmacm
 * unloaded and loaded again. The program is not linked with librdmacm.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <rdma/rdma_user_cm.h>

#include "self.h"

/* rdma_cma.h has this; it cannot be included beside the kernel's header. */
struct rdma_event_channel {
	int fd;
};

static ssize_t (*cm_write)(int, const void *, size_t);

/* find_write finds the slot for write in librdmacm's table. */
static int find_write(struct dl_phdr_info *info, size_t size, void *unused)
{
	const char *strings = NULL;
	const ElfW(Sym) *symbols = NULL;
	const ElfW(Rela) *r = NULL;
	size_t n = 0;
	if (!strstr(info->dlpi_name, "librdmacm.so.1"))
		return 0;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		if (info->dlpi_phdr[i].p_type != PT_DYNAMIC)
			continue;
		for (const ElfW(Dyn) *d = (void *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr); d->d_tag; d++) {
			if (d->d_tag == DT_STRTAB)
				strings = (void *)d->d_un.d_ptr;
			else if (d->d_tag == DT_SYMTAB)
				symbols = (void *)d->d_un.d_ptr;
			else if (d->d_tag == DT_JMPREL)
				r = (void *)d->d_un.d_ptr;
			else if (d->d_tag == DT_PLTRELSZ)
				n = d->d_un.d_val / sizeof *r;
		}
	}
	for (; n--; r++)
		if (!strcmp(strings + symbols[ELF64_R_SYM(r->r_info)].st_name, "write"))
			cm_write = *(void **)(info->dlpi_addr + r->r_offset);
	return 1;
}

struct call {
	struct rdma_ucm_cmd_hdr h;
	char body[400];
};

/* errno_of writes a command, and returns its errno, or 0. */
static int errno_of(int fd, const void *buf, size_t n)
{
	ssize_t r = cm_write(fd, buf, n);
	WANT(r < 0 || r == (ssize_t)n);
	return r < 0 ? errno : 0;
}

static int create(int fd, void *response, uint32_t out)
{
	struct {
		struct rdma_ucm_cmd_hdr h;
		struct rdma_ucm_create_id c;
	} m = {{RDMA_USER_CM_CMD_CREATE_ID, sizeof m.c, (uint16_t)out}, {1, (uintptr_t)response, RDMA_PS_TCP, IBV_QPT_RC, {0}}};
	return errno_of(fd, &m, sizeof m);
}

static int destroy(int fd, uint32_t id)
{
	struct rdma_ucm_destroy_id_resp resp;
	struct {
		struct rdma_ucm_cmd_hdr h;
		struct rdma_ucm_destroy_id c;
	} m = {{RDMA_USER_CM_CMD_DESTROY_ID, sizeof m.c, sizeof resp}, {(uintptr_t)&resp, id, 0}};
	return errno_of(fd, &m, sizeof m);
}

static int get_event(int fd, void *response)
{
	struct {
		struct rdma_ucm_cmd_hdr h;
		struct rdma_ucm_get_event c;
	} m = {{RDMA_USER_CM_CMD_GET_EVENT, sizeof m.c, sizeof(struct rdma_ucm_event_resp)}, {(uintptr_t)response}};
	return errno_of(fd, &m, sizeof m);
}

/* user_event has the file make an event: a command of newer headers. */
static int user_event(int fd, uint32_t id)
{
	struct call m = {{24, 320, 0}, {0}};
	uint32_t words[4] = {id, 0, 18, 0};
	memcpy(m.body, words, sizeof words);
	return errno_of(fd, &m, 8 + 320);
}

static void bad(int fd, int other)
{
	uint32_t id = 0;
	char *hole = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct call m = {{0}, {0}};
	WANT(hole != MAP_FAILED && !munmap(hole + 4096, 4096));
	WANT(errno_of(fd, &m, 7) == EINVAL && errno_of(fd, (void *)8, 8) == EFAULT);
	m.h = (struct rdma_ucm_cmd_hdr){25, 0, 0};
	WANT(errno_of(fd, &m, 8) == EINVAL);
	m.h.cmd = RDMA_USER_CM_CMD_GET_OPTION;
	WANT(errno_of(fd, &m, 8) == ENOSYS);
	m.h = (struct rdma_ucm_cmd_hdr){RDMA_USER_CM_CMD_LISTEN, 8, 0};
	WANT(errno_of(fd, &m, 15) == EINVAL);
	m.h = (struct rdma_ucm_cmd_hdr){RDMA_USER_CM_CMD_CONNECT, 279, 0};
	WANT(errno_of(fd, &m, sizeof m) == EINVAL);
	memcpy(hole + 4096 - 8, &(struct rdma_ucm_cmd_hdr){RDMA_USER_CM_CMD_DISCONNECT, 0, 0}, 8);
	WANT(errno_of(fd, hole + 4096 - 8, 8) == EFAULT); /* the body is not mapped */
	WANT(create(fd, &id, 3) == ENOSPC && create(fd, hole + 4096 - 2, 4) == EFAULT && create(fd, NULL, 4) == EFAULT);
	WANT(create(fd, &id, 4) == 0);
	WANT(destroy(fd, id + 5000) == ENOENT && destroy(other, id) == EINVAL);
	/* An event that could not be stored stays. */
	struct rdma_ucm_event_resp e;
	struct pollfd p = {fd, POLLIN, 0};
	WANT(!fcntl(fd, F_SETFL, O_NONBLOCK) && get_event(fd, &e) == EAGAIN && poll(&p, 1, 0) == 0);
	WANT(!user_event(fd, id) && poll(&p, 1, 0) == 1);
	WANT(get_event(fd, hole + 4096 - 100) == EFAULT && poll(&p, 1, 0) == 1);
	WANT(!get_event(fd, &e) && e.uid == 1 && e.id == id && e.event == 18 && poll(&p, 1, 0) == 0);
	/* A dropped event makes the channel not ready. */
	WANT(!user_event(fd, id) && !destroy(fd, id) && poll(&p, 1, 0) == 0 && get_event(fd, &e) == EAGAIN);
	WANT(!munmap(hole, 4096));
}

/* in_child uses a channel of the parent: the parent's id is not there, a new one can be made. */
static void in_child(int fd, uint32_t parents)
{
	uint32_t id;
	struct rdma_ucm_event_resp e;
	WANT(get_event(fd, &e) == EINVAL && destroy(fd, parents) == ENOENT);
	WANT(!create(fd, &id, 4) && !user_event(fd, id) && !get_event(fd, &e) && e.id == id && !destroy(fd, id));
	exit(0);
}

static void forked(int fd)
{
	uint32_t id;
	int status;
	struct rdma_ucm_event_resp e;
	WANT(!create(fd, &id, 4) && !user_event(fd, id));
	fflush(stdout);
	pid_t child = fork();
	if (!child)
		in_child(fd, id);
	WANT(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
	WANT(!get_event(fd, &e) && e.id == id && !destroy(fd, id));
}

int main(void)
{
	for (int round = 0; round < 3; round++) {
		void *lib = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL);
		WANT(lib);
		struct rdma_event_channel *(*open_channel)(void) = dlsym(lib, "rdma_create_event_channel");
		void (*close_channel)(struct rdma_event_channel *) = dlsym(lib, "rdma_destroy_event_channel");
		WANT(open_channel && close_channel);
		struct rdma_event_channel *a = open_channel(), *b = open_channel();
		WANT(a && b && dl_iterate_phdr(find_write, NULL) && cm_write);
		bad(a->fd, b->fd);
		forked(b->fd);
		int fd = a->fd;
		close_channel(a);
		WANT(fcntl(fd, F_GETFD) < 0 && errno_of(fd, "", 1) == EBADF);
		close_channel(b);
		WANT(!dlclose(lib));
	}
	puts("ok");
	return 0;
}
