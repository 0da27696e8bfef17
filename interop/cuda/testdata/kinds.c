/* Memory of every kind: allocated, registered, copied to and from by its owner, freed. */
#include <pthread.h>

#include "common.h"
#include "vmm.h"

#include <verbena/verbs.h>

enum { PAGE = 4096 };

#define OTHER_IOVA 0x100000ull /* no address of a GPU */

const char *const kind_names[KINDS] = {
	[PLAIN] = "malloc",	     [PAGE_LOCKED] = "locked",	 [HOST_REGISTERED] = "registered",
	[DEVICE_MEMORY] = "dm",	     [ALLOCATED_MR] = "allocmr", [GPU] = "gpu",
	[VMM] = "vmm",		     [VMM_FD] = "vmmfd",	 [MANAGED] = "managed",
};

const char *const way_names[WAYS] = {
	[BY_ADDRESS] = "address", [BY_DMABUF] = "dmabuf", [BY_PART] = "part",
	[BY_OFFSET] = "offset",	  [BY_IOVA] = "iova",	  [NO_WAY] = "none",
};

bool is_gpu(enum kind kind) { return kind >= GPU; }

void cuda_start(void)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards primary */
	static CUcontext primary;
	CUcontext now;
	CUdevice dev;
	pthread_mutex_lock(&lock);
	if (!primary) {
		OK(cuInit(0));
		OK(cuDeviceGet(&dev, 0));
		OK(cuDevicePrimaryCtxRetain(&primary, dev));
	}
	pthread_mutex_unlock(&lock);
	OK(cuCtxGetCurrent(&now));
	if (!now)
		OK(cuCtxSetCurrent(primary));
}

