/*
 * The five functions by which pyverbs allocates dma-bufs from a render node. Debian 12 built its
 * pyverbs without the kernel's headers of graphics, and has functions there that always fail. These
 * are preloaded over them.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

/* Numbers of the kernel's drm.h and amdgpu_drm.h. */
#define GEM_CLOSE 0x40086409
#define HANDLE_TO_FD 0xc00c642d
#define AMDGPU_CREATE 0xc0206440
#define AMDGPU_MMAP 0xc0086441
enum { CPU_ACCESS = 1, USWC = 4, GTT = 2, VRAM = 4 };

struct dmabuf {
	int node, fd;
	uint32_t handle;
	uint64_t offset;
};

struct prime {
	uint32_t handle, flags;
	int fd;
};

void dmabuf_free(struct dmabuf *d)
{
	uint32_t handle[2] = {d->handle, 0};
	int err = errno;
	if (d->fd >= 0)
		close(d->fd);
	if (d->handle)
		ioctl(d->node, GEM_CLOSE, handle);
	if (d->node >= 0)
		close(d->node);
	free(d);
	errno = err;
}

struct dmabuf *dmabuf_alloc(unsigned long size, int gpu, int gtt)
{
	char path[40];
	uint64_t create[4] = {size, 0, gtt ? GTT : VRAM, gtt ? USWC : CPU_ACCESS};
	struct dmabuf *d = malloc(sizeof *d);
	if (!d)
		return NULL;
	*d = (struct dmabuf){.node = -1, .fd = -1};
	snprintf(path, sizeof path, "/dev/dri/renderD%d", 128 + gpu);
	d->node = open(path, O_RDWR | O_CLOEXEC);
	if (d->node < 0 || ioctl(d->node, AMDGPU_CREATE, create))
		goto fail;
	d->handle = (uint32_t)create[0];
	d->offset = d->handle;
	if (ioctl(d->node, AMDGPU_MMAP, &d->offset))
		goto fail;
	struct prime p = {.handle = d->handle, .flags = O_RDWR | O_CLOEXEC, .fd = -1};
	if (ioctl(d->node, HANDLE_TO_FD, &p))
		goto fail;
	d->fd = p.fd;
	return d;
fail:
	dmabuf_free(d);
	return NULL;
}

int dmabuf_get_drm_fd(struct dmabuf *d) { return d->node; }

int dmabuf_get_fd(struct dmabuf *d) { return d->fd; }

unsigned long dmabuf_get_offset(struct dmabuf *d) { return d->offset; }
