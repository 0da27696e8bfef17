// What a program does at the edge of what the kernel allows, while pages are away: one case a run, by its name. It ends with
// status 0 if all went well, with 77 where the kernel does not allow it, and by SIGALRM if it hangs.

#define _GNU_SOURCE
#include "../hmm.h"
#include "../uffd.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 64

static struct vh_space *s;
static struct vh_features have;
static unsigned char *b; // PAGES pages of vh_alloc; page i begins with i + 1
static char *vram;
static uint64_t page, addr;
static int dev;
static unsigned seed = 1;

#define must(x) do { int e_ = (x); if (e_ != 0) { printf("%d: %s: %s\n", __LINE__, #x, strerror(e_)); fflush(stdout); _exit(1); } } while (0)
#define want(x) do { if (!(x)) { printf("%d: not %s\n", __LINE__, #x); fflush(stdout); _exit(1); } } while (0)

static void *map(uint64_t pages, int prot) { return mmap(NULL, pages * page, prot, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); }

static void move(int to, int flags)
{
	uint64_t there = 0;

	must(vh_migrate(s, addr, PAGES * page, to, flags, &there));
	want(there == PAGES);
}

static void fill(unsigned char *at)
{
	for (int i = 0; i < PAGES; i++)
		at[i * page] = (unsigned char)(i + 1);
}

static void check(unsigned char *at)
{
	for (int i = 0; i < PAGES; i++)
		if (at[i * page] != i + 1) {
			printf("page %d begins with %d\n", i, at[i * page]);
			fflush(stdout);
			_exit(1);
		}
}

static int bare_fork(void) { return (int)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0); }

static int wait_for(int pid)
{
	int status;

	want(waitpid(pid, &status, 0) == pid);
	return status;
}

// Memory that mremap has made larger has a part that is not the space's, but faults like it.
static void grown(void)
{
	unsigned char *at = mremap(b, PAGES * page, 2 * PAGES * page, MREMAP_MAYMOVE);

	want(at != MAP_FAILED);
	b = at;
	addr = (uintptr_t)at;
	move(dev, 0);
	must(vh_read(s, dev, 1, addr, b + PAGES * page, PAGES * page)); // nobody has touched it
	check(b + PAGES * page);
	must(vh_write(s, dev, 1, addr, b + PAGES * page + 9 * page, 1));
	want(b[0] == 10);
}

// A bare fork when no descriptor is free: the child gets its bytes, and everything goes on.
static void descriptors(void)
{
	struct rlimit few;
	int pid, high = dup(0);

	if (!have.fork_events)
		_exit(0);
	want(getrlimit(RLIMIT_NOFILE, &few) == 0);
	few.rlim_cur = (rlim_t)high + 1;
	want(setrlimit(RLIMIT_NOFILE, &few) == 0 && dup(0) < 0);
	for (int i = 0; i < 3; i++) {
		move(dev, 0);
		pid = bare_fork();
		if (pid == 0) {
			check(b);
			_exit(0);
		}
		want(pid > 0 && wait_for(pid) == 0);
		check(b);
	}
}

// The engine's ioctls come here: a kernel before Linux 6.11 has no PROCMAP_QUERY.
static volatile int old_kernel;

int ioctl(int fd, unsigned long request, ...)
{
	va_list args;
	void *arg;

	va_start(args, request);
	arg = va_arg(args, void *);
	va_end(args);
	if (old_kernel && request == VH_PROCMAP_QUERY) {
		errno = ENOTTY;
		return -1;
	}
	return (int)syscall(SYS_ioctl, fd, request, arg);
}

// An older kernel, and no descriptor is free.
static void old_query(void)
{
	struct rlimit few = {.rlim_cur = 0, .rlim_max = 0};
	struct vh_stats st;

	old_kernel = 1;
	want(setrlimit(RLIMIT_NOFILE, &few) == 0);
	move(dev, VH_COHERENT);
	check(b);
	move(VH_HOME, 0);
	check(b);
	must(vh_adopt(s, (uintptr_t)map(1, PROT_READ | PROT_WRITE), page));
	vh_get_stats(s, &st);
	want(st.orphaned_pages == 0 && st.coherent_pages == PAGES);
}

