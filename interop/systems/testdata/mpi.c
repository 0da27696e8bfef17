/*
 * A program of MPI for any number of ranks. All data are checked. Arguments: a seed, how often, and what:
 *
 *   messages     of many sizes around a ring, in both directions at once; receives from any source
 *   collectives  broadcast, sums, gather, scatter, all to all
 *   windows      put, get, accumulate; fetch_and_op and compare_and_swap that all ranks aim at one word
 *   threads      four threads of each rank exchange messages at once (MPI_THREAD_MULTIPLE)
 *   remap        messages from and to memory that is unmapped and mapped again at the same address
 *   unhooked     UCX is told before MPI_Init that somebody reports to it what is unmapped, and nobody does
 *   times        latency and bandwidth between ranks 0 and 1
 *
 * The last line of rank 0 is "ok".
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <pthread.h>
#include <sys/mman.h>
#include "check.h"

enum { MOST = 1000001, THREADS = 4 };
static int rank, ranks, rounds;

static void messages(void)
{
	static const int sizes[] = {0, 1, 7, 64, 1000, 4096, 8193, 30000, 65536, 262147, MOST};
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	char *out = malloc(MOST), *in[2] = {malloc(MOST), malloc(MOST)};
	for (int round = 0; round < rounds; round++)
		for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
			MPI_Request r[4];
			MPI_Status s[4];
			int n = sizes[i], tag = (int)(round * 100 + i), got;
			fill(out, n, rank, tag);
			memset(in[0], 0xee, n);
			memset(in[1], 0xee, n);
			MPI_Irecv(in[0], n, MPI_BYTE, last, tag, MPI_COMM_WORLD, &r[0]);
			MPI_Irecv(in[1], n, MPI_BYTE, next, tag + 50, MPI_COMM_WORLD, &r[1]);
			MPI_Isend(out, n, MPI_BYTE, next, tag, MPI_COMM_WORLD, &r[2]);
			MPI_Isend(out, n, MPI_BYTE, last, tag + 50, MPI_COMM_WORLD, &r[3]);
			MPI_Waitall(4, r, s);
			MPI_Get_count(&s[0], MPI_BYTE, &got);
			WANT(got == n && filled(in[0], n, last, tag) && filled(in[1], n, next, tag));
		}
	/* Everybody sends to rank 0, which takes what comes. */
	if (rank) {
		for (int i = 0; i < 20 * rounds; i++) {
			int n = (int)(mix(rank, i) % 20000);
			fill(out, n, rank, i);
			MPI_Send(out, n, MPI_BYTE, 0, i, MPI_COMM_WORLD);
		}
	} else {
		int *seen = calloc(ranks, sizeof *seen);
		for (int i = 0; i < 20 * rounds * (ranks - 1); i++) {
			MPI_Status s;
			int n;
			MPI_Recv(in[0], MOST, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &s);
			MPI_Get_count(&s, MPI_BYTE, &n);
			WANT(s.MPI_TAG == seen[s.MPI_SOURCE]++ && n == (int)(mix(s.MPI_SOURCE, s.MPI_TAG) % 20000));
			WANT(filled(in[0], n, s.MPI_SOURCE, s.MPI_TAG));
		}
		free(seen);
	}
	free(out);
	free(in[0]);
	free(in[1]);
}

static void collectives(void)
{
	static const int sizes[] = {1, 100, 5000, 100000};
	for (int round = 0; round < rounds; round++)
		for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
			int n = sizes[k], per = n / ranks + 1, from = (int)(mix(round, k) % ranks);
			char *b = malloc(n);
			int64_t *x = malloc(8 * (size_t)per * ranks), *y = malloc(8 * (size_t)per * ranks);
			memset(b, 0xee, n);
			if (rank == from)
				fill(b, n, from, k);
			MPI_Bcast(b, n, MPI_BYTE, from, MPI_COMM_WORLD);
			WANT(filled(b, n, from, k));
			free(b);

			for (int i = 0; i < per * ranks; i++)
				x[i] = (int64_t)rank * i + round;
			MPI_Allreduce(x, y, per * ranks, MPI_INT64_T, MPI_SUM, MPI_COMM_WORLD);
			for (int i = 0; i < per * ranks; i++)
				WANT(y[i] == (int64_t)ranks * (ranks - 1) / 2 * i + (int64_t)ranks * round);
			MPI_Reduce_scatter_block(x, y, per, MPI_INT64_T, MPI_MAX, MPI_COMM_WORLD);
			for (int i = 0; i < per; i++)
				WANT(y[i] == (int64_t)(ranks - 1) * (rank * per + i) + round);

			MPI_Alltoall(x, per, MPI_INT64_T, y, per, MPI_INT64_T, MPI_COMM_WORLD);
			for (int r = 0; r < ranks; r++)
				for (int i = 0; i < per; i++)
					WANT(y[r * per + i] == (int64_t)r * (rank * per + i) + round);
			/*
			 * As bytes: MPICH 4.0 gathers to a rank that is not the first by a type of several blocks, and
			 * fails ("Message truncated") if a fragment of its transport ends within a word. The same program
			 * fails over UCX's TCP with UCX_TCP_TX_SEG_SIZE=8250.
			 */
			MPI_Gather(x, 8 * per, MPI_BYTE, y, 8 * per, MPI_BYTE, from, MPI_COMM_WORLD);
			for (int i = 0; rank == from && i < per * ranks; i++)
				WANT(y[i] == (int64_t)(i / per) * (i % per) + round);
			MPI_Scatter(y, 8 * per, MPI_BYTE, x, 8 * per, MPI_BYTE, from, MPI_COMM_WORLD);
			for (int i = 0; i < per; i++)
				WANT(x[i] == (int64_t)rank * i + round);
			MPI_Barrier(MPI_COMM_WORLD);
			free(x);
			free(y);
		}
}

