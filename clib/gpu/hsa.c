/*
 * libhsa-runtime64.so.1 on software GPUs: agents, memory pools, and what programs do with memory that they share with
 * other devices and processes. There are no queues, and so no kernels. docs/gpu.md has the table of functions.
 *
 * There is one agent that is a CPU, and one for each GPU. Each has one memory pool.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hsa.h"

PUBLIC extern const int verbena_gpu_shim;
const int verbena_gpu_shim = 1; /* by which our library is told from a real one */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static uint64_t inits;					  /* hsa_init without hsa_shut_down */
static int gpus;					  /* also read without the lock, while inits is not 0 */
static struct locked {
	uintptr_t addr;
	size_t n;
	struct locked *next;
} *locks; /* memory of the program that it has locked, the last one first */

/* A child of fork has none of its parent's GPUs: it has to call hsa_init. */
static void after_fork(void)
{
	pthread_mutex_init(&lock, NULL);
	inits = 0;
	locks = NULL;
	hsa_forget_signals();
}

__attribute__((constructor)) static void at_load(void) { pthread_atfork(NULL, NULL, after_fork); }

bool hsa_begin(void) { return __atomic_load_n(&inits, __ATOMIC_ACQUIRE); }

enum hsa_status hsa_answer(int r, enum hsa_status other)
{
	if (r >= 0)
		return SUCCESS;
	return r == -ENOMEM || r == -EMFILE || r == -ENFILE ? OUT_OF_RESOURCES : r == -ENODEV ? ERROR : other;
}

PUBLIC enum hsa_status hsa_init(void)
{
	pthread_mutex_lock(&lock);
	int n = verbena_gpu_init();
	if (n >= 0) {
		gpus = n;
		__atomic_store_n(&inits, inits + 1, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return n < 0 ? OUT_OF_RESOURCES : SUCCESS;
}

PUBLIC enum hsa_status hsa_shut_down(void)
{
	pthread_mutex_lock(&lock);
	bool was = inits;
	if (was)
		__atomic_store_n(&inits, inits - 1, __ATOMIC_RELEASE);
	pthread_mutex_unlock(&lock);
	return was ? SUCCESS : NOT_INITIALIZED;
}

PUBLIC enum hsa_status hsa_status_string(enum hsa_status status, const char **text)
{
	static const struct {
		enum hsa_status status;
		const char *text;
	} texts[] = {
		{SUCCESS, "success"},
		{INFO_BREAK, "a callback has ended the iteration"},
		{INVALID_MEMORY_POOL, "no such memory pool"},
		{ERROR, "an error without a number of its own"},
		{INVALID_ARGUMENT, "an argument that cannot be"},
		{INVALID_QUEUE_CREATION, "the agent has no such queues"},
		{INVALID_ALLOCATION, "such memory cannot be allocated, or was not"},
		{INVALID_AGENT, "no such agent"},
		{INVALID_SIGNAL, "no such signal"},
		{OUT_OF_RESOURCES, "out of memory"},
		{NOT_INITIALIZED, "HSA is not initialised"},
	};
	for (size_t i = 0; text && i < sizeof texts / sizeof *texts; i++)
		if (texts[i].status == status) {
			*text = texts[i].text;
			return SUCCESS;
		}
	return INVALID_ARGUMENT;
}

/* --- agents and pools --- */

bool hsa_is_agent(hsa_handle a) { return a.handle >= CPU && a.handle < FIRST_GPU + (uint64_t)gpus; }

static int gpu_of(hsa_handle h) { return (int)h.handle - FIRST_GPU; }

PUBLIC enum hsa_status hsa_iterate_agents(enum hsa_status (*callback)(hsa_handle, void *), void *data)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!callback)
		return INVALID_ARGUMENT;
	for (hsa_handle a = {CPU}; hsa_is_agent(a); a.handle++) {
		enum hsa_status s = callback(a, data);
		if (s)
			return s;
	}
	return SUCCESS;
}

