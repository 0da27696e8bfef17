/*
 * Calls CUDA's functions that free memory, and prints what they return. The libraries that it calls print, too
 * (cudalib.c, cudaears.c), so that the order can be seen. UNLINKED: it is not linked to libcuda.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef int function(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t);
typedef int find1(const char *, void **, int, uint64_t);
typedef int find2(const char *, void **, int, uint64_t, int *);

#define NAMES(X)                                                                                                       \
	X(cuMemFree) X(cuMemFree_v2) X(cuMemFreeAsync) X(cuMemFreeAsync_ptsz) X(cuIpcCloseMemHandle) X(cuMemUnmap)         \
	X(cuCtxDestroy) X(cuCtxDestroy_v2) X(cuDevicePrimaryCtxReset) X(cuDevicePrimaryCtxReset_v2)                        \
	X(cuDevicePrimaryCtxRelease) X(cuDevicePrimaryCtxRelease_v2) X(cuMemFreeHost) X(cuMemHostUnregister)               \
	X(cuMemGetHandleForAddressRange)
#define NAME(name) #name,
static const char *const names[] = {NAMES(NAME)};
enum { COUNT = sizeof names / sizeof *names };

#ifndef UNLINKED
#define DECLARE(name) extern function name;
NAMES(DECLARE)
extern find1 cuGetProcAddress;
extern find2 cuGetProcAddress_v2;
#endif

static void *load(const char *name)
{
	void *lib = dlopen(name, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		printf("%s\n", dlerror());
		exit(1);
	}
	return lib;
}

/* try_it calls a function, which may be NULL. */
static void try_it(const char *name, void *f, uint64_t a, uint64_t b)
{
	int fd = -1, r;
	if (!f) {
		dprintf(1, "none %s\n", name);
		return;
	}
	errno = 7;
	if (!strcmp(name, "cuMemGetHandleForAddressRange"))
		r = ((function *)f)((uintptr_t)&fd, a, b, 1, 0);
	else if (strstr(name, "Primary"))
		r = ((function *)f)(a < 16 ? a : 0xdead00000001, 0, 0, 0, 0); /* the number of a device has 32 bits */
	else
		r = ((function *)f)(a, b, 0, 0, 0);
	dprintf(1, "returned %d%s\n", r, errno == 7 ? "" : ", and has changed errno");
}

/* each calls all functions that find returns. */
static void each(void *find(const char *name))
{
	for (int i = 0; i < COUNT; i++)
		try_it(names[i], find(names[i]), 0x7f0000010000, 0x20000);
	try_it("cuDevicePrimaryCtxRelease_v2", find("cuDevicePrimaryCtxRelease_v2"), 2, 0); /* has another user */
	try_it("cuMemFree_v2", find("cuMemFree_v2"), 0xbad, 0);
	try_it("cuMemFree_v2", find("cuMemFree_v2"), 0x7f0000010040, 0); /* within an allocation */
	try_it("cuMemFree_v2", find("cuMemFree_v2"), 0, 0);
}

static void *lib; /* libcuda, from dlopen */

static void *by_handle(const char *name) { return dlsym(lib, name); }
static void *by_version(const char *name) { return dlvsym(lib, name, "CUDA_1"); }
static void *by_program(const char *name) { return dlsym(dlopen(NULL, RTLD_LAZY), name); }
static void *by_default(const char *name) { return dlsym(RTLD_DEFAULT, name); }
static void *by_default_version(const char *name) { return dlvsym(RTLD_DEFAULT, name, "CUDA_1"); }
static void *by_next(const char *name) { return dlsym(RTLD_NEXT, name); }

#ifndef UNLINKED
static void *linked(const char *name)
{
	for (int i = 0; i < COUNT; i++) {
#define ADDRESS(name) (void *)name,
		void *const all[] = {NAMES(ADDRESS)};
		if (!strcmp(names[i], name))
			return all[i];
	}
	return NULL;
}
#endif

/* ask calls functions that cuGetProcAddress returns, of both versions. */
static void ask(find1 *one, find2 *two, const char *name, int version, uint64_t flags)
{
	void *a = NULL, *b = (void *)1;
	int status = -1;
	int r1 = one(name, &a, version, flags), r2 = two(name, &b, version, flags, &status);
	dprintf(1, "asked %s %d %ld: %d, %d %d%s\n", name, version, flags, r1, r2, status, a == b ? "" : ", different");
	try_it(name, a, 0x7f0000010000, 0x20000);
}

