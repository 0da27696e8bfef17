/*
 * The names of all functions, for cuGetProcAddress, and of all errors. What CUDA has and this library does not, kernels
 * above all, is refused with CUDA_ERROR_NOT_SUPPORTED.
 */
#include "cuda_state.h"

#define EXPORT __attribute__((visibility("default")))

EXPORT extern const char verbena_gpu_shim; /* by which Verbena knows that this is its own libcuda */
const char verbena_gpu_shim = 1;

#undef cuGetProcAddress
#undef cuCtxCreate

static CUresult lookup(const char *symbol, void **function, int version, cuuint64_t flags,
		       CUdriverProcAddressQueryResult *status);

CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version, cuuint64_t flags,
			     CUdriverProcAddressQueryResult *status)
{
	CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
	CUresult r = lookup(symbol, function, version, flags, &found);
	if (r)
		return r;
	if (found)
		*function = NULL;
	if (status)
		*status = found;
	else if (found)
		return CUDA_ERROR_NOT_FOUND;
	return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags);
CUresult cuGetProcAddress(const char *symbol, void **function, int version, cuuint64_t flags)
{
	CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SUCCESS;
	CUresult r = lookup(symbol, function, version, flags, &found);
	return r ? r : found ? CUDA_ERROR_NOT_FOUND : CUDA_SUCCESS;
}

/* Contexts that are limited to some processors, or share a client: there are no kernels to limit. */
EXPORT CUresult cuCtxCreate_v3(CUcontext *ctx, void *limits, int count, unsigned int flags, CUdevice dev);
CUresult cuCtxCreate_v3(CUcontext *ctx, void *limits, int count, unsigned int flags, CUdevice dev)
{
	return limits || count ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(ctx, flags, dev);
}

EXPORT CUresult cuCtxCreate_v4(CUcontext *ctx, void *limits, unsigned int flags, CUdevice dev);
CUresult cuCtxCreate_v4(CUcontext *ctx, void *limits, unsigned int flags, CUdevice dev)
{
	return limits ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(ctx, flags, dev);
}

#define REFUSED(X)                                                                                                     \
	X(cuModuleLoad)                                                                                                \
	X(cuModuleLoadData)                                                                                            \
	X(cuModuleLoadDataEx)                                                                                          \
	X(cuModuleLoadFatBinary)                                                                                       \
	X(cuModuleUnload)                                                                                              \
	X(cuModuleGetFunction)                                                                                         \
	X(cuModuleGetGlobal_v2)                                                                                        \
	X(cuLibraryLoadData)                                                                                           \
	X(cuLibraryLoadFromFile)                                                                                       \
	X(cuLibraryGetKernel)                                                                                          \
	X(cuLinkCreate_v2)                                                                                             \
	X(cuFuncGetAttribute)                                                                                          \
	X(cuLaunchKernel)                                                                                              \
	X(cuLaunchKernelEx)                                                                                            \
	X(cuLaunchCooperativeKernel)                                                                                   \
	X(cuGraphCreate)                                                                                               \
	X(cuGraphLaunch)                                                                                               \
	X(cuStreamBeginCapture_v2)                                                                                     \
	X(cuStreamWaitValue32_v2)                                                                                      \
	X(cuStreamWaitValue64_v2)                                                                                      \
	X(cuStreamWriteValue32_v2)                                                                                     \
	X(cuStreamWriteValue64_v2)                                                                                     \
	X(cuMemAddressReserve)                                                                                         \
	X(cuMemAddressFree)                                                                                            \
	X(cuMemCreate)                                                                                                 \
	X(cuMemRelease)                                                                                                \
	X(cuMemMap)                                                                                                    \
	X(cuMemUnmap)                                                                                                  \
	X(cuMemSetAccess)                                                                                              \
	X(cuMemGetAllocationGranularity)                                                                               \
	X(cuMemRetainAllocationHandle)                                                                                 \
	X(cuMemGetAllocationPropertiesFromHandle)                                                                      \
	X(cuMemExportToShareableHandle)                                                                                \
	X(cuMemImportFromShareableHandle)                                                                              \
	X(cuMemAllocAsync)                                                                                             \
	X(cuMemFreeAsync)                                                                                              \
	X(cuMemPoolCreate)                                                                                             \
	X(cuMemPoolDestroy)                                                                                            \
	X(cuMemAllocPitch_v2)                                                                                          \
	X(cuMemcpy2D_v2)                                                                                               \
	X(cuMemcpy2DAsync_v2)                                                                                          \
	X(cuMemcpy3D_v2)                                                                                               \
	X(cuMemcpy3DAsync_v2)                                                                                          \
	X(cuArrayCreate_v2)                                                                                            \
	X(cuImportExternalMemory)                                                                                      \
	X(cuIpcGetEventHandle)                                                                                         \
	X(cuIpcOpenEventHandle)

