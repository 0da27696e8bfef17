/*
 * A graphics device for programs that make dma-bufs with one: /dev/dri/renderD128, and
 * /dev/dri/card0 for dumb buffers. It has memory, and draws nothing. A real node of that
 * name is never hidden, unless VERBENA_DRM asks for it.
 *
 * A node is a memory file without contents, known by its inode: so duplicates and inherited
 * descriptors work. Its objects are memory files, too. Stages of an object's life:
 *
 *  1. GEM_CREATE or CREATE_DUMB makes the file. The node gives it a handle.
 *  2. GEM_MMAP, GEM_MMAP_GTT or MAP_DUMB returns an offset. mmap of the node at that offset
 *     maps the file.
 *  3. PRIME_HANDLE_TO_FD asks libibverbs.so.1 for a dma-buf of the file: so the exporter is
 *     the library's, and may move the buffer under its importers. PRIME_FD_TO_HANDLE is the
 *     way back.
 *  4. GEM_CLOSE, or the last close of the node, closes the file. Mappings and dma-bufs keep
 *     its memory.
 *
 * errnos are those of the kernel's drm_ioctl.c, drm_gem.c, drm_prime.c, and of amdgpu or i915.
 *
 * Unlike in the kernel, a child of fork() has its own handles: it has those that its parent
 * had made before. A node does not survive exec: the program there sees a memory file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "drm.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8U
#endif

/* --- the kernel's structures and numbers --- */

struct version {
	int32_t major, minor, patch;
	uint64_t name_len, name, date_len, date, desc_len, desc;
};

struct handle {
	uint32_t handle, pad;
};

struct prime {
	uint32_t handle, flags;
	int32_t fd;
};

struct cap {
	uint64_t capability, value;
};

struct dumb {
	uint32_t height, width, bpp, flags, handle, pitch;
	uint64_t size;
};

struct map { /* of dumb buffers, and GEM_MMAP_GTT */
	uint32_t handle, pad;
	uint64_t offset;
};

union amdgpu_create {
	struct {
		uint64_t size, alignment, domains, flags;
	} in;
	struct handle out;
};

union amdgpu_map {
	struct handle in;
	uint64_t offset;
};

struct i915_create {
	uint64_t size;
	uint32_t handle, pad;
};

union argument {
	struct version version;
	struct handle handle;
	struct prime prime;
	struct cap cap;
	struct dumb dumb;
	struct map map;
	union amdgpu_create amdgpu_create;
	union amdgpu_map amdgpu_map;
	struct i915_create i915_create;
};

_Static_assert(sizeof(struct version) == 64 && sizeof(struct dumb) == 32 && sizeof(union amdgpu_create) == 32,
	       "these are the kernel's on 64-bit machines");

enum { TYPE = 'd', COMMANDS = 0x40 /* a driver's numbers begin here */ };
enum { CAP_DUMB_BUFFER = 1, CAP_PRIME = 5, CAP_PRIME_BOTH = 3 };
enum { AMDGPU_DOMAINS = 7 /* CPU, GTT and VRAM */, AMDGPU_FLAGS = 0xffff, AMDGPU_NO_CPU_ACCESS = 2 };
enum { MAX_DUMB = 1 << 15 /* pixels in a row, and rows */ };

/* --- nodes and their objects --- */

struct object {
	int fd; /* -1: there is none with this handle */
	bool no_cpu;
	uint64_t size, offset; /* offset: where a mapping of the node finds it */
	ino_t inode;
};