static enum hsa_status put32(void *to, uint32_t value)
{
	memcpy(to, &value, sizeof value);
	return SUCCESS;
}

static enum hsa_status put64(void *to, uint64_t value)
{
	memcpy(to, &value, sizeof value);
	return SUCCESS;
}

/* put_name writes a text of 64 bytes. */
static enum hsa_status put_name(void *to, const char *name)
{
	memset(to, 0, 64);
	snprintf(to, 64, "%s", name);
	return SUCCESS;
}

PUBLIC enum hsa_status hsa_agent_get_info(hsa_handle agent, int attribute, void *value)
{
	struct verbena_gpu_info info = {.name = "host"};
	bool gpu = agent.handle != CPU;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(agent))
		return INVALID_AGENT;
	if (!value)
		return INVALID_ARGUMENT;
	int r = gpu ? verbena_gpu_info(gpu_of(agent), &info) : 0;
	if (r)
		return hsa_answer(r, ERROR);
	switch (attribute) {
	case 0: /* NAME */
	case 0xA009: /* AMD: PRODUCT_NAME */
		return put_name(value, info.name);
	case 1: /* VENDOR_NAME */
		return put_name(value, "Verbena");
	case 2: /* FEATURE: no kernels */
		return put32(value, 0);
	case 3: /* MACHINE_MODEL: large */
	case 4: /* PROFILE: full for the CPU */
		return put32(value, attribute == 3 || !gpu);
	case 12: /* QUEUES_MAX */
	case 13: /* QUEUE_MIN_SIZE */
	case 14: /* QUEUE_MAX_SIZE */
		return put32(value, 0);
	case 16: /* NODE */
	case 0xA004: /* AMD: DRIVER_NODE_ID */
		return put32(value, (uint32_t)agent.handle - CPU);
	case 17: /* DEVICE: CPU or GPU */
		return put32(value, gpu);
	case 21: /* VERSION_MAJOR */
	case 22: /* VERSION_MINOR */
		memcpy(value, &(uint16_t){attribute == 21}, sizeof(uint16_t));
		return SUCCESS;
	case 0xA006: /* AMD: BDFID */
		return put32(value, info.pci_bus << 8 | info.pci_device << 3 | info.pci_function);
	case 0xA00F: /* AMD: DOMAIN */
		return put32(value, info.pci_domain);
	case 0xA011: /* AMD: UUID */
		if (!gpu)
			strcpy(value, "CPU-XX");
		else {
			uint64_t id;
			memcpy(&id, info.uuid, sizeof id);
			sprintf(value, "GPU-%016llx", (unsigned long long)id);
		}
		return SUCCESS;
	case 0xA015: /* AMD: MEMORY_AVAIL */
		return gpu ? put64(value, info.vram_free) : INVALID_ARGUMENT;
	case 0xA113: /* AMD: NEAREST_CPU */
		return put64(value, CPU);
	}
	return INVALID_ARGUMENT;
}

PUBLIC enum hsa_status hsa_amd_agent_iterate_memory_pools(hsa_handle agent, enum hsa_status (*callback)(hsa_handle, void *), void *data)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(agent))
		return INVALID_AGENT;
	return callback ? callback(agent, data) : INVALID_ARGUMENT;
}

/* size_of returns how large a pool is. */
static uint64_t size_of(hsa_handle pool)
{
	struct verbena_gpu_info info;
	if (pool.handle == CPU)
		return (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGESIZE);
	return verbena_gpu_info(gpu_of(pool), &info) ? 0 : info.vram;
}

enum { FINE_GRAINED = 2, COARSE_GRAINED = 4 };

static uint32_t flags_of(hsa_handle pool) { return pool.handle == CPU ? FINE_GRAINED : COARSE_GRAINED; }

