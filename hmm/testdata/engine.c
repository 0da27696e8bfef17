// The engine without Go: what a program in C does to it. It ends with status 0 if all went well, and with 77 where the
// kernel does not allow it.

#define _GNU_SOURCE
#include "../hmm.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGES 64

static struct vh_space *s;
static unsigned char *b;
static uint64_t page;
static volatile unsigned touched, wrong;

#define must(x) do { int e_ = (x); if (e_ != 0) { printf("%d: %s: %s\n", __LINE__, #x, strerror(e_)); exit(1); } } while (0)
#define want(x) do { if (!(x)) { printf("%d: not %s\n", __LINE__, #x); exit(1); } } while (0)

// on_alarm touches a page, which may be away, in whatever the thread does.
static void on_alarm(int sig)
{
	unsigned i = touched++ % PAGES;

	(void)sig;
	if (b[i * page] != (unsigned char)(i + 1))
		wrong++;
	b[i * page + 1]++;
}

static int child_of(int bare)
{
	pid_t pid = bare ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
	int status;

	want(pid >= 0);
	if (pid == 0) {
		for (int i = 0; i < PAGES; i++)
			if (b[i * page] != i + 1)
				_exit(1);
		b[0] = 99; // the child's own copy
		uint64_t there;
		_exit(vh_migrate(s, (uintptr_t)b, page, VH_HOME, 0, &there) == ENODEV ? 0 : 2);
	}
	want(waitpid(pid, &status, 0) == pid);
	return status;
}

// mover moves pages in all ways until it is told to stop.
static volatile int stop;
static int the_dev;

static void *mover(void *arg)
{
	uint64_t there;

	(void)arg;
	for (unsigned i = 0; !stop; i++) {
		int err = vh_migrate(s, (uintptr_t)b, PAGES * page, the_dev, i % 3 == 0 ? VH_COHERENT : 0, &there);

		want(err == 0 || err == EBUSY); // a page may be shared with a child, again and again
		if (i % 2)
			must(vh_migrate(s, (uintptr_t)b, PAGES * page, VH_HOME, 0, &there));
	}
	return NULL;
}