struct node {
	struct node *next;
	dev_t device;
	ino_t inode;
	int watch; /* of inotify; -1: there is none */
	bool render;
	uint32_t count; /* of objects; a handle is an index, plus one */
	struct object *objects;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows, but for driver and any */
static struct node *nodes;
static uint64_t next_page = 0x100000; /* where the kernel's offsets begin: behind those of other mappings */
static int watcher = -1;	      /* inotify */
static pid_t owner;		      /* a child of vfork() has the same memory, and other descriptors */
static bool forked;		      /* the nodes are the parent's, and not watched yet */
static bool any;		      /* nodes is not empty; read without the lock */
static enum { OFF, AMDGPU, I915 } driver = AMDGPU;
static bool hides; /* a real node does not win */

static void lock_all(void) { pthread_mutex_lock(&lock); }
static void unlock_all(void) { pthread_mutex_unlock(&lock); }
static void in_child(void);

__attribute__((constructor)) static void at_load(void)
{
	const char *v = getenv("VERBENA_DRM");
	if (v && *v) {
		driver = !strcmp(v, "off") ? OFF : !strcmp(v, "i915") ? I915 : AMDGPU;
		hides = driver != OFF;
	}
	pthread_atfork(lock_all, unlock_all, in_child);
}

/* do_close: the function close would come back here. */
static void do_close(int fd) { (void)syscall(SYS_close, fd); }

/* out_of_the_way moves a descriptor to a high number, where no program expects its own. */
static int out_of_the_way(int fd)
{
	struct rlimit limit;
	if (fd < 0 || getrlimit(RLIMIT_NOFILE, &limit))
		return fd;
	int high = fcntl(fd, F_DUPFD_CLOEXEC, limit.rlim_cur > 2048 ? 1024 : (int)limit.rlim_cur / 2);
	if (high < 0)
		return fd;
	do_close(fd);
	return high;
}

static int memory_file(const char *name, uint64_t size, int seals)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
	if (fd < 0 && errno == EINVAL) /* the kernel is older than 6.3 */
		fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return -1;
	if (ftruncate(fd, (off_t)size) || fcntl(fd, F_ADD_SEALS, seals | F_SEAL_GROW | F_SEAL_SHRINK | F_SEAL_SEAL)) {
		int err = errno;
		do_close(fd);
		errno = err;
		return -1;
	}
	return fd;
}

static bool same_file(int fd, dev_t device, ino_t inode)
{
	struct stat st;
	return !fstat(fd, &st) && st.st_dev == device && st.st_ino == inode;
}

/* find_locked returns the node of a descriptor, or NULL. */
static struct node *find_locked(int fd)
{
	struct stat st;
	if (!nodes || fstat(fd, &st))
		return NULL;
	for (struct node *n = nodes; n; n = n->next)
		if (n->inode == st.st_ino && n->device == st.st_dev)
			return n;
	return NULL;
}

static struct object *object_locked(struct node *n, uint32_t handle)
{
	struct object *o = handle && handle <= n->count ? &n->objects[handle - 1] : NULL;
	return o && o->fd >= 0 ? o : NULL;
}

static void drop_locked(struct object *o)
{
	/* A program that closes descriptors in a loop may have closed it, and opened another. */
	struct stat st;
	if (!fstat(o->fd, &st) && st.st_ino == o->inode)
		do_close(o->fd);
	o->fd = -1;
}

/* --- the last close of a node --- */

/* descriptor_of returns a descriptor that this process has of a node, or -1. It uses calls
 * that are allowed in a signal handler: close is. */
static int descriptor_of(const struct node *n)
{
	struct entry { /* struct linux_dirent64 */
		uint64_t inode;
		int64_t next;
		uint16_t length;
		uint8_t type;
		char name[];
	};
	char buf[4096] __attribute__((aligned(8)));
	int found = -1, dir = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
	for (long got; dir >= 0 && found < 0 && (got = syscall(SYS_getdents64, dir, buf, sizeof buf)) > 0;)
		for (long at = 0; at < got && found < 0;) {
			struct entry *e = (struct entry *)(buf + at);
			int fd = 0;
			for (const char *c = e->name; *c >= '0' && *c <= '9'; c++)
				fd = fd * 10 + (*c - '0');
			if (e->name[0] != '.' && same_file(fd, n->device, n->inode))
				found = fd;
			at += e->length;
		}
	if (dir >= 0)
		do_close(dir);
	return found;
}

static void free_node_locked(struct node *n)
{
	for (struct node **p = &nodes; *p; p = &(*p)->next)
		if (*p == n) {
			*p = n->next;
			break;
		}
	__atomic_store_n(&any, nodes != NULL, __ATOMIC_RELEASE);
	for (uint32_t i = 0; i < n->count; i++)
		if (n->objects[i].fd >= 0)
			drop_locked(&n->objects[i]);
	free(n->objects);
	free(n);
}

