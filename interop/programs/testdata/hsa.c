/*
 * Our libraries of HSA and HIP: what programs do with them, and arguments that cannot be. It runs with
 * VERBENA_GPU=count=2,vram=64M. The interface is declared here as the libraries' headers have it.
 */
#include <signal.h>
#include <stdbool.h>
#include <sys/utsname.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "self.h"

typedef struct {
	uint64_t handle;
} agent_t, pool_t, signal_t;
enum { BREAK = 1, BAD_POOL = 40, BAD_ARGUMENT = 0x1001, NO_QUEUE = 0x1002, BAD_ALLOCATION = 0x1003, BAD_AGENT = 0x1004, BAD_SIGNAL = 0x1006, RESOURCES = 0x1008, NOT_INITIALIZED = 0x100B };
enum { EQ, NE, LT, GTE };
struct info {
	uint32_t size, type;
	void *base, *host;
	size_t bytes;
	void *user;
	agent_t owner;
	uint32_t flags;
};
struct link {
	uint32_t latency[2], bandwidth[2];
	bool atomics[2], coherent;
	uint32_t type, distance;
};
int hsa_init(void), hsa_shut_down(void), hsa_status_string(int, const char **);
int hsa_iterate_agents(int (*)(agent_t, void *), void *), hsa_agent_get_info(agent_t, int, void *);
int hsa_amd_agent_iterate_memory_pools(agent_t, int (*)(pool_t, void *), void *), hsa_amd_memory_pool_get_info(pool_t, int, void *);
int hsa_amd_agent_memory_pool_get_info(agent_t, pool_t, int, void *);
int hsa_amd_memory_pool_allocate(pool_t, size_t, uint32_t, void **), hsa_amd_memory_pool_free(void *);
int hsa_amd_agents_allow_access(uint32_t, const agent_t *, const uint32_t *, const void *);
int hsa_amd_memory_lock(void *, size_t, agent_t *, int, void **), hsa_amd_memory_unlock(void *);
int hsa_amd_pointer_info(const void *, struct info *, void *(*)(size_t), uint32_t *, agent_t **);
int hsa_signal_create(int64_t, uint32_t, const agent_t *, signal_t *), hsa_signal_destroy(signal_t);
int64_t hsa_signal_load_scacquire(signal_t), hsa_signal_wait_scacquire(signal_t, int, int64_t, uint64_t, int);
void hsa_signal_store_screlease(signal_t, int64_t);
int hsa_amd_memory_async_copy(void *, agent_t, const void *, agent_t, size_t, uint32_t, const signal_t *, signal_t);
int hsa_memory_copy(void *, const void *, size_t), hsa_amd_memory_fill(void *, uint32_t, size_t);
int hsa_amd_portable_export_dmabuf(const void *, size_t, int *, uint64_t *), hsa_amd_portable_close_dmabuf(int);
int hsa_amd_ipc_memory_create(void *, size_t, uint32_t *), hsa_amd_ipc_memory_detach(void *);
int hsa_amd_ipc_memory_attach(const uint32_t *, size_t, uint32_t, const agent_t *, void **);
int hsa_queue_create(agent_t, uint32_t, int, void *, void *, uint32_t, uint32_t, void **);
int hipGetDeviceCount(int *), hipSetDevice(int), hipGetDevice(int *), hipMalloc(void **, size_t), hipMallocManaged(void **, size_t, unsigned);
int hipFree(void *), hipMemcpy(void *, const void *, size_t, int), hipMemset(void *, int, size_t), hipGetLastError(void), hipDeviceSynchronize(void);
const char *hipGetErrorString(int), *hipGetErrorName(int);

enum { N = 100000, PAGES = 25 * 4096 };
static agent_t cpu, gpu[2];
static pool_t pool[2], host_pool;
static uint8_t here[N], there[N];

static int see_agent(agent_t a, void *num)
{
	uint32_t device = 9;
	WANT(!hsa_agent_get_info(a, 17, &device) && device <= 1);
	if (!device)
		cpu = a;
	else
		gpu[(*(int *)num)++] = a;
	return 0;
}

