/*
 * CUDA's functions that free memory, intercepted before they do so, and the one that makes a dma-buf of memory.
 * libibverbs.so.1 is told (files.h), if it is loaded and Verbena's.
 *
 * A program reaches CUDA's functions in three ways, and gets a wrapper in each of them:
 *
 *  1. It is linked to libcuda.so.1: this library has functions of the same names, and comes first. They call what comes
 *     next, which may be another preloaded library.
 *  2. It calls dlsym or dlvsym (dlsym.c).
 *  3. It calls cuGetProcAddress, which is one of the functions here.
 *
 * In the second and third way the program gets a wrapper that calls exactly the function that it would have got: of one
 * name there may be several (cuMemFreeAsync for the two default streams). A function that the loaded libcuda does not
 * have has no wrapper. libcuda is never loaded here.
 *
 * Not seen: calls of a library that was loaded with RTLD_DEEPBIND, and what libcuda frees by itself. Without libcuda a
 * weak reference to one of these names is not NULL, nor is what a library preloaded in front of this one gets by
 * RTLD_NEXT for a name of its own; the function then returns an error.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "dlsym.h"
#include "files.h"
#include "words.h"

#define PUBLIC __attribute__((visibility("default")))

enum {
	CUDA_SUCCESS = 0,
	CUDA_ERROR_NOT_FOUND = 500,
	DMA_BUF_FD = 1, /* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */
};

/* What a wrapper does, besides those of enum vb_cuda. */
enum { EXPORTS = 100, FINDS };

#define FUNCTIONS(X)                                                                                                   \
	X(cuMemFree, VB_CUDA_ALLOCATION)                                                                               \
	X(cuMemFree_v2, VB_CUDA_ALLOCATION)                                                                            \
	X(cuMemFreeAsync, VB_CUDA_ALLOCATION)                                                                          \
	X(cuMemFreeAsync_ptsz, VB_CUDA_ALLOCATION)                                                                     \
	X(cuIpcCloseMemHandle, VB_CUDA_ALLOCATION)                                                                     \
	X(cuMemUnmap, VB_CUDA_RANGE)                                                                                   \
	X(cuCtxDestroy, VB_CUDA_CONTEXT)                                                                               \
	X(cuCtxDestroy_v2, VB_CUDA_CONTEXT)                                                                            \
	X(cuDevicePrimaryCtxReset, VB_CUDA_DEVICE)                                                                     \
	X(cuDevicePrimaryCtxReset_v2, VB_CUDA_DEVICE)                                                                  \
	X(cuDevicePrimaryCtxRelease, VB_CUDA_RELEASE)                                                                  \
	X(cuDevicePrimaryCtxRelease_v2, VB_CUDA_RELEASE)                                                               \
	X(cuMemFreeHost, VB_CUDA_HOST)                                                                                 \
	X(cuMemHostUnregister, VB_CUDA_HOST)                                                                           \
	X(cuMemGetHandleForAddressRange, EXPORTS)                                                                      \
	X(cuGetProcAddress, FINDS)                                                                                     \
	X(cuGetProcAddress_v2, FINDS)

/* All of them have up to five arguments, integers and pointers, and return an int. On the processors that dlsym.c is
 * for these are in registers, and a function with fewer arguments does not look at the others. */
#define ARGS uint64_t a, uint64_t b, uint64_t c, uint64_t d, uint64_t e
typedef int function(ARGS);

/* Wrappers of one name. The first is the function that programs are linked to. The others are bound to functions, in
 * the order in which programs ask for them; a program that asks for more gets those functions themselves. */
enum { WRAPPERS = 5, LINKED = 0 };

struct row {
	const char *name;
	int what;
	function *wrappers[WRAPPERS];
	function *real[WRAPPERS]; /* what the wrappers call; NULL: not known yet. Accessed atomically */
};

static int call(struct row *r, int i, ARGS);

enum {
#define INDEX(name, what) ROW_##name,
	FUNCTIONS(INDEX)
	ROWS
};
static struct row rows[ROWS];

#define WRAPPER(name, i)                                                                                               \
	static int name##_##i(ARGS) { return call(&rows[ROW_##name], i, a, b, c, d, e); }