/* watch_locked has the kernel report the end of the open file behind a descriptor. */
static void watch_locked(struct node *n, int fd)
{
	char path[32];
	snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
	if (watcher < 0)
		watcher = out_of_the_way(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
	n->watch = watcher < 0 ? -1 : inotify_add_watch(watcher, path, IN_CLOSE);
}

/* settle_locked frees a node if this process has no descriptor of it any more. */
static void settle_locked(struct node *n)
{
	int fd = descriptor_of(n);
	if (fd < 0)
		free_node_locked(n);
	else if (n->watch < 0)
		watch_locked(n, fd);
}

/* reap_locked frees the nodes whose last descriptor is closed. The kernel reports when an
 * open file ends, whoever has closed it last. */
static void reap_locked(void)
{
	char buf[1024] __attribute__((aligned(8)));
	if (owner != getpid()) /* a child of vfork() */
		return;
	for (struct node *n = nodes, *next; n && forked; n = next) {
		next = n->next;
		settle_locked(n);
	}
	forked = false;
	for (ssize_t got; watcher >= 0 && (got = read(watcher, buf, sizeof buf)) > 0;)
		for (ssize_t at = 0; at < got;) {
			struct inotify_event *e = (struct inotify_event *)(buf + at);
			at += (ssize_t)(sizeof *e + e->len);
			struct node *n = nodes;
			while (n && n->watch != e->wd)
				n = n->next;
			if (n)
				settle_locked(n);
		}
}

/* in_child: a child of fork() shares its parent's inotify, whose events are the parent's. It
 * gets one of its own when it uses a node. */
static void in_child(void)
{
	if (watcher >= 0)
		do_close(watcher);
	watcher = -1;
	owner = getpid();
	forked = nodes != NULL;
	for (struct node *n = nodes; n; n = n->next)
		n->watch = -1;
	pthread_mutex_unlock(&lock);
}

void vd_closed(void)
{
	if (!__atomic_load_n(&any, __ATOMIC_ACQUIRE))
		return;
	int err = errno;
	if (!pthread_mutex_trylock(&lock)) { /* in a signal handler it may be this thread's */
		reap_locked();
		pthread_mutex_unlock(&lock);
	}
	errno = err;
}

/* --- opening --- */

bool vd_is_node(const char *path)
{
	if (driver == OFF || !path || strncmp(path, "/dev/dri/", 9) ||
	    (strcmp(path + 9, "renderD128") && strcmp(path + 9, "card0")))
		return false;
	int err = errno;
	bool real = !hides && !syscall(SYS_faccessat, AT_FDCWD, path, F_OK);
	errno = err;
	return !real;
}

int vd_open(const char *path, int flags)
{
	if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL) || (flags & O_DIRECTORY)) {
		errno = flags & O_DIRECTORY ? ENOTDIR : EEXIST;
		return -1;
	}
	struct node *n = calloc(1, sizeof *n);
	int file = n ? memory_file("verbena-drm", 0, F_SEAL_WRITE) : -1, fd = -1;
	struct stat st;
	if (file >= 0 && !fstat(file, &st)) {
		/* The kernel does not report the end of the open file that memfd_create has made. */
		char self[32];
		snprintf(self, sizeof self, "/proc/self/fd/%d", file);
		fd = (int)syscall(SYS_openat, AT_FDCWD, self, flags & (O_ACCMODE | O_CLOEXEC | O_NONBLOCK), 0);
	}
	int err = errno;
	if (file >= 0)
		do_close(file);
	if (fd < 0) {
		free(n);
		errno = err;
		return -1;
	}
	n->device = st.st_dev, n->inode = st.st_ino;
	n->render = strstr(path, "render") != NULL;
	pthread_mutex_lock(&lock);
	owner = getpid();
	reap_locked();
	watch_locked(n, fd);
	n->next = nodes;
	nodes = n;
	__atomic_store_n(&any, true, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return fd;
}

/* --- commands; each returns 0 or a negative errno --- */

static uint64_t page_size(void) { return (uint64_t)sysconf(_SC_PAGESIZE); }

/* add_locked gives a memory file a handle, and returns it; or a negative errno. The file is
 * the node's then. */
static int64_t add_locked(struct node *n, int fd, uint64_t size, bool no_cpu)
{
	struct stat st;
	uint32_t i = 0;
	while (i < n->count && n->objects[i].fd >= 0)
		i++;
	if (fstat(fd, &st))
		return -errno;
	if (i == n->count) {
		uint32_t more = n->count ? 2 * n->count : 16;
		struct object *all = n->count < 1U << 24 ? realloc(n->objects, more * sizeof *all) : NULL;
		if (!all)
			return -ENOMEM;
		for (uint32_t k = n->count; k < more; k++)
			all[k].fd = -1;
		n->objects = all;
		n->count = more;
	}
	n->objects[i] = (struct object){
		.fd = fd, .size = size, .offset = next_page * page_size(), .no_cpu = no_cpu, .inode = st.st_ino};
	next_page += size / page_size();
	return (int64_t)i + 1;
}

