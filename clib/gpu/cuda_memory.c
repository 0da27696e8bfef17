/*
 * Memory: of GPUs, of the host, managed, and of other processes. The table vcu_memory has all that programs may ask
 * for: the size as it was asked for, the context, the kind.
 */
#include <sys/mman.h>
#include <sys/random.h>

#include "cuda_state.h"

#define AT(key) ((void *)(uintptr_t)(key))

static size_t whole_pages(size_t n) { return (n + PAGE - 1) & ~(PAGE - 1); }

/* of finds the memory that an address is a part of; NULL if there is none. vcu_lock is held. */
static struct memory *of(uintptr_t addr)
{
	struct memory *m = (struct memory *)vcu_floor(&vcu_memory, addr);
	return m && addr - m->row.key < m->size ? m : NULL;
}

/* enter makes a row of new memory. handle is that of imported memory. It fails if there is no memory for the row, or if
 * the context was destroyed meanwhile. */
static bool enter(struct context *c, void *addr, size_t size, int kind, unsigned int flags, const CUipcMemHandle *handle)
{
	static uint64_t ids; /* guarded by vcu_lock */
	struct memory *m = calloc(1, sizeof *m);
	if (!m)
		return false;
	pthread_mutex_lock(&vcu_lock);
	*m = (struct memory){.row.key = (uintptr_t)addr, .size = size, .kind = kind, .flags = flags, .ctx = c, .id = ++ids, .opened = 1};
	if (handle)
		m->handle = *handle;
	bool in = !c->destroyed && vcu_add(&vcu_memory, &m->row);
	pthread_mutex_unlock(&vcu_lock);
	if (!in)
		free(m);
	return in;
}

void vcu_release_memory(struct memory *m)
{
	switch (m->kind) {
	case VERBENA_GPU_REGISTERED:
		return;
	case VERBENA_GPU_IMPORTED:
		verbena_gpu_ipc_close(AT(m->row.key));
		return;
	case VERBENA_GPU_VRAM:
		vcu_gpus[m->ctx->dev].used -= whole_pages(m->size);
	}
	verbena_gpu_free(AT(m->row.key));
}

/* leave frees memory of some kinds by its address, when it was opened no more often. */
static CUresult leave(uintptr_t addr, unsigned int kinds)
{
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = (struct memory *)vcu_find(&vcu_memory, addr);
	bool good = m && kinds >> m->kind & 1;
	if (good && --m->opened == 0) {
		vcu_remove(&vcu_memory, &m->row);
		vcu_release_memory(m);
		free(m);
	}
	pthread_mutex_unlock(&vcu_lock);
	return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Memory of a GPU. Software GPUs would evict what does not fit; for CUDA's programs VRAM has an end. */

static bool reserve(CUdevice dev, size_t n)
{
	struct gpu *g = &vcu_gpus[dev];
	pthread_mutex_lock(&vcu_lock);
	bool fits = n <= g->info.vram && g->used <= g->info.vram - n;
	if (fits)
		g->used += n;
	pthread_mutex_unlock(&vcu_lock);
	return fits;
}

static void unreserve(CUdevice dev, size_t n)
{
	pthread_mutex_lock(&vcu_lock);
	vcu_gpus[dev].used -= n;
	pthread_mutex_unlock(&vcu_lock);
}

/* make allocates memory of a kind. */
static CUresult make(struct context *c, void **addr, size_t size, int kind, unsigned int flags)
{
	void *at = NULL;
	size_t n = whole_pages(size);
	if (n < size)
		return CUDA_ERROR_OUT_OF_MEMORY;
	bool vram = kind == VERBENA_GPU_VRAM;
	if (vram && !reserve(c->dev, n))
		return CUDA_ERROR_OUT_OF_MEMORY;
	int r = verbena_gpu_alloc(c->dev, n, kind, &at);
	if (r >= 0 && !enter(c, at, size, kind, flags, NULL)) {
		verbena_gpu_free(at);
		r = -ENOMEM;
	}
	if (r < 0 && vram)
		unreserve(c->dev, n);
	if (r >= 0)
		*addr = at;
	return vcu_result(r);
}

CUresult cuMemGetInfo(size_t *free, size_t *total)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !free || !total)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	*total = vcu_gpus[c->dev].info.vram;
	*free = *total - vcu_gpus[c->dev].used;
	pthread_mutex_unlock(&vcu_lock);
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *addr, size_t size)
{
	void *at;
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !addr || !size)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if ((r = make(c, &at, size, VERBENA_GPU_VRAM, 0)) == CUDA_SUCCESS)
		*addr = (uintptr_t)at;
	return r;
}