int main(void)
{
	struct vh_features have;
	struct vh_stats st;
	char why[256];
	uint64_t addr, there, old, adds = 0;
	int dev, fd, err;
	char *vram;

	err = vh_open(&s, &have, why, sizeof why);
	if (err != 0) {
		printf("%s\n", why);
		return err == ENOSYS || err == EPERM || err == EOPNOTSUPP ? 77 : 1;
	}
	page = (uint64_t)sysconf(_SC_PAGESIZE);
	fd = memfd_create("vram", MFD_CLOEXEC);
	want(fd >= 0 && ftruncate(fd, 2 * PAGES * (off_t)page) == 0);
	vram = mmap(NULL, 2 * PAGES * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	want(vram != MAP_FAILED);
	must(vh_device_add(s, &dev));
	must(vh_vram_add(s, dev, (uintptr_t)vram, 2 * PAGES, fd, 0));
	must(vh_alloc(s, PAGES * page, &addr));
	b = (unsigned char *)(uintptr_t)addr;
	for (int i = 0; i < PAGES; i++)
		b[i * page] = (unsigned char)(i + 1);

	// A signal handler that touches pages, in a thread that moves and accesses them.
	struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	struct itimerval timer = {{0, 200}, {0, 200}}, none = {{0, 0}, {0, 0}};
	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &timer, NULL);
	while (touched < 2000) {
		unsigned char buf[100];

		must(vh_migrate(s, addr, PAGES * page, dev, 0, &there));
		want(there == PAGES);
		for (int i = 0; i < 20; i++) {
			must(vh_write(s, dev, 1, addr + 5 * page + 200, "abc", 3));
			must(vh_read(s, dev, 1, addr + 5 * page + 200, buf, sizeof buf));
			want(memcmp(buf, "abc", 3) == 0);
			must(vh_atomic(s, 1, addr + 6 * page + 800, VH_ATOMIC_ADD, 1, 0, &old));
			want(old == adds++);
		}
	}
	setitimer(ITIMER_REAL, &none, NULL);
	want(wrong == 0);
	unsigned sum = 0;
	for (int i = 0; i < PAGES; i++)
		sum += b[i * page + 1];
	want(sum % 256 == touched % 256);

	// Forks, with pages that are away.
	for (int bare = 0; bare <= (have.fork_events ? 1 : 0); bare++) {
		must(vh_migrate(s, addr, PAGES * page, dev, 0, &there));
		int status = child_of(bare);
		want(WIFEXITED(status) && WEXITSTATUS(status) == 0);
		want(b[0] == 1);
		vh_get_stats(s, &st);
		want(bare ? st.forked_pages == PAGES : st.forked_pages == 0 && st.away == 0);
	}
	// A child that lives shares pages copy on write: they are copied, and leave.
	int pipes[2];
	want(pipe(pipes) == 0);
	pid_t pid = fork();
	if (pid == 0) {
		char c;
		close(pipes[1]);
		(void)!read(pipes[0], &c, 1);
		for (int i = 0; i < PAGES; i++)
			if (b[i * page] != i + 1)
				_exit(1);
		_exit(0);
	}
	must(vh_migrate(s, addr, PAGES * page, dev, 0, &there));
	want(there == PAGES);
	for (int i = 0; i < PAGES; i++)
		b[i * page] += 100;
	close(pipes[1]);
	int status;
	want(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	for (int i = 0; i < PAGES; i++)
		b[i * page] -= 100;

	// A device that fails before a fork: the child dies by a signal, and sees no zeros. The parent has its bytes later.
	for (int bare = 0; bare <= (have.fork_events ? 1 : 0); bare++) {
		must(vh_migrate(s, addr, PAGES * page, dev, 0, &there));
		must(vh_device_fail(s, dev, 10));
		status = child_of(bare);
		want(WIFSIGNALED(status) && (WTERMSIG(status) == SIGBUS || WTERMSIG(status) == SIGSEGV));
		must(vh_device_fail(s, dev, -1));
		must(vh_migrate(s, addr, PAGES * page, VH_HOME, 0, &there));
		for (int i = 0; i < PAGES; i++)
			want(b[i * page] == i + 1);
	}
	// Forks while pages leave, come home and become coherent: every child has all bytes.
	pthread_t thread;
	the_dev = dev;
	want(pthread_create(&thread, NULL, mover, NULL) == 0);
	for (int i = 0; i < 200; i++) {
		int bare = have.fork_events && i % 2;

		pid = bare ? (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0) : fork();
		want(pid >= 0);
		if (pid == 0) {
			for (int k = 0; k < PAGES; k++)
				if (b[k * page] != k + 1)
					_exit(k + 1);
			_exit(0);
		}
		want(waitpid(pid, &status, 0) == pid);
		// A bare fork gives the child no mapping of coherent pages.
		if (status != 0 && !(bare && WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV)) {
			printf("%d: child %d (bare: %d): status %#x\n", __LINE__, i, bare, status);
			return 1;
		}
	}
	stop = 1;
	want(pthread_join(thread, NULL) == 0);

	// Results of calls may lie in memory of the space, and be away.
	uint64_t more, *result, *seq;
	uint32_t *entries;
	const uint64_t *word;
	must(vh_alloc(s, 2 * page, &more));
	result = (uint64_t *)(uintptr_t)more;
	entries = (uint32_t *)(uintptr_t)(more + page);
	seq = result + 1;
	must(vh_mirror(s, addr, PAGES * page, &word));
	for (int i = 0; i < 50; i++) {
		must(vh_migrate(s, more, 2 * page, dev, 0, &there));
		must(vh_atomic(s, 1, addr + 7 * page + 800, VH_ATOMIC_ADD, 1, 0, result));
		want(*result == (uint64_t)i);
		must(vh_migrate(s, more, 2 * page, dev, 0, &there));
		must(vh_snapshot(s, 1, addr, PAGES, entries, word, seq));
		want(entries[7] & VH_E_VALID);
		must(vh_migrate(s, more, 2 * page, dev, 0, &there));
		must(vh_read(s, dev, 1, addr + 5 * page, result, 100)); // a buffer of the space
		want(*(unsigned char *)result == 6);
		must(vh_migrate(s, more, 2 * page, dev, 0, &there));
		must(vh_write(s, dev, 1, addr + 5 * page, result, 100));
		must(vh_vram_free(s, dev, result));
	}
	vh_mirror_end(s, word);
	must(vh_close(s));
	return 0;
}
