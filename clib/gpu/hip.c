/*
 * libamdhip64.so.5 on software GPUs: the memory functions of HIP that programs call which test communication
 * (ucx_perftest). There are no streams and no kernels. docs/gpu.md has the table of functions.
 *
 * Memory is allocated and freed by HSA's functions, as by the real library: UCX intercepts these to know which memory is
 * a GPU's.
 */
#include <pthread.h>

#include "hsa.h"

PUBLIC extern const int verbena_gpu_shim;
const int verbena_gpu_shim = 1; /* by which our library is told from a real one */

/* Of hipError_t, the numbers that are returned here. */
enum hip_error {
	HIP_SUCCESS = 0,
	INVALID_VALUE = 1,
	OUT_OF_MEMORY = 2,
	HIP_NOT_INITIALIZED = 3,
	INVALID_MEMCPY_DIRECTION = 21,
	NO_DEVICE = 100,
	INVALID_DEVICE = 101,
	UNKNOWN = 999,
};

static const struct {
	enum hip_error error;
	const char *name, *text;
} errors[] = {
	{HIP_SUCCESS, "hipSuccess", "no error"},
	{INVALID_VALUE, "hipErrorInvalidValue", "invalid argument"},
	{OUT_OF_MEMORY, "hipErrorOutOfMemory", "out of memory"},
	{HIP_NOT_INITIALIZED, "hipErrorNotInitialized", "initialization error"},
	{INVALID_MEMCPY_DIRECTION, "hipErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
	{NO_DEVICE, "hipErrorNoDevice", "no device is available"},
	{INVALID_DEVICE, "hipErrorInvalidDevice", "invalid device ordinal"},
	{UNKNOWN, "hipErrorUnknown", "unknown error"},
};

static __thread int current;	      /* the thread's device */
static __thread enum hip_error last; /* the thread's last error */

static enum hip_error note(enum hip_error e)
{
	if (e)
		last = e;
	return e;
}

/* answer returns the error for what a function of verbena/gpu.h has returned. */
static enum hip_error answer(int r)
{
	switch (r) {
	case 0:
		return HIP_SUCCESS;
	case -EINVAL:
	case -EFAULT:
		return note(INVALID_VALUE);
	case -ENOMEM:
		return note(OUT_OF_MEMORY);
	case -ENODEV:
		return note(HIP_NOT_INITIALIZED);
	}
	return note(UNKNOWN);
}

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards started, and the start */
static int started;
static int count; /* of devices; it is written once */

static void forget(void)
{
	pthread_mutex_init(&lock, NULL);
	count = 0;
}

/* begin starts the GPUs at the process's first call, and reports whether there are any. A child of fork has none of its
 * parent's: there, all calls fail, as with the real library. */
static enum hip_error begin(void)
{
	pthread_mutex_lock(&lock);
	if (!started) {
		started = 1;
		pthread_atfork(NULL, NULL, forget);
		int n = hsa_init() ? 0 : verbena_gpu_init();
		count = n > 0 ? n : 0;
	}
	pthread_mutex_unlock(&lock);
	return count ? HIP_SUCCESS : note(NO_DEVICE);
}

PUBLIC enum hip_error hipGetDeviceCount(int *n)
{
	if (!n)
		return note(INVALID_VALUE);
	enum hip_error e = begin();
	*n = count;
	return e;
}

PUBLIC enum hip_error hipSetDevice(int device)
{
	enum hip_error e = begin();
	if (e)
		return e;
	if (device < 0 || device >= count)
		return note(INVALID_DEVICE);
	current = device;
	return HIP_SUCCESS;
}

PUBLIC enum hip_error hipGetDevice(int *device)
{
	enum hip_error e = begin();
	if (e || !device)
		return e ? e : note(INVALID_VALUE);
	*device = current;
	return HIP_SUCCESS;
}

/* of_hsa returns the error for a status of HSA. */
static enum hip_error of_hsa(enum hsa_status s)
{
	return !s ? HIP_SUCCESS : note(s == OUT_OF_RESOURCES || s == INVALID_ALLOCATION ? OUT_OF_MEMORY : INVALID_VALUE);
}

PUBLIC enum hip_error hipMalloc(void **p, size_t size)
{
	enum hip_error e = begin();
	if (e || !p)
		return e ? e : note(INVALID_VALUE);
	*p = NULL;
	return size ? of_hsa(hsa_amd_memory_pool_allocate(HSA_GPU(current), size, 0, p)) : HIP_SUCCESS;
}

PUBLIC enum hip_error hipMallocManaged(void **p, size_t size, unsigned flags)
{
	enum { GLOBAL = 1, HOST = 2 };
	enum hip_error e = begin();
	if (e || !p || !size || (flags != GLOBAL && flags != HOST))
		return e ? e : note(INVALID_VALUE);
	return answer(verbena_gpu_alloc(current, size, VERBENA_GPU_MANAGED, p));
}

PUBLIC enum hip_error hipFree(void *p)
{
	struct verbena_gpu_pointer what;
	enum hip_error e = begin();
	if (e || !p)
		return e;
	if (verbena_gpu_lookup(p, &what) || what.kind == VERBENA_GPU_HOST) /* that is hipHostFree's */
		return note(INVALID_VALUE);
	if (what.kind == VERBENA_GPU_MANAGED)
		return answer(verbena_gpu_free(p));
	return hsa_amd_memory_pool_free(p) ? note(INVALID_VALUE) : HIP_SUCCESS;
}

PUBLIC enum hip_error hipMemcpy(void *to, const void *from, size_t n, int kind)
{
	enum { DEFAULT = 4 };
	enum hip_error e = begin();
	if (e)
		return e;
	if (kind < 0 || kind > DEFAULT)
		return note(INVALID_MEMCPY_DIRECTION);
	if (!n)
		return HIP_SUCCESS;
	return to && from ? answer(verbena_gpu_copy(to, from, n)) : note(INVALID_VALUE);
}

PUBLIC enum hip_error hipMemset(void *to, int value, size_t n)
{
	struct verbena_gpu_pointer what;
	enum hip_error e = begin();
	if (e || !n)
		return e;
	if (verbena_gpu_lookup(to, &what))
		return note(INVALID_VALUE);
	return answer(verbena_gpu_fill(to, (uint8_t)value, 1, n));
}

/* Nothing here is executed after its call. */
PUBLIC enum hip_error hipDeviceSynchronize(void) { return begin(); }

PUBLIC enum hip_error hipGetLastError(void)
{
	enum hip_error e = last;
	last = HIP_SUCCESS;
	return e;
}

PUBLIC const char *hipGetErrorString(enum hip_error e)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].error == e)
			return errors[i].text;
	return "unknown error";
}

PUBLIC const char *hipGetErrorName(enum hip_error e)
{
	for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
		if (errors[i].error == e)
			return errors[i].name;
	return "hipErrorUnknown";
}