// Memory is locked as it is mapped.
static void lock_future(void)
{
	move(dev, VH_COHERENT);
	if (mlockall(MCL_FUTURE) != 0)
		_exit(0); // an ordinary user may not
	move(VH_HOME, 0);
	check(b);
	munlockall();
	move(dev, 0);
	check(b);
}

// All memory is locked for a while. Then pages leave again.
static void lock_all(void)
{
	uint64_t there;
	int err;

	move(dev, 0);
	if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0)
		_exit(0);
	check(b);
	err = vh_migrate(s, addr, PAGES * page, dev, 0, &there);
	if (err != EPERM)
		printf("locked memory leaves: %s\n", strerror(err));
	want(err == EPERM);
	munlockall();
	move(dev, 0);
	check(b);
	move(dev, VH_COHERENT);
	check(b);
	move(VH_HOME, 0);
	check(b);
}

// The process has as many mappings as it may have: coherent pages come home nevertheless, at the end at least.
static void mappings(int close)
{
	unsigned char *at = map(PAGES, PROT_READ | PROT_WRITE);
	void *last = NULL;

	fill(at);
	must(vh_adopt(s, (uintptr_t)at, PAGES * page));
	addr = (uintptr_t)at;
	move(dev, VH_COHERENT);
	for (int i = 0;; i++) {
		void *p = map(1, i % 2 ? PROT_READ : PROT_NONE);

		if (p == MAP_FAILED)
			break;
		last = p;
	}
	want(errno == ENOMEM);
	if (!close) {
		move(VH_HOME, 0);
		check(at);
		return;
	}
	must(vh_close(s));
	memset(vram, 0xee, 4 * PAGES * page); // another page may have this memory now
	check(at);
	at[0] = 55;
	want((unsigned char)vram[0] == 0xee);
	munmap(last, page);
	_exit(0);
}

static void mappings_home(void) { mappings(0); }
static void mappings_close(void) { mappings(1); }

// What forks wipe in the child is wiped, if it was away, too.
static void wiped(void)
{
	if (!have.fork_events)
		_exit(0);
	want(madvise(b + 8 * page, 8 * page, MADV_WIPEONFORK) == 0);
	move(dev, 0);
	int pid = bare_fork();
	if (pid == 0) {
		for (int i = 0; i < PAGES; i++)
			if (b[i * page] != (i >= 8 && i < 16 ? 0 : i + 1))
				_exit(i + 1);
		_exit(0);
	}
	want(pid > 0);
	int status = wait_for(pid);
	if (status != 0)
		printf("status %#x\n", status);
	want(status == 0);
	check(b);
}

static volatile int stop;

static void *mover(void *arg)
{
	uint64_t there;

	(void)arg;
	while (!stop)
		vh_migrate(s, addr, PAGES * page, dev, 0, &there);
	return NULL;
}

// Another way to write: /proc/self/mem, as debuggers do.
static void proc_mem(void)
{
	pthread_t thread;
	int fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	static unsigned char buf[4096], got[4096];

	want(fd >= 0);
	want(pthread_create(&thread, NULL, mover, NULL) == 0);
	for (unsigned i = 0; i < 20000; i++) {
		uint64_t k = (uint64_t)rand_r(&seed) % PAGES;

		memset(buf, (int)i, sizeof buf);
		ssize_t n = pwrite(fd, buf, sizeof buf, (off_t)(addr + k * page));
		if (n < 0)
			continue; // the page is away, and this way does not wait for it
		want(n == sizeof buf);
		memcpy(got, b + k * page, sizeof got);
		if (memcmp(got, buf, sizeof buf) != 0) {
			printf("write %u is lost\n", i);
			fflush(stdout);
			_exit(1);
		}
	}
	stop = 1;
	pthread_join(thread, NULL);
}

static void *mapper(void *arg)
{
	(void)arg;
	while (!stop) { // mappings of others, which may come to lie anywhere
		for (int i = 0; i < 50; i++) {
			unsigned char *p = map(PAGES, PROT_READ | PROT_WRITE);

			memset(p, 0x5a, PAGES * page);
			for (int k = 0; k < 3; k++)
				sched_yield();
			for (uint64_t k = 0; k < PAGES * page; k += 64)
				if (p[k] != 0x5a) {
					printf("another mapping has %#x at %#lx\n", p[k], (unsigned long)k);
					fflush(stdout);
					_exit(1);
				}
			munmap(p, PAGES * page);
		}
	}
	return NULL;
}

