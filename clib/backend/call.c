/* Go cannot call a C function pointer. These functions call the front's for it. */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "call.h"

static struct vbe_front front;

void set_front(struct vbe_front *f) { front = *f; }

void call_cq_event(uint64_t cookie) { front.cq_event(cookie); }

void call_async_event(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type)
{
	front.async_event(context, of, cookie, type);
}

void call_gpu(uint64_t function, uint64_t arg, int error)
{
	void (*call)(void *, int) = (void (*)(void *, int))(uintptr_t)function;
	call((void *)(uintptr_t)arg, error);
}

int cuda_is_watched(void)
{
	int (*watches)(void) = (int (*)(void))(uintptr_t)dlsym(RTLD_DEFAULT, "verbena_cuda_watches");
	return watches && watches();
}
