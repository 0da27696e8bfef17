/*
 * What the parts of libcuda.so.1 share: tables of contexts, memory, streams and events. The GPUs themselves are the
 * backend's: verbena/gpu.h.
 */
#ifndef VERBENA_CUDA_STATE_H
#define VERBENA_CUDA_STATE_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "../include/verbena/gpu.h"
#pragma GCC visibility push(default)
#include "include/cuda.h"
#pragma GCC visibility pop

/* A table has its rows in the order of their keys. The key of memory is its address. Contexts, streams and events have
 * numbers that never come again, which programs take for pointers: one that is destroyed is never found. */
struct row {
	uintptr_t key;
};

struct table {
	struct row **rows;
	size_t n, room;
};

struct context {
	struct row row;
	CUdevice dev;
	unsigned int flags;
	unsigned int retained; /* of a primary context: how often */
	bool primary;
	bool destroyed;	 /* its row stays, so that its use is recognised */
	uint64_t stream; /* the default stream */
};

struct memory {
	struct row row;
	size_t size; /* as it was asked for */
	int kind;    /* VERBENA_GPU_* */
	unsigned int flags;
	unsigned int opened; /* how often; of others than VERBENA_GPU_IMPORTED 1 */
	struct context *ctx;
	uint64_t id;	       /* no other memory of the process gets it */
	bool shared;	       /* handle is valid */
	CUipcMemHandle handle; /* of shared or imported memory */
};

/* A stream or an event. */
struct item {
	struct row row;
	struct context *ctx;
	unsigned int flags;
	uint64_t handle; /* verbena/gpu.h's */
};

struct gpu {
	struct verbena_gpu_info info;
	struct context *primary; /* NULL until it is retained first */
	unsigned int flags;	 /* of the primary context */
	size_t used;		 /* bytes of cuMemAlloc, in whole pages */
};

extern pthread_mutex_t vcu_lock; /* guards all of the following, and the rows */
extern struct table vcu_contexts, vcu_memory, vcu_streams, vcu_events;
extern struct gpu *vcu_gpus;
extern int vcu_count; /* of GPUs; 0: cuInit has not succeeded */

struct row *vcu_floor(const struct table *t, uintptr_t key); /* the last row whose key is not larger; or NULL */
struct row *vcu_find(const struct table *t, uintptr_t key);
bool vcu_add(struct table *t, struct row *r); /* false: no memory */
void vcu_remove(struct table *t, struct row *r);
uintptr_t vcu_number(void); /* a key for a context, a stream or an event; vcu_lock is held */

CUresult vcu_result(int error);	     /* of a function of verbena/gpu.h */
CUresult vcu_ready(void);	     /* CUDA_ERROR_NOT_INITIALIZED unless cuInit has succeeded in this process */
CUresult vcu_device(CUdevice dev);   /* and CUDA_ERROR_INVALID_DEVICE */
CUresult vcu_current(struct context **ctx);

void vcu_release_memory(struct memory *m);	/* frees what its row, which is in no table any more, describes */
CUresult vcu_drain(struct context *c, bool all); /* waits for the context's streams, all or those that block */

#define PAGE ((size_t)4096)

#endif
