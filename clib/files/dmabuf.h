/*
 * Descriptors of verbena's dma-bufs: what files.c asks dmabuf.c.
 */
#ifndef VERBENA_DMABUF_H
#define VERBENA_DMABUF_H

#include <stdbool.h>

/* verbena_dmabuf_ioctl handles an ioctl of a dma-buf of verbena's, or of a fence, and stores its
 * result. It returns false if the descriptor is neither. */
bool verbena_dmabuf_ioctl(int fd, unsigned long request, void *arg, int *result);

#endif
