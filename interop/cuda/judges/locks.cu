// Which calls of the driver wait while another thread of the program waits for a kernel? Those by which the library moves
// bytes (internal/cuda) must not: the kernel may be waiting for the bytes. It is the driver alone that is looked at here.
//
//   locks [--quick]
//
// For each way in which a program waits for a kernel that does not end, and each of the calls, on a stream that was used
// before and on a new one, one line:
//
//   PASS or FAIL   for a call that lies before or behind each copy of the library's: it has to return, and its copy to end
//   NOTE           for one that the library makes elsewhere, or not any more: what was seen
//
// What cuMemFree holds up is known, and not among the ways. Without nvcc, for software GPUs, a function of the host's takes the
// place of the kernel (g++ -std=c++20 -x c++ locks.cu -lcuda): that says nothing about NVIDIA's driver, but that this program works.

#include <cuda.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

using std::function;
using std::string;
using std::vector;
using std::chrono::duration;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

enum { MIB = 1 << 20 };

static void ok(CUresult r, const char *what)
{
	const char *name = "?";
	if (r == CUDA_SUCCESS)
		return;
	cuGetErrorName(r, &name);
	printf("FAIL %s: %s\n", what, name);
	fflush(stdout);
	_exit(1);
}
#define OK(call) ok(call, #call)

static volatile int *go;

#ifdef __CUDACC__
static CUdeviceptr go_there;

__global__ static void wait_for(volatile int *to)
{
	while (!*to)
		;
}

static void start_kernel(CUstream s) { wait_for<<<1, 1, 0, s>>>((volatile int *)go_there); }

// two_rows is how the library stores few bytes.
static CUresult two_rows(CUdeviceptr to, const void *from, size_t n, CUstream s)
{
	CUDA_MEMCPY2D c;
	memset(&c, 0, sizeof c);
	c.srcMemoryType = CU_MEMORYTYPE_HOST;
	c.srcHost = from;
	c.dstMemoryType = CU_MEMORYTYPE_DEVICE;
	c.dstDevice = to;
	c.srcPitch = c.dstPitch = c.WidthInBytes = n / 2;
	c.Height = 2;
	return cuMemcpy2DAsync(&c, s);
}

static CUresult write_value(CUdeviceptr to, CUstream s) { return cuStreamWriteValue32(s, to, 1, 0); }
#else
static void spin(void *)
{
	while (!*go)
		std::this_thread::sleep_for(milliseconds(1));
}
static void start_kernel(CUstream s) { OK(cuLaunchHostFunc(s, spin, NULL)); }
static CUresult two_rows(CUdeviceptr to, const void *from, size_t n, CUstream s) { return cuMemcpyHtoDAsync(to, from, n, s); }
static CUresult write_value(CUdeviceptr, CUstream) { return CUDA_ERROR_NOT_SUPPORTED; }
#endif

static CUcontext ctx;
static CUdeviceptr a, b, others; // others: of another process
static char *locked, *pageable, *unlocked_page;
static CUstream kernels;
static CUevent behind;
static CUipcMemHandle handles[2]; // of another process: the first one is open

struct way {
	const char *name;
	CUstream on; // of the kernel
	function<CUresult()> wait;
};

struct call {
	const char *name;
	bool path;   // the library makes it for each copy
	bool stream; // it queues something on a stream
	function<CUresult(CUstream)> make;
	function<void()> undo; // when the kernel has ended
};

struct outcome {
	CUresult result = CUDA_SUCCESS;
	std::atomic<bool> returned{false}, over{false};
	std::atomic<double> took{0}; // until it returned
};

// attempt makes a call, and waits for what it has queued. Whoever looks has its own share of the outcome.
static void attempt(const call &c, CUstream s, CUevent e, std::shared_ptr<outcome> out)
{
	OK(cuCtxSetCurrent(ctx));
	auto begin = steady_clock::now();
	CUresult r = c.make(s);
	out->took = duration<double>(steady_clock::now() - begin).count();
	out->returned = true;
	if (!r && c.stream && !(r = cuEventRecord(e, s)))
		while ((r = cuEventQuery(e)) == CUDA_ERROR_NOT_READY)
			;
	out->result = r;
	out->over = true;
}

// serve is the other process: it has memory that this one opens, until the pipe is closed.
static void serve(int to, int until)
{
	CUdevice dev;
	CUdeviceptr p;
	CUipcMemHandle h[2];
	OK(cuInit(0));
	OK(cuDeviceGet(&dev, 0));
	OK(cuDevicePrimaryCtxRetain(&ctx, dev));
	OK(cuCtxSetCurrent(ctx));
	for (int i = 0; i < 2; i++) {
		OK(cuMemAlloc(&p, 4 * MIB));
		OK(cuIpcGetMemHandle(&h[i], p));
	}
	char c;
	if (write(to, h, sizeof h) == (ssize_t)sizeof h)
		(void)!read(until, &c, 1);
	_exit(0);
}

