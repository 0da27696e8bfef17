/*
 * The connection manager's file, by the write that the distribution's librdmacm has in its
 * table: bad lengths, ids and addresses; a child of fork with its parent's channel; librdmacm
 * unloaded and loaded again; random commands of two threads, from a seed. The program is not
 * linked with librdmacm.
 *
 *   ucma SEED ROUNDS
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
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

/* --- at random --- */

enum { LIVE = 12, NUM_COMMANDS = 27 };

/* Where a command has its id, and the address for its answer, plus one; 0: it has none. */
static const struct {
	uint16_t size;
	uint8_t response;
	uint16_t id;
} shapes[NUM_COMMANDS] = {
	[0] = {24, 9, 0},    [1] = {16, 1, 9},   [2] = {40, 0, 37}, [3] = {64, 0, 57}, [4] = {8, 0, 1},	   [5] = {16, 1, 9},  [6] = {288, 0, 273},
	[7] = {8, 0, 1},     [8] = {296, 0, 281}, [9] = {264, 0, 1}, [10] = {4, 0, 1},  [11] = {16, 1, 9},  [12] = {8, 1, 0},  [14] = {24, 1, 9},
	[15] = {8, 0, 1},    [16] = {48, 1, 17}, [17] = {16, 1, 9}, [18] = {16, 1, 9}, [19] = {16, 1, 9},  [20] = {136, 0, 1}, [21] = {272, 0, 1},
	[22] = {152, 1, 17}, [23] = {88, 0, 1},	 [24] = {320, 0, 1},
};

struct player {
	uint32_t live[LIVE]; /* ids that it was given; some are destroyed, or moved to the other's channel */
	int after;	     /* the command that an event suggests, or -1 */
	uint32_t after_id;
	uint64_t state; /* of the random numbers */
	int rounds, fd, other;
	char *hole;	/* two pages, of which the second is not mapped */
	char room[1024]; /* for answers */
};

static uint32_t below(struct player *p, uint32_t n)
{
	p->state = p->state * 6364136223846793005 + 1442695040888963407;
	return (uint32_t)(p->state >> 33) % n;
}

static uint64_t some_address(struct player *p)
{
	switch (below(p, 12)) {
	case 0:
		return 0;
	case 1:
		return (uintptr_t)p->hole + 4096 - below(p, 16);
	case 2:
		return UINT64_MAX - below(p, 64);
	default:
		return (uintptr_t)p->room;
	}
}

/* put_sockaddr writes a socket address, of this machine alone, and returns its size. */
static uint16_t put_sockaddr(struct player *p, char *to, int room)
{
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(7000 + below(p, 4))};
	if (below(p, 3))
		inet_pton(AF_INET, getenv("VERBENA_ADDR"), &in.sin_addr);
	switch (below(p, 8)) {
	case 0: {
		struct sockaddr_in6 six = {.sin6_family = AF_INET6, .sin6_port = in.sin_port, .sin6_scope_id = below(p, 4)};
		memcpy(&six.sin6_addr.s6_addr[12], &in.sin_addr, 4);
		if (below(p, 2))
			memset(&six.sin6_addr.s6_addr[10], 0xff, 2);
		else
			six.sin6_addr = (struct in6_addr)IN6ADDR_LOOPBACK_INIT;
		memcpy(to, &six, sizeof six);
		return sizeof six;
	}
	case 1: {
		uint16_t native[24] = {27, 0xffff};
		memset(native + 9, below(p, 2) ? 0xff : 0, 2);
		memcpy(native + 10, &in.sin_addr, 4);
		native[13] = htons(0x106);
		native[15] = in.sin_port;
		memcpy(to, native, room < 48 ? room : 48);
		return 48;
	}
	case 2:
		return below(p, 200); /* what is there already */
	default:
		memcpy(to, &in, sizeof in);
		return sizeof in;
	}
}

/* put16 and put32 write a number anywhere in a body. */
static void put16(char *to, uint16_t v) { memcpy(to, &v, sizeof v); }
static void put32(char *to, uint32_t v) { memcpy(to, &v, sizeof v); }

