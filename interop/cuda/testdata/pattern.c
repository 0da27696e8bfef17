/* The bytes that are moved depend on the seed, on the round and on the offset: a byte that is lost, repeated, late or in
 * the wrong place is found. */
#include <time.h>

#include "common.h"

uint64_t seed;
uint64_t max_message = UINT64_MAX;

static uint64_t mix(uint64_t x)
{
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
	x = (x ^ x >> 27) * 0x94d049bb133111eb;
	return x ^ x >> 31;
}

static uint64_t start_of(uint64_t round) { return mix(seed + 0x9e3779b97f4a7c15 * (round + 1)); }

uint64_t pattern_word(uint64_t round, size_t off) { return mix(start_of(round) + off); }

void pattern_fill(void *to, size_t n, uint64_t round)
{
	unsigned char *p = (unsigned char *)to;
	const uint64_t start = start_of(round);
	for (size_t i = 0; i < n; i += 8) {
		uint64_t word = mix(start + i);
		memcpy(p + i, &word, n - i < 8 ? n - i : 8);
	}
}

int64_t pattern_check(const void *from, size_t n, uint64_t round)
{
	const unsigned char *p = (const unsigned char *)from;
	const uint64_t start = start_of(round);
	for (size_t i = 0; i < n; i += 8) {
		uint64_t word = mix(start + i);
		size_t k = n - i < 8 ? n - i : 8;
		if (!memcmp(p + i, &word, k))
			continue;
		for (size_t j = 0; j < k; j++)
			if (p[i + j] != ((unsigned char *)&word)[j])
				return (int64_t)(i + j);
	}
	return -1;
}

double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}
