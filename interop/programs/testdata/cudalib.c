/*
 * A libcuda.so.1 that prints which of its functions are called, for cudafree.c. LACKING: it does not have some of them.
 * SHIM: it says that it is Verbena's.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef SHIM
const int verbena_gpu_shim = 1;
#endif

/* The value 0xbad is refused. */
#define FREES(name)                                                                                                    \
	int name(uint64_t a, uint64_t b)                                                                               \
	{                                                                                                              \
		dprintf(1, "real %s %lx %lx\n", #name, a, b);                                                          \
		return a == 0xbad ? 1 : 0;                                                                             \
	}
FREES(cuMemFree)
FREES(cuMemFree_v2)
FREES(cuMemFreeAsync)
FREES(cuIpcCloseMemHandle)
FREES(cuCtxDestroy)
FREES(cuCtxDestroy_v2)
FREES(cuDevicePrimaryCtxReset)
FREES(cuDevicePrimaryCtxReset_v2)
FREES(cuMemFreeHost)
FREES(cuMemHostUnregister)
#ifndef LACKING
FREES(cuMemUnmap)
FREES(cuMemFreeAsync_ptsz)
#endif
static FREES(unnamed_free_async) /* which only cuGetProcAddress returns */

/* The primary context of a device has as many users as the device's number says. */
static int released;
#define RELEASES(name)                                                                                                 \
	int name(int device)                                                                                           \
	{                                                                                                              \
		dprintf(1, "real %s %x 0\n", #name, device);                                                           \
		released = 1;                                                                                          \
		return 0;                                                                                              \
	}
RELEASES(cuDevicePrimaryCtxRelease)
RELEASES(cuDevicePrimaryCtxRelease_v2)

int cuDevicePrimaryCtxGetState(int device, unsigned int *flags, int *active)
{
	*flags = 0;
	*active = device - released;
	return 0;
}

/* An allocation begins at each multiple of 64 KiB. */
int cuMemGetAddressRange_v2(uint64_t *base, size_t *size, uint64_t addr)
{
	*base = addr & ~0xffffUL;
	*size = 0x10000;
	return addr == 0xbad;
}

int cuMemGetHandleForAddressRange(int *handle, uint64_t addr, size_t size, int type, unsigned long long flags)
{
	dprintf(1, "real cuMemGetHandleForAddressRange %lx %zx\n", addr, size);
	if (addr == 0xbad || flags)
		return 1;
	*handle = 77;
	(void)type;
	return 0;
}

static int not_intercepted(void)
{
	dprintf(1, "real cuInit 0 0\n");
	return 0;
}

int cuGetProcAddress(const char *name, void **to, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status);

static void *find(const char *name, int version, uint64_t flags)
{
	static const struct {
		const char *name;
		int version;	/* the first one that has it */
		uint64_t flags; /* 2: only for the default stream of each thread */
		void *function;
	} all[] = {
		{"cuMemFree", 2000, 0, (void *)cuMemFree},
		{"cuMemFree", 3020, 0, (void *)cuMemFree_v2},
		{"cuMemFreeAsync", 11020, 0, (void *)cuMemFreeAsync},
#ifndef LACKING
		{"cuMemFreeAsync", 11020, 2, (void *)cuMemFreeAsync_ptsz},
		{"cuMemUnmap", 10020, 0, (void *)cuMemUnmap},
#endif
		{"cuMemFreeAsync", 13000, 2, (void *)unnamed_free_async},
		{"cuCtxDestroy", 4000, 0, (void *)cuCtxDestroy_v2},
		{"cuIpcCloseMemHandle", 4010, 0, (void *)cuIpcCloseMemHandle},
		{"cuDevicePrimaryCtxReset", 11000, 0, (void *)cuDevicePrimaryCtxReset_v2},
		{"cuMemFreeHost", 2000, 0, (void *)cuMemFreeHost},
		{"cuMemHostUnregister", 4000, 0, (void *)cuMemHostUnregister},
		{"cuMemGetHandleForAddressRange", 11070, 0, (void *)cuMemGetHandleForAddressRange},
		{"cuInit", 2000, 0, (void *)not_intercepted},
		{"cuGetProcAddress", 11030, 0, (void *)cuGetProcAddress},
		{"cuGetProcAddress", 12000, 0, (void *)cuGetProcAddress_v2},
	};
	void *found = NULL;
	for (size_t i = 0; i < sizeof all / sizeof *all; i++)
		if (!strcmp(all[i].name, name) && all[i].version <= version && (!all[i].flags || all[i].flags == flags))
			found = all[i].function;
	return found;
}

int cuGetProcAddress(const char *name, void **to, int version, uint64_t flags)
{
	void *f = find(name, version, flags);
	if (!f)
		return 500;
	*to = f;
	return 0;
}

int cuGetProcAddress_v2(const char *name, void **to, int version, uint64_t flags, int *status)
{
	*to = find(name, version, flags);
	*status = *to ? 0 : 1;
	return 0;
}