/* play writes a command. */
static void play(struct player *p)
{
	uint32_t cmd = below(p, 40), id = below(p, 8) ? p->live[below(p, LIVE)] : below(p, 1 << 16);
	if (p->after >= 0 && below(p, 2)) {
		cmd = (uint32_t)p->after;
		id = p->after_id;
		p->after = -1;
	} else if (cmd >= NUM_COMMANDS)
		cmd = (const uint8_t[]){0, 0, 2, 7, 7, 12, 12, 12, 12, 12, 21, 21, 3}[cmd - NUM_COMMANDS]; /* these more often */
	struct call m = {{cmd, shapes[cmd].size, 512}, {0}};
	if (below(p, 3) == 0)
		for (unsigned i = 0; i < sizeof m.body; i++)
			m.body[i] = (char)below(p, 256);
	if (below(p, 10) == 0)
		m.h.in = (uint16_t)below(p, 400);
	if (below(p, 10) == 0)
		m.h.out = (uint16_t)below(p, 400);
	char *b = m.body;
	uint64_t response = some_address(p);
	if (shapes[cmd].id)
		put32(b + shapes[cmd].id - 1, id);
	if (shapes[cmd].response)
		memcpy(b + shapes[cmd].response - 1, &response, 8);
	switch (cmd) {
	case RDMA_USER_CM_CMD_CREATE_ID:
		put32(b, 1 + below(p, 3));
		put16(b + 16, (const uint16_t[]){0x106, 0x106, 0x106, 0x111, 0x13f, 2, 7}[below(p, 7)]);
		b[18] = (char)below(p, 12);
		break;
	case RDMA_USER_CM_CMD_BIND_IP:
		put_sockaddr(p, b + 8, 28);
		break;
	case RDMA_USER_CM_CMD_RESOLVE_IP:
		if (below(p, 2))
			put_sockaddr(p, b, 28);
		else
			memset(b, 0, 28);
		put_sockaddr(p, b + 28, 28);
		put32(b + 60, 1 + below(p, 100));
		break;
	case RDMA_USER_CM_CMD_RESOLVE_ROUTE:
		put32(b + 4, below(p, 4) * 100);
		break;
	case RDMA_USER_CM_CMD_CONNECT:
	case RDMA_USER_CM_CMD_ACCEPT: {
		char *c = b + (cmd == RDMA_USER_CM_CMD_ACCEPT ? 8 : 0);
		put32(c, 17 + below(p, 8));
		c[271] = below(p, 4) != 0;
		if (cmd == RDMA_USER_CM_CMD_ACCEPT)
			put32(b, 1 + below(p, 3));
		break;
	}
	case RDMA_USER_CM_CMD_INIT_QP_ATTR:
		put32(b + 12, below(p, 9));
		break;
	case RDMA_USER_CM_CMD_SET_OPTION:
		put32(b + 12, below(p, 3));
		put32(b + 16, below(p, 6));
		put32(b + 20, (const uint32_t[]){1, 4, 72, 144, 4096, 1 << 20, UINT32_MAX}[below(p, 7)]);
		break;
	case RDMA_USER_CM_CMD_NOTIFY:
		put32(b + 4, below(p, 20));
		break;
	case RDMA_USER_CM_CMD_JOIN_IP_MCAST:
		put_sockaddr(p, b + 20, 28);
		break;
	case RDMA_USER_CM_CMD_MIGRATE_ID:
		put32(b + 12, (const uint32_t[]){(uint32_t)p->fd, (uint32_t)p->other, 0, UINT32_MAX, below(p, 4096)}[below(p, 5)]);
		break;
	case RDMA_USER_CM_CMD_QUERY:
		put32(b + 12, below(p, 5));
		break;
	case RDMA_USER_CM_CMD_BIND:
		put16(b + 4, put_sockaddr(p, b + 8, 128));
		put16(b + 6, 0);
		break;
	case RDMA_USER_CM_CMD_RESOLVE_ADDR:
		put32(b + 4, 1 + below(p, 100));
		memset(b + 8, 0, 8);
		if (below(p, 2))
			put16(b + 8, put_sockaddr(p, b + 16, 128));
		put16(b + 10, put_sockaddr(p, b + 144, 128));
		break;
	case 24: /* WRITE_CM_EVENT */
		put32(b + 4, 0);
		put32(b + 8, 18 - (below(p, 8) == 0));
		put32(b + 12, 0);
		break;
	case RDMA_USER_CM_CMD_JOIN_MCAST:
		put16(b + 20, put_sockaddr(p, b + 24, 128));
		put16(b + 22, (uint16_t)below(p, 3));
		break;
	}
	int fd = below(p, 10) ? p->fd : p->other;
	size_t n = sizeof m.h + m.h.in;
	if (below(p, 20) == 0)
		n = below(p, sizeof m);
	ssize_t done = cm_write(fd, &m, n);
	WANT(done == (ssize_t)n || done < 0);
	if (done < 0 || response != (uintptr_t)p->room)
		return;
	uint32_t words[4];
	memcpy(words, p->room, sizeof words);
	if (cmd == RDMA_USER_CM_CMD_CREATE_ID)
		p->live[below(p, LIVE)] = words[0];
	if (cmd != RDMA_USER_CM_CMD_GET_EVENT || fd != p->fd)
		return;
	p->after_id = words[2];
	switch (words[3]) {
	case 0: /* ADDR_RESOLVED */
		p->after = RDMA_USER_CM_CMD_RESOLVE_ROUTE;
		break;
	case 2: /* ROUTE_RESOLVED */
		p->after = RDMA_USER_CM_CMD_CONNECT;
		break;
	case 4: /* CONNECT_REQUEST */
		p->live[below(p, LIVE)] = words[2];
		p->after = RDMA_USER_CM_CMD_ACCEPT;
		break;
	case 5: /* CONNECT_RESPONSE */
		p->after = RDMA_USER_CM_CMD_ACCEPT;
		break;
	case 9: /* ESTABLISHED */
		p->after = RDMA_USER_CM_CMD_DISCONNECT;
	}
}