static int see_pool(pool_t p, void *to)
{
	*(pool_t *)to = p;
	return 0;
}

static int stop(agent_t a, void *num)
{
	(void)a;
	++*(int *)num;
	return BREAK;
}

static void topology(void)
{
	int n = 0;
	uint32_t flags[2], bdf[2], domain, segment = 9, hops = 9;
	size_t size = 0;
	bool allowed = false;
	char name[64];
	struct link link = {.type = 9};
	WANT(!hsa_iterate_agents(see_agent, &n) && n == 2 && cpu.handle);
	n = 0;
	WANT(hsa_iterate_agents(stop, &n) == BREAK && n == 1 && hsa_iterate_agents(NULL, NULL) == BAD_ARGUMENT);
	for (int i = 0; i < 2; i++) {
		WANT(!hsa_amd_agent_iterate_memory_pools(gpu[i], see_pool, &pool[i]));
		WANT(!hsa_agent_get_info(gpu[i], 0xA006, &bdf[i]) && !hsa_agent_get_info(gpu[i], 0xA00F, &domain) && domain);
		WANT(!hsa_amd_memory_pool_get_info(pool[i], 1, &flags[i]) && flags[i] == 4);
	}
	WANT(!hsa_amd_agent_iterate_memory_pools(cpu, see_pool, &host_pool) && bdf[0] != bdf[1]);
	WANT(!hsa_agent_get_info(gpu[0], 0, name) && *name && hsa_agent_get_info(gpu[0], 999, name) == BAD_ARGUMENT);
	WANT(hsa_agent_get_info((agent_t){0}, 0, name) == BAD_AGENT && hsa_agent_get_info((agent_t){77}, 0, name) == BAD_AGENT);
	WANT(!hsa_amd_memory_pool_get_info(pool[0], 0, &segment) && !segment && !hsa_amd_memory_pool_get_info(pool[0], 2, &size) && size == 64 << 20);
	WANT(!hsa_amd_memory_pool_get_info(pool[0], 5, &allowed) && allowed && hsa_amd_memory_pool_get_info((pool_t){0}, 5, &allowed) == BAD_POOL);
	WANT(!hsa_amd_agent_memory_pool_get_info(gpu[0], pool[0], 1, &hops) && !hops);
	WANT(!hsa_amd_agent_memory_pool_get_info(gpu[0], pool[1], 1, &hops) && hops == 1);
	WANT(!hsa_amd_agent_memory_pool_get_info(gpu[0], pool[1], 2, &link) && link.type == 2);
	void *queue;
	WANT(hsa_queue_create(gpu[0], 64, 0, NULL, NULL, 0, 0, &queue) == NO_QUEUE);
}

static void *allocate(pool_t p, size_t n)
{
	void *ptr;
	WANT(!hsa_amd_memory_pool_allocate(p, n, 0, &ptr));
	return ptr;
}

static uint32_t type_of(const void *p, struct info *i)
{
	*i = (struct info){.size = sizeof *i, .type = 77};
	WANT(!hsa_amd_pointer_info(p, i, NULL, NULL, NULL));
	return i->type;
}