/* window works on one window: allocated by MPI, or the program's own memory. */
static void window(int own)
{
	enum { BYTES = 300000, TIMES = 20 };
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	int64_t *mem, one = 1, got, before = -1;
	char *out = malloc(BYTES), *in = malloc(BYTES);
	size_t size = 4 * sizeof *mem + BYTES;
	MPI_Win win;
	if (own) {
		mem = malloc(size);
		MPI_Win_create(mem, size, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &win);
	} else {
		MPI_Win_allocate(size, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &mem, &win);
	}
	memset(mem, 0, size);
	MPI_Barrier(MPI_COMM_WORLD);
	for (int round = 0; round < rounds; round++) {
		fill(out, BYTES, rank, round);
		MPI_Win_fence(0, win);
		MPI_Put(out, BYTES, MPI_BYTE, next, 32, BYTES, MPI_BYTE, win);
		MPI_Win_fence(0, win);
		WANT(filled(mem + 4, BYTES, last, round));
		MPI_Get(in, BYTES, MPI_BYTE, next, 32, BYTES, MPI_BYTE, win);
		MPI_Win_fence(0, win);
		WANT(filled(in, BYTES, rank, round));
	}

	/* One word of rank 0: everybody adds, and no two see the same value. */
	MPI_Win_lock_all(0, win);
	for (int i = 0; i < TIMES * rounds; i++) {
		MPI_Fetch_and_op(&one, &got, MPI_INT64_T, 0, 0, MPI_SUM, win);
		MPI_Win_flush(0, win);
		WANT(got > before);
		before = got;
	}
	/* Another word is a lock, and guards a third, to which everybody adds by get and put. */
	for (int i = 0; i < 5; i++) {
		int64_t mine = rank + 1, none = 0, sum;
		do {
			MPI_Compare_and_swap(&mine, &none, &got, MPI_INT64_T, 0, 8, win);
			MPI_Win_flush(0, win);
		} while (got);
		MPI_Get(&sum, 1, MPI_INT64_T, 0, 16, 1, MPI_INT64_T, win);
		MPI_Win_flush(0, win);
		sum += mine;
		MPI_Put(&sum, 1, MPI_INT64_T, 0, 16, 1, MPI_INT64_T, win);
		MPI_Win_flush(0, win);
		MPI_Compare_and_swap(&none, &mine, &got, MPI_INT64_T, 0, 8, win);
		MPI_Win_flush(0, win);
		WANT(got == mine);
		MPI_Accumulate(&mine, 1, MPI_INT64_T, next, 24, 1, MPI_INT64_T, MPI_SUM, win);
		MPI_Win_flush(next, win);
	}
	MPI_Win_unlock_all(win);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_lock(MPI_LOCK_SHARED, rank, 0, win);
	if (!rank)
		WANT(mem[0] == TIMES * rounds * ranks && mem[1] == 0 && mem[2] == 5 * ranks * (ranks + 1) / 2);
	WANT(mem[3] == 5 * (last + 1));
	MPI_Win_unlock(rank, win);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Win_free(&win);
	if (own)
		free(mem);
	free(out);
	free(in);
}

static void windows(void)
{
	window(0);
	window(1);
}

