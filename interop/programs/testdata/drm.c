/*
 * The render node, which "verbena exec" shows: objects, mappings, dma-bufs of them and traffic
 * through these, errnos, and that the last close frees everything. The argument is the driver
 * that the node should have (amdgpu, i915), off, or storm.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

enum { ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ, PAGE = 4096 };
#define RENDER "/dev/dri/renderD128"
#define CARD "/dev/dri/card0"

/* Numbers and structures of the kernel's drm.h, amdgpu_drm.h and i915_drm.h. */
#define VERSION 0xc0406400
#define GEM_CLOSE 0x40086409
#define GET_CAP 0xc010640c
#define HANDLE_TO_FD 0xc00c642d
#define FD_TO_HANDLE 0xc00c642e
#define CREATE_DUMB 0xc02064b2
#define MAP_DUMB 0xc01064b3
#define DESTROY_DUMB 0xc00464b4
#define AMDGPU_CREATE 0xc0206440
#define AMDGPU_MMAP 0xc0086441
#define I915_CREATE 0xc010645b
#define I915_MMAP_GTT 0xc0106464

struct version {
	int major, minor, patch;
	size_t name_len;
	char *name;
	size_t date_len;
	char *date;
	size_t desc_len;
	char *desc;
};
struct prime {
	uint32_t handle, flags;
	int fd;
};
struct handle {
	uint32_t handle, pad;
};
struct map {
	uint32_t handle, pad;
	uint64_t offset;
};
struct dumb {
	uint32_t height, width, bpp, flags, handle, pitch;
	uint64_t size;
};
struct i915 {
	uint64_t size;
	uint32_t handle, pad;
};

static bool amd = true;

#define FAILS(call, err)                                                                                               \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT((call) == -1 && errno == (err));                                                                  \
	} while (0)

/* create makes an object and returns its handle; 0 if it cannot, with errno. */
static uint32_t create(int fd, uint64_t size)
{
	if (amd) {
		uint64_t a[4] = {size, 0, 4 /* VRAM */, 1 /* CPU_ACCESS_REQUIRED */};
		return ioctl(fd, AMDGPU_CREATE, a) ? 0 : (uint32_t)a[0];
	}
	struct i915 c = {.size = size};
	if (ioctl(fd, I915_CREATE, &c))
		return 0;
	WANT(c.size == (size + PAGE - 1) / PAGE * PAGE);
	return c.handle;
}

static int offset(int fd, uint32_t handle, uint64_t *off)
{
	if (amd) {
		*off = handle;
		return ioctl(fd, AMDGPU_MMAP, off);
	}
	struct map m = {.handle = handle};
	int r = ioctl(fd, I915_MMAP_GTT, &m);
	*off = m.offset;
	return r;
}

static char *map(int fd, uint32_t handle, size_t n)
{
	uint64_t off = 0;
	WANT(!offset(fd, handle, &off) && off >= (uint64_t)1 << 32);
	char *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)off);
	WANT(p != MAP_FAILED);
	return p;
}

static int export(int fd, uint32_t handle)
{
	struct prime p = {.handle = handle, .flags = O_RDWR | O_CLOEXEC, .fd = -1};
	return ioctl(fd, HANDLE_TO_FD, &p) ? -1 : p.fd;
}

static int descriptors(void)
{
	int n = 0;
	DIR *d = opendir("/proc/self/fd");
	WANT(d);
	while (readdir(d))
		n++;
	closedir(d);
	return n;
}

/* await_descriptors waits until the process has at most so many: the library closes those
 * of a dma-buf when the kernel has reported that the program's are closed. */
static void await_descriptors(int most)
{
	for (int i = 0; i < 6000 && descriptors() > most; i++)
		usleep(10000);
	WANT(descriptors() <= most);
}