static void memory(void)
{
	struct info i;
	uint8_t *a = allocate(pool[0], N), *b = allocate(pool[1], N), *h = allocate(host_pool, N);
	void *p;
	uint32_t num;
	agent_t *list;
	for (int k = 0; k < N; k++)
		here[k] = (uint8_t)(k * 13 + k / 7);
	WANT(!hsa_memory_copy(a, here, N) && !hsa_memory_copy(b, a, N) && !memcmp(b, here, N)); /* by the CPU: the BAR is full */
	WANT(!hsa_memory_copy(h, b, N) && !memcmp(h, here, N));
	WANT(!hsa_amd_memory_fill(a, 0x01020304, 8) && ((uint32_t *)a)[7] == 0x01020304 && a[32] == here[32]);
	WANT(type_of(a + 5, &i) == 1 && i.base == a && i.host == a && i.bytes == PAGES && i.owner.handle == gpu[0].handle);
	WANT(type_of(b, &i) == 1 && i.owner.handle == gpu[1].handle && type_of(h, &i) == 1 && i.owner.handle == cpu.handle);
	WANT(type_of(here, &i) == 0);
	WANT(!hsa_amd_pointer_info(a, &i, malloc, &num, &list) && num == 3);
	free(list);
	i.size = 8; /* an older structure */
	i.bytes = 5;
	WANT(!hsa_amd_pointer_info(a, &i, NULL, NULL, NULL) && i.size == 8 && i.type == 1 && i.bytes == 5);
	WANT(!hsa_amd_agents_allow_access(2, gpu, NULL, a) && hsa_amd_agents_allow_access(2, gpu, NULL, here) == BAD_ARGUMENT);
	WANT(hsa_amd_agents_allow_access(1, &(agent_t){55}, NULL, a) == BAD_AGENT);

	WANT(!hsa_amd_memory_lock(here, N, gpu, 2, &p) && p == here && !hsa_amd_memory_lock(here + 100, 50, NULL, 0, &p));
	WANT(type_of(here + 120, &i) == 2 && i.bytes == 50 && type_of(here + N - 1, &i) == 2 && i.base == here && i.bytes == N);
	WANT(!hsa_amd_memory_unlock(here + 100) && !hsa_amd_memory_unlock(here) && hsa_amd_memory_unlock(here) == BAD_ARGUMENT);
	WANT(type_of(here, &i) == 0 && hsa_amd_memory_lock(here, SIZE_MAX, NULL, 0, &p) == BAD_ARGUMENT);

	WANT(hsa_amd_memory_pool_allocate(pool[0], 0, 0, &p) == BAD_ARGUMENT && hsa_amd_memory_pool_allocate((pool_t){9}, 1, 0, &p) == BAD_POOL);
	WANT(hsa_amd_memory_pool_allocate(pool[0], SIZE_MAX, 0, &p) == BAD_ALLOCATION && !p);
	WANT(hsa_amd_memory_pool_allocate(pool[0], 64 << 20, 0, &p) == RESOURCES && !p);
	WANT(hsa_memory_copy(a, here, PAGES + 1) == BAD_ARGUMENT && hsa_memory_copy(a, here, SIZE_MAX) == BAD_ARGUMENT);
	WANT(hsa_amd_memory_fill(a, 0, SIZE_MAX / 2) == BAD_ARGUMENT && hsa_amd_memory_fill(here, 0, 1) == BAD_ARGUMENT);
	WANT(hsa_amd_memory_pool_free(a + 1) == BAD_ALLOCATION && hsa_amd_memory_pool_free(here) == BAD_ALLOCATION && !hsa_amd_memory_pool_free(NULL));
	WANT(!hsa_amd_memory_pool_free(a) && hsa_amd_memory_pool_free(a) == BAD_ALLOCATION);
	WANT(type_of(a, &i) == 0 && hsa_memory_copy(there, a, 1) == BAD_ARGUMENT);
	WANT(!hsa_amd_memory_pool_free(b) && !hsa_amd_memory_pool_free(h));
}

