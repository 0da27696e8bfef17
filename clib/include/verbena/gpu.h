/*
 * Verbena's software GPUs, for libraries that have the interface of a GPU's driver (clib/gpu has some): what
 * docs/gpu.md says of memory, streams and other processes holds for them.
 *
 * Functions return 0, or a number that is not negative, and a negative errno if they fail:
 *
 *   -ENODEV    verbena_gpu_init was not called in this process (a child of fork has to call it again, and
 *              finds nothing of its parent's); imported memory whose owner has freed it, or has ended
 *   -EINVAL    no such GPU, stream or event; no bytes; an address that is not the beginning of what was
 *              allocated, or was freed; a handle that is none, or whose memory is freed
 *   -EFAULT    a range that is not inside one allocation, or an address of a GPU that nothing has
 *   -ENOMEM    out of VRAM, out of host memory, or the BAR is full
 *   -EAGAIN    of a query: not yet
 *   -ESRCH     the process of a handle has ended
 *
 * An address is the GPU's if a GPU has it, and else the program's own. The program's memory is accessed as by
 * memcpy. All functions may be called by several threads.
 */
#ifndef VERBENA_GPU_H
#define VERBENA_GPU_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* verbena_gpu_init starts the GPUs that the setting VERBENA_GPU asks for, and returns how many there are. */
int verbena_gpu_init(void);

struct verbena_gpu_info {
	char name[64];
	uint8_t uuid[16];
	uint32_t pci_domain, pci_bus, pci_device, pci_function;
	uint64_t vram;	    /* bytes */
	uint64_t vram_free; /* bytes, now */
	uint64_t bar;	    /* bytes of the VRAM that the CPU and other devices reach */
};

int verbena_gpu_info(int gpu, struct verbena_gpu_info *info);

/* Kinds of memory. */
#define VERBENA_GPU_VRAM 1	 /* of the GPU; a load by the CPU faults */
#define VERBENA_GPU_VISIBLE 2	 /* of the GPU, in the BAR: the CPU can load and store at the same address */
#define VERBENA_GPU_MANAGED 3	 /* as VERBENA_GPU_VISIBLE; its name is for interfaces that tell them apart */
#define VERBENA_GPU_HOST 4	 /* of the host, which the GPU reaches */
#define VERBENA_GPU_IMPORTED 5	 /* of verbena_gpu_ipc_open */
#define VERBENA_GPU_REGISTERED 6 /* of the program: verbena_gpu_register */

/* verbena_gpu_alloc allocates memory of one of the first four kinds, all zero. verbena_gpu_free frees it: after
 * the operations that were queued before. Regions of it that are registered lose it. */
int verbena_gpu_alloc(int gpu, size_t size, int kind, void **addr);
int verbena_gpu_free(void *addr);

/* verbena_gpu_register makes memory of the program known to verbena_gpu_lookup; -EEXIST if a part of it is. */
int verbena_gpu_register(void *addr, size_t size);
int verbena_gpu_unregister(void *addr);

struct verbena_gpu_pointer {
	int32_t gpu;	  /* -1: VERBENA_GPU_REGISTERED */
	int32_t kind;	  /* VERBENA_GPU_* */
	uint64_t base;	  /* of the allocation */
	uint64_t size;	  /* of the allocation, as it was asked for */
	uint64_t id;	  /* of the allocation: no other one of the process gets it */
	int32_t visible;  /* 1: the CPU can load from the address */
	int32_t resident; /* 1: in VRAM, now */
};

/* verbena_gpu_lookup finds what an address is a part of: -EFAULT if it is nothing that is known here. */
int verbena_gpu_lookup(const void *addr, struct verbena_gpu_pointer *p);

/* verbena_gpu_copy copies n bytes between memory of GPUs and of the program, in any mixture. verbena_gpu_fill
 * writes a pattern of 1, 2 or 4 bytes count times; the address is a multiple of its width. Both wait until it is done. */
int verbena_gpu_copy(void *to, const void *from, size_t n);
int verbena_gpu_fill(void *to, uint32_t pattern, uint32_t width, size_t count);

/* verbena_gpu_copy_then does not wait: done is called at the end, by another thread, with 0 or a negative errno.
 * done may not wait for other operations. It is not called if the function fails. */
int verbena_gpu_copy_then(void *to, const void *from, size_t n, void (*done)(void *arg, int error), void *arg);

/* Streams: what is queued is executed in order. verbena_gpu_stream_sync returns the error of the first operation
 * that failed, once; what was queued behind it is not executed. verbena_gpu_stream_query returns -EAGAIN if
 * something is left. Destroying a stream waits for what is queued. verbena_gpu_stream_call has the stream call a function. */
int verbena_gpu_stream_create(int gpu, uint64_t *stream);
int verbena_gpu_stream_destroy(uint64_t stream);
int verbena_gpu_stream_sync(uint64_t stream);
int verbena_gpu_stream_query(uint64_t stream);
int verbena_gpu_stream_copy(uint64_t stream, void *to, const void *from, size_t n);
int verbena_gpu_stream_fill(uint64_t stream, void *to, uint32_t pattern, uint32_t width, size_t count);
int verbena_gpu_stream_call(uint64_t stream, void (*call)(void *arg, int error), void *arg);

/* Events: one that was never recorded has happened, for all that wait for it. Elapsed returns nanoseconds:
 * -EAGAIN if one of them has not happened, -EINVAL if one was never recorded. */
int verbena_gpu_event_create(uint64_t *event);
int verbena_gpu_event_destroy(uint64_t event);
int verbena_gpu_event_record(uint64_t event, uint64_t stream);
int verbena_gpu_event_wait(uint64_t event, uint64_t stream); /* the stream waits */
int verbena_gpu_event_sync(uint64_t event);		     /* the caller does */
int verbena_gpu_event_query(uint64_t event);
int verbena_gpu_event_elapsed(uint64_t from, uint64_t to, int64_t *ns);

/* verbena_gpu_export returns the descriptor of a dma-buf that has the memory, and where in it the memory begins. If offset
 * is NULL it is a new dma-buf of this memory alone, which begins and ends at pages (-EINVAL). */
int verbena_gpu_export(const void *addr, size_t size, uint64_t *offset);

/* Handles for other processes of the same user. The memory that has been opened is closed by its address. */
#define VERBENA_GPU_HANDLE 32
int verbena_gpu_ipc_get(const void *addr, uint8_t handle[VERBENA_GPU_HANDLE]); /* addr: of an allocation's beginning */
int verbena_gpu_ipc_open(int gpu, const uint8_t handle[VERBENA_GPU_HANDLE], void **addr);
int verbena_gpu_ipc_close(void *addr);

#ifdef __cplusplus
}
#endif

#endif
