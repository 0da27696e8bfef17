/*
 * CUDA's driver interface on software GPUs: memory, contexts, streams and events, RDMA by dma-buf and by address, other
 * processes, and arguments that cannot be, at last at random. The numbers of errors are those that CUDA's own driver returned to the same
 * calls (version 13.0, on an H200), unless a comment says otherwise. It runs with VERBENA_GPU=count=2,vram=64M.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda.h"

#include "self.h"

enum { N = 200000, VRAM = 64 << 20 };
static uint8_t here[N], there[N];

/* IS checks what a call returns. */
#define IS(call, want)                                                                                                 \
	do {                                                                                                           \
		int got_ = (int)(call);                                                                                \
		if (got_ != (int)(want)) {                                                                             \
			fprintf(stderr, "%s:%d: %s is %d, not %d\n", __FILE__, __LINE__, #call, got_, (int)(want));   \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)
#define OK(call) IS(call, CUDA_SUCCESS)

static CUdeviceptr alloc(size_t n)
{
	CUdeviceptr p = 0;
	OK(cuMemAlloc(&p, n));
	WANT(p);
	return p;
}

static void scribble(int seed)
{
	for (int i = 0; i < N; i++)
		here[i] = (uint8_t)(i * 7 + i / 251 + seed);
}

/* holds reports whether memory has what scribble wrote. */
static int holds(CUdeviceptr p)
{
	memset(there, 0xee, N);
	OK(cuMemcpyDtoH(there, p, N));
	return !memcmp(here, there, N);
}

static void not_initialized(void)
{
	int n;
	CUcontext c;
	CUdeviceptr p;
	OK(cuDriverGetVersion(&n));
	WANT(n >= 12000);
	IS(cuDeviceGetCount(&n), CUDA_ERROR_NOT_INITIALIZED);
	IS(cuMemAlloc(&p, 9), CUDA_ERROR_NOT_INITIALIZED);
	IS(cuCtxGetCurrent(&c), CUDA_ERROR_NOT_INITIALIZED);
	IS(cuInit(1), CUDA_ERROR_INVALID_VALUE);
}

static void devices(void)
{
	int n, bus[2], dev, value;
	char name[100], id[32];
	size_t total;
	CUuuid uuid[2];
	OK(cuDeviceGetCount(&n));
	IS(n, 2);
	IS(cuDeviceGet(&dev, 99), CUDA_ERROR_INVALID_DEVICE);
	IS(cuDeviceGet(&dev, -1), CUDA_ERROR_INVALID_DEVICE);
	IS(cuDeviceGet(NULL, 0), CUDA_ERROR_INVALID_VALUE);
	for (int i = 0; i < 2; i++) {
		OK(cuDeviceGet(&dev, i));
		OK(cuDeviceGetName(name, sizeof name, dev));
		WANT(name[0]);
		OK(cuDeviceGetUuid(&uuid[i], dev));
		OK(cuDeviceTotalMem(&total, dev));
		WANT(total == VRAM);
		OK(cuDeviceGetAttribute(&bus[i], CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, dev));
		OK(cuDeviceGetPCIBusId(id, sizeof id, dev));
		OK(cuDeviceGetByPCIBusId(&dev, id));
		IS(dev, i);
	}
	WANT(bus[0] != bus[1] && memcmp(&uuid[0], &uuid[1], sizeof *uuid));
	const int yes[] = {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED,
			   CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED, CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
			   CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS};
	for (unsigned i = 0; i < sizeof yes / sizeof *yes; i++) {
		OK(cuDeviceGetAttribute(&value, (CUdevice_attribute)yes[i], 0));
		IS(value, 1);
	}
	OK(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_INTEGRATED, 1));
	IS(value, 0);
	IS(cuDeviceGetAttribute(&value, (CUdevice_attribute)999, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuDeviceGetAttribute(&value, (CUdevice_attribute)0, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 9), CUDA_ERROR_INVALID_DEVICE);
	IS(cuDeviceGetByPCIBusId(&dev, "zz"), CUDA_ERROR_INVALID_VALUE);
	IS(cuDeviceGetByPCIBusId(&dev, "0000:ff:1f.7"), CUDA_ERROR_INVALID_DEVICE);
}

static void no_context(void)
{
	int dev;
	CUcontext c = (CUcontext)1;
	CUdeviceptr p;
	unsigned type;
	IS(cuMemAlloc(&p, 9), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxPopCurrent(&c), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxSynchronize(), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxGetDevice(&dev), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuMemcpy((uintptr_t)here, (uintptr_t)there, 4), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)here), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree(0));
	OK(cuCtxGetCurrent(&c));
	WANT(!c);
}

static void memory(void)
{
	CUdeviceptr p = 1, d = alloc(N), e = alloc(N), base;
	size_t size, left, total;
	scribble(1);
	OK(cuMemcpyHtoD(d, here, N));
	OK(cuMemcpyDtoD(e, d, N));
	WANT(holds(e));
	OK(cuMemsetD8(e, 5, N));
	OK(cuMemcpy(e + 10, d + 10, 100));
	OK(cuMemcpyDtoH(there, e, N));
	WANT(there[9] == 5 && there[10] == here[10] && there[109] == here[109] && there[110] == 5);
	OK(cuMemsetD32(e, 0x11223344, 3));
	OK(cuMemsetD16(e + 12, 0x5566, 1));
	OK(cuMemcpyDtoH(there, e, 16));
	WANT(((uint32_t *)there)[2] == 0x11223344 && ((uint16_t *)there)[6] == 0x5566 && there[14] == here[14]);
	OK(cuMemGetInfo(&left, &total));
	WANT(total == VRAM && left < total - 2 * N && left > total - 3 * N);

	IS(cuMemAlloc(&p, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemAlloc(NULL, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemAlloc(&p, (size_t)1 << 45), CUDA_ERROR_OUT_OF_MEMORY);
	IS(cuMemAlloc(&p, SIZE_MAX), CUDA_ERROR_OUT_OF_MEMORY);
	IS(cuMemAlloc(&p, left + 1), CUDA_ERROR_OUT_OF_MEMORY);
	WANT(p == 1);
	OK(cuMemAlloc(&p, left)); /* all that is left */
	IS(cuMemAlloc(&base, 1), CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuMemFree(p));
	OK(cuMemFree(0));
	IS(cuMemFree((uintptr_t)here), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFree(d + 4096), CUDA_ERROR_INVALID_VALUE);

	IS(cuMemcpyHtoD(d + N - 16, here, 64), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyHtoD(d + N, here, 1), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemcpyHtoD(d, here, 0));
	OK(cuMemcpyHtoD(5, here, 0));
	IS(cuMemcpyDtoH(there, (uintptr_t)here, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoH(there, 0x1234560000, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyHtoD(d, NULL, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoD(d, (uintptr_t)here, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoD(d, d + 4096, SIZE_MAX - 4095), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemcpy((uintptr_t)there, (uintptr_t)here, N));
	WANT(!memcmp(here, there, N));
	IS(cuMemsetD8((uintptr_t)here, 1, 9), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemsetD32(d + 2, 1, 1), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemsetD8(d, 1, 0));
	IS(cuMemsetD8(d, 1, N + 1), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemsetD32(d, 1, SIZE_MAX / 2), CUDA_ERROR_INVALID_VALUE);

	OK(cuMemGetAddressRange(&base, &size, d + 5));
	WANT(base == d && size == N);
	OK(cuMemGetAddressRange(NULL, NULL, d));
	IS(cuMemGetAddressRange(&base, &size, (uintptr_t)here), CUDA_ERROR_NOT_FOUND);
	IS(cuMemGetAddressRange(&base, &size, d + N), CUDA_ERROR_NOT_FOUND);

	OK(cuMemFree(d));
	IS(cuMemFree(d), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoH(there, d, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpy((uintptr_t)there, d, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemsetD8(d, 0, 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemGetAddressRange(&base, &size, d), CUDA_ERROR_NOT_FOUND);
	OK(cuMemFree(e));
	OK(cuMemGetInfo(&left, &total));
	WANT(left == total);
}

/* about asks for one attribute. */
static uint64_t about(CUdeviceptr p, CUpointer_attribute a, size_t width)
{
	uint64_t value = 0;
	OK(cuPointerGetAttribute(&value, a, p));
	return width == 4 ? (uint32_t)value : value;
}

static void attributes(CUcontext ctx)
{
	CUdeviceptr d = alloc(N), m, again;
	void *host;
	unsigned one = 1, type = 9, managed = 9;
	int ordinal = 9;
	uint64_t id = 9, start = 9, hostPointer = 9;
	OK(cuMemAllocManaged(&m, 4096, CU_MEM_ATTACH_GLOBAL));
	OK(cuMemAllocHost(&host, 4096));
	struct {
		CUdeviceptr p, base;
		size_t size;
		unsigned type, managed, direct;
	} all[] = {{d + 256, d, N, CU_MEMORYTYPE_DEVICE, 0, 1},
		   {m + 8, m, 4096, CU_MEMORYTYPE_DEVICE, 1, 0},
		   {(uintptr_t)host, (uintptr_t)host, 4096, CU_MEMORYTYPE_HOST, 0, 0}};
	for (int i = 0; i < 3; i++) {
		CUdeviceptr p = all[i].p;
		WANT(about(p, CU_POINTER_ATTRIBUTE_CONTEXT, 8) == (uintptr_t)ctx);
		WANT(about(p, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4) == all[i].type);
		WANT(about(p, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, 8) == p);
		WANT(about(p, CU_POINTER_ATTRIBUTE_IS_MANAGED, 4) == all[i].managed);
		WANT(about(p, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4) == 0);
		WANT(about(p, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, 8) == all[i].base);
		WANT(about(p, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 8) == all[i].size);
		WANT(about(p, CU_POINTER_ATTRIBUTE_MAPPED, 4) == 1);
		WANT(about(p, CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, 4) == all[i].direct);
		WANT(about(p, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, 4) == all[i].direct);
		IS(cuPointerGetAttribute(&id, (CUpointer_attribute)99, p), CUDA_ERROR_INVALID_VALUE);
	}
	IS(cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_HOST_POINTER, d), CUDA_ERROR_INVALID_VALUE);
	WANT(about(m, CU_POINTER_ATTRIBUTE_HOST_POINTER, 8) == m);
	IS(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)here), CUDA_ERROR_INVALID_VALUE);

	/* Several at once: of any address. */
	CUpointer_attribute a[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
				   CU_POINTER_ATTRIBUTE_BUFFER_ID, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, CU_POINTER_ATTRIBUTE_HOST_POINTER};
	void *to[] = {&type, &managed, &ordinal, &id, &start, &hostPointer};
	OK(cuPointerGetAttributes(6, a, to, (uintptr_t)here));
	WANT(type == 0 && managed == 0 && ordinal == CU_DEVICE_INVALID && id == 0 && start == 9 && hostPointer == (uintptr_t)here);
	OK(cuPointerGetAttributes(6, a, to, d + 1));
	WANT(type == CU_MEMORYTYPE_DEVICE && ordinal == 0 && id && start == d && hostPointer == 0);
	IS(cuPointerGetAttributes(0, a, to, d), CUDA_ERROR_INVALID_VALUE);

	OK(cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, d));
	IS(cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, (uintptr_t)here), CUDA_ERROR_INVALID_VALUE);
	IS(cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, d), CUDA_ERROR_INVALID_VALUE);

	/* Managed memory is the CPU's, too. */
	memcpy((void *)(uintptr_t)m, here, 4096);
	OK(cuMemcpyDtoD(d, m, 4096));
	OK(cuMemcpyDtoH(there, d, 4096));
	WANT(!memcmp(here, there, 4096));
	IS(cuMemAllocManaged(&again, 4096, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree(m));
	OK(cuMemFreeHost(host));

	/* An address that comes again is another buffer's. */
	id = about(d, CU_POINTER_ATTRIBUTE_BUFFER_ID, 8);
	OK(cuMemFree(d));
	IS(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, d), CUDA_ERROR_INVALID_VALUE);
	again = alloc(N);
	WANT(about(again, CU_POINTER_ATTRIBUTE_BUFFER_ID, 8) != id);
	OK(cuMemFree(again));
}

static void host_memory(void)
{
	void *p = NULL;
	CUdeviceptr d = alloc(4096), q;
	unsigned flags;
	OK(cuMemHostAlloc(&p, 8192, CU_MEMHOSTALLOC_PORTABLE));
	memset(p, 7, 8192);
	OK(cuMemcpyHtoD(d, p, 4096));
	OK(cuMemHostGetDevicePointer(&q, p, 0));
	WANT(q == (uintptr_t)p);
	OK(cuMemHostGetFlags(&flags, p));
	WANT(flags & CU_MEMHOSTALLOC_PORTABLE);
	IS(cuMemHostGetDevicePointer(&q, here, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFree((uintptr_t)p), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFreeHost((void *)(uintptr_t)d), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFreeHost(p));
	IS(cuMemFreeHost(p), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFreeHost(here), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemHostAlloc(&p, 9, 64), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemHostAlloc(&p, 0, 0));

	OK(cuMemHostRegister(here, 8192, 0));
	IS(cuMemHostRegister(here, 8192, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	IS(cuMemHostRegister(here + 100, 100, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	WANT(about((uintptr_t)here + 8, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4) == CU_MEMORYTYPE_HOST);
	IS(cuMemHostUnregister(here + 4096), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemFreeHost(here), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemHostUnregister(here));
	IS(cuMemHostUnregister(here), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	void *hole = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	WANT(hole != MAP_FAILED && !munmap(hole, 4096));
	IS(cuMemHostRegister(hole, 4096, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemHostRegister(here, 0, 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemHostRegister(here, 4096, 64), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemHostRegister(here, SIZE_MAX, 0), CUDA_ERROR_INVALID_VALUE); /* not asked of CUDA's driver */
	OK(cuMemFree(d));
}

static int called;
static void note(void *data) { __atomic_fetch_add((int *)data, 1, __ATOMIC_SEQ_CST); }
static void noted(CUstream s, CUresult r, void *data)
{
	WANT(s && !r);
	note(data);
}

static void streams(void)
{
	CUstream s, t;
	CUevent e, f, untimed;
	float ms = -1;
	unsigned flags;
	CUdeviceptr d = alloc(N), x = alloc(N);
	void *host;
	IS(cuStreamCreate(&s, 8), CUDA_ERROR_INVALID_VALUE);
	OK(cuStreamCreate(&s, CU_STREAM_DEFAULT));
	OK(cuStreamCreate(&t, CU_STREAM_NON_BLOCKING));
	OK(cuStreamGetFlags(t, &flags));
	WANT(flags == CU_STREAM_NON_BLOCKING);
	OK(cuMemAllocHost(&host, N));
	IS(cuEventCreate(&e, 64), CUDA_ERROR_INVALID_VALUE);
	OK(cuEventCreate(&e, CU_EVENT_DEFAULT));
	OK(cuEventCreate(&f, CU_EVENT_DEFAULT));
	OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
	OK(cuEventQuery(e));
	OK(cuEventSynchronize(e));
	IS(cuEventElapsedTime(&ms, e, e), CUDA_ERROR_INVALID_HANDLE);

	/* Two streams that an event puts in order; the data comes back the same way. */
	scribble(2);
	memcpy(host, here, N);
	OK(cuEventRecord(f, s));
	OK(cuMemcpyHtoDAsync(d, host, N, s));
	OK(cuEventRecord(e, s));
	OK(cuStreamWaitEvent(t, e, 0));
	OK(cuMemcpyDtoDAsync(x, d, N, t));
	OK(cuMemsetD8Async(d, 0, N, t));
	OK(cuLaunchHostFunc(t, note, &called));
	OK(cuStreamAddCallback(t, noted, &called, 0));
	OK(cuStreamSynchronize(t));
	IS(called, 2);
	OK(cuStreamQuery(t));
	OK(cuEventQuery(e));
	OK(cuEventElapsedTime(&ms, f, e));
	WANT(ms >= 0);
	WANT(holds(x));
	OK(cuMemcpyDtoH(there, d, N));
	WANT(there[0] == 0 && there[N - 1] == 0);

	/* The program may change its own memory at once. */
	OK(cuMemcpyHtoDAsync(d, here, N, t));
	scribble(3);
	OK(cuStreamSynchronize(t));
	scribble(2);
	WANT(holds(d));

	/* The default stream waits for streams that block. */
	scribble(4);
	memcpy(host, here, N);
	OK(cuMemcpyHtoDAsync(d, host, N, s));
	OK(cuMemcpyDtoD(x, d, N));
	OK(cuStreamQuery(NULL));
	WANT(holds(x));
	OK(cuStreamSynchronize(CU_STREAM_LEGACY));
	OK(cuStreamSynchronize(CU_STREAM_PER_THREAD));
	OK(cuCtxSynchronize());

	OK(cuEventRecord(untimed, s));
	OK(cuEventSynchronize(untimed));
	IS(cuEventElapsedTime(&ms, e, untimed), CUDA_ERROR_INVALID_HANDLE);
	IS(cuStreamWaitEvent(t, e, 4), CUDA_ERROR_INVALID_VALUE);
	IS(cuEventQuery(NULL), CUDA_ERROR_INVALID_HANDLE);
	IS(cuEventDestroy(NULL), CUDA_ERROR_INVALID_HANDLE);
	IS(cuStreamDestroy(NULL), CUDA_ERROR_INVALID_HANDLE);
	IS(cuMemcpyHtoDAsync(d + N, here, 1, s), CUDA_ERROR_INVALID_VALUE);
	OK(cuStreamDestroy(s));
	OK(cuEventDestroy(e));
	/* CUDA's own driver crashes, or does whatever it does. */
	IS(cuStreamDestroy(s), CUDA_ERROR_INVALID_HANDLE);
	IS(cuStreamSynchronize((CUstream)3), CUDA_ERROR_INVALID_HANDLE);
	IS(cuEventRecord(e, t), CUDA_ERROR_INVALID_HANDLE);
	IS(cuMemcpyHtoDAsync(d, here, 1, s), CUDA_ERROR_INVALID_HANDLE);
	OK(cuStreamDestroy(t));
	OK(cuEventDestroy(f));
	OK(cuEventDestroy(untimed));
	OK(cuMemFreeHost(host));
	OK(cuMemFree(d));
	OK(cuMemFree(x));
}

static void ranges(void)
{
	CUdeviceptr d = alloc(1 << 20);
	int fd = -5;
	const CUmemRangeHandleType type = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
	OK(cuMemGetHandleForAddressRange(&fd, d, 1 << 20, type, 0));
	WANT(fd >= 0 && lseek(fd, 0, SEEK_END) == 1 << 20 && !close(fd));
	OK(cuMemGetHandleForAddressRange(&fd, d + 4096, 65536, type, 0)); /* a part */
	WANT(fd >= 0 && lseek(fd, 0, SEEK_END) == 65536 && !close(fd));
	struct {
		CUdeviceptr p;
		size_t n;
		int type, flags;
	} bad[] = {{d + 8, 4096, 1, 0}, {d, 100, 1, 0}, {d, 0, 1, 0}, {d + (1 << 20), 4096, 1, 0}, {d, 1 << 22, 1, 0}, {d, 4096, 7, 0},
		   {d, 4096, 1, 8}, {(uintptr_t)here & -4096UL, 4096, 1, 0}, {0x1234560000, 4096, 1, 0}, {d, -4096UL, 1, 0}};
	for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++)
		IS(cuMemGetHandleForAddressRange(&fd, bad[i].p, bad[i].n, (CUmemRangeHandleType)bad[i].type, (unsigned)bad[i].flags),
		   CUDA_ERROR_INVALID_VALUE);
	IS(cuMemGetHandleForAddressRange(&fd, d, 4096, type, CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE), CUDA_ERROR_NOT_SUPPORTED);
	OK(cuMemFree(d));
	IS(cuMemGetHandleForAddressRange(&fd, d, 4096, type, 0), CUDA_ERROR_INVALID_VALUE);
	OK(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER));
	IS(cuFlushGPUDirectRDMAWrites(CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX, (CUflushGPUDirectRDMAWritesScope)0), CUDA_ERROR_INVALID_VALUE);
}

/* reg registers memory of a GPU: the part of it from a page on, by dma-buf or by its address. */
static struct ibv_mr *reg(struct self *s, CUdeviceptr p, int dmabuf)
{
	const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_mr *mr;
	int fd;
	if (dmabuf) {
		const size_t pages = (N + 4095) & -4096UL;
		OK(cuMemGetHandleForAddressRange(&fd, p, pages, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
		mr = ibv_reg_dmabuf_mr(s->pd, 0, N, p, fd, access);
		WANT(!close(fd));
	} else {
		mr = ibv_reg_mr(s->pd, (void *)(uintptr_t)p, N, access);
	}
	WANT(mr);
	return mr;
}

static void rdma(void)
{
	struct self s = connect_self();
	for (int dmabuf = 0; dmabuf < 2; dmabuf++) {
		CUdeviceptr from = alloc(N), to = alloc(N);
		struct ibv_mr *a = reg(&s, from, dmabuf), *b = reg(&s, to, dmabuf);
		scribble(10 + dmabuf);
		OK(cuMemcpyHtoD(from, here, N));
		WANT(write_to(&s, (void *)(uintptr_t)from, a->lkey, to, b->rkey, N) == IBV_WC_SUCCESS);
		WANT(holds(to));
		/* Freed while a peer still has the key: the peer's access fails. */
		OK(cuMemFree(to));
		WANT(write_to(&s, (void *)(uintptr_t)from, a->lkey, to, b->rkey, N) == IBV_WC_REM_ACCESS_ERR);
		WANT(!ibv_dereg_mr(a) && !ibv_dereg_mr(b));
		OK(cuMemFree(from));
		close_self(&s);
		s = connect_self();
	}
	/* A dma-buf of a part has no other bytes: its offset 0 is the part's beginning. */
	const size_t at = 8192, part = 65536;
	CUdeviceptr p = alloc(N), from = alloc(N);
	int fd;
	OK(cuMemsetD8(p, 9, N));
	scribble(13);
	OK(cuMemcpyHtoD(from, here, N));
	OK(cuMemGetHandleForAddressRange(&fd, p + at, part, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0));
	WANT(!ibv_reg_dmabuf_mr(s.pd, 0, part + 1, p + at, fd, IBV_ACCESS_LOCAL_WRITE) && errno == EINVAL);
	struct ibv_mr *a = reg(&s, from, 1), *b = ibv_reg_dmabuf_mr(s.pd, 4096, part - 4096, p + at + 4096, fd, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	WANT(b && !close(fd));
	WANT(write_to(&s, (void *)(uintptr_t)from, a->lkey, p + at + 4096, b->rkey, part - 4096) == IBV_WC_SUCCESS);
	OK(cuMemcpyDtoH(there, p, N));
	WANT(!memcmp(there + at + 4096, here, part - 4096) && there[at + 4095] == 9 && there[at + part] == 9);
	WANT(!ibv_dereg_mr(a) && !ibv_dereg_mr(b));
	OK(cuMemFree(p));
	OK(cuMemFree(from));
	/* A freed address cannot be registered. */
	CUdeviceptr gone = alloc(N);
	OK(cuMemFree(gone));
	WANT(!ibv_reg_mr(s.pd, (void *)(uintptr_t)gone, N, IBV_ACCESS_LOCAL_WRITE));
	close_self(&s);
}

/* Two processes: the parent opens handles of its child's memory. */
static void send_all(int fd, const void *p, size_t n) { WANT(write(fd, p, n) == (ssize_t)n); }
static void recv_all(int fd, void *p, size_t n) { WANT(read(fd, p, n) == (ssize_t)n); }

static void child(int in, int out)
{
	CUcontext c;
	CUipcMemHandle h[2];
	char word;
	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuCtxSetCurrent(c));
	CUdeviceptr d = alloc(N), gone = alloc(N);
	scribble(20);
	OK(cuMemcpyHtoD(d, here, N));
	OK(cuIpcGetMemHandle(&h[0], d + 4096)); /* of all that was allocated */
	OK(cuIpcGetMemHandle(&h[1], d));
	WANT(!memcmp(&h[0], &h[1], sizeof *h));
	OK(cuIpcGetMemHandle(&h[1], gone));
	OK(cuMemFree(gone));
	send_all(out, h, sizeof h);
	recv_all(in, &word, 1); /* the parent has written */
	scribble(21);
	WANT(holds(d));
	send_all(out, &word, 1);
	recv_all(in, &word, 1);
	exit(0);
}

static void processes(int in, int out, pid_t pid)
{
	CUipcMemHandle h[2], own, junk = {"zz"};
	CUdeviceptr p, q = 0, d = alloc(4096), m;
	char word = 'x';
	int status;
	recv_all(in, h, sizeof h);
	OK(cuIpcGetMemHandle(&own, d));
	IS(cuIpcGetMemHandle(&own, (uintptr_t)here), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAllocManaged(&m, 4096, CU_MEM_ATTACH_GLOBAL));
	IS(cuIpcGetMemHandle(&junk, m), CUDA_ERROR_INVALID_VALUE);
	OK(cuMemFree(m));
	IS(cuIpcOpenMemHandle(&p, own, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_CONTEXT); /* its own */
	IS(cuIpcOpenMemHandle(&p, junk, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE);
	IS(cuIpcOpenMemHandle(&p, h[0], 0), CUDA_ERROR_INVALID_VALUE);
	IS(cuIpcOpenMemHandle(&p, h[0], 8), CUDA_ERROR_INVALID_VALUE);
	IS(cuIpcOpenMemHandle(&p, h[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_VALUE); /* freed; not asked of CUDA's driver */
	OK(cuIpcOpenMemHandle(&p, h[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuIpcOpenMemHandle(&q, h[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	WANT(p == q);
	scribble(20);
	WANT(holds(p));
	WANT(about(p + 9, CU_POINTER_ATTRIBUTE_RANGE_SIZE, 8) >= N && about(p, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, 4) == CU_MEMORYTYPE_DEVICE);
	scribble(21);
	OK(cuMemcpyHtoD(p, here, N));
	send_all(out, &word, 1);
	recv_all(in, &word, 1);
	OK(cuIpcCloseMemHandle(p));
	WANT(holds(p)); /* it was opened twice */
	IS(cuMemFree(p), CUDA_ERROR_INVALID_VALUE); /* not asked of CUDA's driver */
	send_all(out, &word, 1);
	WANT(waitpid(pid, &status, 0) == pid && !status);
	/* CUDA keeps memory of a process that has ended; here it is gone as soon as this process hears of it. */
	CUresult r;
	while ((r = cuMemcpyDtoH(there, p, 8)) == CUDA_SUCCESS)
		usleep(1000);
	IS(r, CUDA_ERROR_ILLEGAL_ADDRESS);
	OK(cuIpcCloseMemHandle(p));
	IS(cuIpcCloseMemHandle(p), CUDA_ERROR_INVALID_VALUE);
	IS(cuIpcCloseMemHandle(d), CUDA_ERROR_INVALID_VALUE);
	IS(cuIpcOpenMemHandle(&p, h[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS), CUDA_ERROR_INVALID_HANDLE);
	OK(cuMemFree(d));
}

static void contexts(CUcontext first)
{
	CUcontext c, now, primary;
	CUdevice dev;
	CUstream s;
	CUevent e;
	int active;
	unsigned flags;
	size_t left, total;
	CUdeviceptr p;
	OK(cuCtxCreate(&c, CU_CTX_MAP_HOST, 1));
	OK(cuCtxGetCurrent(&now));
	WANT(now == c);
	OK(cuCtxGetDevice(&dev));
	IS(dev, 1);
	OK(cuStreamCreate(&s, 0));
	OK(cuEventCreate(&e, 0));
	CUdeviceptr d = alloc(N);
	WANT(about(d, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, 4) == 1);
	/* From one GPU to another. */
	OK(cuCtxPushCurrent(first));
	CUdeviceptr other = alloc(N);
	scribble(30);
	OK(cuMemcpyHtoD(other, here, N));
	OK(cuMemcpyPeer(d, c, other, first, N));
	WANT(holds(d));
	OK(cuMemFree(other));
	OK(cuDeviceCanAccessPeer(&active, 0, 1));
	IS(active, 1);
	OK(cuDeviceCanAccessPeer(&active, 0, 0));
	IS(active, 0);
	IS(cuCtxEnablePeerAccess(first, 0), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
	OK(cuCtxEnablePeerAccess(c, 0));
	OK(cuCtxPopCurrent(&now));
	WANT(now == first);

	OK(cuMemcpyHtoDAsync(d, here, N, s));
	OK(cuCtxDestroy(c)); /* with all that it has */
	OK(cuCtxGetCurrent(&now));
	WANT(now == first);
	IS(cuCtxDestroy(c), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cuMemFree(d), CUDA_ERROR_INVALID_VALUE);
	IS(cuMemcpyDtoH(there, d, 8), CUDA_ERROR_INVALID_VALUE);
	/* CUDA's own driver takes the context as the current one, and crashes later. */
	IS(cuCtxSetCurrent(c), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cuCtxPushCurrent(c), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cuStreamQuery(s), CUDA_ERROR_INVALID_HANDLE);
	IS(cuEventQuery(e), CUDA_ERROR_INVALID_HANDLE);
	IS(cuCtxSetCurrent((CUcontext)5), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxDestroy(NULL), CUDA_ERROR_INVALID_CONTEXT);
	IS(cuCtxCreate(&c, 0, 7), CUDA_ERROR_INVALID_DEVICE);

	/* Primary contexts. */
	OK(cuDevicePrimaryCtxGetState(1, &flags, &active));
	IS(active, 0);
	OK(cuDevicePrimaryCtxRetain(&primary, 1));
	OK(cuDevicePrimaryCtxRetain(&now, 1));
	WANT(primary == now);
	IS(cuCtxDestroy(primary), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuCtxPushCurrent(primary));
	d = alloc(N);
	OK(cuDevicePrimaryCtxRelease(1));
	OK(cuMemcpyHtoD(d, here, N));
	OK(cuDevicePrimaryCtxRelease(1));
	IS(cuMemAlloc(&p, 8), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	IS(cuDevicePrimaryCtxRelease(1), CUDA_ERROR_INVALID_CONTEXT);
	OK(cuDevicePrimaryCtxRetain(&primary, 1));
	OK(cuMemGetInfo(&left, &total));
	WANT(left == total);
	OK(cuCtxPopCurrent(NULL));
	OK(cuDevicePrimaryCtxReset(1));
}

/* What cuGetProcAddress finds is what a program is linked with. */
static void names(void)
{
	CUdriverProcAddressQueryResult status;
	void *f, *lib = dlopen("libcuda.so.1", RTLD_NOW), *copy = NULL;
	CUresult (*old)(const char *, void **, int, cuuint64_t);
	WANT(lib && (*(void **)&old = dlsym(lib, "cuGetProcAddress")));
	struct {
		const char *name;
		int version;
		const char *symbol; /* NULL: status says why not */
		CUdriverProcAddressQueryResult status;
	} all[] = {
		{"cuInit", 12000, "cuInit", 0},
		{"cuMemAlloc", 13000, "cuMemAlloc_v2", 0},
		{"cuMemAlloc", 11040, "cuMemAlloc_v2", 0},
		{"cuCtxCreate", 11020, "cuCtxCreate_v2", 0},
		{"cuCtxCreate", 12080, "cuCtxCreate_v4", 0},
		{"cuCtxCreate", 13000, "cuCtxCreate_v4", 0},
		{"cuGetProcAddress", 12000, "cuGetProcAddress_v2", 0},
		{"cuGetProcAddress", 11030, "cuGetProcAddress", 0},
		{"cuMemGetHandleForAddressRange", 12000, "cuMemGetHandleForAddressRange", 0},
		{"cuMemGetHandleForAddressRange", 11000, NULL, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT},
		{"cuMemAlloc_v2", 13000, NULL, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND},
		{"nope", 13000, NULL, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND},
		{"", 13000, NULL, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND},
		{"cuLaunchKernel", 12000, "cuLaunchKernel", 0},
		{"cuStreamBeginCapture", 12000, "cuStreamBeginCapture_v2", 0},
	};
	for (unsigned i = 0; i < sizeof all / sizeof *all; i++) {
		f = (void *)7;
		OK(cuGetProcAddress(all[i].name, &f, all[i].version, 0, &status));
		void *want = all[i].symbol ? dlsym(lib, all[i].symbol) : NULL;
		WANT(f == want && status == all[i].status && !all[i].symbol == !want);
		IS(old(all[i].name, &f, all[i].version, 0), want ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
	}
	IS(cuGetProcAddress("cuInit", &f, 14000, 0, &status), CUDA_ERROR_INVALID_VALUE);
	IS(cuGetProcAddress("cuInit", &f, 12000, 64, &status), CUDA_ERROR_INVALID_VALUE);

	/* Kernels are refused. */
	CUresult (*load)(void **, const void *);
	OK(cuGetProcAddress("cuModuleLoadData", (void **)&load, 12000, 0, &status));
	IS(load(&copy, ""), CUDA_ERROR_NOT_SUPPORTED);
	const char *text;
	OK(cuGetErrorString(CUDA_ERROR_NOT_SUPPORTED, &text));
	WANT(strstr(text, "kernels"));
	OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
	WANT(!strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
	IS(cuGetErrorName((CUresult)12345, &text), CUDA_ERROR_INVALID_VALUE);
}

/* A child of fork has no GPUs. */
static void forked(void)
{
	int status;
	pid_t pid = fork();
	WANT(pid >= 0);
	if (!pid) {
		CUcontext c;
		IS(cuCtxGetCurrent(&c), CUDA_ERROR_NOT_INITIALIZED); /* not asked of CUDA's driver */
		IS(cuInit(0), CUDA_ERROR_NOT_INITIALIZED);
		_exit(0);
	}
	WANT(waitpid(pid, &status, 0) == pid && !status);
}

/* Threads that share a context, each with a stream and memory of its own. */
static void *one_thread(void *arg)
{
	enum { SIZE = 30000 };
	unsigned char own[SIZE], back[SIZE];
	CUstream s;
	OK(cuCtxSetCurrent((CUcontext)arg));
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	for (int i = 0; i < 50; i++) {
		CUdeviceptr a = alloc(SIZE), b = alloc(SIZE);
		memset(own, (int)((uintptr_t)s >> 4) + i, SIZE);
		OK(cuMemcpyHtoDAsync(a, own, SIZE, s));
		OK(cuMemcpyDtoDAsync(b, a, SIZE, s));
		OK(cuMemcpyDtoHAsync(back, b, SIZE, s));
		WANT(!memcmp(own, back, SIZE));
		OK(cuMemFree(a));
		OK(cuMemFree(b));
	}
	OK(cuStreamDestroy(s));
	return NULL;
}

/* A primary context is retained by one thread while another one is still in its last release. */
static void until(void *flag)
{
	while (!__atomic_load_n((int *)flag, __ATOMIC_ACQUIRE))
		usleep(1000);
}

static void *release_primary(void *arg)
{
	(void)arg;
	OK(cuDevicePrimaryCtxRelease(0));
	return NULL;
}

static void retained_meanwhile(CUcontext before)
{
	CUcontext c, again;
	CUstream s;
	pthread_t t;
	unsigned flags;
	int go = 0, active = 1;
	OK(cuDevicePrimaryCtxRetain(&c, 0));
	OK(cuCtxSetCurrent(c));
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuLaunchHostFunc(s, until, &go));
	WANT(!pthread_create(&t, NULL, release_primary, NULL));
	while (active) /* then the release waits for the stream */
		OK(cuDevicePrimaryCtxGetState(0, &flags, &active));
	OK(cuDevicePrimaryCtxRetain(&again, 0));
	WANT(again == c);
	CUdeviceptr d = alloc(4096);
	__atomic_store_n(&go, 1, __ATOMIC_RELEASE);
	WANT(!pthread_join(t, NULL));
	OK(cuMemsetD8(d, 1, 4096));
	OK(cuStreamDestroy(s));
	OK(cuDevicePrimaryCtxRelease(0));
	IS(cuMemsetD8(d, 1, 4096), CUDA_ERROR_CONTEXT_IS_DESTROYED);
	OK(cuCtxSetCurrent(before));
}

static void threads(CUcontext c)
{
	pthread_t t[4];
	for (int i = 0; i < 4; i++)
		WANT(!pthread_create(&t[i], NULL, one_thread, c));
	for (int i = 0; i < 4; i++)
		WANT(!pthread_join(t[i], NULL));
}

/* Calls with arguments that are right, were right once, or never were. None may crash, and none may succeed with an
 * address that is not the program's to use. */
static uint64_t state;

static unsigned dice(unsigned n)
{
	state = state * 6364136223846793005UL + 1442695040888963407UL;
	return (unsigned)(state >> 33) % n;
}

static void random_calls(uint64_t seed, int rounds)
{
	enum { SLOTS = 6, SIZE = 10000 };
	CUdeviceptr p[SLOTS] = {0};
	int live[SLOTS] = {0};
	CUstream s[SLOTS] = {0};
	CUevent e[SLOTS] = {0};
	state = seed;
	for (int i = 0; i < rounds; i++) {
		unsigned k = dice(SLOTS), j = dice(SLOTS), what = dice(14);
		size_t n = (size_t[]){0, 1, 4096, SIZE, SIZE + 1, SIZE_MAX}[dice(6)];
		size_t at = (size_t[]){0, 1, 4096, SIZE - 1, SIZE, 1UL << 40}[dice(6)];
		int in = live[k] && at <= SIZE && n <= SIZE - at, ours = in && live[j] && n <= SIZE;
		CUdeviceptr base;
		CUresult r;
		int fd;
		switch (what) {
		case 0:
			if (!live[k])
				live[k] = !cuMemAlloc(&p[k], SIZE);
			break;
		case 1:
			IS(cuMemFree(p[k] ? p[k] : 4096), live[k] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE);
			live[k] = 0;
			break;
		case 2:
			r = cuMemcpyHtoDAsync(p[k] + at, here, n, s[j]);
			WANT(r != CUDA_SUCCESS || in || !n);
			break;
		case 3:
			r = cuMemcpyDtoHAsync(there, p[k] + at, n, s[j]);
			WANT(r != CUDA_SUCCESS || in || !n);
			break;
		case 4:
			r = cuMemcpyDtoD(p[k] + at, p[j], n);
			WANT((r == CUDA_SUCCESS) == (ours || !n));
			break;
		case 5:
			r = cuMemsetD8Async(p[k] + at, (unsigned char)i, n, s[j]);
			WANT(r != CUDA_SUCCESS || in || !n);
			break;
		case 6:
			r = cuMemGetHandleForAddressRange(&fd, p[k] + at, n, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
			WANT(r != CUDA_SUCCESS || (live[k] && at % 4096 == 0 && n == 4096 && !close(fd)));
			break;
		case 7:
			IS(cuMemGetAddressRange(&base, NULL, p[k] + at), live[k] && at < SIZE ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND);
			break;
		case 8:
			if (!s[k])
				OK(cuStreamCreate(&s[k], dice(2)));
			break;
		case 9:
			r = cuStreamDestroy(s[k]); /* it stays in the list: later calls use what is destroyed */
			WANT(!r || r == CUDA_ERROR_INVALID_HANDLE);
			if (!dice(2))
				s[k] = NULL;
			break;
		case 10:
			r = e[k] ? cuEventDestroy(e[k]) : cuEventCreate(&e[k], 0);
			WANT(!r || r == CUDA_ERROR_INVALID_HANDLE);
			if (r)
				e[k] = NULL;
			break;
		case 11:
			r = cuEventRecord(e[k], s[j]);
			WANT(!r || r == CUDA_ERROR_INVALID_HANDLE);
			break;
		case 12:
			r = cuStreamWaitEvent(s[k], e[j], 0);
			WANT(!r || r == CUDA_ERROR_INVALID_HANDLE);
			break;
		default:
			r = cuStreamQuery(s[k]);
			WANT(!r || r == CUDA_ERROR_NOT_READY || r == CUDA_ERROR_INVALID_HANDLE);
		}
	}
	OK(cuCtxSynchronize());
	for (int i = 0; i < SLOTS; i++) {
		if (live[i])
			OK(cuMemFree(p[i]));
		(void)cuStreamDestroy(s[i]);
		(void)cuEventDestroy(e[i]);
	}
}

int main(int argc, char **argv)
{
	int to[2], from[2];
	WANT(argc == 3);
	fprintf(stderr, "seed %s\n", argv[1]);
	CUcontext c;
	WANT(!pipe(to) && !pipe(from));
	pid_t pid = fork(); /* before anything else: a child of fork has no GPUs of its parent's */
	WANT(pid >= 0);
	WANT(!close(to[pid ? 0 : 1]) && !close(from[pid ? 1 : 0])); /* so that one hears when the other has ended */
	if (!pid)
		child(to[0], from[1]);
	not_initialized();
	OK(cuInit(0));
	OK(cuInit(0));
	devices();
	no_context();
	OK(cuCtxCreate(&c, CU_CTX_MAP_HOST, 0));
	memory();
	attributes(c);
	host_memory();
	streams();
	ranges();
	processes(from[0], to[1], pid);
	contexts(c);
	threads(c);
	retained_meanwhile(c);
	random_calls(strtoull(argv[1], NULL, 10), atoi(argv[2]));
	names();
	forked();
	rdma();
	OK(cuCtxDestroy(c));
	IS(cuMemAlloc(&(CUdeviceptr){0}, 8), CUDA_ERROR_INVALID_CONTEXT);
	printf("ok\n");
	return 0;
}
