/*
 * Software GPUs by verbena/gpu.h: memory, streams and events, RDMA by dma-buf and by address, other processes, and
 * arguments that cannot be. It runs with VERBENA_GPU=count=2,vram=64M.
 */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "verbena/gpu.h"

#include "self.h"

enum { N = 200000 };
static uint8_t here[N], there[N];

static void *alloc(int gpu, size_t n, int kind)
{
	void *p;
	WANT(!verbena_gpu_alloc(gpu, n, kind, &p));
	return p;
}

static void scribble(int seed)
{
	for (int i = 0; i < N; i++)
		here[i] = (uint8_t)(i * 7 + i / 251 + seed);
}

/* holds reports whether memory has what scribble wrote. */
static int holds(const void *p)
{
	memset(there, 0xee, N);
	WANT(!verbena_gpu_copy(there, p, N));
	return !memcmp(here, there, N);
}

static void memory(void)
{
	struct verbena_gpu_info info[2];
	struct verbena_gpu_pointer p;
	WANT(verbena_gpu_info(0, &info[0]) == 0 && verbena_gpu_info(1, &info[1]) == 0 && verbena_gpu_info(2, info) == -EINVAL);
	WANT(!verbena_gpu_info(0, &info[0]));
	WANT(info[0].vram == 64 << 20 && info[0].bar == info[0].vram && info[0].vram_free == info[0].vram && info[0].name[0]);
	WANT(memcmp(info[0].uuid, info[1].uuid, 16) && info[0].pci_bus != info[1].pci_bus);

	void *vram[2] = {alloc(0, N, VERBENA_GPU_VRAM), alloc(1, N, VERBENA_GPU_VRAM)};
	uint8_t *seen = alloc(1, N, VERBENA_GPU_VISIBLE), *host = alloc(0, N, VERBENA_GPU_HOST);
	scribble(1);
	WANT(!verbena_gpu_copy(vram[0], here, N) && !verbena_gpu_copy(vram[1], vram[0], N) && !verbena_gpu_copy(seen, vram[1], N));
	WANT(!memcmp(seen, here, N)); /* by the CPU */
	WANT(!verbena_gpu_copy(host, seen, N) && !memcmp(host, here, N));
	memset(host, 5, N);
	WANT(!verbena_gpu_copy(vram[0], host, N) && !verbena_gpu_copy(there, vram[0], N) && there[0] == 5 && there[N - 1] == 5);
	WANT(!verbena_gpu_copy(there, here, N) && !memcmp(here, there, N)); /* neither is a GPU's */

	WANT(!verbena_gpu_lookup((char *)vram[1] + 77, &p));
	WANT(p.gpu == 1 && p.kind == VERBENA_GPU_VRAM && p.base == (uintptr_t)vram[1] && p.size == N && p.id && !p.visible && p.resident);
	uint64_t id = p.id;
	WANT(!verbena_gpu_lookup(seen, &p) && p.kind == VERBENA_GPU_VISIBLE && p.visible && p.id != id);
	WANT(!verbena_gpu_lookup(host, &p) && p.kind == VERBENA_GPU_HOST && p.visible && !p.resident);
	WANT(verbena_gpu_lookup(here, &p) == -EFAULT && verbena_gpu_lookup(NULL, &p) == -EFAULT);
	WANT(!verbena_gpu_register(here, N) && verbena_gpu_register(here + 5, 1) == -EEXIST && verbena_gpu_register(seen, 1) == -EINVAL);
	WANT(!verbena_gpu_lookup(here + N - 1, &p) && p.kind == VERBENA_GPU_REGISTERED && p.gpu == -1 && p.base == (uintptr_t)here);
	WANT(!verbena_gpu_unregister(here) && verbena_gpu_unregister(here) == -EINVAL && verbena_gpu_lookup(here, &p) == -EFAULT);

	WANT(!verbena_gpu_fill(seen + 4, 0x11223344, 4, 10) && !verbena_gpu_fill(seen + 44, 0x5566, 2, 3) && !verbena_gpu_fill(seen + 50, 0x77, 1, 1));
	WANT(((uint32_t *)seen)[1] == 0x11223344 && ((uint32_t *)seen)[10] == 0x11223344 && ((uint16_t *)seen)[24] == 0x5566 && seen[50] == 0x77);
	WANT(seen[51] == here[51] && seen[3] == here[3]);
	WANT(verbena_gpu_fill(seen + 1, 0, 2, 1) == -EINVAL && verbena_gpu_fill(seen, 0, 3, 1) == -EINVAL);

	/* What cannot be. */
	void *no = &no;
	WANT(verbena_gpu_alloc(0, 0, VERBENA_GPU_VRAM, &no) == -EINVAL && !no);
	WANT(verbena_gpu_alloc(0, 65 << 20, VERBENA_GPU_VRAM, &no) == -ENOMEM && verbena_gpu_alloc(0, SIZE_MAX, VERBENA_GPU_VISIBLE, &no) == -ENOMEM);
	WANT(verbena_gpu_alloc(7, 1, VERBENA_GPU_VRAM, &no) == -EINVAL && verbena_gpu_alloc(0, 1, 9, &no) == -EINVAL);
	WANT(verbena_gpu_copy(vram[0], here, N + 4096) == -EFAULT && verbena_gpu_copy(there, (char *)vram[0] + N, 1) == -EFAULT);
	WANT(verbena_gpu_copy(vram[0], here, SIZE_MAX) == -EFAULT && verbena_gpu_copy((void *)(uintptr_t)-8, vram[0], 16) == -EFAULT);
	WANT(verbena_gpu_fill(vram[0], 0, 4, SIZE_MAX / 2) == -EFAULT);
	WANT(verbena_gpu_free((char *)vram[0] + 1) == -EINVAL && verbena_gpu_free(here) == -EINVAL && verbena_gpu_free(NULL) == -EINVAL);
	WANT(verbena_gpu_ipc_close(vram[0]) == -EINVAL);
	WANT(!verbena_gpu_free(vram[0]) && verbena_gpu_free(vram[0]) == -EINVAL);
	WANT(verbena_gpu_copy(there, vram[0], 1) == -EFAULT && verbena_gpu_lookup(vram[0], &p) == -EFAULT);
	WANT(!verbena_gpu_free(vram[1]) && !verbena_gpu_free(seen) && !verbena_gpu_free(host));

	/* All of the VRAM that the CPU sees, and no more. */
	void *all[17];
	for (int i = 0; i < 16; i++)
		all[i] = alloc(0, 4 << 20, VERBENA_GPU_VISIBLE);
	WANT(verbena_gpu_alloc(0, 4096, VERBENA_GPU_VISIBLE, &all[16]) == -ENOMEM);
	for (int i = 0; i < 16; i++)
		WANT(!verbena_gpu_free(all[i]));
	WANT(!verbena_gpu_info(0, info) && info[0].vram_free == info[0].vram);
}

