// What a program sees of the library that hmm-tests do not look at: errors, when a fault is counted, what ends exclusive
// access, files of other devices and processes. It ends with status 0 if all is as in lib/test_hmm.c.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <lib/test_hmm_uapi.h>

#define PAGE 4096
#define N 40 // pages: more than one chunk

#define want(x) do { if (!(x)) { printf("line %d: not %s (device %d, errno %d)\n", __LINE__, #x, device, errno); exit(1); } } while (0)

static int device;
static struct hmm_dmirror_cmd cmd;
static unsigned char out[N * PAGE], in[N * PAGE];

// call returns 0 or an errno; the counts are in cmd.
static int call(int fd, unsigned long request, void *addr, uint64_t pages, void *ptr)
{
	cmd = (struct hmm_dmirror_cmd){.addr = (uintptr_t)addr, .npages = pages, .ptr = (uintptr_t)ptr};
	return ioctl(fd, request, &cmd) == 0 ? 0 : errno;
}

static int file(int number)
{
	char name[32];

	snprintf(name, sizeof name, "/dev/hmm_dmirror%d", number);
	return open(name, O_RDWR);
}

static unsigned char *memory(int prot, int flags)
{
	unsigned char *p = mmap(NULL, N * PAGE, prot, flags | MAP_ANONYMOUS, -1, 0);

	want(p != MAP_FAILED);
	madvise(p, N * PAGE, MADV_NOHUGEPAGE);
	return p;
}

static void fill(unsigned char *p, unsigned seed)
{
	for (unsigned i = 0; i < N * PAGE; i++)
		p[i] = (unsigned char)(seed + i * 7 + i / PAGE);
}

static int same(const unsigned char *p, unsigned seed)
{
	for (unsigned i = 0; i < N * PAGE; i++)
		if (p[i] != (unsigned char)(seed + i * 7 + i / PAGE))
			return 0;
	return 1;
}

// where returns what a device sees of a page.
static unsigned char where(int fd, unsigned char *p)
{
	unsigned char perm = 0;

	want(call(fd, HMM_DMIRROR_SNAPSHOT, p, 1, &perm) == 0 && cmd.cpages == 1);
	return perm;
}

static void errors(int fd)
{
	unsigned char *p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE), *shared;

	want(file(4) < 0 && errno == ENOENT);
	want(call(fd, HMM_DMIRROR_READ, p + 1, 1, in) == EINVAL);
	want(call(fd, HMM_DMIRROR_READ, p, 0, in) == EINVAL);
	want(call(fd, HMM_DMIRROR_READ, p, UINT64_MAX / PAGE, in) == EINVAL);
	want(call(fd, _IOWR('H', 0x09, struct hmm_dmirror_cmd), p, 1, in) == EINVAL);
	want(ioctl(fd, HMM_DMIRROR_READ, NULL) != 0 && errno == EFAULT);
	want(call(fd, HMM_DMIRROR_READ, p, 1, NULL) == EFAULT);
	want(call(fd, HMM_DMIRROR_WRITE, p, 1, NULL) == EFAULT);
	want(munmap(p + 33 * PAGE, PAGE) == 0);
	memset(in, 9, sizeof in);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == EFAULT && in[0] == 9);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == EINVAL);
	want(call(fd, HMM_DMIRROR_EXCLUSIVE, p, N, in) == EFAULT);
	want(munmap(p, N * PAGE) == 0);
	shared = memory(PROT_READ | PROT_WRITE, MAP_SHARED);
	fill(out, 1);
	want(call(fd, HMM_DMIRROR_WRITE, shared, N, out) == 0 && cmd.cpages == N && same(shared, 1));
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, shared, N, in) == ENOENT);
	want(call(fd, HMM_DMIRROR_EXCLUSIVE, shared, N, in) == EOPNOTSUPP);
	want(mprotect(shared, N * PAGE, PROT_READ) == 0);
	want(call(fd, HMM_DMIRROR_WRITE, shared, N, out) == EPERM);
	want(where(fd, shared) == HMM_DMIRROR_PROT_READ);
	want(munmap(shared, N * PAGE) == 0);
}