static double wait_limit = 0.3; // seconds

// run prints one line about one call, on a stream that was used before, or on a new one.
static void run(const way &w, const call &c, bool used)
{
	CUstream s;
	CUevent e;
	OK(cuStreamCreate(&s, CU_STREAM_NON_BLOCKING));
	OK(cuEventCreate(&e, CU_EVENT_DISABLE_TIMING));
	if (used && c.stream && c.make(s) == CUDA_SUCCESS) {
		OK(cuEventRecord(e, s));
		OK(cuStreamSynchronize(s));
	}
	*go = 0;
	start_kernel(w.on);
	std::thread program([&] {
		OK(cuCtxSetCurrent(ctx));
		OK(w.wait());
	});
	std::this_thread::sleep_for(milliseconds(20)); // it waits in the driver
	auto out = std::make_shared<outcome>();
	std::thread t([&c, s, e, out] { attempt(c, s, e, out); });
	auto until = steady_clock::now() + duration<double>(wait_limit);
	while (!out->over && steady_clock::now() < until)
		std::this_thread::sleep_for(milliseconds(1));
	bool returned = out->returned, over = out->over;
	*go = 1; // if it was late, it is over now
	t.join();
	program.join();
	OK(cuCtxSynchronize());
	bool supported = out->result != CUDA_ERROR_NOT_SUPPORTED;
	if (supported)
		ok(out->result, c.name);
	if (c.undo)
		c.undo();
	string name = string(c.name) + (used || !c.stream ? "" : ", a new stream") + ", beside " + w.name;
	char took[64];
	snprintf(took, sizeof took, "%.1f us", out->took * 1e6);
	string said = !supported ? "not supported" : over ? string(took) : returned ? "THE COPY WAITS for the kernel; the call took " + string(took) : "THE CALL WAITS for the kernel";
	printf("%s %s: %s\n", !c.path ? "NOTE" : over && supported ? "PASS" : "FAIL", name.c_str(), said.c_str());
	fflush(stdout);
	OK(cuEventDestroy(e));
	OK(cuStreamDestroy(s));
}