static void note(void *arg, int error) { __atomic_store_n((int *)arg, error ? error : 1, __ATOMIC_RELEASE); }

static void await(int *what)
{
	while (!__atomic_load_n(what, __ATOMIC_ACQUIRE))
		usleep(100);
}

/* empty copies one after the other: each one's end starts the next, by another thread than the one that has asked. */
static void next_empty(void *arg, int error)
{
	int *left = arg;
	WANT(!error);
	if (*left > 1) {
		--*left;
		WANT(!verbena_gpu_copy_then(there, here, 0, next_empty, left));
	} else {
		__atomic_store_n(left, 0, __ATOMIC_RELEASE);
	}
}

/* hold keeps a stream busy until *arg is set. */
static void hold(void *arg, int error)
{
	WANT(!error);
	await(arg);
}

static void in_order(void)
{
	uint64_t s, other, e[3];
	int go = 0, reached = 0, copied = 0;
	int64_t ns = -1;
	void *a = alloc(0, N, VERBENA_GPU_VRAM), *b = alloc(1, N, VERBENA_GPU_VRAM);
	WANT(!verbena_gpu_stream_create(0, &s) && !verbena_gpu_stream_create(1, &other) && verbena_gpu_stream_create(2, &other) == -EINVAL);
	for (int i = 0; i < 3; i++)
		WANT(!verbena_gpu_event_create(&e[i]));
	WANT(!verbena_gpu_event_query(e[0]) && !verbena_gpu_event_sync(e[0]) && !verbena_gpu_event_wait(e[0], s));
	WANT(verbena_gpu_event_elapsed(e[0], e[1], &ns) == -EINVAL);
	scribble(2);
	WANT(!verbena_gpu_stream_call(s, hold, &go) && !verbena_gpu_event_record(e[0], s));
	WANT(!verbena_gpu_stream_copy(s, a, here, N) && !verbena_gpu_event_record(e[1], s));
	WANT(!verbena_gpu_event_wait(e[1], other) && !verbena_gpu_stream_copy(other, b, a, N));
	WANT(!verbena_gpu_stream_fill(other, a, 0, 4, N / 4) && !verbena_gpu_stream_call(other, note, &reached));
	WANT(!verbena_gpu_event_record(e[2], other));
	WANT(verbena_gpu_stream_query(s) == -EAGAIN && verbena_gpu_event_query(e[2]) == -EAGAIN);
	WANT(verbena_gpu_event_elapsed(e[0], e[2], &ns) == -EAGAIN && !__atomic_load_n(&reached, __ATOMIC_ACQUIRE));
	WANT(!verbena_gpu_free(a)); /* what is queued is executed all the same */
	__atomic_store_n(&go, 1, __ATOMIC_RELEASE);
	WANT(!verbena_gpu_event_sync(e[2]) && reached == 1 && !verbena_gpu_event_query(e[2]));
	WANT(!verbena_gpu_stream_sync(s) && !verbena_gpu_stream_sync(other) && !verbena_gpu_stream_query(other));
	WANT(!verbena_gpu_event_elapsed(e[0], e[2], &ns) && ns >= 0);
	WANT(holds(b));
	WANT(!verbena_gpu_copy_then(there, b, N, note, &copied));
	await(&copied);
	WANT(copied == 1 && !memcmp(here, there, N));
	WANT(verbena_gpu_copy_then(there, a, N, note, &copied) == -EFAULT);
	int left = 100000;
	WANT(!verbena_gpu_copy_then(there, here, 0, next_empty, &left));
	while (__atomic_load_n(&left, __ATOMIC_ACQUIRE))
		usleep(1000);
	WANT(verbena_gpu_stream_copy(s, a, here, 1) == -EFAULT && verbena_gpu_stream_copy(~s, b, here, 1) == -EINVAL);
	WANT(!verbena_gpu_stream_destroy(s) && verbena_gpu_stream_destroy(s) == -EINVAL && verbena_gpu_stream_sync(s) == -EINVAL);
	WANT(!verbena_gpu_stream_destroy(other) && verbena_gpu_event_record(e[0], other) == -EINVAL);
	for (int i = 0; i < 3; i++)
		WANT(!verbena_gpu_event_destroy(e[i]) && verbena_gpu_event_query(e[i]) == -EINVAL);
	WANT(!verbena_gpu_free(b));
}