static void refusals(int fd)
{
	struct handle none = {.handle = 77};
	struct prime p = {.handle = 77, .flags = O_RDWR};
	uint64_t off;
	FAILS(ioctl(fd, GEM_CLOSE, &none), EINVAL);
	FAILS(ioctl(fd, HANDLE_TO_FD, &p), ENOENT);
	p.flags = O_APPEND;
	FAILS(ioctl(fd, HANDLE_TO_FD, &p), EINVAL);
	FAILS(offset(fd, 77, &off), ENOENT);
	FAILS(offset(fd, 0, &off), ENOENT);
	WANT(!create(fd, 0) && errno == EINVAL);
	WANT(!create(fd, UINT64_MAX) && errno == ENOMEM);
	p = (struct prime){.fd = -1};
	FAILS(ioctl(fd, FD_TO_HANDLE, &p), EBADF);
	p.fd = fd;
	FAILS(ioctl(fd, FD_TO_HANDLE, &p), EINVAL);
	FAILS(ioctl(fd, VERSION, (void *)8), EFAULT);
	FAILS(ioctl(fd, VERSION, NULL), EFAULT);
	FAILS(ioctl(fd, 0xc004643f, &none), EINVAL);  /* a number that nobody has */
	FAILS(ioctl(fd, 0x5401, &none), ENOTTY);      /* a terminal's */
	FAILS(ioctl(fd, amd ? I915_MMAP_GTT : AMDGPU_CREATE, &p), EINVAL);
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0) == MAP_FAILED && errno == EINVAL);
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, (off_t)1 << 40) == MAP_FAILED && errno == EINVAL);
	if (amd) {
		uint64_t bad[4] = {PAGE, 0, 1 << 10, 0};
		FAILS(ioctl(fd, AMDGPU_CREATE, bad), EINVAL);
		uint64_t flags[4] = {PAGE, 0, 4, (uint64_t)1 << 40};
		FAILS(ioctl(fd, AMDGPU_CREATE, flags), EINVAL);
		uint64_t hidden[4] = {PAGE, 0, 4, 2 /* NO_CPU_ACCESS */};
		WANT(!ioctl(fd, AMDGPU_CREATE, hidden));
		FAILS(offset(fd, (uint32_t)hidden[0], &off), EPERM);
		struct handle h = {.handle = (uint32_t)hidden[0]};
		WANT(!ioctl(fd, GEM_CLOSE, &h));
	}
	struct dumb d = {.height = 1, .width = 1, .bpp = 32};
	FAILS(ioctl(fd, CREATE_DUMB, &d), EACCES);
}

static void mappings(int fd)
{
	uint64_t off, other_off;
	uint32_t h = create(fd, 2 * PAGE + 1);
	WANT(h && !offset(fd, h, &off));
	char *p = map(fd, h, 3 * PAGE);
	strcpy(p + 2 * PAGE, "third page");
	WANT(mmap(NULL, 4 * PAGE, PROT_READ, MAP_SHARED, fd, (off_t)off) == MAP_FAILED && errno == EINVAL);
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, (off_t)off + PAGE) == MAP_FAILED && errno == EINVAL);
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, fd, (off_t)off) == MAP_FAILED && errno == EINVAL);

	/* Another open file of the node has other handles, and duplicates have the same. */
	int second = open(RENDER, O_RDONLY | O_CLOEXEC), copy = dup(fd);
	WANT(second >= 0 && copy >= 0 && fcntl(second, F_GETFD) == FD_CLOEXEC);
	FAILS(offset(second, h, &other_off), ENOENT);
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, second, (off_t)off) == MAP_FAILED && errno == EACCES);
	uint32_t mine = create(second, PAGE);
	WANT(mine && !offset(second, mine, &other_off));
	WANT(mmap(NULL, PAGE, PROT_WRITE, MAP_SHARED, second, (off_t)other_off) == MAP_FAILED && errno == EACCES);
	char *q = map(copy, h, 3 * PAGE);
	WANT(!strcmp(q + 2 * PAGE, "third page") && !close(copy) && !close(second));

	/* A mapping outlives the handle, and a handle is given again. */
	struct handle c = {.handle = h};
	WANT(!ioctl(fd, GEM_CLOSE, &c));
	strcpy(q, "still there");
	WANT(!strcmp(p, "still there") && !munmap(p, 3 * PAGE) && !munmap(q, 3 * PAGE));
	WANT(mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, (off_t)off) == MAP_FAILED && errno == EINVAL);
	WANT(create(fd, PAGE) == h && !ioctl(fd, GEM_CLOSE, &c));
}