CUresult cuMemAllocManaged(CUdeviceptr *addr, size_t size, unsigned int flags)
{
	void *at;
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !addr || !size || (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST))
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if ((r = make(c, &at, size, VERBENA_GPU_MANAGED, flags)) == CUDA_SUCCESS)
		*addr = (uintptr_t)at;
	return r;
}

CUresult cuMemFree(CUdeviceptr addr)
{
	CUresult r = vcu_ready();
	if (r || !addr)
		return r;
	return leave(addr, 1U << VERBENA_GPU_VRAM | 1U << VERBENA_GPU_MANAGED);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *size, CUdeviceptr addr)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	if (m && base)
		*base = m->row.key;
	if (m && size)
		*size = m->size;
	pthread_mutex_unlock(&vcu_lock);
	return m ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Memory of the host. */

CUresult cuMemHostAlloc(void **addr, size_t size, unsigned int flags)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !addr ||
	    flags & ~(unsigned int)(CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED))
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if (!size) {
		*addr = NULL;
		return CUDA_SUCCESS;
	}
	return make(c, addr, size, VERBENA_GPU_HOST, flags | CU_MEMHOSTALLOC_DEVICEMAP);
}

CUresult cuMemAllocHost(void **addr, size_t size) { return cuMemHostAlloc(addr, size, 0); }

CUresult cuMemFreeHost(void *addr)
{
	CUresult r = vcu_ready();
	return r ? r : leave((uintptr_t)addr, 1U << VERBENA_GPU_HOST);
}

/* mapped reports whether the program has memory everywhere in a range. */
static bool mapped(uintptr_t addr, size_t size)
{
	unsigned char present[64];
	uintptr_t at = addr & ~(PAGE - 1), stop = addr + size;
	while (at < stop) {
		size_t n = stop - at < sizeof present * PAGE ? stop - at : sizeof present * PAGE;
		if (mincore(AT(at), n, present))
			return false;
		at += whole_pages(n);
	}
	return true;
}

