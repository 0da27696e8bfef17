/*
 * What the front keeps about dma-bufs that CUDA has exported. The preloaded library's calls are made by the program
 * itself, with memory files for dma-bufs; the backend (cudabackend.c) prints which addresses it gets.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../clib/files/files.h"
#include "newer.h"
#include "verbena/verbs.h"

enum { RECORDS = 1024, FORKS = 200 };

static struct ibv_pd *pd;

static void failed(const char *what)
{
	perror(what);
	exit(1);
}

static int file(void)
{
	int fd = memfd_create("dma-buf", MFD_CLOEXEC);
	if (fd < 0)
		failed("memfd_create");
	return fd;
}

/* export returns a descriptor of a new file that CUDA has exported. */
static int export(uint64_t addr, uint64_t size)
{
	int fd = file();
	verbena_cuda_exported(fd, addr, size);
	return fd;
}

static struct ibv_mr *reg(int fd)
{
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(pd, 0, 4096, 0, fd, IBV_ACCESS_LOCAL_WRITE);
	if (!mr)
		failed("ibv_reg_dmabuf_mr");
	return mr;
}

static void open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context = list && *list ? ibv_open_device(*list) : NULL;
	pd = context ? ibv_alloc_pd(context) : NULL;
	if (!pd)
		failed("ibv_alloc_pd");
}

static void *work(void *stop)
{
	for (int fd = file(); !__atomic_load_n((bool *)stop, __ATOMIC_RELAXED);)
		verbena_cuda_exported(fd, 0x1000, 0x1000);
	return NULL;
}

/* Children of fork() are not kept by a lock of a thread that they do not have. */
static void fork_while_working(void)
{
	bool stop = false;
	pthread_t t;
	if (pthread_create(&t, NULL, work, &stop))
		failed("pthread_create");
	for (int i = 0; i < FORKS; i++) {
		pid_t child = fork();
		int status;
		if (!child) {
			verbena_cuda_exported(0, 0x1000, 0x1000);
			verbena_cuda_gone(VB_CUDA_CONTEXT, 1, 0); /* the child has no backend: it is not told */
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child || status)
			failed("a child");
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(t, NULL);
}

int main(void)
{
	int early = export(0x100000, 0x10000);
	verbena_cuda_gone(VB_CUDA_HOST, 0x5000, 0); /* no backend yet, and none is started */
	dprintf(1, "# before, a copy, another file\n");
	open_device();
	reg(early);
	struct ibv_mr *mr = reg(dup(early));
	reg(file());
	if (verbena_rereg_mr_fd(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, 0, 4096, early, 0))
		failed("verbena_rereg_mr_fd");
	struct attr a = {.length = 4096, .mask = MASK_IOVA | MASK_FD | MASK_FD_OFFSET, .fd = early};
	if (!reg_mr_ex(pd, &a))
		failed("ibv_reg_mr_ex");

	dprintf(1, "# an allocation and what lies beside it, below, within\n");
	int below = export(0x1f0000, 0x10000), within = export(0x208000, 0x1000), above = export(0x210000, 0x10000);
	verbena_cuda_gone(VB_CUDA_ALLOCATION, 0x200000, 0x10000);
	reg(below), reg(within), reg(above);

	dprintf(1, "# a range, in the middle of an export\n");
	verbena_cuda_gone(VB_CUDA_RANGE, 0x218000, 0x1000);
	reg(below), reg(above);

	dprintf(1, "# memory of the host, a release\n");
	verbena_cuda_gone(VB_CUDA_HOST, 0x100000, 0x10000);
	verbena_cuda_gone(VB_CUDA_RELEASE, 0, 0);
	reg(early), reg(below);

	dprintf(1, "# an allocation of unknown size\n");
	above = export(0x210000, 0x10000);
	verbena_cuda_gone(VB_CUDA_ALLOCATION, 0x200000, 0);
	reg(early), reg(above);

	dprintf(1, "# exported again\n");
	verbena_cuda_exported(early, 0x300000, 0x1000);
	reg(early);

	dprintf(1, "# a context, a device\n");
	verbena_cuda_gone(VB_CUDA_CONTEXT, 0x55, 0);
	reg(early);
	early = export(0x100000, 0x10000);
	verbena_cuda_gone(VB_CUDA_DEVICE, 1, 0);
	reg(early);

	dprintf(1, "# the last %d\n", RECORDS);
	early = export(0x100000, 0x10000);
	for (int i = 1; i < RECORDS; i++)
		close(export(0x1000000 + (uint64_t)i * 0x1000, 0x1000));
	reg(early);
	int last = export(0x400000, 0x1000);
	reg(early), reg(last);

	dprintf(1, "# a child\n");
	fork_while_working();
	pid_t child = fork();
	int status;
	if (!child) {
		reg(last);
		_exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		failed("the child");
	reg(last);
	return 0;
}