/* map_vmm creates physical memory and maps it at an address of its own. */
static int map_vmm(struct memory *m, size_t size, int handle_type)
{
	CUmemAllocationProp prop;
	CUmemAccessDesc access;
	CUmemGenericAllocationHandle handle;
	size_t unit = 0;
	CUdevice dev;
	CUresult r;
	OK(cuCtxGetDevice(&dev));
	memset(&prop, 0, sizeof prop);
	memset(&access, 0, sizeof access);
	prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	prop.requestedHandleTypes = handle_type ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE;
	prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	prop.location.id = dev;
	prop.allocFlags.gpuDirectRDMACapable = 1;
	r = cuMemGetAllocationGranularity(&unit, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
	if (r == CUDA_ERROR_NOT_SUPPORTED)
		return ENOTSUP;
	OK(r);
	m->reserved = (size + unit - 1) / unit * unit;
	OK(cuMemAddressReserve(&m->base, m->reserved, 0, 0, 0));
	OK(cuMemCreate(&handle, m->reserved, &prop, 0));
	OK(cuMemMap(m->base, m->reserved, 0, handle, 0));
	access.location = prop.location;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	OK(cuMemSetAccess(m->base, m->reserved, &access, 1));
	m->handle = handle;
	return 0;
}

/* allocate allocates size bytes, of whole pages. */
static int allocate(struct memory *m, struct ibv_pd *pd, size_t size)
{
	struct ibv_alloc_dm_attr dm = {.length = size};
	switch (m->kind) {
	case PLAIN:
	case HOST_REGISTERED:
		WANT(!posix_memalign(&m->block, PAGE, size));
		if (m->kind == HOST_REGISTERED)
			OK(cuMemHostRegister(m->block, size, 0));
		break;
	case PAGE_LOCKED:
		OK(cuMemHostAlloc(&m->block, size, CU_MEMHOSTALLOC_PORTABLE));
		break;
	case DEVICE_MEMORY:
		m->dm = ibv_alloc_dm(pd->context, &dm);
		return m->dm ? 0 : errno;
	case ALLOCATED_MR:
		break; /* with its registration */
	case GPU:
		OK(cuMemAlloc(&m->base, size));
		break;
	case MANAGED:
		OK(cuMemAllocManaged(&m->base, size, CU_MEM_ATTACH_GLOBAL));
		break;
	case VMM:
	case VMM_FD:
		return map_vmm(m, size, m->kind == VMM_FD);
	default:
		failed("memory of kind %d", m->kind);
	}
	m->host = (unsigned char *)m->block;
	return 0;
}

int export_range(CUdeviceptr p, size_t n)
{
	int fd = -1;
	OK(cuMemGetHandleForAddressRange(&fd, p, n, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	WANT(fd >= 0);
	return fd;
}

/* by_dmabuf registers m->size bytes of GPU memory by a dma-buf, which is closed again. */
static struct ibv_mr *by_dmabuf(struct memory *m, struct ibv_pd *pd, size_t pages, int access)
{
	CUdeviceptr from = m->way == BY_PART ? m->device : m->base;
	int fd = export_range(from, pages - (from - m->base));
	m->addr = m->way == BY_IOVA ? OTHER_IOVA : m->device;
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(pd, m->device - from, m->size, m->addr, fd, access);
	int err = errno;
	WANT(!close(fd));
	errno = err;
	return mr;
}

int memory_open(struct memory *m, struct ibv_pd *pd, enum kind kind, enum way way, size_t size, int access)
{
	const size_t skip = way == BY_PART || way == BY_OFFSET ? PAGE : 0, pages = (size + skip + PAGE - 1) & -(size_t)PAGE;
	*m = (struct memory){.kind = kind, .way = way, .size = size};
	if (kind != PLAIN)
		cuda_start();
	int err = allocate(m, pd, pages);
	if (err)
		return err;
	if (m->base)
		m->device = m->base + skip;
	m->addr = m->base ? m->device : (uintptr_t)m->block;
	if (way == NO_WAY)
		return 0;
	if (kind == DEVICE_MEMORY) {
		m->mr = ibv_reg_dm_mr(pd, m->dm, 0, size, (unsigned)access | IBV_ACCESS_ZERO_BASED);
		m->addr = 0;
	} else if (kind == ALLOCATED_MR) {
		m->mr = ibv_reg_mr(pd, NULL, size, access | IBV_ACCESS_ALLOCATE_MR);
		if (m->mr) {
			m->host = (unsigned char *)m->mr->addr;
			m->addr = (uintptr_t)m->host;
		}
	} else if (way == BY_ADDRESS) {
		m->mr = ibv_reg_mr(pd, (void *)(uintptr_t)m->addr, size, access);
	} else {
		m->mr = by_dmabuf(m, pd, pages, access);
	}
	return m->mr ? 0 : errno ? errno : EIO;
}

int memory_free(struct memory *m)
{
	if (m->gone)
		return 0;
	m->gone = true;
	if (m->reserved) {
		OK(cuMemUnmap(m->base, m->reserved));
		OK(cuMemRelease(m->handle));
		OK(cuMemAddressFree(m->base, m->reserved));
	} else if (m->base) {
		OK(cuMemFree(m->base));
	} else if (m->kind == PAGE_LOCKED) {
		OK(cuMemFreeHost(m->block));
	} else if (m->block) {
		if (m->kind == HOST_REGISTERED)
			OK(cuMemHostUnregister(m->block));
		free(m->block);
	} else if (m->dm) {
		return ibv_free_dm(m->dm);
	}
	return 0;
}

int memory_close(struct memory *m)
{
	int err = m->mr ? ibv_dereg_mr(m->mr) : 0;
	m->mr = NULL;
	return err ? err : memory_free(m);
}

/* copy_dm copies to or from device memory, of which the CPU reaches whole words only. */
static void copy_dm(struct ibv_dm *dm, size_t off, const void *from, void *to, size_t n)
{
	const size_t begin = off & ~(size_t)3, words = (off + n + 3 - begin) & ~(size_t)3;
	unsigned char *copy = (unsigned char *)malloc(words);
	WANT(copy && !ibv_memcpy_from_dm(copy, dm, begin, words));
	if (to)
		memcpy(to, copy + (off - begin), n);
	if (from) {
		memcpy(copy + (off - begin), from, n);
		WANT(!ibv_memcpy_to_dm(dm, begin, copy, words));
	}
	free(copy);
}

void memory_put(struct memory *m, size_t off, const void *from, size_t n)
{
	WANT(off <= m->size && n <= m->size - off);
	if (m->dm)
		copy_dm(m->dm, off, from, NULL, n);
	else if (m->host)
		memcpy(m->host + off, from, n);
	else
		OK(cuMemcpyHtoD(m->device + off, from, n));
}

void memory_get(struct memory *m, size_t off, void *to, size_t n)
{
	WANT(off <= m->size && n <= m->size - off);
	if (m->dm)
		copy_dm(m->dm, off, NULL, to, n);
	else if (m->host)
		memcpy(to, m->host + off, n);
	else
		OK(cuMemcpyDtoH(to, m->device + off, n));
}