// vh_unmap while a coherent page is on its way, by a prefetch, or by an access of a device that does not reach it.
static void unmap_beside(void)
{
	pthread_t thread;
	struct vh_stats st;
	uint64_t there, free_pages;

	want(pthread_create(&thread, NULL, mapper, NULL) == 0);
	must(vh_unmap(s, addr, PAGES * page));
	for (int i = 0; i < 1000; i++) {
		must(vh_alloc(s, PAGES * page, &addr));
		b = (unsigned char *)(uintptr_t)addr;
		fill(b);
		must(vh_migrate(s, addr, PAGES * page, dev, VH_COHERENT, &there));
		want(there == PAGES);
		for (uint64_t k = 0; k < PAGES; k += 8)
			must(vh_prefetch(s, addr + k * page, 8 * page, k % 16 ? VH_HOME : dev, VH_COHERENT));
		for (int k = rand_r(&seed) % 8; k > 0; k--)
			sched_yield();
		must(vh_unmap(s, addr, PAGES * page));
		must(vh_drain(s));
	}
	stop = 1;
	pthread_join(thread, NULL);
	vh_get_stats(s, &st);
	must(vh_vram_free(s, dev, &free_pages));
	if (st.away != 0 || st.orphaned_pages != 0 || free_pages != 4 * PAGES)
		printf("away %lu, orphaned %lu, free %lu\n", (unsigned long)st.away, (unsigned long)st.orphaned_pages, (unsigned long)free_pages);
	want(st.away == 0 && st.orphaned_pages == 0 && free_pages == 4 * PAGES);
}

static volatile uint64_t target;

static void *writer(void *arg)
{
	static unsigned char data[8 * 4096];

	(void)arg;
	memset(data, 0x77, sizeof data);
	while (!stop)
		vh_write(s, dev, 1, target, data, sizeof data);
	return NULL;
}

// When vh_unmap has returned, no access of a device is under way there.
static void write_beside(void)
{
	pthread_t thread;

	target = addr;
	want(pthread_create(&thread, NULL, writer, NULL) == 0);
	for (int i = 0; i < 3000; i++) {
		uint64_t at;

		must(vh_unmap(s, target, PAGES * page));
		unsigned char *p = mmap((void *)(uintptr_t)target, PAGES * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
		want(p != MAP_FAILED);
		p[0] = 1;
		for (int k = 0; k < 20; k++) {
			if (k % 4 == 3)
				sched_yield();
			if (p[8 * page - 1] != 0 || p[0] != 1 || p[4 * page] != 0) {
				printf("round %d: a device has written to another mapping\n", i);
				fflush(stdout);
				_exit(1);
			}
		}
		munmap(p, PAGES * page);
		must(vh_alloc(s, PAGES * page, &at));
		*(volatile char *)(uintptr_t)at = 1;
		target = at;
		if (i % 2)
			sched_yield();
	}
	stop = 1;
	pthread_join(thread, NULL);
	addr = target;
}

// The engine's reads come here. After target is set, what is reported before a mapping is moved there is reported after that, as when
// its thread has lost its processor between a change and the report: in one read, or in two.
static struct uffd_msg kept[2];
static volatile uint64_t target_of_move;
static volatile int apart, keep_moves, keeps;

ssize_t read(int fd, void *buf, size_t n)
{
	struct uffd_msg *msg = buf;
	ssize_t got;

	if (n < 3 * sizeof *msg || (target_of_move == 0 && keeps == 0))
		return syscall(SYS_read, fd, buf, n);
	if (target_of_move != 0) {
		got = syscall(SYS_read, fd, msg, sizeof *msg);
		if (got < 0 || (msg->event != UFFD_EVENT_UNMAP && msg->event != UFFD_EVENT_REMAP))
			return got;
		if (msg->event == UFFD_EVENT_UNMAP || msg->arg.remap.to != target_of_move) {
			if (msg->event == UFFD_EVENT_REMAP && !keep_moves)
				return got;
			kept[keeps++] = *msg;
			errno = EAGAIN;
			return -1;
		}
		target_of_move = 0;
		if (apart)
			return got;
		msg++;
	}
	got = keeps;
	memcpy(msg, kept, sizeof kept);
	keeps = 0;
	return (got + (msg - (struct uffd_msg *)buf)) * (ssize_t)sizeof *msg;
}

// Threads change mappings at the same time, so that what one moves comes to lie where another's was.
static void order(void)
{
	for (int round = 0; round < 8; round++) {
		uint64_t more, there;
		unsigned char *other = NULL, *at;

		must(vh_alloc(s, PAGES * page, &more));
		memset((void *)(uintptr_t)more, 0x99, PAGES * page);
		must(vh_migrate(s, more, PAGES * page, dev, 0, &there));
		move(dev, 0);
		apart = round % 2;
		keep_moves = round / 2 == 2;
		if (round / 2 == 3) { // what stays behind is still registered
			other = mremap((void *)(uintptr_t)more, PAGES * page, PAGES * page, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, NULL);
			want(other != MAP_FAILED);
		}
		unsigned char *free_place = map(PAGES, PROT_NONE);
		target_of_move = more;
		if (round / 2 == 1 || round / 2 == 2)
			other = mremap((void *)(uintptr_t)more, PAGES * page, PAGES * page, MREMAP_MAYMOVE | MREMAP_FIXED, free_place);
		else
			want(munmap((void *)(uintptr_t)more, PAGES * page) == 0);
		at = mremap(b, PAGES * page, PAGES * page, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)(uintptr_t)more);
		want(other != MAP_FAILED && at == (void *)(uintptr_t)more);
		b = at;
		addr = more;
		check(b);
		want(target_of_move == 0 && keeps == 0);
		move(dev, 0);
		check(b);
		for (uint64_t k = 0; other != NULL && k < PAGES * page; k++)
			want(other[k] == 0x99);
		if (other != NULL)
			must(vh_unmap(s, (uintptr_t)other, PAGES * page));
		struct vh_stats st;
		vh_get_stats(s, &st);
		want(st.away == 0);
	}
}