/* create makes an object of at least size bytes. It returns its handle, or a negative errno,
 * and stores the size that it has. */
static int64_t create(struct node *n, uint64_t *size, bool no_cpu)
{
	uint64_t page = page_size();
	if (!*size)
		return -EINVAL;
	if (*size > (uint64_t)INT64_MAX - page)
		return -ENOMEM;
	*size = (*size + page - 1) / page * page;
	int fd = out_of_the_way(memory_file("verbena-gem", *size, 0));
	if (fd < 0)
		return errno == EMFILE || errno == ENFILE ? -errno : -ENOMEM;
	int64_t handle = add_locked(n, fd, *size, no_cpu);
	if (handle < 0)
		do_close(fd);
	return handle;
}

static int offset_of(struct node *n, uint32_t handle, uint64_t *to)
{
	struct object *o = object_locked(n, handle);
	if (!o)
		return -ENOENT;
	if (o->no_cpu)
		return -EPERM;
	*to = o->offset;
	return 0;
}

static int close_handle(struct node *n, uint32_t handle)
{
	struct object *o = object_locked(n, handle);
	if (!o)
		return -EINVAL; /* as the kernel, which answers ENOENT elsewhere */
	drop_locked(o);
	return 0;
}

/* copy copies between the program's memory and ours; a pointer that the program got wrong is
 * EFAULT. */
static int copy(void *ours, uint64_t theirs, size_t n, bool out)
{
	struct iovec local = {ours, n}, remote = {(void *)(uintptr_t)theirs, n};
	if (!n)
		return 0;
	ssize_t done = out ? process_vm_writev(getpid(), &local, 1, &remote, 1, 0)
			   : process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
	if (done < 0 && errno != EFAULT) { /* the call is forbidden here */
		memcpy(out ? remote.iov_base : ours, out ? ours : remote.iov_base, n);
		return 0;
	}
	return done == (ssize_t)n ? 0 : -EFAULT;
}

/* text returns a field of VERSION: as much as there is room for, and how long it is. */
static int text(uint64_t to, uint64_t *room, const char *s)
{
	uint64_t n = strlen(s), fits = *room < n ? *room : n;
	*room = n;
	return to ? copy((char *)s, to, fits, true) : 0;
}

static int version(struct version *v)
{
	bool amd = driver == AMDGPU;
	v->major = amd ? 3 : 1;
	v->minor = amd ? 54 : 6;
	v->patch = 0;
	int err = text(v->name, &v->name_len, amd ? "amdgpu" : "i915");
	if (!err)
		err = text(v->date, &v->date_len, "0");
	return err ? err : text(v->desc, &v->desc_len, "Verbena: memory, and no graphics");
}

static int create_dumb(struct node *n, struct dumb *d)
{
	if (!d->width || !d->height || !d->bpp || d->bpp > 64 || d->flags)
		return -EINVAL;
	if (d->width > MAX_DUMB || d->height > MAX_DUMB)
		return -EINVAL;
	d->pitch = (d->width * ((d->bpp + 7) / 8) + 63) / 64 * 64;
	d->size = (uint64_t)d->pitch * d->height;
	int64_t handle = create(n, &d->size, false);
	if (handle < 0)
		return (int)handle;
	d->handle = (uint32_t)handle;
	return 0;
}

static int create_amdgpu(struct node *n, union amdgpu_create *c)
{
	uint64_t size = c->in.size;
	if (c->in.domains & ~(uint64_t)AMDGPU_DOMAINS || c->in.flags & ~(uint64_t)AMDGPU_FLAGS)
		return -EINVAL;
	int64_t handle = create(n, &size, c->in.flags & AMDGPU_NO_CPU_ACCESS);
	if (handle < 0)
		return (int)handle;
	memset(c, 0, sizeof *c);
	c->out.handle = (uint32_t)handle;
	return 0;
}

static int create_i915(struct node *n, struct i915_create *c)
{
	int64_t handle = create(n, &c->size, false);
	if (handle < 0)
		return (int)handle;
	c->handle = (uint32_t)handle;
	return 0;
}

/* --- dma-bufs: by libibverbs.so.1, which is loaded for it if the program has not --- */