static void copies(void)
{
	uint8_t *a = allocate(pool[0], N), *b = allocate(pool[1], N);
	signal_t done, first, second;
	WANT(!hsa_signal_create(1, 0, NULL, &done) && !hsa_signal_create(1, 0, NULL, &first) && !hsa_signal_create(2, 1, &cpu, &second));
	WANT(hsa_signal_load_scacquire(second) == 2);
	WANT(!hsa_amd_memory_async_copy(a, gpu[0], here, cpu, N, 0, NULL, done));
	while (hsa_signal_wait_scacquire(done, LT, 1, UINT64_MAX, 1))
		;
	/* It waits for both signals. */
	signal_t both[2] = {first, second};
	hsa_signal_store_screlease(done, 1);
	WANT(!hsa_amd_memory_async_copy(b, gpu[1], a, gpu[0], N, 2, both, done));
	hsa_signal_store_screlease(first, 0);
	WANT(hsa_signal_wait_scacquire(done, EQ, 0, 20 * 1000 * 1000, 0) == 1 && !b[1]);
	hsa_signal_store_screlease(second, 1);
	WANT(hsa_signal_wait_scacquire(done, EQ, 0, 1000 * 1000, 0) == 1);
	hsa_signal_store_screlease(second, 0);
	while (hsa_signal_wait_scacquire(done, EQ, 0, UINT64_MAX, 0))
		;
	WANT(!memcmp(b, here, N));
	/* An error while it waits is one of the signal. */
	hsa_signal_store_screlease(done, 1);
	hsa_signal_store_screlease(first, 1);
	WANT(!hsa_amd_memory_async_copy(b, gpu[1], a, gpu[0], N, 1, &first, done) && !hsa_amd_memory_pool_free(a));
	hsa_signal_store_screlease(first, 0);
	while (hsa_signal_wait_scacquire(done, LT, 0, UINT64_MAX, 0) >= 0)
		;
	WANT(hsa_amd_memory_async_copy(b, gpu[1], a, gpu[0], N, 0, NULL, done) == BAD_ARGUMENT);
	WANT(hsa_amd_memory_async_copy(b, (agent_t){0}, here, cpu, N, 0, NULL, done) == BAD_AGENT);
	WANT(hsa_amd_memory_async_copy(b, gpu[1], here, cpu, PAGES + 1, 0, NULL, done) == BAD_ARGUMENT);
	WANT(!hsa_signal_destroy(done) && hsa_signal_destroy(done) == BAD_SIGNAL && hsa_signal_destroy((signal_t){0}) == BAD_SIGNAL);
	WANT(hsa_amd_memory_async_copy(b, gpu[1], here, cpu, N, 0, NULL, done) == BAD_SIGNAL);
	WANT(hsa_amd_memory_async_copy(b, gpu[1], here, cpu, N, 1, &done, first) == BAD_SIGNAL);
	WANT(!hsa_signal_load_scacquire(done) && !hsa_signal_wait_scacquire(done, EQ, 1, UINT64_MAX, 0));
	hsa_signal_store_screlease(done, 5);
	WANT(!hsa_signal_destroy(first) && !hsa_signal_destroy(second) && !hsa_amd_memory_pool_free(b));
}

static void rdma(void)
{
	struct self s = connect_self();
	uint8_t *a = allocate(pool[0], N), *b = allocate(pool[1], N);
	int fd, rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	uint64_t off;
	struct ibv_mr *from, *to;
	WANT(!hsa_memory_copy(a, here, N));
	WANT(!hsa_amd_portable_export_dmabuf(b + 4096, N - 4096, &fd, &off) && off == 4096);
	WANT(to = ibv_reg_dmabuf_mr(s.pd, off, N - 4096, (uintptr_t)b + 4096, fd, rights));
	WANT(!hsa_amd_portable_close_dmabuf(fd) && hsa_amd_portable_close_dmabuf(fd) == BAD_ARGUMENT);
	WANT(from = ibv_reg_mr(s.pd, a, N, rights));
	WANT(write_to(&s, a + 4096, from->lkey, (uintptr_t)b + 4096, to->rkey, N - 4096) == IBV_WC_SUCCESS);
	WANT(!memcmp(b + 4096, here + 4096, N - 4096) && !b[0] && !b[4095]);
	WANT(hsa_amd_portable_export_dmabuf(b, PAGES + 1, &fd, &off) == BAD_ALLOCATION && hsa_amd_portable_export_dmabuf(here, 1, &fd, &off) == BAD_ALLOCATION);
	WANT(hsa_amd_portable_export_dmabuf(b, 0, &fd, &off) == BAD_ARGUMENT);
	WANT(!hsa_amd_memory_pool_free(b) && hsa_amd_portable_export_dmabuf(b, N, &fd, &off) == BAD_ALLOCATION);
	WANT(write_to(&s, a + 4096, from->lkey, (uintptr_t)b + 4096, to->rkey, N - 4096) == IBV_WC_REM_ACCESS_ERR);
	WANT(!ibv_dereg_mr(from) && !ibv_dereg_mr(to) && !hsa_amd_memory_pool_free(a));
	close_self(&s);
}

