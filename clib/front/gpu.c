/*
 * Software GPUs for libraries with the interface of a GPU's driver: verbena/gpu.h declares what they call. The
 * backend has the GPUs. A child of fork() has a backend of its own, and so GPUs of its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>

#include "../files/files.h"
#include "../include/verbena/gpu.h"
#include "front.h"

static struct backend *serving; /* the backend of the last verbena_gpu_init; accessed atomically */

/* begin returns the backend; NULL if there is none in this process. */
static struct backend *begin(void)
{
	struct backend *b = __atomic_load_n(&serving, __ATOMIC_ACQUIRE);
	return b && !atomic_load(&b->dead) ? b : NULL;
}

bool vb_has_gpus(void) { return begin(); }

/* Files by which programs find that addresses of a GPU can be registered, or memory of a GPU. They are there if the
 * program has loaded our library for that GPU; that of CUDA also with another libcuda, if a setting asks for it. */
static const struct {
	const char *path, *library;
	enum vb_file kind;
	const char *text;
	bool (*shown)(bool ours); /* NULL: if the library is ours */
} files[] = {
	{"/dev/kfd", "libhsa-runtime64.so.1", VB_CHAR_DEVICE, "", NULL},
	{"/sys/module/nvidia_peermem/version", "libcuda.so.1", VB_TEXT, "1\n", vb_cuda_shown},
	{"/proc/self/maps", "libhsa-runtime64.so.1", VB_REPLACED, "/memfd:verbena-gpu-vram (deleted)\n/dev/dri/renderD128", NULL},
};

/* is_shown reports whether a library is loaded, and its file shown. */
static bool is_shown(const char *library, bool (*shown)(bool ours))
{
	void *lib = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
	if (!lib)
		return false;
	bool ours = dlsym(lib, "verbena_gpu_shim");
	dlclose(lib);
	return shown ? shown(ours) : ours;
}

enum vb_file vb_gpu_file(const char *path, char *text)
{
	for (size_t i = 0; i < sizeof files / sizeof *files; i++)
		if (!strcmp(path, files[i].path) && is_shown(files[i].library, files[i].shown)) {
			strcpy(text, files[i].text);
			return files[i].kind;
		}
	return VB_NO_FILE;
}

#define CALL(name, ...)                                                                                                \
	do {                                                                                                           \
		struct backend *b = begin();                                                                           \
		return b ? (int)b->name(__VA_ARGS__) : -ENODEV;                                                        \
	} while (0)

#define ADDR(p) ((uint64_t)(uintptr_t)(p))

PUBLIC int verbena_gpu_init(void)
{
	struct backend *b = vb_backend();
	if (!b)
		return -errno;
	int64_t n = b->vbe_gpu_init();
	if (n >= 0)
		__atomic_store_n(&serving, b, __ATOMIC_RELEASE);
	return (int)n;
}

PUBLIC int verbena_gpu_info(int gpu, struct verbena_gpu_info *info)
{
	if (!info)
		return -EINVAL;
	memset(info, 0, sizeof *info);
	CALL(vbe_gpu_info, gpu, info);
}

PUBLIC int verbena_gpu_alloc(int gpu, size_t size, int kind, void **addr)
{
	uint64_t at = 0;
	struct backend *b = begin();
	if (!addr)
		return -EINVAL;
	int64_t r = b ? b->vbe_gpu_alloc(gpu, size, kind, &at) : -ENODEV;
	*addr = (void *)(uintptr_t)at;
	return (int)r;
}

PUBLIC int verbena_gpu_free(void *addr) { CALL(vbe_gpu_free, ADDR(addr), 0); }
PUBLIC int verbena_gpu_register(void *addr, size_t size) { CALL(vbe_gpu_register, ADDR(addr), size); }
PUBLIC int verbena_gpu_unregister(void *addr) { CALL(vbe_gpu_unregister, ADDR(addr)); }

PUBLIC int verbena_gpu_lookup(const void *addr, struct verbena_gpu_pointer *p)
{
	if (!p)
		return -EINVAL;
	memset(p, 0, sizeof *p);
	CALL(vbe_gpu_lookup, ADDR(addr), p);
}

PUBLIC int verbena_gpu_copy(void *to, const void *from, size_t n)
{
	CALL(vbe_gpu_copy, 0, ADDR(to), ADDR(from), n, 0, 0);
}

