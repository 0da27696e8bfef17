// What the engine and this library do beside the program's calls, as a driver in the kernel would: their memory is apart from
// the program's heap, which a faulty program may overwrite, and their mappings are made by system calls, and not by the
// calls of dmirror.c, which look at what the program does. The engine is compiled with these names (own.h).

#include "dmirror.h"

#include <pthread.h>
#include <stdarg.h>
#include <sys/mman.h>

#define CLASSES 48

struct piece {
	size_t class; // the piece has 1 << class bytes
	struct piece *next;
};

// Where mappings of our own begin: far from the program's, which may count on addresses that it has unmapped.
#define FAR 0x100000000000ull

static uint64_t far = FAR;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; // guards what follows
static struct piece *spare[CLASSES];
static char *fresh;
static size_t left;

// own_forked frees the lock in a child of a fork, which may have been taken then. What was allocated is lost.
void own_forked(void)
{
	pthread_mutex_init(&lock, NULL);
	memset(spare, 0, sizeof spare);
	left = 0;
}

void *own_calloc(size_t n, size_t size)
{
	size_t bytes, class = 5;
	struct piece *p;

	if (__builtin_mul_overflow(n, size, &bytes) || bytes > 1ull << (CLASSES - 2))
		return NULL;
	while ((size_t)1 << class < bytes + sizeof *p)
		class++;
	pthread_mutex_lock(&lock);
	if ((p = spare[class]) != NULL) {
		spare[class] = p->next;
	} else {
		if (left < (size_t)1 << class) {
			size_t want = class > 20 ? (size_t)1 << class : 1 << 20;
			void *more = own_mmap(NULL, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

			if (more == MAP_FAILED) {
				pthread_mutex_unlock(&lock);
				errno = ENOMEM;
				return NULL;
			}
			fresh = more;
			left = want;
		}
		p = (struct piece *)fresh;
		fresh += (size_t)1 << class;
		left -= (size_t)1 << class;
	}
	pthread_mutex_unlock(&lock);
	p->class = class;
	memset(p + 1, 0, bytes);
	return p + 1;
}

void *own_malloc(size_t bytes) { return own_calloc(1, bytes); }

void own_free(void *mem)
{
	struct piece *p = (struct piece *)mem - 1;

	if (mem == NULL)
		return;
	pthread_mutex_lock(&lock);
	p->next = spare[p->class];
	spare[p->class] = p;
	pthread_mutex_unlock(&lock);
}

void *own_realloc(void *mem, size_t bytes)
{
	struct piece *p = (struct piece *)mem - 1;
	void *more;

	if (mem != NULL && bytes + sizeof *p <= (size_t)1 << p->class)
		return mem;
	more = own_malloc(bytes);
	if (more != NULL && mem != NULL) {
		memcpy(more, mem, ((size_t)1 << p->class) - sizeof *p);
		own_free(mem);
	}
	return more;
}

void *own_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t off)
{
	if (addr == NULL) // at a boundary of huge pages, with a gap behind it
		addr = (void *)(uintptr_t)__atomic_fetch_add(&far, (bytes + 2 * BLOCK * PAGE - 1) / (BLOCK * PAGE) * (BLOCK * PAGE), __ATOMIC_RELAXED);
	return (void *)syscall(SYS_mmap, addr, bytes, prot, flags, fd, off);
}

int own_munmap(void *addr, size_t bytes) { return (int)syscall(SYS_munmap, addr, bytes); }

int own_madvise(void *addr, size_t bytes, int advice) { return (int)syscall(SYS_madvise, addr, bytes, advice); }

void *own_mremap(void *addr, size_t old, size_t bytes, int flags, ...)
{
	void *to;
	va_list args;

	va_start(args, flags);
	to = flags & MREMAP_FIXED ? va_arg(args, void *) : NULL;
	va_end(args);
	return (void *)syscall(SYS_mremap, addr, old, bytes, flags, to);
}