/* A child has the handles that were there; what it closes, its parent keeps. */
static void children(int fd)
{
	uint32_t h = create(fd, PAGE);
	char *p = map(fd, h, PAGE);
	strcpy(p, "parent");
	pid_t pid = fork();
	if (!pid) {
		struct handle c = {.handle = h};
		char *q = map(fd, h, PAGE);
		if (strcmp(q, "parent") || ioctl(fd, GEM_CLOSE, &c) || create(fd, PAGE) != h || close(fd))
			_exit(1);
		strcpy(q, "child");
		_exit(0);
	}
	int status;
	WANT(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && !WEXITSTATUS(status));
	WANT(!strcmp(p, "child"));
	if (!(pid = vfork())) { /* it has the parent's memory */
		close(fd);
		_exit(0);
	}
	WANT(waitpid(pid, &status, 0) == pid);
	struct handle c = {.handle = h};
	WANT(!munmap(p, PAGE) && !ioctl(fd, GEM_CLOSE, &c));
}

static void dumb_buffers(void)
{
	struct dumb d = {.height = 10, .width = 100, .bpp = 32};
	int card = open(CARD, O_RDWR | O_CLOEXEC);
	WANT(card >= 0 && !ioctl(card, CREATE_DUMB, &d) && d.pitch >= 400 && d.size >= d.pitch * 10 && d.size % PAGE == 0);
	struct map m = {.handle = d.handle};
	WANT(!ioctl(card, MAP_DUMB, &m));
	char *p = mmap(NULL, d.size, PROT_READ | PROT_WRITE, MAP_SHARED, card, (off_t)m.offset);
	WANT(p != MAP_FAILED && !p[d.size - 1]);
	int fd = export(card, d.handle);
	WANT(fd >= 0 && !ioctl(card, DESTROY_DUMB, &d.handle) && !munmap(p, d.size));
	FAILS(ioctl(card, DESTROY_DUMB, &d.handle), EINVAL);
	FAILS(ioctl(card, MAP_DUMB, &m), ENOENT);
	d.width = 0;
	FAILS(ioctl(card, CREATE_DUMB, &d), EINVAL);
	d.width = 1, d.flags = 1;
	FAILS(ioctl(card, CREATE_DUMB, &d), EINVAL);
	uint64_t cap[2] = {1 /* DUMB_BUFFER */, 0};
	WANT(!ioctl(card, GET_CAP, cap) && cap[1] == 1 && !close(card) && !close(fd));
}

/* The same buffer comes back under the same handle; another node has one of its own. */
static void imports(int fd)
{
	uint32_t h = create(fd, PAGE);
	char *p = map(fd, h, PAGE);
	struct prime e = {.handle = h, .flags = O_RDWR, .fd = -1};
	WANT(!ioctl(fd, HANDLE_TO_FD, &e) && fcntl(e.fd, F_GETFD) == 0);
	struct prime back = {.fd = e.fd};
	WANT(!ioctl(fd, FD_TO_HANDLE, &back) && back.handle == h);
	int other = open(RENDER, O_RDWR | O_CLOEXEC);
	uint32_t first = create(other, PAGE);
	WANT(first && !ioctl(other, FD_TO_HANDLE, &back) && back.handle == first + 1);
	char *q = map(other, back.handle, PAGE);
	strcpy(p, "shared");
	WANT(!strcmp(q, "shared"));
	struct handle c = {.handle = h};
	WANT(!ioctl(fd, GEM_CLOSE, &c) && !close(e.fd) && !close(other));
	strcpy(q, "kept");
	WANT(!strcmp(p, "kept") && !munmap(p, PAGE) && !munmap(q, PAGE));
}

/* WRITEs through the dma-buf arrive in the program's mapping, and the other way round. */
static void traffic(struct self *s, int fd, int rounds)
{
	enum { SIZE = 5 * PAGE, AT = PAGE / 2 };
	static char bytes[SIZE];
	struct ibv_mr *plain = ibv_reg_mr(s->pd, bytes, sizeof bytes, ALL);
	uint32_t h = create(fd, SIZE);
	char *p = map(fd, h, SIZE);
	int dmabuf = export(fd, h);
	WANT(plain && dmabuf >= 0);
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(s->pd, AT, SIZE - AT, AT, dmabuf, ALL);
	WANT(mr && !close(dmabuf));
	for (int i = 0; i < rounds; i++) {
		int at = AT + i * 37 % (SIZE - AT - 64);
		snprintf(bytes, 64, "round %d", i);
		WANT(write_to(s, bytes, plain->lkey, at, mr->rkey, 64) == IBV_WC_SUCCESS && !strcmp(p + at, bytes));
		snprintf(p + at, 64, "the CPU's %d", i);
		WANT(write_to(s, (char *)(uintptr_t)at, mr->lkey, (uintptr_t)bytes + 128, plain->rkey, 64) == IBV_WC_SUCCESS);
		WANT(!strcmp(bytes + 128, p + at));
	}
	struct handle c = {.handle = h};
	WANT(!ioctl(fd, GEM_CLOSE, &c)); /* the region keeps the memory */
	strcpy(bytes, "last");
	WANT(write_to(s, bytes, plain->lkey, AT, mr->rkey, 5) == IBV_WC_SUCCESS && !strcmp(p + AT, "last"));
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(plain) && !munmap(p, SIZE));
}

