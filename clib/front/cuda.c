/*
 * Memory of CUDA. The preloaded clib/files/cuda.c calls the first two functions; without it, the device learns by
 * itself, and later, that memory is gone, and dma-bufs are registered by addresses alone.
 *
 *  1. verbena_cuda_gone is called before memory is freed. The backend then ends all access to it.
 *  2. verbena_cuda_exported is called when CUDA has made a dma-buf of memory. A dma-buf does not say whose memory it is,
 *     and CUDA does not import what it has exported: so its address is noted here, by the inode of the descriptor. Each
 *     export has an inode of its own, and copies of a descriptor have the same.
 *  3. vb_cuda_exports finds the address again when the dma-buf is registered.
 */
#define _GNU_SOURCE
#include <sys/stat.h>

#include "../files/words.h"
#include "front.h"

/* A dma-buf that CUDA has made. */
struct export {
	dev_t dev;
	ino_t ino;
	uint64_t addr, size; /* size 0: no record */
};

enum { EXPORTS = 1024 }; /* the last ones: programs register a dma-buf soon after they have made it */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows; not held while the backend is called */
static struct export exports[EXPORTS];
static unsigned int used; /* records that were ever used: the first ones */
static unsigned int next; /* the record that the next export gets */

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }

/* A child of fork() cannot use its parent's CUDA: addresses of that mean nothing in the child. */
static void after_fork_in_child(void)
{
	pthread_mutex_init(&lock, NULL);
	used = next = 0;
}

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* find_locked returns the record of a descriptor's file, or NULL. */
static struct export *find_locked(const struct stat *st)
{
	for (struct export *x = exports; x < exports + used; x++)
		if (x->size && x->ino == st->st_ino && x->dev == st->st_dev)
			return x;
	return NULL;
}

PUBLIC void verbena_cuda_exported(int fd, uint64_t addr, uint64_t size)
{
	struct stat st;
	if (fstat(fd, &st))
		return;
	pthread_mutex_lock(&lock);
	struct export *x = find_locked(&st); /* of a file that is closed: its inode is another one's now */
	if (!x) {
		x = &exports[next];
		next = (next + 1) % EXPORTS;
		used += used < EXPORTS;
	}
	*x = (struct export){.dev = st.st_dev, .ino = st.st_ino, .addr = addr, .size = size};
	pthread_mutex_unlock(&lock);
}

void vb_cuda_exports(struct vbe_mr *r)
{
	struct stat st;
	if (fstat(r->fd, &st))
		return;
	pthread_mutex_lock(&lock);
	struct export *x = find_locked(&st);
	if (x) {
		r->exported = x->addr;
		r->exported_size = x->size;
	}
	pthread_mutex_unlock(&lock);
}

/* is_gone reports whether memory of an export is, or may be, what a program gives up. */
static bool is_gone(const struct export *x, int what, uint64_t addr, uint64_t size)
{
	switch (what) {
	case VB_CUDA_CONTEXT: /* whose memory an export is of was not noted */
	case VB_CUDA_DEVICE:
		return true;
	case VB_CUDA_ALLOCATION:
	case VB_CUDA_RANGE:
		if (x->addr < addr)
			return x->size > addr - x->addr;
		return !size || x->addr - addr < size; /* of an unknown size: all that lies above */
	default: /* memory of the host is not exported; a context that is released may live on */
		return false;
	}
}

/* The records go first: what is registered from now on must not find memory that is about to be freed. */
PUBLIC void verbena_cuda_gone(int what, uint64_t addr, uint64_t size)
{
	pthread_mutex_lock(&lock);
	for (struct export *x = exports; x < exports + used; x++)
		if (x->size && is_gone(x, what, addr, size))
			x->size = 0;
	pthread_mutex_unlock(&lock);
	struct backend *b = vb_loaded_backend();
	if (b)
		b->vbe_cuda_gone((uint32_t)what, addr, size);
}

/* says reports whether VERBENA_CUDA has a word. */
static bool says(const char *word) { return vb_has_word(vb_setting("VERBENA_CUDA"), word); }

bool vb_cuda_shown(bool shim) { return shim && !says("driver") ? true : says("peermem") && !says("off"); }