#define REFUSE(name)                                                                                                   \
	EXPORT CUresult name(void);                                                                                    \
	CUresult name(void) { return CUDA_ERROR_NOT_SUPPORTED; }
REFUSED(REFUSE)

/* A name may be there several times: then the row with the latest version that is not later than the program's counts.
 * The refused ones come last, with the version of the header's name. */
static const struct {
	const char *name;
	int version;
	void *function;
} functions[] = {
#define F(name, version) {#name, version, (void *)(name)},
#define AS(name, version, function) {#name, version, (void *)(function)},
	F(cuInit, 2000)
	F(cuDriverGetVersion, 2020)
	F(cuGetErrorString, 6000)
	F(cuGetErrorName, 6000)
	AS(cuGetProcAddress, 11030, cuGetProcAddress)
	AS(cuGetProcAddress, 12000, cuGetProcAddress_v2)
	F(cuDeviceGet, 2000)
	F(cuDeviceGetCount, 2000)
	F(cuDeviceGetName, 2000)
	F(cuDeviceGetUuid, 9020)
	F(cuDeviceTotalMem, 3020)
	F(cuDeviceGetAttribute, 2000)
	F(cuDeviceGetByPCIBusId, 4010)
	F(cuDeviceGetPCIBusId, 4010)
	F(cuDeviceCanAccessPeer, 4000)
	F(cuDevicePrimaryCtxRetain, 7000)
	F(cuDevicePrimaryCtxRelease, 7000)
	F(cuDevicePrimaryCtxReset, 7000)
	F(cuDevicePrimaryCtxGetState, 7000)
	F(cuDevicePrimaryCtxSetFlags, 7000)
	AS(cuCtxCreate, 3020, cuCtxCreate_v2)
	AS(cuCtxCreate, 11040, cuCtxCreate_v3)
	AS(cuCtxCreate, 12050, cuCtxCreate_v4)
	F(cuCtxDestroy, 4000)
	F(cuCtxPushCurrent, 4000)
	F(cuCtxPopCurrent, 4000)
	F(cuCtxSetCurrent, 4000)
	F(cuCtxGetCurrent, 4000)
	F(cuCtxGetDevice, 2000)
	F(cuCtxGetFlags, 7000)
	F(cuCtxGetId, 12000)
	F(cuCtxGetApiVersion, 3020)
	F(cuCtxGetStreamPriorityRange, 5050)
	F(cuCtxSynchronize, 2000)
	F(cuCtxEnablePeerAccess, 4000)
	F(cuCtxDisablePeerAccess, 4000)
	F(cuMemGetInfo, 3020)
	F(cuMemAlloc, 3020)
	F(cuMemAllocManaged, 6000)
	F(cuMemFree, 3020)
	F(cuMemGetAddressRange, 3020)
	F(cuMemAllocHost, 3020)
	F(cuMemHostAlloc, 2020)
	F(cuMemFreeHost, 2000)
	F(cuMemHostGetDevicePointer, 3020)
	F(cuMemHostGetFlags, 2030)
	F(cuMemHostRegister, 4000)
	F(cuMemHostUnregister, 4000)
	F(cuPointerGetAttribute, 4000)
	F(cuPointerGetAttributes, 7000)
	F(cuPointerSetAttribute, 6000)
	F(cuMemGetHandleForAddressRange, 11070)
	F(cuFlushGPUDirectRDMAWrites, 11030)
	F(cuIpcGetMemHandle, 4010)
	F(cuIpcOpenMemHandle, 4010)
	F(cuIpcCloseMemHandle, 4010)
	F(cuMemcpy, 4000)
	F(cuMemcpyAsync, 4000)
	F(cuMemcpyHtoD, 3020)
	F(cuMemcpyDtoH, 3020)
	F(cuMemcpyDtoD, 3020)
	F(cuMemcpyHtoDAsync, 3020)
	F(cuMemcpyDtoHAsync, 3020)
	F(cuMemcpyDtoDAsync, 3020)
	F(cuMemcpyPeer, 4000)
	F(cuMemcpyPeerAsync, 4000)
	F(cuMemsetD8, 3020)
	F(cuMemsetD16, 3020)
	F(cuMemsetD32, 3020)
	F(cuMemsetD8Async, 3020)
	F(cuMemsetD16Async, 3020)
	F(cuMemsetD32Async, 3020)
	F(cuStreamCreate, 2000)
	F(cuStreamCreateWithPriority, 5050)
	F(cuStreamDestroy, 4000)
	F(cuStreamSynchronize, 2000)
	F(cuStreamQuery, 2000)
	F(cuStreamWaitEvent, 3020)
	F(cuStreamGetFlags, 5050)
	F(cuStreamGetPriority, 5050)
	F(cuStreamGetCtx, 9020)
	F(cuStreamAddCallback, 5000)
	F(cuLaunchHostFunc, 10000)
	F(cuEventCreate, 2000)
	F(cuEventDestroy, 4000)
	F(cuEventRecord, 2000)
	F(cuEventSynchronize, 2000)
	F(cuEventQuery, 2000)
	F(cuEventElapsedTime, 2000)
#define R(name) {#name, 0, (void *)(name)},
	REFUSED(R)
};

