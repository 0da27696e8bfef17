/*
 * libcuda.so.1 on software GPUs: devices and contexts. cuda_memory.c has the memory, cuda_stream.c copies, streams and
 * events, cuda_proc.c the names of all functions. A function returns what CUDA's driver returns for the same mistake.
 */
#include <stdio.h>

#include "cuda_state.h"

pthread_mutex_t vcu_lock = PTHREAD_MUTEX_INITIALIZER;
struct table vcu_contexts, vcu_memory, vcu_streams, vcu_events;
struct gpu *vcu_gpus;
int vcu_count;

static bool forked; /* a child of fork has no GPUs, and gets none: so does CUDA */

/* The calling thread's contexts, the current one last. */
#define MAX_DEPTH 64
static __thread struct context *stack[MAX_DEPTH];
static __thread int depth;

/* Tables. */

struct row *vcu_floor(const struct table *t, uintptr_t key)
{
	size_t low = 0, high = t->n;
	while (low < high) {
		size_t mid = low + (high - low) / 2;
		if (t->rows[mid]->key <= key)
			low = mid + 1;
		else
			high = mid;
	}
	return low ? t->rows[low - 1] : NULL;
}

struct row *vcu_find(const struct table *t, uintptr_t key)
{
	struct row *r = vcu_floor(t, key);
	return r && r->key == key ? r : NULL;
}

bool vcu_add(struct table *t, struct row *r)
{
	if (t->n == t->room) {
		size_t room = t->room ? 2 * t->room : 16;
		struct row **rows = realloc(t->rows, room * sizeof *rows);
		if (!rows)
			return false;
		t->rows = rows;
		t->room = room;
	}
	size_t at = t->n++;
	for (; at > 0 && t->rows[at - 1]->key > r->key; at--)
		t->rows[at] = t->rows[at - 1];
	t->rows[at] = r;
	return true;
}

void vcu_remove(struct table *t, struct row *r)
{
	size_t at = 0;
	while (at < t->n && t->rows[at] != r)
		at++;
	if (at == t->n)
		return;
	memmove(t->rows + at, t->rows + at + 1, (t->n - at - 1) * sizeof *t->rows);
	t->n--;
}

uintptr_t vcu_number(void)
{
	static uintptr_t last = 0x1000; /* CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are smaller */
	return last += 16;
}

/* Errors. */

CUresult vcu_result(int error)
{
	switch (error >= 0 ? 0 : -error) {
	case 0:
		return CUDA_SUCCESS;
	case EINVAL:
	case EFAULT:
		return CUDA_ERROR_INVALID_VALUE;
	case ENOMEM:
		return CUDA_ERROR_OUT_OF_MEMORY;
	case EAGAIN:
		return CUDA_ERROR_NOT_READY;
	case ENODEV: /* memory of another process that has freed it, or has ended */
		return CUDA_ERROR_ILLEGAL_ADDRESS;
	case ESRCH: /* the process of a handle has ended */
		return CUDA_ERROR_INVALID_HANDLE;
	case EOPNOTSUPP:
		return CUDA_ERROR_NOT_SUPPORTED;
	case EMFILE:
	case ENFILE:
		return CUDA_ERROR_OPERATING_SYSTEM;
	}
	return CUDA_ERROR_UNKNOWN;
}