int main(int argc, char **argv)
{
	bool quick = argc > 1 && !strcmp(argv[1], "--quick");
	int to[2], until[2];
	if (pipe(to) || pipe(until))
		return 1;
	pid_t other = fork(); // before CUDA is used
	if (!other) {
		close(until[1]);
		serve(to[1], until[0]);
	}
	close(until[0]);

	CUdevice dev;
	void *p;
	OK(cuInit(0));
	OK(cuDeviceGet(&dev, 0));
	OK(cuDevicePrimaryCtxRetain(&ctx, dev));
	OK(cuCtxSetCurrent(ctx));
	OK(cuMemAlloc(&a, 4 * MIB));
	OK(cuMemAlloc(&b, 4 * MIB));
	unsigned on = 1;
	OK(cuPointerSetAttribute(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, b)); // as the library does with what is registered
	OK(cuMemHostAlloc((void **)&locked, MIB, CU_MEMHOSTALLOC_PORTABLE));
	OK(cuMemHostAlloc(&p, 64, CU_MEMHOSTALLOC_DEVICEMAP));
	go = (volatile int *)p;
#ifdef __CUDACC__
	OK(cuMemHostGetDevicePointer(&go_there, p, 0));
#endif
	pageable = (char *)calloc(1, MIB);
	unlocked_page = (char *)mmap(NULL, MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (read(to[0], handles, sizeof handles) != (ssize_t)sizeof handles)
		return 1;
	OK(cuIpcOpenMemHandle(&others, handles[0], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(cuStreamCreate(&kernels, CU_STREAM_NON_BLOCKING));
	OK(cuEventCreate(&behind, CU_EVENT_DISABLE_TIMING));
	*go = 1;
	start_kernel(kernels); // its code is loaded from now on
	OK(cuCtxSynchronize());

	CUdeviceptr opened = 0;
	vector<way> ways = {
		// As PyTorch: NCCL's kernel has a stream of its own, for which stream 0 waits; behind it comes the copy.
		{"cuMemcpyDtoHAsync to pageable memory, stream 0, which waits for the kernel's", kernels,
		 [] {
			 CUresult r = cuEventRecord(behind, kernels);
			 if (!r)
				 r = cuStreamWaitEvent(0, behind, 0);
			 if (!r)
				 r = cuMemcpyDtoHAsync(pageable, a, 144, 0);
			 return r ? r : cuStreamSynchronize(0);
		 }},
		{"cuMemcpyDtoHAsync to pageable memory, its stream", kernels, [] { return cuMemcpyDtoHAsync(pageable, a, 144, kernels); }},
		{"cuMemcpyDtoHAsync to pageable memory, stream 0", 0, [] { return cuMemcpyDtoHAsync(pageable, a, 144, 0); }},
		{"cuMemcpyDtoH of 1 MiB to pageable memory, stream 0", 0, [] { return cuMemcpyDtoH(pageable, a, MIB); }},
		{"cuMemcpyHtoDAsync from pageable memory, stream 0", 0, [] { return cuMemcpyHtoDAsync(a, pageable, MIB, 0); }},
		{"cuStreamSynchronize of stream 0", 0, [] { return cuStreamSynchronize(0); }},
		{"cuCtxSynchronize", kernels, [] { return cuCtxSynchronize(); }},
	};
	vector<call> calls = {
		{"event alone", true, true, [](CUstream) { return CUDA_SUCCESS; }, {}},
		{"to the GPU, 1 MiB", true, true, [](CUstream s) { return cuMemcpyHtoDAsync(b, locked, MIB, s); }, {}},
		{"to the GPU, 8 bytes in two rows", true, true, [](CUstream s) { return two_rows(b, locked, 8, s); }, {}},
		{"to the GPU, 280 bytes in two rows", true, true, [](CUstream s) { return two_rows(b, locked, 280, s); }, {}},
		{"from the GPU, 280 bytes", true, true, [](CUstream s) { return cuMemcpyDtoHAsync(locked, b, 280, s); }, {}},
		{"from the GPU, 1 MiB", true, true, [](CUstream s) { return cuMemcpyDtoHAsync(locked, b, MIB, s); }, {}},
		{"within the GPU, 280 bytes", true, true, [](CUstream s) { return cuMemcpyDtoDAsync(b, b + MIB, 280, s); }, {}},
		{"within the GPU, 1 MiB", true, true, [](CUstream s) { return cuMemcpyDtoDAsync(b, b + MIB, MIB, s); }, {}},
		{"from another process's memory, 1 MiB", true, true, [](CUstream s) { return cuMemcpyDtoDAsync(b, others, MIB, s); }, {}},
		{"from another process's memory, 280 bytes", true, true, [](CUstream s) { return cuMemcpyDtoDAsync(b, others, 280, s); }, {}},
		{"cuPointerGetAttribute BUFFER_ID", false, false, [](CUstream) { unsigned long long id; return cuPointerGetAttribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, b); }, {}},
		{"cuPointerGetAttribute MEMORY_TYPE of host memory", false, false, [](CUstream) { unsigned type; return cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)(uintptr_t)locked); }, {}},
		{"cuMemGetAddressRange", false, false, [](CUstream) { CUdeviceptr base; size_t n; return cuMemGetAddressRange(&base, &n, b); }, {}},
		{"cuPointerSetAttribute SYNC_MEMOPS", false, false, [](CUstream) { unsigned one = 1; return cuPointerSetAttribute(&one, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, b); }, {}},
		{"cuCtxSetCurrent", false, false, [](CUstream) { return cuCtxSetCurrent(ctx); }, {}},
		{"to the GPU, from pageable memory", false, true, [](CUstream s) { return two_rows(b, pageable + 512, 280, s); }, {}},
		{"from the GPU, to pageable memory", false, true, [](CUstream s) { return cuMemcpyDtoHAsync(pageable + 512, b, 280, s); }, {}},
		{"cuStreamWriteValue32", false, true, [](CUstream s) { return write_value(b, s); }, {}},
		{"cuStreamSynchronize of a stream without kernels", false, true, [](CUstream s) { return cuStreamSynchronize(s); }, {}},
		{"cuStreamCreate", false, false, [](CUstream) { CUstream s; return cuStreamCreate(&s, CU_STREAM_NON_BLOCKING); }, {}}, // it stays
		{"cuEventCreate", false, false, [](CUstream) { CUevent e; return cuEventCreate(&e, CU_EVENT_DISABLE_TIMING); }, {}},
		{"cuMemHostRegister", false, false, [](CUstream) { return cuMemHostRegister(unlocked_page, MIB, 0); }, [] { OK(cuMemHostUnregister(unlocked_page)); }},
		{"cuIpcGetMemHandle", false, false, [](CUstream) { CUipcMemHandle h; return cuIpcGetMemHandle(&h, b); }, {}},
		{"cuIpcOpenMemHandle", false, false, [&](CUstream) { return cuIpcOpenMemHandle(&opened, handles[1], CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS); },
		 [&] { OK(cuIpcCloseMemHandle(opened)); }},
	};
	if (quick)
		wait_limit = 30; // other programs have the processors, too
#ifndef __CUDACC__
	std::erase_if(ways, [](const way &w) { return !w.on; }); // to software GPUs' stream 0 nothing is queued
#endif
	for (const way &w : ways)
		for (const call &c : calls)
			for (int used = 1; used >= (c.stream && !quick ? 0 : 1); used--)
				run(w, c, used);
	close(until[1]);
	int status;
	waitpid(other, &status, 0);
	return 0;
}