PUBLIC enum hsa_status hsa_amd_memory_pool_get_info(hsa_handle pool, int attribute, void *value)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(pool))
		return INVALID_MEMORY_POOL;
	if (!value)
		return INVALID_ARGUMENT;
	switch (attribute) {
	case 0: /* SEGMENT: global */
		return put32(value, 0);
	case 1: /* GLOBAL_FLAGS */
		return put32(value, flags_of(pool));
	case 2:  /* SIZE */
	case 16: /* ALLOC_MAX_SIZE */
		return put64(value, size_of(pool));
	case 5: /* RUNTIME_ALLOC_ALLOWED */
		*(bool *)value = true;
		return SUCCESS;
	case 6:  /* RUNTIME_ALLOC_GRANULE */
	case 7:  /* RUNTIME_ALLOC_ALIGNMENT */
	case 18: /* RUNTIME_ALLOC_REC_GRANULE */
		return put64(value, (uint64_t)sysconf(_SC_PAGESIZE));
	case 15: /* ACCESSIBLE_BY_ALL */
		*(bool *)value = pool.handle == CPU;
		return SUCCESS;
	case 17: /* LOCATION: CPU or GPU */
		return put32(value, pool.handle != CPU);
	}
	return INVALID_ARGUMENT;
}

struct link_info {
	uint32_t min_latency, max_latency, min_bandwidth, max_bandwidth;
	bool atomic32, atomic64, coherent;
	uint32_t type, distance;
};

PUBLIC enum hsa_status hsa_amd_agent_memory_pool_get_info(hsa_handle agent, hsa_handle pool, int attribute, void *value)
{
	enum { BY_DEFAULT = 1, WHEN_ALLOWED = 2, PCIE = 2, NUMA_DISTANCE = 20 };
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(agent))
		return INVALID_AGENT;
	if (!hsa_is_agent(pool))
		return INVALID_MEMORY_POOL;
	if (!value)
		return INVALID_ARGUMENT;
	bool own = agent.handle == pool.handle;
	switch (attribute) {
	case 0: /* ACCESS */
		return put32(value, own || agent.handle == CPU ? BY_DEFAULT : WHEN_ALLOWED);
	case 1: /* NUM_LINK_HOPS */
		return put32(value, !own);
	case 2: /* LINK_INFO: of each hop */
		if (!own)
			*(struct link_info *)value =
				(struct link_info){.coherent = true, .type = PCIE, .distance = NUMA_DISTANCE};
		return SUCCESS;
	}
	return INVALID_ARGUMENT;
}

/* --- memory --- */

/* kind_of returns the kind of a pool's memory. The CPU sees that of a GPU if the BAR shows all of it, as adapters for RDMA
 * need it. */
static int kind_of(hsa_handle pool)
{
	struct verbena_gpu_info info;
	if (pool.handle == CPU)
		return VERBENA_GPU_HOST;
	return verbena_gpu_info(gpu_of(pool), &info) || info.bar < info.vram ? VERBENA_GPU_VRAM : VERBENA_GPU_VISIBLE;
}

/* whole_pages rounds up to the granule of pools: programs export and register memory of which they use a part. */
static uint64_t whole_pages(uint64_t n)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	return (n + page - 1) / page * page;
}

PUBLIC enum hsa_status hsa_amd_memory_pool_allocate(hsa_handle pool, size_t size, uint32_t flags, void **ptr)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(pool))
		return INVALID_MEMORY_POOL;
	if (!ptr || !size || flags > 1)
		return INVALID_ARGUMENT;
	*ptr = NULL;
	if (size > size_of(pool))
		return INVALID_ALLOCATION;
	size = whole_pages(size);
	return hsa_answer(verbena_gpu_alloc(pool.handle == CPU ? 0 : gpu_of(pool), size, kind_of(pool), ptr), INVALID_ARGUMENT);
}

PUBLIC enum hsa_status hsa_amd_memory_pool_free(void *ptr)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	return ptr ? hsa_answer(verbena_gpu_free(ptr), INVALID_ALLOCATION) : SUCCESS;
}