CUresult vcu_ready(void)
{
	return __atomic_load_n(&vcu_count, __ATOMIC_ACQUIRE) > 0 && !forked ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

CUresult vcu_device(CUdevice dev)
{
	CUresult r = vcu_ready();
	return r ? r : dev >= 0 && dev < vcu_count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* Devices. */

static void in_child(void)
{
	forked = true;
	pthread_mutex_init(&vcu_lock, NULL); /* another thread of the parent may have held it */
}

/* start finds the GPUs. vcu_lock is held. */
static CUresult start(void)
{
	int n = verbena_gpu_init();
	if (n <= 0)
		return n == -ENOMEM ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_NO_DEVICE;
	struct gpu *all = calloc((size_t)n, sizeof *all);
	if (!all)
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (int i = 0; i < n; i++) {
		int r = verbena_gpu_info(i, &all[i].info);
		if (r < 0) {
			free(all);
			return vcu_result(r);
		}
	}
	if (pthread_atfork(NULL, NULL, in_child)) {
		free(all);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	vcu_gpus = all;
	__atomic_store_n(&vcu_count, n, __ATOMIC_RELEASE);
	return CUDA_SUCCESS;
}

CUresult cuInit(unsigned int flags)
{
	if (flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (forked)
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&vcu_lock);
	CUresult r = vcu_count ? CUDA_SUCCESS : start();
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

CUresult cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	CUresult r = vcu_ready();
	if (r || !count)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*count = vcu_count;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult r = vcu_ready();
	if (r || !device)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if ((r = vcu_device(ordinal)) == CUDA_SUCCESS)
		*device = ordinal;
	return r;
}

/* of checks the arguments of a question about a device. */
static CUresult of(CUdevice dev, const void *to)
{
	CUresult r = vcu_device(dev);
	return r ? r : to ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetName(char *name, int length, CUdevice dev)
{
	CUresult r = of(dev, name);
	if (r || length <= 0)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)length, "%s", vcu_gpus[dev].info.name);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
	CUresult r = of(dev, uuid);
	if (!r)
		memcpy(uuid->bytes, vcu_gpus[dev].info.uuid, sizeof uuid->bytes);
	return r;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice dev)
{
	CUresult r = of(dev, bytes);
	if (!r)
		*bytes = vcu_gpus[dev].info.vram;
	return r;
}

/* What all software GPUs have in common. Other attributes are 0: above all what is about kernels. */
static const struct {
	CUdevice_attribute attribute;
	int value;
} attributes[] = {
	{CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
	{CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
	{CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
	{CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8},
	{CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
	{CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
	{CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
	{CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
	{CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
	{CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED, 1},
	{CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST},
	{CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING, CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER},
	{CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, 1},
};

#define LAST_ATTRIBUTE 149 /* larger numbers were no attributes when this was written */

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice dev)
{
	CUresult r = of(dev, value);
	if (r || attribute < 1 || attribute > LAST_ATTRIBUTE)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	const struct verbena_gpu_info *info = &vcu_gpus[dev].info;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
		*value = (int)info->pci_domain;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		*value = (int)info->pci_bus;
		return CUDA_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
		*value = (int)info->pci_device;
		return CUDA_SUCCESS;
	default:
		break;
	}
	*value = 0;
	for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
		if (attributes[i].attribute == attribute)
			*value = attributes[i].value;
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *id, int length, CUdevice dev)
{
	CUresult r = of(dev, id);
	if (r || length <= 0)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	const struct verbena_gpu_info *i = &vcu_gpus[dev].info;
	int n = snprintf(id, (size_t)length, "%04x:%02x:%02x.%x", i->pci_domain, i->pci_bus, i->pci_device, i->pci_function);
	return n < length ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* parse reads "domain:bus:device.function", whose function, or domain, may be missing. */
static bool parse(const char *id, unsigned int at[4])
{
	int end = 0;
	memset(at, 0, 4 * sizeof *at);
	if (sscanf(id, "%x:%x:%x.%x%n", at, at + 1, at + 2, at + 3, &end) == 4 && !id[end])
		return true;
	at[3] = 0;
	if (sscanf(id, "%x:%x:%x%n", at, at + 1, at + 2, &end) == 3 && !id[end])
		return true;
	at[0] = 0;
	return sscanf(id, "%x:%x.%x%n", at + 1, at + 2, at + 3, &end) == 3 && !id[end];
}

CUresult cuDeviceGetByPCIBusId(CUdevice *dev, const char *id)
{
	unsigned int at[4];
	CUresult r = vcu_ready();
	if (r || !dev || !id || !parse(id, at))
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	for (int i = 0; i < vcu_count; i++) {
		const struct verbena_gpu_info *p = &vcu_gpus[i].info;
		if (p->pci_domain == at[0] && p->pci_bus == at[1] && p->pci_device == at[2] && p->pci_function == at[3]) {
			*dev = i;
			return CUDA_SUCCESS;
		}
	}
	return CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceCanAccessPeer(int *can, CUdevice dev, CUdevice peer)
{
	CUresult r = of(dev, can);
	if (r || (r = vcu_device(peer)))
		return r;
	*can = dev != peer; /* copies go between all GPUs of the process */
	return CUDA_SUCCESS;
}

/* Contexts. */

CUresult vcu_current(struct context **ctx)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	struct context *c = depth ? stack[depth - 1] : NULL;
	if (!c)
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&vcu_lock);
	bool destroyed = c->destroyed;
	pthread_mutex_unlock(&vcu_lock);
	*ctx = c;
	return destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
}

/* known finds a context that is not destroyed. */
static CUresult known(CUcontext ctx, struct context **c)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	*c = (struct context *)vcu_find(&vcu_contexts, (uintptr_t)ctx);
	r = !*c ? CUDA_ERROR_INVALID_CONTEXT : (*c)->destroyed ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_SUCCESS;
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

/* new_context makes a context. vcu_lock is held. */
static CUresult new_context(CUdevice dev, unsigned int flags, struct context **made)
{
	struct context *c = calloc(1, sizeof *c);
	if (!c)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*c = (struct context){.row.key = vcu_number(), .dev = dev, .flags = flags};
	int r = verbena_gpu_stream_create(dev, &c->stream);
	if (r < 0 || !vcu_add(&vcu_contexts, &c->row)) {
		if (r >= 0)
			verbena_gpu_stream_destroy(c->stream);
		free(c);
		return r < 0 ? vcu_result(r) : CUDA_ERROR_OUT_OF_MEMORY;
	}
	*made = c;
	return CUDA_SUCCESS;
}

/* take removes the rows of a context from a table, and returns them: a chain by their keys. vcu_lock is held. */
static struct row *take(struct table *t, const struct context *c, size_t owner)
{
	struct row *chain = NULL;
	size_t kept = 0;
	for (size_t i = 0; i < t->n; i++) {
		struct row *r = t->rows[i];
		if (*(struct context **)((char *)r + owner) != c) {
			t->rows[kept++] = r;
			continue;
		}
		if (t == &vcu_memory)
			vcu_release_memory((struct memory *)r);
		r->key = (uintptr_t)chain;
		chain = r;
	}
	t->n = kept;
	return chain;
}

/* end destroys what a context has. */
static void end(struct context *c)
{
	vcu_drain(c, true); /* errors of operations have no reader any more */
	pthread_mutex_lock(&vcu_lock);
	if (c->retained) { /* a primary context that another thread has retained meanwhile */
		pthread_mutex_unlock(&vcu_lock);
		return;
	}
	c->destroyed = true;
	struct row *streams = take(&vcu_streams, c, offsetof(struct item, ctx));
	struct row *events = take(&vcu_events, c, offsetof(struct item, ctx));
	struct row *memory = take(&vcu_memory, c, offsetof(struct memory, ctx));
	uint64_t own = c->stream;
	pthread_mutex_unlock(&vcu_lock);
	for (struct row *r = streams, *next; r; r = next) {
		next = (struct row *)r->key;
		verbena_gpu_stream_destroy(((struct item *)r)->handle);
		free(r);
	}
	verbena_gpu_stream_destroy(own);
	for (struct row *r = events, *next; r; r = next) {
		next = (struct row *)r->key;
		verbena_gpu_event_destroy(((struct item *)r)->handle);
		free(r);
	}
	for (struct row *r = memory, *next; r; r = next) {
		next = (struct row *)r->key;
		free(r);
	}
}

CUresult cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice dev)
{
	struct context *c = NULL;
	CUresult r = of(dev, ctx);
	if (r || flags & ~(unsigned int)CU_CTX_FLAGS_MASK || depth == MAX_DEPTH)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	r = new_context(dev, flags, &c);
	pthread_mutex_unlock(&vcu_lock);
	if (r)
		return r;
	stack[depth++] = c;
	*ctx = (CUcontext)c->row.key;
	return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext ctx)
{
	struct context *c;
	CUresult r = known(ctx, &c);
	if (r || c->primary)
		return r ? r : CUDA_ERROR_INVALID_CONTEXT;
	end(c);
	if (depth && stack[depth - 1] == c)
		depth--;
	return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext ctx)
{
	struct context *c;
	CUresult r = known(ctx, &c);
	if (r || depth == MAX_DEPTH)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	stack[depth++] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *ctx)
{
	CUresult r = vcu_ready();
	if (r || !depth)
		return r ? r : CUDA_ERROR_INVALID_CONTEXT;
	struct context *c = stack[--depth];
	if (ctx)
		*ctx = (CUcontext)c->row.key;
	return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext ctx)
{
	struct context *c;
	CUresult r = vcu_ready();
	if (!r && !ctx) {
		depth -= depth > 0;
		return CUDA_SUCCESS;
	}
	if (r || (r = known(ctx, &c)))
		return r;
	depth += depth == 0;
	stack[depth - 1] = c;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *ctx)
{
	CUresult r = vcu_ready();
	if (r || !ctx)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*ctx = depth ? (CUcontext)stack[depth - 1]->row.key : NULL;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !device)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*device = c->dev;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned int *flags)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !flags)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*flags = c->flags;
	return CUDA_SUCCESS;
}

/* chosen finds a context, or the current one if it is NULL. */
static CUresult chosen(CUcontext ctx, struct context **c) { return ctx ? known(ctx, c) : vcu_current(c); }

CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
	struct context *c;
	CUresult r = chosen(ctx, &c);
	if (r || !id)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*id = c->row.key;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
	struct context *c;
	CUresult r = chosen(ctx, &c);
	if (r || !version)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	*version = 3020;
	return CUDA_SUCCESS;
}

CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (!r && least)
		*least = 0;
	if (!r && greatest)
		*greatest = 0;
	return r;
}

CUresult cuCtxSynchronize(void)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	return r ? r : vcu_drain(c, true);
}

/* Copies go between all GPUs of the process: there is nothing to enable. */
CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
	struct context *c, *p;
	CUresult r = vcu_current(&c);
	if (r || (r = known(peer, &p)) || flags)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	return c->dev == p->dev ? CUDA_ERROR_PEER_ACCESS_UNSUPPORTED : CUDA_SUCCESS;
}

CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
	struct context *c, *p;
	CUresult r = vcu_current(&c);
	if (r || (r = known(peer, &p)))
		return r;
	return c->dev == p->dev ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice dev)
{
	CUresult r = of(dev, ctx);
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	struct gpu *g = &vcu_gpus[dev];
	struct context *c = g->primary;
	if (!c && (r = new_context(dev, g->flags, &c)) == CUDA_SUCCESS) {
		c->primary = true;
		g->primary = c;
	} else if (c && c->destroyed) {
		r = vcu_result(verbena_gpu_stream_create(dev, &c->stream));
		c->destroyed = r != CUDA_SUCCESS;
	}
	if (!r) {
		c->retained++;
		*ctx = (CUcontext)c->row.key;
	}
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

/* leave ends one use of a primary context, or all of them. */
static CUresult leave(CUdevice dev, bool all)
{
	CUresult r = vcu_device(dev);
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	struct context *c = vcu_gpus[dev].primary;
	bool used = c && c->retained > 0;
	if (used && !all)
		c->retained--;
	bool last = used && (all || !c->retained);
	if (last)
		c->retained = 0;
	pthread_mutex_unlock(&vcu_lock);
	if (last)
		end(c);
	return used || all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice dev) { return leave(dev, false); }
CUresult cuDevicePrimaryCtxReset(CUdevice dev) { return leave(dev, true); }

CUresult cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int *flags, int *active)
{
	CUresult r = of(dev, flags);
	if (r || !active)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct context *c = vcu_gpus[dev].primary;
	*flags = vcu_gpus[dev].flags;
	*active = c && c->retained > 0;
	pthread_mutex_unlock(&vcu_lock);
	return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags)
{
	CUresult r = vcu_device(dev);
	if (r || flags & ~(unsigned int)CU_CTX_FLAGS_MASK)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	vcu_gpus[dev].flags = flags;
	if (vcu_gpus[dev].primary)
		vcu_gpus[dev].primary->flags = flags;
	pthread_mutex_unlock(&vcu_lock);
	return CUDA_SUCCESS;
}