// A fork while a space is closed: the child has all bytes.
static pthread_barrier_t both;

static void *closer(void *arg)
{
	pthread_barrier_wait(&both);
	must(vh_close(arg));
	return NULL;
}

static void fork_close(void)
{
	for (int i = 0; i < 150; i++) {
		struct vh_space *other;
		unsigned char *at = map(PAGES, PROT_READ | PROT_WRITE);
		char why[256];
		pthread_t thread;
		uint64_t there;
		int d;

		fill(at);
		must(vh_open(&other, &have, why, sizeof why));
		must(vh_device_add(other, &d));
		must(vh_vram_add(other, d, (uintptr_t)vram, PAGES, -1, 0));
		must(vh_adopt(other, (uintptr_t)at, PAGES * page));
		must(vh_migrate(other, (uintptr_t)at, PAGES * page, d, 0, &there));
		pthread_barrier_init(&both, NULL, 2);
		want(pthread_create(&thread, NULL, closer, other) == 0);
		pthread_barrier_wait(&both);
		for (int k = rand_r(&seed) % 200; k > 0; k--)
			__asm__ volatile("" ::: "memory");
		int pid = fork();
		if (pid == 0) {
			check(at);
			_exit(0);
		}
		int status = wait_for(pid);
		if (status != 0)
			printf("round %d: status %#x\n", i, status);
		want(status == 0);
		pthread_join(thread, NULL);
		check(at);
		munmap(at, PAGES * page);
	}
}

// What vh_discard has made zero stays so, and what vh_protect forbids is forbidden, though others move the pages.
static void *prefetcher(void *arg)
{
	uint64_t there;

	(void)arg;
	while (!stop) {
		vh_migrate(s, addr, PAGES * page, dev, VH_COHERENT, &there);
		vh_migrate(s, addr, PAGES * page, VH_HOME, 0, &there);
	}
	return NULL;
}

