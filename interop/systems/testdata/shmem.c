/*
 * A program of OpenSHMEM, for any number of processing elements: variables of the program and memory of the symmetric
 * heap, put and get of many sizes, atomics and a lock that all aim at one word, waiting for a word, collectives. All data
 * are checked. Arguments: a seed, how often. Element 0 prints "ok" at its end.
 */
#include <shmem.h>
#include "check.h"

enum { MOST = 300001, WORDS = 1000 };
static char variable[MOST];
static long counter, guarded, swapped, flag, sync_words[SHMEM_REDUCE_SYNC_SIZE], work[WORDS + SHMEM_REDUCE_MIN_WRKDATA_SIZE];
static long sums[WORDS], terms[WORDS], lock;

int main(int argc, char **argv)
{
	static const size_t sizes[] = {1, 7, 64, 1000, 4096, 8193, 65536, MOST};
	WANT(argc == 3);
	seed = strtoull(argv[1], NULL, 0);
	int rounds = atoi(argv[2]);
	shmem_init();
	int me = shmem_my_pe(), n = shmem_n_pes(), next = (me + 1) % n, last = (me + n - 1) % n;
	char *heap = shmem_malloc(MOST), *out = malloc(MOST), *in = malloc(MOST);
	WANT(heap && out && in);
	for (int i = 0; i < SHMEM_REDUCE_SYNC_SIZE; i++)
		sync_words[i] = SHMEM_SYNC_VALUE;

	for (int round = 0; round < rounds; round++)
		for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
			for (int of_program = 0; of_program < 2; of_program++) {
				char *there = of_program ? variable : heap;
				int tag = (int)(round * 100 + k * 2) + of_program;
				fill(out, sizes[k], me, tag);
				shmem_barrier_all();
				shmem_putmem(there, out, sizes[k], next);
				shmem_barrier_all();
				WANT(filled(there, sizes[k], last, tag));
				memset(in, 0xee, sizes[k]);
				shmem_getmem(in, there, sizes[k], next);
				WANT(filled(in, sizes[k], me, tag));
			}

	long before = -1, got;
	for (int i = 0; i < 20 * rounds; i++) {
		got = shmem_long_atomic_fetch_add(&counter, 1, 0);
		WANT(got > before);
		before = got;
		while ((got = shmem_long_atomic_compare_swap(&swapped, 0, me + 1, 0)))
			WANT(got > 0 && got <= n);
		WANT(shmem_long_atomic_swap(&swapped, 0, 0) == me + 1);
	}
	for (int i = 0; i < 3; i++) {
		shmem_set_lock(&lock);
		shmem_long_p(&guarded, shmem_long_g(&guarded, 0) + me + 1, 0);
		shmem_quiet();
		shmem_clear_lock(&lock);
	}
	shmem_barrier_all();
	if (!me)
		WANT(counter == 20L * rounds * n && guarded == 3L * n * (n + 1) / 2 && !swapped);

	shmem_long_p(&flag, last + 7, last); /* each waits for the word that the next one writes */
	shmem_long_wait_until(&flag, SHMEM_CMP_NE, 0);
	WANT(flag == me + 7);
	for (int i = 0; i < WORDS; i++)
		terms[i] = (long)me * i;
	shmem_barrier_all();
	shmem_long_sum_to_all(sums, terms, WORDS, 0, 0, n, work, sync_words);
	for (int i = 0; i < WORDS; i++)
		WANT(sums[i] == (long)n * (n - 1) / 2 * i);
	shmem_barrier_all();
	shmem_free(heap);
	shmem_finalize();
	free(out);
	free(in);
	if (!me)
		puts("ok");
	return 0;
}