static CUresult lookup(const char *symbol, void **function, int version, cuuint64_t flags,
		       CUdriverProcAddressQueryResult *status)
{
	if (!symbol || !function || version > CUDA_VERSION || flags > 2) /* 1 and 2 say which default stream is meant */
		return CUDA_ERROR_INVALID_VALUE;
	size_t n = strlen(symbol);
	bool known = false;
	void *best = NULL;
	int latest = -1;
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		const char *name = functions[i].name, *rest = name + n;
		if (!n || strncmp(name, symbol, n) || (*rest && (functions[i].version || strncmp(rest, "_v", 2))))
			continue;
		known = true;
		if (functions[i].version <= version && functions[i].version > latest) {
			latest = functions[i].version;
			best = functions[i].function;
		}
	}
	if (best)
		*function = best;
	*status = best ? CU_GET_PROC_ADDRESS_SUCCESS : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
							     : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return CUDA_SUCCESS;
}

/* Names of the library that are not the header's, but mean the same functions. */
#undef cuDeviceGetUuid
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuDevicePrimaryCtxSetFlags
#undef cuMemHostRegister
#undef cuIpcOpenMemHandle
#define ALSO(name, same, params, args)                                                                                 \
	EXPORT CUresult name params;                                                                                   \
	CUresult name params { return same args; }
ALSO(cuDeviceGetUuid, cuDeviceGetUuid_v2, (CUuuid * uuid, CUdevice dev), (uuid, dev))
ALSO(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, (CUdevice dev), (dev))
ALSO(cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2, (CUdevice dev), (dev))
ALSO(cuDevicePrimaryCtxSetFlags, cuDevicePrimaryCtxSetFlags_v2, (CUdevice dev, unsigned int flags), (dev, flags))
ALSO(cuMemHostRegister, cuMemHostRegister_v2, (void *addr, size_t size, unsigned int flags), (addr, size, flags))
ALSO(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, (CUdeviceptr * addr, CUipcMemHandle h, unsigned int flags), (addr, h, flags))
ALSO(cuEventElapsedTime_v2, cuEventElapsedTime, (float *ms, CUevent from, CUevent to), (ms, from, to))

/* Errors. */

static const struct {
	CUresult error;
	const char *name, *text;
} errors[] = {
#define E(error, text) {error, #error, text},
	E(CUDA_SUCCESS, "no error")
	E(CUDA_ERROR_INVALID_VALUE, "an argument is not valid")
	E(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")
	E(CUDA_ERROR_NOT_INITIALIZED, "cuInit has not succeeded in this process")
	E(CUDA_ERROR_NO_DEVICE, "there is no software GPU")
	E(CUDA_ERROR_INVALID_DEVICE, "there is no such device")
	E(CUDA_ERROR_INVALID_CONTEXT, "there is no such context, or none is current")
	E(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "the contexts are of one device")
	E(CUDA_ERROR_OPERATING_SYSTEM, "the operating system has refused something")
	E(CUDA_ERROR_INVALID_HANDLE, "a handle is not valid")
	E(CUDA_ERROR_NOT_FOUND, "there is nothing of that name, or at that address")
	E(CUDA_ERROR_NOT_READY, "it has not happened yet")
	E(CUDA_ERROR_ILLEGAL_ADDRESS, "the memory is not there any more")
	E(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "access to the peer is enabled already")
	E(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "access to the peer is not enabled")
	E(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, "the primary context is in use")
	E(CUDA_ERROR_CONTEXT_IS_DESTROYED, "the context is destroyed")
	E(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "the memory is registered already")
	E(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "the memory is not registered")
	E(CUDA_ERROR_NOT_SUPPORTED, "software GPUs do not have this: no kernels, no virtual memory management, no pools")
	E(CUDA_ERROR_UNKNOWN, "an error without a number of its own")
};

CUresult cuGetErrorName(CUresult error, const char **name)
{
	if (!name)
		return CUDA_ERROR_INVALID_VALUE;
	*name = NULL;
	for (size_t i = 0; !*name && i < sizeof errors / sizeof *errors; i++)
		if (errors[i].error == error)
			*name = errors[i].name;
	return *name ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
	if (!text)
		return CUDA_ERROR_INVALID_VALUE;
	*text = NULL;
	for (size_t i = 0; !*text && i < sizeof errors / sizeof *errors; i++)
		if (errors[i].error == error)
			*text = errors[i].text;
	return *text ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