static void discard_beside(void)
{
	pthread_t thread;

	want(pthread_create(&thread, NULL, prefetcher, NULL) == 0);
	for (int i = 0; i < 400; i++) {
		fill(b);
		must(vh_discard(s, addr, PAGES * page));
		for (int k = 0; k < PAGES; k++)
			if (b[k * page] != 0) {
				printf("round %d: page %d begins with %d after vh_discard\n", i, k, b[k * page]);
				fflush(stdout);
				_exit(1);
			}
	}
	stop = 1;
	pthread_join(thread, NULL);
}

static int may_write(uint64_t at)
{
	char line[512];
	FILE *f = fopen("/proc/self/maps", "re");
	int yes = -1;

	while (fgets(line, sizeof line, f) != NULL) {
		unsigned long start, end;
		char perms[8];

		if (sscanf(line, "%lx-%lx %7s", &start, &end, perms) == 3 && start <= at && at < end)
			yes = perms[1] == 'w';
	}
	fclose(f);
	return yes;
}

static void protect_beside(void)
{
	pthread_t thread;

	want(pthread_create(&thread, NULL, prefetcher, NULL) == 0);
	for (int i = 0; i < 600; i++) {
		must(vh_protect(s, addr, PAGES * page, 1, 0));
		for (int k = 0; k < 3; k++) {
			if (may_write(addr + (uint64_t)k * 20 * page) == 1) { // -1: it is being replaced
				printf("round %d: page %d may be written\n", i, k * 20);
				fflush(stdout);
				_exit(1);
			}
			sched_yield();
		}
		must(vh_protect(s, addr, PAGES * page, 1, 1));
	}
	stop = 1;
	pthread_join(thread, NULL);
}

// An access of a device never finds that nothing is mapped, though the mapping is replaced.
static void access_beside(void)
{
	pthread_t thread;
	unsigned char got[2];

	want(pthread_create(&thread, NULL, prefetcher, NULL) == 0);
	for (unsigned i = 0; i < 5000; i++) {
		uint64_t k = i % PAGES, old;

		must(vh_read(s, dev, 1, addr + k * page, got, 2));
		want(got[0] == k + 1);
		must(vh_write(s, dev, 1, addr + k * page, got, 1));
		if (i % 100 == 0)
			must(vh_atomic(s, 1, addr + k * page + 8, VH_ATOMIC_ADD, 1, 0, &old));
	}
	stop = 1;
	pthread_join(thread, NULL);
	check(b);
}

static const struct {
	const char *name;
	void (*run)(void);
} cases[] = {
	{"grown", grown}, {"descriptors", descriptors}, {"old-query", old_query}, {"lock-future", lock_future}, {"lock-all", lock_all},
	{"mappings-home", mappings_home}, {"mappings-close", mappings_close}, {"wiped", wiped}, {"proc-mem", proc_mem},
	{"unmap-beside", unmap_beside}, {"write-beside", write_beside}, {"order", order}, {"fork-close", fork_close},
	{"discard-beside", discard_beside}, {"protect-beside", protect_beside}, {"access-beside", access_beside},
};

int main(int argc, char **argv)
{
	char why[256];
	int fd, err;

	if (argc < 2) {
		for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
			puts(cases[i].name);
		return 0;
	}
	if (argc > 2)
		seed = (unsigned)strtoul(argv[2], NULL, 10);
	alarm(argc > 3 ? (unsigned)atoi(argv[3]) : 150);
	page = (uint64_t)sysconf(_SC_PAGESIZE);
	err = vh_open(&s, &have, why, sizeof why);
	if (err != 0) {
		printf("%s\n", why);
		return err == ENOSYS || err == EPERM || err == EOPNOTSUPP ? 77 : 1;
	}
	fd = memfd_create("vram", MFD_CLOEXEC);
	want(fd >= 0 && ftruncate(fd, 4 * PAGES * (off_t)page) == 0);
	vram = mmap(NULL, 4 * PAGES * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	want(vram != MAP_FAILED);
	must(vh_device_add(s, &dev));
	must(vh_vram_add(s, dev, (uintptr_t)vram, 4 * PAGES, fd, 0));
	must(vh_alloc(s, PAGES * page, &addr));
	b = (unsigned char *)(uintptr_t)addr;
	fill(b);
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
		if (strcmp(cases[i].name, argv[1]) == 0) {
			cases[i].run();
			must(vh_close(s));
			return 0;
		}
	printf("no case %s\n", argv[1]);
	return 2;
}