// When a fault is counted: not if the device's table has the pages.
static void faults(int fd, int same_device, int other)
{
	unsigned char *p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE);

	fill(p, 2);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 2));
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 0 && cmd.cpages == N && same(in, 2));
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p + 3 * PAGE, 1, in) == 0 && cmd.cpages == 1);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 0 && same(in, 2));
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_SYS, p, N, in) == 0 && cmd.cpages == 1);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 2));
	want(madvise(p + 5 * PAGE, PAGE, MADV_DONTNEED) == 0);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && in[5 * PAGE] == 0);
	fill(p, 2);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 0 && same(in, 2));
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0 && cmd.cpages == N && same(in, 2));
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 0 && same(in, 2));
	fill(out, 3);
	want(call(fd, HMM_DMIRROR_WRITE, p, N, out) == 0 && cmd.faults == 0);
	want(call(same_device, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 3));
	want(where(fd, p) == ((device < 2 ? HMM_DMIRROR_PROT_DEV_PRIVATE_LOCAL : HMM_DMIRROR_PROT_DEV_COHERENT_LOCAL) | HMM_DMIRROR_PROT_WRITE));
	if (device < 2)
		want(where(other, p) == HMM_DMIRROR_PROT_NONE);
	else
		want(where(other, p) == (HMM_DMIRROR_PROT_DEV_COHERENT_REMOTE | HMM_DMIRROR_PROT_WRITE));
	// A page that the CPU touches comes home, but from coherent memory.
	want(p[35 * PAGE] == (unsigned char)(3 + 35 * PAGE * 7 + 35));
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == (device < 2) && same(in, 3));
	want((where(fd, p + 35 * PAGE) == HMM_DMIRROR_PROT_WRITE) == (device < 2));
	p[36 * PAGE]++;
	want(call(fd, HMM_DMIRROR_READ, p + 36 * PAGE, 1, in) == 0 && in[0] == p[36 * PAGE]);
	p[36 * PAGE]--;
	// A read-only mapping is it for devices, wherever the page is.
	want(mprotect(p, N * PAGE, PROT_READ) == 0);
	want(call(fd, HMM_DMIRROR_WRITE, p, N, out) == EPERM && cmd.cpages == 0);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && same(in, 3));
	want(mprotect(p, N * PAGE, PROT_NONE) == 0);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == EFAULT);
	want(mprotect(p, N * PAGE, PROT_READ | PROT_WRITE) == 0);
	// Another device has private pages come home, and reads coherent ones in place.
	want(call(other, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 3));
	want((where(fd, p) == HMM_DMIRROR_PROT_WRITE) == (device < 2));
	// Back, once.
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == (device < 2 ? 0 : ENOENT)); // it has no entries of the coherent ones
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_SYS, p, N, in) == 0 && cmd.cpages == N);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_SYS, p, N, in) == 0 && cmd.cpages == 0);
	want(same(p, 3));
	// Other memory at the same addresses, where pages were home, and where they were away.
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 3));
	want(mmap(p, N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	fill(p, 3);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && same(in, 3));
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0);
	want(mmap(p, N * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == p);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 1 && in[0] == 0 && memcmp(in, in + 1, sizeof in - 1) == 0);
	fill(p, 4);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0 && same(in, 4));
	want(madvise(p, N * PAGE, MADV_DONTNEED) == 0);
	want(p[0] == 0 && memcmp(p, p + 1, N * PAGE - 1) == 0);
	want(munmap(p, N * PAGE) == 0);
}

