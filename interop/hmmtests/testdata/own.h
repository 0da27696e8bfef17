// The engine and the library are compiled with this header before all others (-include), so that they use what own.c has.

#ifndef OWN_H
#define OWN_H

#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>

void *own_malloc(size_t bytes);
void *own_calloc(size_t n, size_t size);
void *own_realloc(void *mem, size_t bytes);
void own_free(void *mem);
void own_forked(void);
void *own_mmap(void *addr, size_t bytes, int prot, int flags, int fd, off_t off);
int own_munmap(void *addr, size_t bytes);
int own_madvise(void *addr, size_t bytes, int advice);
void *own_mremap(void *addr, size_t old, size_t bytes, int flags, ...);

#define malloc own_malloc
#define calloc own_calloc
#define realloc own_realloc
#define free own_free
#define mmap own_mmap
#define munmap own_munmap
#define madvise own_madvise
#define mremap own_mremap

#endif
