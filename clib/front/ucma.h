/*
 * The connection manager's file, /dev/infiniband/rdma_cm, as the distribution's librdmacm.so.1
 * uses it: ucma.c. gotpatch.c puts these functions into librdmacm in the place of the C
 * library's.
 */
#ifndef VERBENA_UCMA_H
#define VERBENA_UCMA_H

#include <sys/stat.h>
#include <sys/types.h>

int vb_cm_open(const char *path, int flags, ...);
ssize_t vb_cm_write(int fd, const void *buf, size_t n);
int vb_cm_fstat(int fd, struct stat *st);
int vb_cm_fxstat(int version, int fd, struct stat *st);
int vb_cm_close(int fd);

/* vb_patch_librdmacm sees to it that a librdmacm.so.1 which is loaded uses them. It returns 0,
 * or ENODEV if that cannot be done and the caller, a return address, is in that library. */
int vb_patch_librdmacm(const void *caller);

#endif
