/*
 * The part of HSA's interface that our library has, and what its files share. Structures that programs pass are laid
 * out as HSA's.
 */
#ifndef VERBENA_HSA_H
#define VERBENA_HSA_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../include/verbena/gpu.h"

#define PUBLIC __attribute__((visibility("default")))

enum hsa_status {
	SUCCESS = 0,
	INFO_BREAK = 1,
	INVALID_MEMORY_POOL = 40,
	ERROR = 0x1000,
	INVALID_ARGUMENT = 0x1001,
	INVALID_QUEUE_CREATION = 0x1002,
	INVALID_ALLOCATION = 0x1003,
	INVALID_AGENT = 0x1004,
	INVALID_SIGNAL = 0x1006,
	OUT_OF_RESOURCES = 0x1008,
	NOT_INITIALIZED = 0x100B,
};

typedef struct {
	uint64_t handle;
} hsa_handle; /* of an agent, a pool or a signal */

/* The agents: the CPU, and the GPUs. Each has one memory pool, which has the same handle. */
enum { CPU = 1, FIRST_GPU = 2 };
#define HSA_GPU(i) ((hsa_handle){(uint64_t)(i) + FIRST_GPU})

enum hsa_status hsa_init(void);
enum hsa_status hsa_amd_memory_pool_allocate(hsa_handle pool, size_t size, uint32_t flags, void **ptr);
enum hsa_status hsa_amd_memory_pool_free(void *ptr);

/* hsa_begin reports whether HSA is initialised. */
bool hsa_begin(void);

/* hsa_forget_signals is for a child of fork: it has none of its parent's signals. */
void hsa_forget_signals(void);

bool hsa_is_agent(hsa_handle agent);

/* hsa_answer returns the status for what a function of verbena/gpu.h has returned. other is for addresses and sizes that
 * are wrong. */
enum hsa_status hsa_answer(int r, enum hsa_status other);

#endif