PUBLIC enum hsa_status hsa_amd_agents_allow_access(uint32_t num, const hsa_handle *agents, const uint32_t *flags, const void *ptr)
{
	struct verbena_gpu_pointer p;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!num || !agents || flags || !ptr || verbena_gpu_lookup(ptr, &p))
		return INVALID_ARGUMENT;
	for (uint32_t i = 0; i < num; i++)
		if (!hsa_is_agent(agents[i]))
			return INVALID_AGENT;
	return SUCCESS; /* all reach all memory */
}

PUBLIC enum hsa_status hsa_amd_memory_lock(void *host, size_t size, hsa_handle *agents, int num, void **agent_ptr)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!host || !size || !agent_ptr || (num > 0 && !agents) || (uintptr_t)host > UINTPTR_MAX - size)
		return INVALID_ARGUMENT;
	for (int i = 0; i < num; i++)
		if (!hsa_is_agent(agents[i]))
			return INVALID_AGENT;
	struct locked *l = malloc(sizeof *l);
	if (!l)
		return OUT_OF_RESOURCES;
	pthread_mutex_lock(&lock);
	*l = (struct locked){(uintptr_t)host, size, locks};
	locks = l;
	pthread_mutex_unlock(&lock);
	*agent_ptr = host;
	return SUCCESS;
}

PUBLIC enum hsa_status hsa_amd_memory_unlock(void *host)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	pthread_mutex_lock(&lock);
	struct locked **at = &locks, *l;
	while ((l = *at) && l->addr != (uintptr_t)host)
		at = &l->next;
	if (l)
		*at = l->next;
	pthread_mutex_unlock(&lock);
	free(l);
	return l ? SUCCESS : INVALID_ARGUMENT;
}

struct pointer_info {
	uint32_t size; /* of what the program has of this structure */
	uint32_t type;
	void *agent_base, *host_base;
	size_t bytes;
	void *user;
	hsa_handle owner;
	uint32_t flags;
};

enum { UNKNOWN, HSA, LOCKED, IPC = 4 };

/* describe fills in what is known of an address. */
static void describe(const void *ptr, struct pointer_info *to)
{
	struct verbena_gpu_pointer p;
	if (!verbena_gpu_lookup(ptr, &p)) {
		hsa_handle pool = {p.kind == VERBENA_GPU_HOST ? CPU : (uint64_t)p.gpu + FIRST_GPU};
		/* HIP's managed memory is memory of the process, to HSA. */
		if (p.kind == VERBENA_GPU_MANAGED || p.kind == VERBENA_GPU_REGISTERED)
			return;
		to->type = p.kind == VERBENA_GPU_IMPORTED ? IPC : HSA;
		to->agent_base = (void *)(uintptr_t)p.base;
		to->host_base = p.visible ? to->agent_base : NULL;
		to->bytes = p.size;
		to->owner = pool;
		to->flags = flags_of(pool);
		return;
	}
	pthread_mutex_lock(&lock);
	for (struct locked *l = locks; l; l = l->next)
		if ((uintptr_t)ptr - l->addr < l->n) {
			to->type = LOCKED;
			to->agent_base = to->host_base = (void *)l->addr;
			to->bytes = l->n;
			to->owner.handle = CPU;
			to->flags = FINE_GRAINED;
			break;
		}
	pthread_mutex_unlock(&lock);
}

PUBLIC enum hsa_status hsa_amd_pointer_info(const void *ptr, struct pointer_info *info, void *(*alloc)(size_t), uint32_t *num,
					    hsa_handle **accessible)
{
	struct pointer_info found = {0};
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!ptr || !info || info->size < offsetof(struct pointer_info, agent_base) || (alloc && (!num || !accessible)))
		return INVALID_ARGUMENT;
	describe(ptr, &found);
	found.size = info->size < sizeof found ? info->size : sizeof found;
	memcpy(info, &found, found.size);
	if (!alloc)
		return SUCCESS;
	*num = found.type == UNKNOWN ? 0 : (uint32_t)gpus + 1;
	*accessible = *num ? alloc(*num * sizeof **accessible) : NULL;
	if (*num && !*accessible)
		return OUT_OF_RESOURCES;
	for (uint32_t i = 0; i < *num; i++)
		(*accessible)[i].handle = CPU + i;
	return SUCCESS;
}