/* by_library calls a function of the library with a descriptor. It returns a descriptor, or a
 * negative errno. */
static int by_library(const char *function, int fd)
{
	void *lib = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
	if (!lib)
		lib = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_LOCAL);
	int (*f)(int) = lib ? (int (*)(int))dlsym(lib, function) : NULL;
	int got = f ? f(fd) : -EOPNOTSUPP;
	if (lib)
		dlclose(lib); /* the library stays: it is marked so */
	return got;
}

/* export_object has the lock, and gives it up while the library works. */
static int export_object(struct node *n, struct prime *p)
{
	if (p->flags & ~(uint32_t)(O_CLOEXEC | O_RDWR))
		return -EINVAL;
	struct object *o = object_locked(n, p->handle);
	if (!o)
		return -ENOENT;
	int file = fcntl(o->fd, F_DUPFD_CLOEXEC, 0);
	if (file < 0)
		return -errno;
	pthread_mutex_unlock(&lock);
	int fd = by_library("verbena_export_file", file);
	do_close(file);
	if (fd >= 0 && !(p->flags & O_CLOEXEC))
		fcntl(fd, F_SETFD, 0);
	pthread_mutex_lock(&lock);
	if (fd < 0)
		return fd;
	p->fd = fd;
	return 0;
}

/* import_object as well; nobody else frees the node meanwhile, since node has a descriptor of it. */
static int import_object(int node, struct prime *p)
{
	pthread_mutex_unlock(&lock);
	int file = by_library("verbena_dmabuf_file", p->fd);
	struct stat st;
	if (file >= 0 && fstat(file, &st)) {
		do_close(file);
		file = -EINVAL;
	}
	pthread_mutex_lock(&lock);
	if (file < 0)
		return file;
	struct node *n = find_locked(node);
	int64_t handle = n ? 0 : -EBADF;
	for (uint32_t i = 0; n && i < n->count && !handle; i++)
		if (n->objects[i].fd >= 0 && n->objects[i].inode == st.st_ino)
			handle = (int64_t)i + 1; /* an object of a node has one handle */
	bool known = handle > 0;
	if (!handle) {
		file = out_of_the_way(file);
		handle = add_locked(n, file, (uint64_t)st.st_size, false);
	}
	if (known || handle < 0)
		do_close(file);
	if (handle < 0)
		return (int)handle;
	p->handle = (uint32_t)handle;
	return 0;
}

/* --- ioctl --- */

static int get_cap(const struct node *n, struct cap *c)
{
	switch (c->capability) {
	case CAP_DUMB_BUFFER:
		c->value = !n->render;
		return 0;
	case CAP_PRIME:
		c->value = CAP_PRIME_BOTH;
		return 0;
	}
	return -EINVAL;
}

#define READ_WRITE(nr, type) (_IOC(_IOC_READ | _IOC_WRITE, TYPE, nr, sizeof(type)))
#define WRITE_ONLY(nr, type) (_IOC(_IOC_WRITE, TYPE, nr, sizeof(type)))

static const struct command {
	unsigned int request;
	int only; /* this driver's; 0: any */
	bool card; /* not on a render node */
} commands[] = {
	{READ_WRITE(0x00, struct version), 0, false},
	{WRITE_ONLY(0x09, struct handle), 0, false}, /* GEM_CLOSE */
	{READ_WRITE(0x0c, struct cap), 0, false},
	{READ_WRITE(0x2d, struct prime), 0, false}, /* PRIME_HANDLE_TO_FD */
	{READ_WRITE(0x2e, struct prime), 0, false}, /* PRIME_FD_TO_HANDLE */
	{READ_WRITE(0xb2, struct dumb), 0, true},
	{READ_WRITE(0xb3, struct map), 0, true},
	{READ_WRITE(0xb4, uint32_t), 0, true}, /* DESTROY_DUMB */
	{READ_WRITE(COMMANDS + 0x00, union amdgpu_create), AMDGPU, false},
	{READ_WRITE(COMMANDS + 0x01, union amdgpu_map), AMDGPU, false},
	{READ_WRITE(COMMANDS + 0x1b, struct i915_create), I915, false},
	{READ_WRITE(COMMANDS + 0x24, struct map), I915, false}, /* GEM_MMAP_GTT */
};