/* What UCX looks at: whether addresses can be registered, whether there are dma-bufs, and what is mapped already. */
static void files(void)
{
	char name[300], line[300];
	struct utsname kernel;
	bool config = false, symbol = false, mapped = false;
	void *p = allocate(pool[0], N);
	WANT(!access("/dev/kfd", F_OK) && !uname(&kernel));
	snprintf(name, sizeof name, "/boot/config-%s", kernel.release);
	FILE *f = fopen(name, "r");
	WANT(f);
	while (fgets(line, sizeof line, f))
		config |= !strcmp(line, "CONFIG_DMABUF_MOVE_NOTIFY=y\n");
	WANT(config && !fclose(f) && (f = fopen("/proc/kallsyms", "r")));
	while (fgets(line, sizeof line, f))
		symbol |= strstr(line, " dma_buf_move_notify") != NULL;
	WANT(symbol && !fclose(f) && (f = fopen("/proc/self/maps", "r")));
	while (fgets(line, sizeof line, f))
		mapped |= strtoull(line, NULL, 16) == (uintptr_t)p && strstr(line, " /dev/dri/renderD128\n");
	WANT(mapped && !fclose(f) && !hsa_amd_memory_pool_free(p));
}

static void hip(void)
{
	int n;
	void *p, *m;
	struct info i;
	WANT(!hipGetDeviceCount(&n) && n == 2 && hipSetDevice(2) == 101 && hipGetLastError() == 101 && !hipGetLastError() && !hipSetDevice(1));
	WANT(!hipGetDevice(&n) && n == 1 && !hipMalloc(&p, N) && !hipMallocManaged(&m, N, 1) && !hipDeviceSynchronize());
	WANT(type_of(p, &i) == 1 && i.owner.handle == gpu[1].handle && type_of(m, &i) == 0);
	WANT(!hipMemset(p, 7, N) && !hipMemcpy(m, p, N, 3) && ((uint8_t *)m)[N - 1] == 7 && !hipMemcpy(there, m, N, 4) && there[0] == 7);
	WANT(hipMemset(here, 0, 1) == 1 && hipMemset(p, 0, PAGES + 1) == 1 && hipMemcpy(p, here, SIZE_MAX, 1) == 1 && hipMemcpy(p, here, 1, 9) == 21);
	WANT(hipMemcpy(NULL, here, 1, 1) == 1 && !hipMemcpy(NULL, NULL, 0, 1));
	WANT(hipMalloc(NULL, 1) == 1 && hipMalloc(&p, SIZE_MAX) == 2 && !p && hipMallocManaged(&p, 65 << 20, 1) == 2 && hipMallocManaged(&p, 1, 5) == 1);
	WANT(!hipMalloc(&p, 0) && !p && !hipFree(NULL) && hipFree(here) == 1 && !hipFree(m) && hipFree(m) == 1);
	WANT(!strcmp(hipGetErrorName(2), "hipErrorOutOfMemory") && *hipGetErrorString(1) && *hipGetErrorString(12345));
	WANT(!hipMalloc(&p, N) && hipFree((char *)p + 1) == 1 && !hipFree(p) && hipFree(p) == 1);
}

/* owner gives the other process a handle, waits until it has written to it, and ends. */
static int owner(int in, int out)
{
	uint32_t handle[8];
	char c;
	int n = 0;
	WANT(!hsa_init() && !hsa_iterate_agents(see_agent, &n) && !hsa_amd_agent_iterate_memory_pools(gpu[1], see_pool, &pool[1]));
	uint8_t *p = allocate(pool[1], N);
	memset(p, 3, N);
	WANT(!hsa_amd_ipc_memory_create(p, N, handle) && hsa_amd_ipc_memory_create(p + 1, N, handle) == BAD_ARGUMENT);
	WANT(hsa_amd_ipc_memory_create(p, 4096, handle) == BAD_ARGUMENT && hsa_amd_ipc_memory_create(here, N, handle) == BAD_ARGUMENT);
	WANT(!hsa_amd_ipc_memory_create(p, N, handle) && write(out, handle, sizeof handle) == sizeof handle && read(in, &c, 1) == 1);
	WANT(p[0] == 9 && p[N - 1] == 9);
	return 0;
}