PUBLIC enum hsa_status hsa_memory_copy(void *to, const void *from, size_t n)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	return to && from ? hsa_answer(verbena_gpu_copy(to, from, n), INVALID_ARGUMENT) : INVALID_ARGUMENT;
}

PUBLIC enum hsa_status hsa_amd_memory_fill(void *to, uint32_t value, size_t count)
{
	struct verbena_gpu_pointer p;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!to || (uintptr_t)to % sizeof value || verbena_gpu_lookup(to, &p))
		return INVALID_ARGUMENT;
	return hsa_answer(verbena_gpu_fill(to, value, sizeof value, count), INVALID_ARGUMENT);
}

/* --- other devices and processes --- */

PUBLIC enum hsa_status hsa_amd_portable_export_dmabuf(const void *ptr, size_t size, int *fd, uint64_t *offset)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!ptr || !size || !fd || !offset)
		return INVALID_ARGUMENT;
	int r = verbena_gpu_export(ptr, size, offset);
	*fd = r >= 0 ? r : -1;
	return hsa_answer(r, INVALID_ALLOCATION);
}

PUBLIC enum hsa_status hsa_amd_portable_close_dmabuf(int fd)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	return close(fd) ? INVALID_ARGUMENT : SUCCESS;
}

/* fits reports whether a length is that of an allocation, in whole pages or not. */
static bool fits(size_t length, uint64_t size) { return length && length <= size && whole_pages(length) == whole_pages(size); }

PUBLIC enum hsa_status hsa_amd_ipc_memory_create(void *ptr, size_t size, uint32_t handle[8])
{
	struct verbena_gpu_pointer p;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!ptr || !handle || verbena_gpu_lookup(ptr, &p) || !fits(size, p.size))
		return INVALID_ARGUMENT;
	return hsa_answer(verbena_gpu_ipc_get(ptr, (uint8_t *)handle), INVALID_ARGUMENT);
}

PUBLIC enum hsa_status hsa_amd_ipc_memory_attach(const uint32_t handle[8], size_t size, uint32_t num, const hsa_handle *agents, void **ptr)
{
	struct verbena_gpu_pointer p;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!handle || !ptr || !size || (num && !agents))
		return INVALID_ARGUMENT;
	int gpu = 0;
	for (uint32_t i = 0; i < num; i++) {
		if (!hsa_is_agent(agents[i]))
			return INVALID_AGENT;
		if (agents[i].handle != CPU)
			gpu = gpu_of(agents[i]);
	}
	enum hsa_status s = hsa_answer(verbena_gpu_ipc_open(gpu, (const uint8_t *)handle, ptr), INVALID_ARGUMENT);
	if (!s && (verbena_gpu_lookup(*ptr, &p) || !fits(size, p.size))) {
		verbena_gpu_ipc_close(*ptr);
		*ptr = NULL;
		s = INVALID_ARGUMENT;
	}
	return s;
}

PUBLIC enum hsa_status hsa_amd_ipc_memory_detach(void *ptr)
{
	if (!hsa_begin())
		return NOT_INITIALIZED;
	return hsa_answer(verbena_gpu_ipc_close(ptr), INVALID_ARGUMENT);
}

/* There are no kernels. */
PUBLIC enum hsa_status hsa_queue_create(hsa_handle agent, uint32_t size, int type, void (*callback)(int, void *, void *), void *data,
					uint32_t private_size, uint32_t group_size, void **queue)
{
	(void)size, (void)type, (void)callback, (void)data, (void)private_size, (void)group_size;
	if (!hsa_begin())
		return NOT_INITIALIZED;
	if (!hsa_is_agent(agent))
		return INVALID_AGENT;
	return queue ? INVALID_QUEUE_CREATION : INVALID_ARGUMENT;
}