/* execute runs a command with its argument. */
static int execute(struct node *n, int fd, unsigned int request, union argument *a)
{
	switch (_IOC_NR(request)) {
	case 0x00:
		return version(&a->version);
	case 0x09:
		return close_handle(n, a->handle.handle);
	case 0x0c:
		return get_cap(n, &a->cap);
	case 0x2d:
		return export_object(n, &a->prime);
	case 0x2e:
		return import_object(fd, &a->prime);
	case 0xb2:
		return create_dumb(n, &a->dumb);
	case 0xb3:
	case COMMANDS + 0x24:
		return offset_of(n, a->map.handle, &a->map.offset);
	case 0xb4:
		return close_handle(n, a->handle.handle);
	case COMMANDS + 0x00:
		return create_amdgpu(n, &a->amdgpu_create);
	case COMMANDS + 0x01:
		return offset_of(n, a->amdgpu_map.in.handle, &a->amdgpu_map.offset);
	case COMMANDS + 0x1b:
		return create_i915(n, &a->i915_create);
	}
	return -EINVAL;
}

/* perform finds a command by its number, as the kernel does: the size in the request only
 * says how much of the argument the program has. */
static int perform(struct node *n, int fd, unsigned int request, void *arg)
{
	const struct command *c = NULL;
	union argument a;
	if (_IOC_TYPE(request) != TYPE)
		return -ENOTTY;
	for (size_t i = 0; i < sizeof commands / sizeof *commands && !c; i++)
		if (_IOC_NR(commands[i].request) == _IOC_NR(request) &&
		    (!commands[i].only || commands[i].only == (int)driver))
			c = &commands[i];
	if (!c)
		return -EINVAL;
	if (c->card && n->render)
		return -EACCES;
	size_t size = _IOC_SIZE(request) < _IOC_SIZE(c->request) ? _IOC_SIZE(request) : _IOC_SIZE(c->request);
	unsigned int both = request & c->request;
	memset(&a, 0, sizeof a);
	int err = _IOC_DIR(both) & _IOC_WRITE ? copy(&a, (uintptr_t)arg, size, false) : 0;
	if (!err)
		err = execute(n, fd, c->request, &a);
	if (_IOC_DIR(both) & _IOC_READ) {
		int wrong = copy(&a, (uintptr_t)arg, size, true);
		err = err ? err : wrong;
	}
	return err;
}

bool vd_ioctl(int fd, unsigned long request, void *arg, int *result)
{
	if (!__atomic_load_n(&any, __ATOMIC_ACQUIRE))
		return false;
	int err = errno;
	pthread_mutex_lock(&lock);
	reap_locked();
	struct node *n = find_locked(fd);
	int r = n ? perform(n, fd, (unsigned int)request, arg) : 0;
	pthread_mutex_unlock(&lock);
	errno = r < 0 ? -r : err;
	*result = r < 0 ? -1 : 0;
	return n != NULL;
}

/* --- mmap --- */

/* backing_locked returns a descriptor of the object at an offset, or a negative errno. */
static int backing_locked(struct node *n, int fd, size_t length, int prot, int flags, uint64_t off)
{
	int mode = fcntl(fd, F_GETFL);
	for (struct node *of = nodes; of; of = of->next)
		for (uint32_t i = 0; i < of->count; i++) {
			struct object *o = &of->objects[i];
			if (o->fd < 0 || o->offset != off || length > o->size)
				continue;
			if (of != n)
				return -EACCES; /* this open file has no handle of it */
			if (o->no_cpu || (flags & MAP_TYPE) == MAP_PRIVATE)
				return -EINVAL;
			if (mode < 0 || (mode & O_ACCMODE) == O_WRONLY || (prot & PROT_WRITE && (mode & O_ACCMODE) == O_RDONLY))
				return -EACCES;
			int backing = fcntl(o->fd, F_DUPFD_CLOEXEC, 0);
			return backing < 0 ? -ENOMEM : backing;
		}
	return -EINVAL;
}

bool vd_mmap(int fd, size_t n, int prot, int flags, off_t off, int *backing)
{
	if (!__atomic_load_n(&any, __ATOMIC_ACQUIRE) || fd < 0 || flags & MAP_ANONYMOUS)
		return false;
	int err = errno;
	pthread_mutex_lock(&lock);
	struct node *of = find_locked(fd);
	int r = of ? backing_locked(of, fd, n, prot, flags, (uint64_t)off) : 0;
	pthread_mutex_unlock(&lock);
	errno = r < 0 ? -r : err;
	*backing = r < 0 ? -1 : r;
	return of != NULL;
}