static void other_process(int in, int out, pid_t pid)
{
	uint32_t handle[8], bad[8];
	struct info i;
	void *p, *q;
	int status, copied;
	WANT(read(in, handle, sizeof handle) == sizeof handle);
	memset(bad, 1, sizeof bad);
	WANT(hsa_amd_ipc_memory_attach(bad, N, 0, NULL, &q) == BAD_ARGUMENT && hsa_amd_ipc_memory_attach(handle, 1, 0, NULL, &q) == BAD_ARGUMENT);
	WANT(!hsa_amd_ipc_memory_attach(handle, N, 1, gpu, &p) && type_of(p, &i) == 4 && i.owner.handle == gpu[0].handle);
	WANT(!hsa_memory_copy(there, p, N) && there[0] == 3 && there[N - 1] == 3);
	WANT(!hsa_amd_memory_fill(p, 0x09090909, N / 4) && write(out, "", 1) == 1);
	WANT(waitpid(pid, &status, 0) == pid && !status);
	while (!(copied = hsa_memory_copy(there, p, N))) /* this process is told, and need not have heard of it yet */
		usleep(100);
	WANT(copied == 0x1000);
	WANT(hsa_amd_memory_pool_free(p) == BAD_ALLOCATION && !hsa_amd_ipc_memory_detach(p) && hsa_amd_ipc_memory_detach(p) == BAD_ARGUMENT);
	WANT(hsa_amd_ipc_memory_attach(handle, N, 0, NULL, &p) == BAD_ARGUMENT); /* the process has ended */
}

int main(void)
{
	int to[2], from[2], status;
	const char *text;
	void *p = &p;
	struct info i = {.size = sizeof i};
	WANT(!pipe(to) && !pipe(from));
	pid_t pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		return owner(to[0], from[1]);
	}
	WANT(hsa_amd_pointer_info(here, &i, NULL, NULL, NULL) == NOT_INITIALIZED && hsa_shut_down() == NOT_INITIALIZED);
	WANT(!hsa_init() && !hsa_init() && !hsa_shut_down());
	WANT(!hsa_status_string(0, &text) && *text && hsa_status_string(4, &text) == BAD_ARGUMENT);
	topology();
	memory();
	copies();
	rdma();
	files();
	hip();
	other_process(from[0], to[1], pid);
	/* A child has nothing of its parent's. */
	void *mine = allocate(pool[0], N);
	if (!(pid = fork())) {
		WANT(hsa_amd_memory_pool_free(mine) == NOT_INITIALIZED && hipMalloc(&p, N) == 100 && !hsa_init());
		WANT(hsa_amd_memory_pool_free(mine) == BAD_ALLOCATION && !hsa_memory_copy(allocate(pool[0], N), here, N));
		exit(0);
	}
	WANT(waitpid(pid, &status, 0) == pid && !status && !hsa_amd_memory_pool_free(mine));
	/* HIP has initialised it, too, and does not end. */
	WANT(!hsa_shut_down() && !hsa_shut_down() && hsa_shut_down() == NOT_INITIALIZED);
	WANT(hsa_amd_memory_pool_allocate(pool[0], 1, 0, &p) == NOT_INITIALIZED && hsa_memory_copy(here, there, 1) == NOT_INITIALIZED);
	WANT(hsa_signal_create(0, 0, NULL, &(signal_t){0}) == NOT_INITIALIZED && hsa_iterate_agents(stop, &status) == NOT_INITIALIZED);
	puts("ok");
	return 0;
}