/* Without descriptors calls fail, and later ones succeed. */
static void few_descriptors(int fd)
{
	struct rlimit old, less;
	uint32_t h = create(fd, PAGE);
	WANT(h && !getrlimit(RLIMIT_NOFILE, &old));
	less = old;
	less.rlim_cur = 3;
	WANT(!setrlimit(RLIMIT_NOFILE, &less));
	WANT(!create(fd, PAGE) && errno == EMFILE);
	FAILS(export(fd, h), EMFILE);
	FAILS(open(RENDER, O_RDWR), EMFILE);
	WANT(!setrlimit(RLIMIT_NOFILE, &old));
	struct handle c = {.handle = h};
	WANT(!ioctl(fd, GEM_CLOSE, &c));
}

static void *churn(void *arg)
{
	int fd = *(int *)arg;
	for (int i = 0; i < 200; i++) {
		int own = open(RENDER, O_RDWR | O_CLOEXEC), use = i & 1 ? fd : own;
		uint32_t h = create(use, PAGE);
		WANT(own >= 0 && h);
		char *p = map(use, h, PAGE);
		*p = 1;
		int dmabuf = export(use, h);
		WANT(dmabuf >= 0);
		struct handle c = {.handle = h};
		WANT(!ioctl(use, GEM_CLOSE, &c) && !munmap(p, PAGE) && !close(dmabuf) && !close(own));
	}
	return NULL;
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "amdgpu";
	struct stat st;
	if (!strcmp(how, "off")) {
		FAILS(open(RENDER, O_RDWR), ENOENT);
		WANT(stat(RENDER, &st) && access(CARD, F_OK));
		puts("ok");
		return 0;
	}
	amd = strcmp(how, "i915") != 0;
	struct self s = connect_self();
	WANT(!stat(RENDER, &st) && S_ISCHR(st.st_mode) && !access(RENDER, R_OK | W_OK));
	FAILS(open("/dev/dri/renderD129", O_RDWR), ENOENT);
	FAILS(open(RENDER, O_RDWR | O_DIRECTORY), ENOTDIR);
	int fd = open(RENDER, O_RDWR);
	WANT(fd >= 0);
	char name[4] = "";
	struct version v = {.name = name, .name_len = 4};
	WANT(!ioctl(fd, VERSION, &v) && !memcmp(name, amd ? "amdg" : "i915", 4) && v.name_len == (amd ? 6 : 4));

	int start = descriptors();
	traffic(&s, fd, 10);
	int before = descriptors(); /* perhaps with some that are about to be closed */
	refusals(fd);
	mappings(fd);
	children(fd);
	dumb_buffers();
	imports(fd);
	few_descriptors(fd);
	traffic(&s, fd, strcmp(how, "storm") ? 50 : 2000);
	pthread_t t[4];
	for (int i = 0; i < 4; i++)
		WANT(!pthread_create(&t[i], NULL, churn, &fd));
	for (int i = 0; i < 4; i++)
		WANT(!pthread_join(t[i], NULL));
	await_descriptors(before);

	/* The last close frees the objects. */
	for (int i = 0; i < 100; i++)
		WANT(create(fd, PAGE));
	int copy = dup(fd);
	WANT(descriptors() >= start + 100 && !close(fd) && create(copy, PAGE) && !close(copy));
	WANT(descriptors() < before);
	FAILS(ioctl(fd, VERSION, &v), EBADF);
	close_self(&s);
	puts("ok");
	return 0;
}