/* rdma writes from one GPU's memory to the other's: registered by address, and by dma-buf. */
static void rdma(int dmabuf)
{
	struct self s = connect_self();
	uint8_t *from = alloc(0, N, VERBENA_GPU_VRAM), *to = alloc(1, N, VERBENA_GPU_VISIBLE);
	struct ibv_mr *mr[2];
	int rights = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	if (dmabuf) {
		uint64_t off = 1;
		int fd = verbena_gpu_export(from, N, &off);
		WANT(fd >= 0 && off == 0);
		WANT(mr[0] = ibv_reg_dmabuf_mr(s.pd, 0, N, (uintptr_t)from, fd, rights));
		WANT(!close(fd));
		fd = verbena_gpu_export(to + 4096, N - 4096, &off);
		WANT(fd >= 0 && off == 4096);
		WANT(mr[1] = ibv_reg_dmabuf_mr(s.pd, 0, N, (uintptr_t)to, fd, rights));
		WANT(!close(fd));
		WANT(verbena_gpu_export(to, N + 4096, &off) == -EFAULT && verbena_gpu_export(here, 1, &off) == -EFAULT);
	} else {
		WANT(mr[0] = ibv_reg_mr(s.pd, from, N, rights));
		WANT(mr[1] = ibv_reg_mr(s.pd, to, N, rights));
		WANT(!ibv_reg_mr(s.pd, from, N + 1, rights) && errno == EFAULT);
		WANT(!ibv_reg_mr(s.pd, from, N, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL);
	}
	scribble(3 + dmabuf);
	WANT(!verbena_gpu_copy(from, here, N));
	WANT(write_to(&s, from, mr[0]->lkey, (uintptr_t)to, mr[1]->rkey, N) == IBV_WC_SUCCESS);
	WANT(!memcmp(to, here, N)); /* by the CPU */
	WANT(holds(to));
	if (!dmabuf) { /* other memory of the GPU for a region */
		uint8_t *next = alloc(0, N, VERBENA_GPU_VISIBLE);
		WANT(!ibv_rereg_mr(mr[1], IBV_REREG_MR_CHANGE_TRANSLATION, NULL, next, N, 0));
		WANT(write_to(&s, from, mr[0]->lkey, (uintptr_t)next, mr[1]->rkey, N) == IBV_WC_SUCCESS && holds(next));
		WANT(ibv_rereg_mr(mr[1], IBV_REREG_MR_CHANGE_TRANSLATION, NULL, next, N + 1, 0) == IBV_REREG_MR_ERR_INPUT && errno == EFAULT);
		WANT(!ibv_rereg_mr(mr[1], IBV_REREG_MR_CHANGE_TRANSLATION, NULL, to, N, 0) && !verbena_gpu_free(next));
	}
	/* The memory is freed: the region is not what others get. */
	WANT(!verbena_gpu_free(to));
	WANT(write_to(&s, from, mr[0]->lkey, (uintptr_t)to, mr[1]->rkey, N) == IBV_WC_REM_ACCESS_ERR);
	WANT(!ibv_reg_mr(s.pd, to, N, rights) && errno == EFAULT);
	WANT(!ibv_dereg_mr(mr[0]) && !ibv_dereg_mr(mr[1]) && !verbena_gpu_free(from));
	close_self(&s);
}

struct offer {
	uint8_t handle[VERBENA_GPU_HANDLE];
	int kind;
};

static void put(int fd, const void *what, size_t n) { WANT(write(fd, what, n) == (ssize_t)n); }
static void get(int fd, void *what, size_t n) { WANT(read(fd, what, n) == (ssize_t)n); }

/* owner is the process whose memory the other one opens. */
static int owner(int in, int out)
{
	WANT(verbena_gpu_init() == 2);
	scribble(9);
	for (int kind = VERBENA_GPU_VRAM; kind <= VERBENA_GPU_HOST; kind++) {
		uint8_t ok;
		struct offer o = {.kind = kind};
		void *p = alloc(1, N, kind);
		WANT(!verbena_gpu_copy(p, here, N) && !verbena_gpu_ipc_get(p, o.handle));
		WANT(verbena_gpu_ipc_get((char *)p + 1, o.handle) == -EINVAL);
		put(out, &o, sizeof o);
		get(in, &ok, 1); /* it was written to */
		WANT(!verbena_gpu_copy(there, p, N) && there[0] == 0xab && there[N - 1] == 0xab);
		WANT(!verbena_gpu_free(p));
		put(out, &ok, 1);
		get(in, &ok, 1);
	}
	struct offer last = {.kind = 0};
	WANT(!verbena_gpu_ipc_get(alloc(0, N, VERBENA_GPU_VISIBLE), last.handle));
	put(out, &last, sizeof last);
	return 0;
}

static void other_process(int in, int out, pid_t pid)
{
	struct offer o;
	void *p, *again;
	int status;
	for (scribble(9);;) {
		get(in, &o, sizeof o);
		if (!o.kind)
			break;
		struct verbena_gpu_pointer what;
		WANT(!verbena_gpu_ipc_open(0, o.handle, &p) && !verbena_gpu_ipc_open(0, o.handle, &again) && again != p);
		WANT(!verbena_gpu_lookup(p, &what) && what.kind == VERBENA_GPU_IMPORTED && what.gpu == 0 && what.size == N);
		WANT(holds(p) && holds(again));
		WANT(verbena_gpu_free(p) == -EINVAL && !verbena_gpu_ipc_close(again) && verbena_gpu_ipc_close(again) == -EINVAL);
		WANT(!verbena_gpu_fill(p, 0xab, 1, N));
		put(out, "", 1);
		get(in, &status, 1); /* it is freed */
		int copied;
		while (!(copied = verbena_gpu_copy(there, p, N))) /* this process is told, and need not have heard of it yet */
			usleep(100);
		WANT(copied == -ENODEV);
		WANT(verbena_gpu_ipc_open(0, o.handle, &again) == -EINVAL || verbena_gpu_ipc_open(0, o.handle, &again) == -ESRCH);
		WANT(!verbena_gpu_ipc_close(p));
		put(out, "", 1);
	}
	WANT(waitpid(pid, &status, 0) == pid && !status);
	WANT(verbena_gpu_ipc_open(0, o.handle, &p) == -ESRCH && !p);
	memset(o.handle, 1, sizeof o.handle);
	WANT(verbena_gpu_ipc_open(0, o.handle, &p) == -EINVAL);
}

/* child is a child of a process with GPUs: it has none until it asks for its own. */
static void child(void)
{
	void *p = alloc(0, N, VERBENA_GPU_VRAM), *q;
	int status;
	pid_t pid = fork();
	if (!pid) {
		struct verbena_gpu_pointer what;
		WANT(verbena_gpu_lookup(p, &what) == -ENODEV && verbena_gpu_alloc(0, 1, VERBENA_GPU_VRAM, &q) == -ENODEV);
		WANT(verbena_gpu_init() == 2 && verbena_gpu_lookup(p, &what) == -EFAULT && verbena_gpu_free(p) == -EINVAL);
		scribble(4);
		q = alloc(0, N, VERBENA_GPU_VRAM);
		WANT(!verbena_gpu_copy(q, here, N) && holds(q));
		exit(0);
	}
	WANT(waitpid(pid, &status, 0) == pid && !status);
	WANT(!verbena_gpu_free(p));
}

int main(void)
{
	int to[2], from[2];
	void *p;
	WANT(!pipe(to) && !pipe(from));
	pid_t pid = fork();
	if (!pid) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		return owner(to[0], from[1]);
	}
	WANT(verbena_gpu_alloc(0, 1, VERBENA_GPU_VRAM, &p) == -ENODEV && !p);
	WANT(verbena_gpu_init() == 2 && verbena_gpu_init() == 2);
	memory();
	in_order();
	rdma(0);
	rdma(1);
	other_process(from[0], to[1], pid);
	child();
	puts("ok");
	return 0;
}
