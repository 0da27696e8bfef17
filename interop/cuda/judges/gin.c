// What NCCL's GIN proxy does, without NCCL: a put is a WRITE into GPU memory, its signal a FETCH_AND_ADD on GPU memory
// behind it, on the same queue pair. Who sees the signal has to see the data.
//
//   gin RANK DIR address|dmabuf
//
// runs as rank 0 and rank 1, which tell each other the names of their queue pairs by files in DIR.
//
//   1. Each rank puts into the other's memory, slot after slot, and looks at the slot when the signal has come. Every
//      other put comes from GPU memory, as all of NCCL's do, the others from the host's.
//   2. Both ranks add to one counter of rank 0 at the same time. No two additions may return the same value, and the
//      sum has to be that of all of them.

#include "pair.h"

enum { SLOTS = 32, SLOT = 64 << 10, PUTS = 400, ADDS = 2000, SIGNALS = 64 };

// hello is what a rank tells the other one.
struct hello {
	struct name peer, self; // the queue pair to the other rank, and to its own memory
	uint64_t data, signals;
	uint32_t data_key, signals_key;
};

static int rank;
static struct device dev;
static struct ibv_cq *cq;
static struct ibv_qp *to_peer, *to_self;
static CUdeviceptr data, signals, gpu_source;
static unsigned char *source; // of the host: slots, and the results of additions behind them
static struct ibv_mr *source_mr, *gpu_source_mr;
static struct hello mine, theirs;

static uint64_t *results(void) { return (uint64_t *)(source + SLOTS * SLOT); }

// tell writes a file for the other rank, and listen waits for the other rank's.
static void tell(const char *dir, const char *what, const void *p, size_t n)
{
	char path[4096], fresh[4200];
	snprintf(path, sizeof path, "%s/%s.%d", dir, what, rank);
	snprintf(fresh, sizeof fresh, "%s.new", path);
	FILE *f = fopen(fresh, "wb");
	need(f && fwrite(p, 1, n, f) == n && fclose(f) == 0 && rename(fresh, path) == 0, path);
}

static void listen_to(const char *dir, const char *what, void *p, size_t n)
{
	char path[4096];
	double end = seconds() + 60;
	snprintf(path, sizeof path, "%s/%s.%d", dir, what, 1 - rank);
	for (; seconds() < end; usleep(1000)) {
		FILE *f = fopen(path, "rb");
		if (!f)
			continue;
		size_t got = fread(p, 1, n, f);
		fclose(f);
		if (got == n)
			return;
	}
	give_up(what, "the other rank does not come");
}

static void meet(const char *dir, const char *what)
{
	char c = 0;
	tell(dir, what, &c, 1);
	listen_to(dir, what, &c, 1);
}

static void setup(const char *dir, int dmabuf)
{
	CUdevice gpu;
	CUcontext ctx;
	struct ibv_mr *d, *s;

	cuda_ok(cuInit(0), "cuInit");
	cuda_ok(cuDeviceGet(&gpu, 0), "cuDeviceGet");
	cuda_ok(cuDevicePrimaryCtxRetain(&ctx, gpu), "cuDevicePrimaryCtxRetain");
	cuda_ok(cuCtxSetCurrent(ctx), "cuCtxSetCurrent");
	cuda_ok(cuMemAlloc(&data, SLOTS * SLOT), "cuMemAlloc");
	cuda_ok(cuMemAlloc(&gpu_source, SLOTS * SLOT), "cuMemAlloc");
	cuda_ok(cuMemAlloc(&signals, SIGNALS * 8), "cuMemAlloc");
	cuda_ok(cuMemsetD8(data, 0, SLOTS * SLOT), "cuMemsetD8");
	cuda_ok(cuMemsetD8(signals, 0, SIGNALS * 8), "cuMemsetD8");
	cuda_ok(cuCtxSynchronize(), "cuCtxSynchronize");

	open_device(&dev);
	need((cq = ibv_create_cq(dev.ctx, 4 * DEPTH, NULL, NULL, 0)) != NULL, "ibv_create_cq");
	need((d = register_gpu(&dev, data, SLOTS * SLOT, dmabuf)) != NULL, "registering data on the GPU");
	need((s = register_gpu(&dev, signals, SIGNALS * 8, dmabuf)) != NULL, "registering signals on the GPU");
	need((gpu_source_mr = register_gpu(&dev, gpu_source, SLOTS * SLOT, dmabuf)) != NULL, "registering what is put on the GPU");
	size_t n = SLOTS * SLOT + DEPTH * 8;
	need(posix_memalign((void **)&source, 4096, n) == 0, "posix_memalign");
	memset(source, 0, n);
	need((source_mr = ibv_reg_mr(dev.pd, source, n, IBV_ACCESS_LOCAL_WRITE)) != NULL, "ibv_reg_mr of host memory");
	to_peer = make_qp(&dev, cq, &mine.peer);
	to_self = make_qp(&dev, cq, &mine.self);
	mine.data = data;
	mine.signals = signals;
	mine.data_key = d->rkey;
	mine.signals_key = s->rkey;
	tell(dir, "hello", &mine, sizeof mine);
	listen_to(dir, "hello", &theirs, sizeof theirs);
	connect_qp(&dev, to_peer, &mine.peer, &theirs.peer);
	connect_qp(&dev, to_self, &mine.self, &mine.self);
	meet(dir, "connected");
}

// add makes a FETCH_AND_ADD whose result goes to a place of ours.
static struct ibv_send_wr add(struct ibv_sge *sge, int place, uint64_t address, uint32_t key, uint64_t by)
{
	*sge = (struct ibv_sge){.addr = (uintptr_t)&results()[place], .length = 8, .lkey = source_mr->lkey};
	return (struct ibv_send_wr){.wr_id = place, .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
				    .send_flags = IBV_SEND_SIGNALED,
				    .wr.atomic = {.remote_addr = address, .rkey = key, .compare_add = by}};
}