CUresult cuMemHostRegister(void *addr, size_t size, unsigned int flags)
{
	struct context *c;
	uintptr_t at = (uintptr_t)addr;
	CUresult r = vcu_current(&c);
	if (r || !addr || !size || size > UINTPTR_MAX - at || flags > 0xf)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *last = (struct memory *)vcu_floor(&vcu_memory, at + size - 1);
	bool overlaps = last && last->row.key + last->size > at;
	bool own = overlaps && last->kind == VERBENA_GPU_REGISTERED;
	pthread_mutex_unlock(&vcu_lock);
	if (overlaps)
		return own ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
	if (!mapped(at, size))
		return CUDA_ERROR_INVALID_VALUE;
	return enter(c, addr, size, VERBENA_GPU_REGISTERED, flags, NULL) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostUnregister(void *addr)
{
	CUresult r = vcu_ready();
	if (r)
		return r;
	pthread_mutex_lock(&vcu_lock);
	bool known = of((uintptr_t)addr) != NULL;
	pthread_mutex_unlock(&vcu_lock);
	return known ? leave((uintptr_t)addr, 1U << VERBENA_GPU_REGISTERED) : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

static bool of_host(const struct memory *m)
{
	return m && (m->kind == VERBENA_GPU_HOST || m->kind == VERBENA_GPU_REGISTERED);
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned int flags)
{
	CUresult r = vcu_ready();
	if (r || !device || flags)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	bool good = of_host(of((uintptr_t)host));
	pthread_mutex_unlock(&vcu_lock);
	if (good)
		*device = (uintptr_t)host; /* one address for all */
	return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemHostGetFlags(unsigned int *flags, void *addr)
{
	CUresult r = vcu_ready();
	if (r || !flags)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of((uintptr_t)addr);
	bool good = m && m->kind == VERBENA_GPU_HOST;
	if (good)
		*flags = m->flags;
	pthread_mutex_unlock(&vcu_lock);
	return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Attributes of addresses. */

/* attribute finds one attribute: its value, and how many bytes it has. m is NULL for an address that is unknown here: of
 * such addresses cuPointerGetAttributes alone answers. */
static CUresult attribute(const struct memory *m, CUdeviceptr addr, CUpointer_attribute a, uint64_t *value, size_t *width)
{
	bool vram = m && (m->kind == VERBENA_GPU_VRAM || m->kind == VERBENA_GPU_IMPORTED);
	bool managed = m && m->kind == VERBENA_GPU_MANAGED;
	*width = 4;
	switch (a) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		*width = sizeof(CUcontext);
		*value = m ? m->ctx->row.key : 0;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*value = !m ? 0 : vram || managed ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		*width = sizeof(CUdeviceptr);
		*value = m ? addr : 0;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		*width = sizeof(void *);
		*value = vram ? 0 : addr;
		return vram ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: /* operations without a stream always wait until they are done */
		*value = vram || managed;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_BUFFER_ID:
	case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
		*width = sizeof(unsigned long long);
		*value = m ? m->id : 0;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		*value = managed;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		*value = (uint32_t)(m ? m->ctx->dev : CU_DEVICE_INVALID);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
	case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
		*value = m && m->kind == VERBENA_GPU_VRAM;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
	case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
		*width = m ? sizeof(CUdeviceptr) : 0;
		*value = !m ? 0 : a == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR ? m->row.key : m->row.key & ~(PAGE - 1);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
	case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
		*width = m ? sizeof(size_t) : 0;
		*value = !m ? 0 : a == CU_POINTER_ATTRIBUTE_RANGE_SIZE ? m->size : whole_pages(m->row.key % PAGE + m->size);
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		*value = m != NULL;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: /* of cuMemCreate, which is not there */
	case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
		*width = sizeof(uint64_t);
		*value = 0;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
		*value = m ? 3 : 0; /* reading and writing */
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_P2P_TOKENS:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute a, CUdeviceptr addr)
{
	uint64_t value = 0;
	size_t width = 0;
	CUresult r = vcu_ready();
	if (r || !data)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	r = m ? attribute(m, addr, a, &value, &width) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&vcu_lock);
	if (!r)
		memcpy(data, &value, width);
	return r;
}

CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr addr)
{
	CUresult r = vcu_ready();
	if (r || !count || !attributes || !data)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	for (unsigned int i = 0; !r && i < count; i++) {
		uint64_t value = 0;
		size_t width = 0;
		CUresult one = attribute(m, addr, attributes[i], &value, &width);
		if (!data[i] || !attributes[i] || (one == CUDA_ERROR_INVALID_VALUE && attributes[i] != CU_POINTER_ATTRIBUTE_HOST_POINTER))
			r = CUDA_ERROR_INVALID_VALUE;
		else if (one == CUDA_ERROR_NOT_SUPPORTED)
			r = one;
		else
			memcpy(data[i], &value, width);
	}
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute a, CUdeviceptr addr)
{
	CUresult r = vcu_ready();
	if (r || !value || a != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	bool good = m && !of_host(m);
	pthread_mutex_unlock(&vcu_lock);
	return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Other devices. */

CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr addr, size_t size, CUmemRangeHandleType type,
				       unsigned long long flags)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || !handle || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || !size || addr % PAGE || size % PAGE ||
	    flags & ~(unsigned long long)CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if (flags)
		return CUDA_ERROR_NOT_SUPPORTED;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	bool good = m && m->kind == VERBENA_GPU_VRAM && size <= whole_pages(m->size) - (addr - m->row.key);
	pthread_mutex_unlock(&vcu_lock);
	if (!good)
		return CUDA_ERROR_INVALID_VALUE;
	int fd = verbena_gpu_export(AT(addr), size, NULL);
	if (fd < 0)
		return vcu_result(fd);
	*(int *)handle = fd;
	return CUDA_SUCCESS;
}

/* What a peer has written is in memory when its completion is there. */
CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
{
	struct context *c;
	CUresult r = vcu_current(&c);
	if (r || target != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX ||
	    (scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER && scope != CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES))
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	__atomic_thread_fence(__ATOMIC_SEQ_CST);
	return CUDA_SUCCESS;
}

/* Other processes. A handle is verbena/gpu.h's, and a number of the process, by which that recognises its own. */

static uint8_t process[16]; /* random; all 0 until the first handle is made; guarded by vcu_lock */

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr addr)
{
	static const uint8_t none[sizeof process];
	CUresult r = vcu_ready();
	if (r || !handle)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&vcu_lock);
	struct memory *m = of(addr);
	if (!m || m->kind != VERBENA_GPU_VRAM) {
		r = CUDA_ERROR_INVALID_VALUE;
	} else if (!m->shared) {
		if (!memcmp(process, none, sizeof process) && getrandom(process, sizeof process, 0) != sizeof process)
			r = CUDA_ERROR_OPERATING_SYSTEM;
		else
			r = vcu_result(verbena_gpu_ipc_get(AT(m->row.key), (uint8_t *)m->handle.reserved));
		memcpy(m->handle.reserved + VERBENA_GPU_HANDLE, process, sizeof process);
		m->shared = r == CUDA_SUCCESS;
	}
	if (!r)
		*handle = m->handle;
	pthread_mutex_unlock(&vcu_lock);
	return r;
}