PUBLIC int verbena_gpu_copy_then(void *to, const void *from, size_t n, void (*done)(void *, int), void *arg)
{
	if (!done)
		return -EINVAL;
	CALL(vbe_gpu_copy, 0, ADDR(to), ADDR(from), n, ADDR(done), ADDR(arg));
}

PUBLIC int verbena_gpu_stream_copy(uint64_t stream, void *to, const void *from, size_t n)
{
	if (!stream)
		return -EINVAL;
	CALL(vbe_gpu_copy, stream, ADDR(to), ADDR(from), n, 0, 0);
}

PUBLIC int verbena_gpu_fill(void *to, uint32_t pattern, uint32_t width, size_t count)
{
	CALL(vbe_gpu_fill, 0, ADDR(to), pattern, width, count);
}

PUBLIC int verbena_gpu_stream_fill(uint64_t stream, void *to, uint32_t pattern, uint32_t width, size_t count)
{
	if (!stream)
		return -EINVAL;
	CALL(vbe_gpu_fill, stream, ADDR(to), pattern, width, count);
}

/* made passes a new handle on. */
static int made(int64_t h, uint64_t *to)
{
	if (h < 0)
		return (int)h;
	*to = (uint64_t)h;
	return 0;
}

PUBLIC int verbena_gpu_stream_create(int gpu, uint64_t *stream)
{
	struct backend *b = begin();
	return !stream ? -EINVAL : !b ? -ENODEV : made(b->vbe_gpu_stream(gpu), stream);
}

PUBLIC int verbena_gpu_stream_destroy(uint64_t s) { CALL(vbe_gpu_stream_do, s, VBE_GPU_DESTROY); }
PUBLIC int verbena_gpu_stream_sync(uint64_t s) { CALL(vbe_gpu_stream_do, s, VBE_GPU_SYNC); }
PUBLIC int verbena_gpu_stream_query(uint64_t s) { CALL(vbe_gpu_stream_do, s, VBE_GPU_QUERY); }

PUBLIC int verbena_gpu_stream_call(uint64_t stream, void (*call)(void *, int), void *arg)
{
	if (!call)
		return -EINVAL;
	CALL(vbe_gpu_stream_call, stream, ADDR(call), ADDR(arg));
}

PUBLIC int verbena_gpu_event_create(uint64_t *event)
{
	struct backend *b = begin();
	return !event ? -EINVAL : !b ? -ENODEV : made(b->vbe_gpu_event(), event);
}

PUBLIC int verbena_gpu_event_destroy(uint64_t e) { CALL(vbe_gpu_event_do, e, 0, VBE_GPU_DESTROY); }
PUBLIC int verbena_gpu_event_record(uint64_t e, uint64_t s) { CALL(vbe_gpu_event_do, e, s, VBE_GPU_RECORD); }
PUBLIC int verbena_gpu_event_wait(uint64_t e, uint64_t s) { CALL(vbe_gpu_event_do, e, s, VBE_GPU_WAIT); }
PUBLIC int verbena_gpu_event_sync(uint64_t e) { CALL(vbe_gpu_event_do, e, 0, VBE_GPU_SYNC); }
PUBLIC int verbena_gpu_event_query(uint64_t e) { CALL(vbe_gpu_event_do, e, 0, VBE_GPU_QUERY); }

PUBLIC int verbena_gpu_event_elapsed(uint64_t from, uint64_t to, int64_t *ns)
{
	if (!ns)
		return -EINVAL;
	CALL(vbe_gpu_elapsed, from, to, ns);
}

PUBLIC int verbena_gpu_export(const void *addr, size_t size, uint64_t *offset)
{
	CALL(vbe_gpu_export, ADDR(addr), size, offset);
}

PUBLIC int verbena_gpu_ipc_get(const void *addr, uint8_t handle[VERBENA_GPU_HANDLE])
{
	if (!handle)
		return -EINVAL;
	CALL(vbe_gpu_ipc_get, ADDR(addr), handle);
}

PUBLIC int verbena_gpu_ipc_open(int gpu, const uint8_t handle[VERBENA_GPU_HANDLE], void **addr)
{
	struct backend *b = begin();
	uint64_t at = 0;
	if (!handle || !addr)
		return -EINVAL;
	int64_t r = b ? b->vbe_gpu_ipc_open(gpu, (uint8_t *)handle, &at) : -ENODEV;
	*addr = (void *)(uintptr_t)at;
	return (int)r;
}

PUBLIC int verbena_gpu_ipc_close(void *addr) { CALL(vbe_gpu_free, ADDR(addr), 1); }
