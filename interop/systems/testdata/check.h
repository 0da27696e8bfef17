/* What the programs of this directory share: a check, numbers from a seed, and the process's locked memory. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WANT(cond)                                                                                                     \
	do {                                                                                                           \
		if (!(cond)) {                                                                                         \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #cond);                            \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

static uint64_t seed;

/* mix returns a number that depends on the seed and on what it is asked for. */
static inline uint64_t mix(uint64_t a, uint64_t b)
{
	uint64_t x = seed ^ a * 0x9e3779b97f4a7c15u ^ b * 0xc2b2ae3d27d4eb4fu;
	x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 29) * 0x94d049bb133111ebu;
	return x ^ x >> 32;
}

/* fill writes the message number b of the sender a. */
static inline void fill(void *to, size_t n, uint64_t a, uint64_t b)
{
	uint64_t x = mix(a, b) | 1;
	uint8_t *p = to;
	for (size_t i = 0; i < n; i++) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		p[i] = (uint8_t)(x >> 56);
	}
}

/* filled reports whether memory has what fill writes. */
static inline int filled(const void *from, size_t n, uint64_t a, uint64_t b)
{
	uint64_t x = mix(a, b) | 1;
	const uint8_t *p = from;
	for (size_t i = 0; i < n; i++) {
		x = x * 6364136223846793005u + 1442695040888963407u;
		if (p[i] != (uint8_t)(x >> 56)) {
			fprintf(stderr, "message %llu of %llu: byte %zu of %zu is %#x\n", (unsigned long long)b,
				(unsigned long long)a, i, n, p[i]);
			return 0;
		}
	}
	return 1;
}

/* locked returns how many KiB of this process are locked or pinned, by /proc/self/status. */
static inline long locked(void)
{
	char line[256];
	long sum = 0, kib;
	FILE *f = fopen("/proc/self/status", "r");
	WANT(f);
	while (fgets(line, sizeof line, f))
		if (sscanf(line, "VmLck: %ld", &kib) == 1 || sscanf(line, "VmPin: %ld", &kib) == 1)
			sum += kib;
	fclose(f);
	return sum;
}