static unsigned char byte_of(int sender, int put, size_t i) { return (unsigned char)(sender * 101 + put * 31 + i % 251); }

// put posts a WRITE and the signal behind it in one list, as the proxy does, and waits for the signal's completion.
static void put(int k)
{
	unsigned char *from = source + k % SLOTS * SLOT;
	struct ibv_sge w = {.addr = (uintptr_t)from, .length = SLOT, .lkey = source_mr->lkey}, a;
	struct ibv_send_wr signal = add(&a, 0, theirs.signals + 8 * (1 + k % (SIGNALS - 1)), theirs.signals_key, 1), *bad;
	struct ibv_send_wr write = {.sg_list = &w, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE, .next = &signal,
				    .wr.rdma = {.remote_addr = theirs.data + k % SLOTS * (uint64_t)SLOT, .rkey = theirs.data_key}};

	for (size_t i = 0; i < SLOT; i++)
		from[i] = byte_of(rank, k, i);
	if (k % 2) {
		w.addr = gpu_source + k % SLOTS * (CUdeviceptr)SLOT;
		w.lkey = gpu_source_mr->lkey;
		cuda_ok(cuMemcpyHtoD(w.addr, from, SLOT), "writing a slot");
		cuda_ok(cuStreamSynchronize(NULL), "writing a slot"); // a copy from pageable memory may be under way when it returns
	}
	errno = ibv_post_send(to_peer, &write, &bad);
	need(errno == 0, "ibv_post_send");
	enum ibv_wc_status status = poll_one(cq, NULL);
	if (status != IBV_WC_SUCCESS)
		give_up("put with signal", ibv_wc_status_str(status));
	uint64_t before = (uint64_t)k / (SIGNALS - 1);
	if (results()[0] != before)
		give_up("put with signal", "the addition returns another value than the signal had");
}

// see waits for the signal of the other rank's put, and then looks at the slot.
static void see(int k)
{
	static unsigned char slot[SLOT];
	uint64_t want = (uint64_t)k / (SIGNALS - 1) + 1, have = 0;
	double end = seconds() + 20;

	do {
		cuda_ok(cuMemcpyDtoH(&have, signals + 8 * (1 + k % (SIGNALS - 1)), 8), "reading a signal");
		if (seconds() > end)
			give_up("put with signal", "a signal does not come");
	} while (have < want);
	if (have != want)
		give_up("put with signal", "a signal was added twice");
	cuda_ok(cuMemcpyDtoH(slot, data + k % SLOTS * (CUdeviceptr)SLOT, SLOT), "reading a slot");
	for (size_t i = 0; i < SLOT; i++)
		if (slot[i] != byte_of(1 - rank, k, i))
			give_up("put with signal", "the signal has come, and its data has not");
}

static void puts_with_signals(const char *dir)
{
	char what[32];
	for (int k = 0; k < PUTS; k++) {
		put(k);
		see(k);
		if (k % SLOTS == SLOTS - 1) { // slots are used again once both have looked at them
			snprintf(what, sizeof what, "seen%d", k);
			meet(dir, what);
		}
	}
	meet(dir, "puts");
	printf("PASS put with signal, rank %d: %d puts of %d bytes\n", rank, PUTS, SLOT);
}

static int less(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
	return x < y ? -1 : x > y;
}

// additions adds 1 to rank 0's counter, many at a time.
static void additions(const char *dir)
{
	static uint64_t old[2 * ADDS];
	struct ibv_qp *qp = rank == 0 ? to_self : to_peer;
	const struct hello *owner = rank == 0 ? &mine : &theirs;
	int posted = 0, done = 0;

	meet(dir, "additions");
	while (done < ADDS) {
		for (; posted < ADDS && posted - done < DEPTH; posted++) {
			struct ibv_sge sge;
			struct ibv_send_wr wr = add(&sge, posted % DEPTH, owner->signals, owner->signals_key, 1), *bad;
			errno = ibv_post_send(qp, &wr, &bad);
			need(errno == 0, "ibv_post_send");
		}
		uint64_t place;
		enum ibv_wc_status status = poll_one(cq, &place);
		if (status != IBV_WC_SUCCESS)
			give_up("additions", ibv_wc_status_str(status));
		old[done++] = results()[place];
	}
	for (int i = 1; i < ADDS; i++)
		if (old[i] <= old[i - 1])
			give_up("additions", "those of one queue pair are not executed in order");
	tell(dir, "old", old, ADDS * sizeof *old);
	listen_to(dir, "old", old + ADDS, ADDS * sizeof *old);
	qsort(old, 2 * ADDS, sizeof *old, less);
	for (uint64_t i = 0; i < 2 * ADDS; i++)
		if (old[i] != i)
			give_up("additions", "two additions have seen the same value");
	if (rank == 0) {
		uint64_t sum;
		cuda_ok(cuMemcpyDtoH(&sum, signals, 8), "reading the counter");
		if (sum != 2 * ADDS)
			give_up("additions", "the sum is wrong");
	}
	printf("PASS additions of two ranks, rank %d: %d each\n", rank, ADDS);
	meet(dir, "end"); // the other rank may still be at our memory
}

int main(int argc, char **argv)
{
	if (argc < 4) {
		fprintf(stderr, "usage: gin RANK DIR address|dmabuf\n");
		return 2;
	}
	rank = atoi(argv[1]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	setup(argv[2], strcmp(argv[3], "dmabuf") == 0);
	puts_with_signals(argv[2]);
	additions(argv[2]);
	return 0;
}