#define DEFINE(name, what)                                                                                             \
	WRAPPER(name, 0)                                                                                               \
	WRAPPER(name, 1)                                                                                               \
	WRAPPER(name, 2)                                                                                               \
	WRAPPER(name, 3)                                                                                               \
	WRAPPER(name, 4)                                                                                               \
	PUBLIC int name(ARGS) __attribute__((alias(#name "_0")));
FUNCTIONS(DEFINE)

static struct row rows[ROWS] = {
#define ROW(name, what) {#name, what, {name##_0, name##_1, name##_2, name##_3, name##_4}, {NULL}},
	FUNCTIONS(ROW)};

static struct row *row_of(const char *name)
{
	for (size_t i = 0; i < ROWS; i++)
		if (!strcmp(rows[i].name, name))
			return &rows[i];
	return NULL;
}

/* --- the functions that wrappers call --- */

/* look_up is dlsym on a handle or RTLD_NEXT, which leaves no text of an error. */
static void *look_up(void *handle, const char *name)
{
	void *at = vb_find_symbol(handle, name, NULL);
	if (!at)
		(void)dlerror();
	return at;
}

/* libcuda returns a handle of libcuda.so.1, which stays loaded from then on; NULL if the program has not loaded it. */
static void *libcuda(void)
{
	static void *loaded; /* accessed atomically */
	void *lib = __atomic_load_n(&loaded, __ATOMIC_ACQUIRE);
	if (!lib && (lib = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)))
		__atomic_store_n(&loaded, lib, __ATOMIC_RELEASE);
	return lib;
}

/* linked returns what a program calls that is linked to a function, without this library; NULL if there is none. */
static function *linked(struct row *r)
{
	function *f = __atomic_load_n(&r->real[LINKED], __ATOMIC_ACQUIRE);
	if (f)
		return f;
	void *lib = libcuda();
	f = (function *)look_up(RTLD_NEXT, r->name);
	if (!f && lib)
		f = (function *)look_up(lib, r->name);
	if (f)
		__atomic_store_n(&r->real[LINKED], f, __ATOMIC_RELEASE);
	return f;
}

/* is_wrapper reports whether a function is one of ours: a libcuda that was not linked for it finds them in the place of
 * its own. */
static bool is_wrapper(const void *f)
{
	for (size_t r = 0; r < ROWS; r++)
		for (int i = 0; i < WRAPPERS; i++)
			if (f == (void *)rows[r].wrappers[i])
				return true;
	return false;
}

/* find_linked finds what programs are linked to, once libcuda is loaded, and reports whether it is. */
static bool find_linked(void)
{
	static bool found; /* accessed atomically: two threads find the same */
	if (__atomic_load_n(&found, __ATOMIC_ACQUIRE))
		return true;
	if (!libcuda())
		return false;
	for (size_t r = 0; r < ROWS; r++)
		(void)linked(&rows[r]);
	__atomic_store_n(&found, true, __ATOMIC_RELEASE);
	return true;
}

/* bound returns a wrapper that calls a function: itself, if it is a wrapper already. A function has the same wrapper in
 * whatever way a program has found it, so that programs can compare addresses. */
static void *bound(struct row *r, void *real)
{
	if (is_wrapper(real))
		return real;
	for (size_t i = 0; i < ROWS; i++)
		if (real == (void *)__atomic_load_n(&rows[i].real[LINKED], __ATOMIC_ACQUIRE))
			return (void *)rows[i].wrappers[LINKED];
	for (int i = LINKED + 1; i < WRAPPERS; i++) {
		function *is = NULL;
		if (__atomic_compare_exchange_n(&r->real[i], &is, (function *)real, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE) ||
		    is == (function *)real)
			return (void *)r->wrappers[i];
	}
	return real;
}

/* vb_look_cuda: what RTLD_NEXT and RTLD_DEFAULT mean depends on the caller, so the C library looks. It may find our
 * function, which is right if that has another one to call; also if the program would not have found that one, since it
 * has loaded libcuda for another library only. */
struct vb_look vb_look_cuda(void *go_on, void *handle, const char *name, const char *version)
{
	struct row *r = row_of(name);
	if (!r)
		return (struct vb_look){go_on, NULL};
	void *own = (void *)r->wrappers[LINKED];
	if (handle == RTLD_NEXT || (handle == RTLD_DEFAULT && !version)) {
		if (linked(r) || vb_find_symbol(RTLD_DEFAULT, name, NULL) != own)
			return (struct vb_look){go_on, NULL};
		return (struct vb_look){NULL, vb_find_symbol(RTLD_NEXT, name, version)}; /* NULL, with dlerror's text */
	}
	bool cuda = find_linked();
	void *at = vb_find_symbol(handle, name, version);
	if (at == own)
		at = vb_find_symbol(RTLD_NEXT, name, version) ? own : NULL;
	else if (at && cuda)
		at = bound(r, at);
	return (struct vb_look){NULL, at};
}

/* --- who is told --- */

static struct {
	vb_cuda_gone_function *gone;
	vb_cuda_exported_function *exported;
} listener; /* functions of libibverbs.so.1, which stays loaded; accessed atomically */

/* loads stores how many objects the process has ever loaded. */
static int loads(struct dl_phdr_info *info, size_t size, void *to)
{
	(void)size;
	*(unsigned long long *)to = info->dlpi_adds;
	return 1; /* the first object has it already */
}

/* find_listener looks for libibverbs.so.1, and reports whether it is there. For one that is not loaded the loader
 * searches directories, which would make each free slow: so it looks again only when something was loaded. */
static bool find_listener(void)
{
	static unsigned long long looked_at; /* loads when it was not there; accessed atomically */
	unsigned long long now = 0;
	dl_iterate_phdr(loads, &now);
	if (now && now == __atomic_load_n(&looked_at, __ATOMIC_RELAXED))
		return false;
	void *lib = dlopen("libibverbs.so.1", RTLD_LAZY | RTLD_NOLOAD);
	vb_cuda_gone_function *gone = lib ? (vb_cuda_gone_function *)look_up(lib, "verbena_cuda_gone") : NULL;
	vb_cuda_exported_function *exported =
		lib ? (vb_cuda_exported_function *)look_up(lib, "verbena_cuda_exported") : NULL;
	if (!gone || !exported) { /* none, or not Verbena's */
		if (lib)
			dlclose(lib);
		__atomic_store_n(&looked_at, now, __ATOMIC_RELAXED);
		return false;
	}
	__atomic_store_n(&listener.exported, exported, __ATOMIC_RELEASE);
	__atomic_store_n(&listener.gone, gone, __ATOMIC_RELEASE);
	return true;
}

/* heard reports whether there is a listener. The libcuda of software GPUs belongs to Verbena, which needs no telling,
 * unless VERBENA_CUDA asks to take it for a driver. */
static bool heard(void)
{
	static int driver; /* 0: not known yet, 1: libcuda is a driver, -1: it is Verbena's; accessed atomically */
	int is = __atomic_load_n(&driver, __ATOMIC_RELAXED);
	if (!is) {
		void *lib = libcuda();
		bool shim = lib && look_up(lib, "verbena_gpu_shim");
		is = shim && !vb_has_word(getenv("VERBENA_CUDA"), "driver") ? -1 : 1;
		if (lib)
			__atomic_store_n(&driver, is, __ATOMIC_RELAXED);
	}
	return is > 0 && (__atomic_load_n(&listener.gone, __ATOMIC_ACQUIRE) || find_listener());
}

/* size_of returns the size of the allocation that begins at an address; 0 if CUDA does not say it. */
static uint64_t size_of(uint64_t addr)
{
	static int (*range)(uint64_t *base, size_t *size, uint64_t addr); /* accessed atomically */
	__typeof__(range) f = __atomic_load_n(&range, __ATOMIC_RELAXED);
	if (!f) {
		void *lib = libcuda();
		f = lib ? (__typeof__(range))look_up(lib, "cuMemGetAddressRange_v2") : NULL;
		__atomic_store_n(&range, f, __ATOMIC_RELAXED);
	}
	uint64_t base = 0;
	size_t size = 0;
	return f && f(&base, &size, addr) == CUDA_SUCCESS && base == addr ? size : 0;
}

/* is_active reports whether the primary context of a device has users. */
static bool is_active(int device)
{
	void *lib = libcuda();
	int (*f)(int, unsigned int *, int *) =
		lib ? (__typeof__(f))look_up(lib, "cuDevicePrimaryCtxGetState") : NULL;
	unsigned int flags;
	int active = 0;
	return f && f(device, &flags, &active) == CUDA_SUCCESS && active;
}

static void tell(int what, uint64_t addr, uint64_t size)
{
	int err = errno;
	if (heard())
		__atomic_load_n(&listener.gone, __ATOMIC_ACQUIRE)(what, addr, what == VB_CUDA_ALLOCATION ? size_of(addr) : size);
	errno = err;
}

static void tell_export(int fd, uint64_t addr, uint64_t size)
{
	int err = errno;
	if (heard())
		__atomic_load_n(&listener.exported, __ATOMIC_ACQUIRE)(fd, addr, size);
	errno = err;
}

/* verbena_cuda_watches reports whether libibverbs.so.1 will be told of what the program frees. */
PUBLIC int verbena_cuda_watches(void) { return heard(); }

/* --- the wrappers --- */

/* call is what the wrapper i of a name does. */
static int call(struct row *r, int i, ARGS)
{
	function *real = i == LINKED ? linked(r) : __atomic_load_n(&r->real[i], __ATOMIC_ACQUIRE);
	if (!real)
		return CUDA_ERROR_NOT_FOUND;
	switch (r->what) {
	case VB_CUDA_ALLOCATION: /* addr */
	case VB_CUDA_HOST:
	case VB_CUDA_CONTEXT: /* context */
		if (a) /* programs free NULL to have CUDA initialized */
			tell(r->what, a, 0);
		break;
	case VB_CUDA_RANGE: /* addr, size */
		if (b)
			tell(r->what, a, b);
		break;
	case VB_CUDA_DEVICE: /* device */
	case VB_CUDA_RELEASE:
		tell(r->what, (uint32_t)a, 0);
		break;
	}
	int result = real(a, b, c, d, e);
	if (result != CUDA_SUCCESS)
		return result;
	switch (r->what) {
	case VB_CUDA_RELEASE:
		if (heard() && !is_active((int)a))
			tell(VB_CUDA_DEVICE, (uint32_t)a, 0);
		break;
	case EXPORTS: /* handle, addr, size, type, flags */
		if ((uint32_t)d == DMA_BUF_FD && a)
			tell_export(*(int *)(uintptr_t)a, b, c);
		break;
	case FINDS: { /* name, function, version, flags, and of the second version a status */
		struct row *found = a ? row_of((const char *)(uintptr_t)a) : NULL;
		void **to = (void **)(uintptr_t)b;
		if (found && to && *to && find_linked())
			*to = bound(found, *to);
		break;
	}
	}
	return result;
}