/* opened finds memory of a handle that the context has opened before, and counts another use. */
static bool opened(const struct context *c, const CUipcMemHandle *h, CUdeviceptr *addr)
{
	bool found = false;
	pthread_mutex_lock(&vcu_lock);
	for (size_t i = 0; !found && i < vcu_memory.n; i++) {
		struct memory *m = (struct memory *)vcu_memory.rows[i];
		if (m->kind != VERBENA_GPU_IMPORTED || m->ctx != c || memcmp(&m->handle, h, sizeof *h))
			continue;
		m->opened++;
		*addr = m->row.key;
		found = true;
	}
	pthread_mutex_unlock(&vcu_lock);
	return found;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr *addr, CUipcMemHandle handle, unsigned int flags)
{
	void *at = NULL;
	struct context *c;
	struct verbena_gpu_pointer p;
	CUresult r = vcu_current(&c);
	if (r || !addr || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		return r ? r : CUDA_ERROR_INVALID_VALUE;
	if (opened(c, &handle, addr))
		return CUDA_SUCCESS;
	pthread_mutex_lock(&vcu_lock);
	static const uint8_t none[sizeof process];
	const char *maker = handle.reserved + VERBENA_GPU_HANDLE;
	bool own = memcmp(process, none, sizeof process) && !memcmp(process, maker, sizeof process);
	pthread_mutex_unlock(&vcu_lock);
	if (own)
		return CUDA_ERROR_INVALID_CONTEXT;
	int e = verbena_gpu_ipc_open(c->dev, (const uint8_t *)handle.reserved, &at);
	if (e < 0)
		return vcu_result(e);
	if ((e = verbena_gpu_lookup(at, &p)) >= 0 && !enter(c, at, p.size, VERBENA_GPU_IMPORTED, 0, &handle))
		e = -ENOMEM;
	if (e < 0) {
		verbena_gpu_ipc_close(at);
		return vcu_result(e);
	}
	*addr = (uintptr_t)at;
	return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr addr)
{
	CUresult r = vcu_ready();
	return r ? r : leave(addr, 1U << VERBENA_GPU_IMPORTED);
}
