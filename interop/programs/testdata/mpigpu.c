/*
 * Two ranks of MPI, each with a software GPU: messages from GPU to GPU and from the host to a GPU, one by one and many at
 * once, and a broadcast. All data are compared. argv[1] is a seed.
 */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int hipGetDeviceCount(int *), hipSetDevice(int), hipMalloc(void **, size_t), hipFree(void *), hipMemset(void *, int, size_t);
int hipMemcpy(void *, const void *, size_t, int);

#define WANT(cond)                                                                                                     \
	do {                                                                                                           \
		if (!(cond)) {                                                                                         \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond);                            \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

enum { MOST = 3 << 20, TO_DEVICE = 1, TO_HOST = 2 };
static uint8_t want[MOST], got[MOST];
static uint64_t state;

static void fill(size_t n)
{
	for (size_t i = 0; i < n; i++) {
		state = state * 6364136223846793005u + 1442695040888963407u;
		want[i] = (uint8_t)(state >> 56);
	}
}

/* check compares memory of the GPU with what the sender has filled in. */
static void check(const void *gpu, size_t n)
{
	memset(got, 0, n);
	WANT(!hipMemcpy(got, gpu, n, TO_HOST) && !memcmp(got, want, n));
}

int main(int argc, char **argv)
{
	static const size_t sizes[] = {1, 7, 64, 1000, 4096, 30000, 65536, 1000001, MOST};
	int rank, num, gpus;
	void *a, *b;
	MPI_Init(&argc, &argv);
	MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	MPI_Comm_size(MPI_COMM_WORLD, &num);
	WANT(argc == 2 && num == 2);
	state = strtoull(argv[1], NULL, 0);
	WANT(!hipGetDeviceCount(&gpus) && gpus > 0 && !hipSetDevice(rank % gpus));
	WANT(!hipMalloc(&a, MOST) && !hipMalloc(&b, MOST));

	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
		for (int from_host = 0; from_host < 2; from_host++) {
			int n = (int)sizes[i];
			fill(sizes[i]); /* both ranks have the same numbers */
			if (!rank) {
				void *from = from_host ? (void *)want : a;
				WANT(!hipMemcpy(a, want, sizes[i], TO_DEVICE));
				WANT(!MPI_Send(from, n, MPI_BYTE, 1, 5, MPI_COMM_WORLD));
				WANT(!MPI_Recv(b, n, MPI_BYTE, 1, 6, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
				check(b, sizes[i]);
			} else {
				WANT(!hipMemset(b, 0, sizes[i]));
				WANT(!MPI_Recv(b, n, MPI_BYTE, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
				check(b, sizes[i]);
				WANT(!MPI_Send(b, n, MPI_BYTE, 0, 6, MPI_COMM_WORLD));
			}
		}

	/* Several at once, in both directions. */
	enum { PARTS = 24, PART = MOST / PARTS };
	MPI_Request req[2 * PARTS];
	fill(MOST);
	WANT(!hipMemcpy(a, want, MOST, TO_DEVICE) && !hipMemset(b, 0, MOST));
	for (int i = 0; i < PARTS; i++) {
		WANT(!MPI_Irecv((char *)b + i * PART, PART, MPI_BYTE, !rank, i, MPI_COMM_WORLD, &req[2 * i]));
		WANT(!MPI_Isend((char *)a + i * PART, PART, MPI_BYTE, !rank, i, MPI_COMM_WORLD, &req[2 * i + 1]));
	}
	WANT(!MPI_Waitall(2 * PARTS, req, MPI_STATUSES_IGNORE));
	check(b, MOST);
	WANT(!MPI_Bcast(a, MOST, MPI_BYTE, 0, MPI_COMM_WORLD));
	check(a, MOST);
	WANT(!hipFree(a) && !hipFree(b) && hipFree(a));
	MPI_Finalize();
	printf("rank %d: ok\n", rank);
	return 0;
}