static void *play_all(void *of)
{
	struct player *p = of;
	for (int i = 0; i < p->rounds; i++)
		play(p);
	return NULL;
}

/* at_random writes random commands to two channels, by two threads. Then no id is left that cannot be
 * destroyed, and the channels work. */
static void at_random(int a, int b, uint64_t seed, int rounds)
{
	pthread_t threads[2];
	char *hole = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct player players[2] = {{.state = seed, .rounds = rounds, .after = -1, .fd = a, .other = b, .hole = hole},
				    {.state = ~seed, .rounds = rounds, .after = -1, .fd = b, .other = a, .hole = hole}};
	WANT(hole != MAP_FAILED && !munmap(hole + 4096, 4096));
	WANT(!fcntl(a, F_SETFL, O_NONBLOCK) && !fcntl(b, F_SETFL, O_NONBLOCK));
	for (int i = 0; i < 2; i++)
		WANT(!pthread_create(&threads[i], NULL, play_all, &players[i]));
	for (int i = 0; i < 2; i++)
		WANT(!pthread_join(threads[i], NULL));
	/* The end of a listener refuses what waits at it; until then requests make new ids. */
	for (uint32_t found = 1; found;) {
		found = 0;
		for (uint32_t id = 0; id < 1 << 16; id++)
			for (int i = 0; i < 2; i++) {
				int e = destroy(i ? b : a, id);
				WANT(e == 0 || e == ENOENT || e == EINVAL);
				found += e == 0;
			}
	}
	for (int i = 0; i < 2; i++) {
		struct rdma_ucm_event_resp e;
		struct pollfd poll_it = {i ? b : a, POLLIN, 0};
		WANT(get_event(i ? b : a, &e) == EAGAIN && poll(&poll_it, 1, 0) == 0);
	}
	WANT(!munmap(hole, 4096));
}

int main(int argc, char **argv)
{
	uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
	fprintf(stderr, "seed %llu\n", (unsigned long long)seed); /* before anything can fail */
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
		at_random(a->fd, b->fd, seed + round, argc > 2 ? atoi(argv[2]) : 3000);
		bad(a->fd, b->fd);
		int fd = a->fd;
		close_channel(a);
		WANT(fcntl(fd, F_GETFD) < 0 && errno_of(fd, "", 1) == EBADF);
		close_channel(b);
		WANT(!dlclose(lib));
	}
	puts("ok");
	return 0;
}