static void exclusive(int fd, int same_device)
{
	unsigned char *p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE);

	fill(p, 5);
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == 0);
	want(call(fd, HMM_DMIRROR_EXCLUSIVE, p, N, in) == 0 && cmd.cpages == N && same(in, 5));
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == EPERM);
	want(call(same_device, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == 0);
	want(where(fd, p) == HMM_DMIRROR_PROT_NONE);
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && cmd.faults == 0 && same(in, 5));
	for (int i = 0; i < N - 1; i++)
		p[i * PAGE]++;
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N - 1, in) == 0);
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == EPERM); // the last page
	want(call(same_device, HMM_DMIRROR_READ, p + (N - 1) * PAGE, 1, in) == 0 && cmd.faults == 1);
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == 0);
	want(call(fd, HMM_DMIRROR_EXCLUSIVE, p, N, in) == 0);
	fill(out, 6);
	want(call(fd, HMM_DMIRROR_WRITE, p, N, out) == 0 && cmd.faults == 1);
	want(call(fd, HMM_DMIRROR_CHECK_EXCLUSIVE, p, N, in) == 0);
	want(same(p, 6));
	want(munmap(p, N * PAGE) == 0);
}

// An allocation of the device that fails: of one page, since there are no huge pages here.
static void allocation(int fd)
{
	unsigned char *p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE);

	fill(p, 7);
	want(call(fd, HMM_DMIRROR_FLAGS, p, HMM_DMIRROR_FLAG_FAIL_ALLOC, NULL) == 0);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == ENOENT);
	want(where(fd, p) == HMM_DMIRROR_PROT_WRITE && where(fd, p + PAGE) != HMM_DMIRROR_PROT_WRITE);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0 && same(in, 7));
	want(call(fd, HMM_DMIRROR_FLAGS, p, HMM_DMIRROR_FLAG_FAIL_ALLOC, NULL) == 0);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_SYS, p, N, in) == ENOMEM);
	want(call(fd, HMM_DMIRROR_RELEASE, p, N, in) == 0);
	want(where(fd, p) == HMM_DMIRROR_PROT_WRITE && where(fd, p + (N - 1) * PAGE) == HMM_DMIRROR_PROT_WRITE);
	want(same(p, 7));
	want(munmap(p, N * PAGE) == 0);
}

static void child(int fd)
{
	unsigned char *p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE);
	int status, mine;
	pid_t pid;

	fill(p, 8);
	want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0);
	if ((pid = fork()) == 0) {
		want(call(fd, HMM_DMIRROR_READ, p, N, in) == EOPNOTSUPP);
		want(same(p, 8));
		want((mine = file(device)) >= 0);
		fill(out, 9);
		want(call(mine, HMM_DMIRROR_WRITE, p, N, out) == 0 && cmd.faults == 1 && same(p, 9));
		want(call(mine, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0 && same(in, 9));
		want(where(mine, p) != HMM_DMIRROR_PROT_WRITE);
		want(close(mine) == 0 && close(fd) == 0 && same(p, 9));
		_exit(0);
	}
	want(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
	want(same(p, 8));
	want(call(fd, HMM_DMIRROR_READ, p, N, in) == 0 && same(in, 8));
	want(munmap(p, N * PAGE) == 0);
}

int main(void)
{
	for (device = 0; device < 4; device++) {
		int fd = file(device), same_device = file(device), other = file(device ^ 1);
		unsigned char *p;

		want(fd >= 0 && same_device >= 0 && other >= 0);
		errors(fd);
		faults(fd, same_device, other);
		exclusive(fd, same_device);
		allocation(fd);
		child(fd);
		// A file that is closed takes the device's pages home.
		p = memory(PROT_READ | PROT_WRITE, MAP_PRIVATE);
		fill(p, 10);
		want(call(fd, HMM_DMIRROR_MIGRATE_TO_DEV, p, N, in) == 0);
		want(where(same_device, p) != HMM_DMIRROR_PROT_WRITE);
		want(close(fd) == 0);
		want(where(same_device, p) == HMM_DMIRROR_PROT_WRITE && same(p, 10));
		want(close(same_device) == 0 && close(other) == 0);
		want(ioctl(fd, HMM_DMIRROR_READ, &cmd) != 0 && errno == EBADF);
	}
	printf("ok\n");
	return 0;
}
