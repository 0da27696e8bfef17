/*
 * The render node: what files.c and maps.c ask drm.c.
 */
#ifndef VERBENA_DRM_H
#define VERBENA_DRM_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

/* vd_is_node reports whether a path is that of a node which is shown here. */
bool vd_is_node(const char *path);

/* vd_open opens such a node. It returns a descriptor, or -1 with errno. */
int vd_open(const char *path, int flags);

/* vd_ioctl handles an ioctl of a node, and stores its result. It returns false if the
 * descriptor is not that of a node. */
bool vd_ioctl(int fd, unsigned long request, void *arg, int *result);

/* vd_mmap finds the memory that a mapping of a node would show. It returns false if the
 * descriptor is not that of a node. Otherwise it stores a descriptor that the caller maps
 * from its beginning, and closes; or -1, with errno, if the mapping is refused. */
bool vd_mmap(int fd, size_t n, int prot, int flags, off_t off, int *backing);

/* vd_closed is called after a descriptor was closed: with the last one of a node its
 * objects go. */
void vd_closed(void);

#endif