static void *exchange(void *arg)
{
	int t = (int)(intptr_t)arg, next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
	char *out = malloc(200000), *in = malloc(200000);
	for (int i = 0; i < 10 * rounds; i++) {
		int n = (int)(mix(t, i) % (i % 3 ? 3000 : 200000)), tag = t * 1000 + i;
		fill(out, n, rank, tag);
		MPI_Sendrecv(out, n, MPI_BYTE, next, tag, in, n, MPI_BYTE, last, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		WANT(filled(in, n, last, tag));
	}
	free(out);
	free(in);
	return NULL;
}

static void threads(void)
{
	pthread_t t[THREADS];
	int have;
	MPI_Query_thread(&have);
	WANT(have == MPI_THREAD_MULTIPLE);
	for (int i = 0; i < THREADS; i++)
		WANT(!pthread_create(&t[i], NULL, exchange, (void *)(intptr_t)i));
	for (int i = 0; i < THREADS; i++)
		WANT(!pthread_join(t[i], NULL));
}

/*
 * remap sends from and receives into memory that is replaced between messages. The addresses stay the same: the first
 * time the new memory is put over the old one (MAP_FIXED), then the old one is unmapped before, and every third time
 * the range is given back to malloc and taken again.
 */
static void remap(void)
{
	static const size_t size = 2 << 20;
	int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks, same = 0;
	char *both = mmap(NULL, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *old = NULL;
	WANT(both != MAP_FAILED);
	for (int i = 0; i < 10 * rounds; i++) {
		if (i % 2)
			WANT(!munmap(both, 2 * size));
		WANT(mmap(both, 2 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == both);
		char *heap = malloc(size), *out = i % 3 ? both : heap, *in = i % 3 == 1 ? heap : both + size;
		int n = (int)(size - mix(1, i) % 5000);
		same += heap == old;
		old = heap;
		fill(out, n, rank, i);
		MPI_Sendrecv(out, n, MPI_BYTE, next, i, in, n, MPI_BYTE, last, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		WANT(filled(in, n, last, i));
		free(heap);
	}
	WANT(!munmap(both, 2 * size));
	printf("rank %d: %d of %d allocations had the address of the one before, %ld KiB locked\n", rank, same, 10 * rounds, locked());
}

static void unhook(void)
{
	enum { VM_UNMAPPED = 1 << 17 }; /* of ucm/api/ucm.h */
	void *ucs = dlopen("libucs.so.0", RTLD_NOW | RTLD_GLOBAL);
	WANT(ucs);
	void (*set)(int) = (void (*)(int))dlsym(ucs, "ucm_set_external_event");
	WANT(set);
	set(VM_UNMAPPED);
}

static void times(void)
{
	static const int sizes[] = {8, 4096, 65536, 1 << 20};
	char *b = calloc(1, 1 << 20);
	for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
		int n = sizes[k], loops = rounds * (n > 4096 ? 100 : 1000), warm = loops / 10;
		double start = 0, round, each;
		for (int i = -warm; rank < 2 && i < loops; i++) {
			if (!i)
				start = MPI_Wtime();
			if (rank)
				MPI_Recv(b, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
			MPI_Send(b, n, MPI_BYTE, !rank, 0, MPI_COMM_WORLD);
			if (!rank)
				MPI_Recv(b, n, MPI_BYTE, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
		}
		round = (MPI_Wtime() - start) / loops;
		MPI_Barrier(MPI_COMM_WORLD);
		start = MPI_Wtime();
		for (int i = 0; rank < 2 && i < loops; i += 10) {
			MPI_Request r[10];
			MPI_Status s[10];
			for (int j = 0; j < 10; j++)
				if (rank)
					MPI_Irecv(b, n, MPI_BYTE, 0, 0, MPI_COMM_WORLD, &r[j]);
				else
					MPI_Isend(b, n, MPI_BYTE, 1, 0, MPI_COMM_WORLD, &r[j]);
			MPI_Waitall(10, r, s);
		}
		MPI_Barrier(MPI_COMM_WORLD);
		each = (MPI_Wtime() - start) / loops;
		if (!rank)
			printf("%7d bytes: %8.2f us, %8.1f MB/s\n", n, round / 2 * 1e6, n / each / 1e6);
	}
	free(b);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} parts[] = {{"unhooked", NULL}, {"messages", messages}, {"collectives", collectives}, {"windows", windows}, {"threads", threads}, {"remap", remap}, {"times", times}};
	int have, known = 0;
	for (int a = 3; a < argc; a++)
		if (!strcmp(argv[a], "unhooked"))
			unhook();
	MPI_Init_thread(&argc, &argv, MPI_THREAD_MULTIPLE, &have);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &ranks);
	WANT(argc >= 4);
	seed = strtoull(argv[1], NULL, 0);
	rounds = atoi(argv[2]);
	for (int a = 3; a < argc; a++)
		for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
			if (!strcmp(argv[a], parts[i].name)) {
				if (parts[i].run)
					parts[i].run();
				MPI_Barrier(MPI_COMM_WORLD);
				if (!rank)
					printf("%s: done\n", argv[a]);
				fflush(stdout);
				known++;
			}
	WANT(known == argc - 3);
	MPI_Barrier(MPI_COMM_WORLD);
	MPI_Finalize();
	if (!rank)
		puts("ok");
	return 0;
}