static void ask_all(find1 *one, find2 *two)
{
	ask(one, two, "cuMemFree", 2000, 0);
	ask(one, two, "cuMemFree", 12000, 0);
	ask(one, two, "cuMemFreeAsync", 12000, 0);
	ask(one, two, "cuMemFreeAsync", 12000, 2);
	ask(one, two, "cuMemFreeAsync", 13000, 2);
	ask(one, two, "cuMemFreeAsync", 10000, 0); /* too early */
	ask(one, two, "cuMemUnmap", 12000, 0);
	ask(one, two, "cuCtxDestroy", 12000, 0);
	ask(one, two, "cuMemGetHandleForAddressRange", 12000, 0);
	ask(one, two, "cuInit", 12000, 0);
}

/* Threads free at addresses of their own, by functions that each finds first. */
enum { THREADS = 8, ROUNDS = 50 };
static pthread_barrier_t start;

static void *race(void *arg)
{
	uint64_t n = (uintptr_t)arg;
	pthread_barrier_wait(&start);
	function *f = NULL;
	if (n % 4 == 0)
		f = (function *)by_handle("cuMemFree_v2");
	else if (n % 4 == 1)
		f = (function *)by_handle("cuMemFreeAsync_ptsz");
	else {
		int status;
		void *get = by_handle("cuGetProcAddress_v2"), *to = NULL;
		((find2 *)get)("cuMemFreeAsync", &to, n % 4 == 2 ? 12000 : 13000, n % 4 == 2 ? 0 : 2, &status);
		f = (function *)to;
	}
	for (uint64_t i = 0; i < ROUNDS; i++)
		if (f((n + 1) << 32 | i << 16, n, 0, 0, 0))
			abort();
	return NULL;
}

static void race_all(void)
{
	pthread_t t[THREADS];
	pthread_barrier_init(&start, NULL, THREADS);
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&t[i], NULL, race, (void *)i);
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IONBF, 0);
	for (int i = 1; i < argc; i++) {
		const char *way = argv[i];
		dprintf(1, "# %s\n", way);
		if (!strcmp(way, "ears"))
			load("libibverbs.so.1");
		else if (!strcmp(way, "load"))
			lib = load("libcuda.so.1");
		else if (!strcmp(way, "handle"))
			each(by_handle);
		else if (!strcmp(way, "version"))
			each(by_version);
		else if (!strcmp(way, "program"))
			each(by_program);
		else if (!strcmp(way, "default"))
			each(by_default);
		else if (!strcmp(way, "default version"))
			each(by_default_version);
		else if (!strcmp(way, "next"))
			each(by_next);
		else if (!strcmp(way, "ask"))
			ask_all((find1 *)by_handle("cuGetProcAddress"), (find2 *)by_handle("cuGetProcAddress_v2"));
		else if (!strcmp(way, "ask more")) { /* by a function that was asked for */
			void *one, *two;
			((find1 *)by_handle("cuGetProcAddress"))("cuGetProcAddress", &one, 11030, 0);
			((find1 *)by_handle("cuGetProcAddress"))("cuGetProcAddress", &two, 12000, 0);
			ask_all((find1 *)one, (find2 *)two);
		} else if (!strcmp(way, "race"))
			race_all();
		else if (!strcmp(way, "getppid"))
			dprintf(1, "%s\n", getppid() > 0 ? "ok" : "wrong");
		else if (!strcmp(way, "error")) {
			dlerror();
			dprintf(1, "%s", dlsym(lib ? lib : RTLD_DEFAULT, "cuMemFree_v2") ? "found" : "none");
			dprintf(1, " %s\n", dlerror() ? "with a text" : "without a text");
		} else if (!strcmp(way, "fork")) { /* the rest is done by a child */
			pid_t child = fork();
			int status = 1;
			if (child)
				return waitpid(child, &status, 0) != child || status ? 1 : 0;
#ifndef UNLINKED
		} else if (!strcmp(way, "linked")) {
			each(linked);
		} else if (!strcmp(way, "address")) {
			void *of = (void *)cuMemFree_v2, *f = NULL;
			dprintf(1, "%d", of == by_handle("cuMemFree_v2") && of == by_default("cuMemFree_v2"));
			dprintf(1, " %d\n", !cuGetProcAddress("cuMemFree", &f, 12000, 0) && f == of);
		} else if (!strcmp(way, "linked ask")) {
			ask_all(cuGetProcAddress, cuGetProcAddress_v2);
		} else if (!strcmp(way, "one")) {
			try_it("cuMemFree_v2", (void *)cuMemFree_v2, 0x7f0000010000, 0);
#endif
		} else
			return 2;
	}
	return 0;
}
