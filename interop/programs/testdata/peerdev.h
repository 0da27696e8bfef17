/*
 * A device for tests of PeerDirect: addresses at which the CPU finds nothing, and pages elsewhere, in
 * the opposite order. It notes which functions of its client were called, and can be told to fail,
 * to hang and to lie.
 */
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <verbena/peer_mem.h>

enum { DEV_PAGE = 65536, DEV_PAGES = 4, DEV_SIZE = DEV_PAGES * DEV_PAGE };

enum lie { TRUTH, SHORT, TWICE, WRAPS, NOWHERE, EMPTY, NO_TABLE, BEYOND, MANY };

struct dev {
	char *addr;   /* where programs register it */
	char *memory; /* where it is */
	pthread_mutex_t lock; /* guards what follows */
	char calls[256]; /* a letter for each call: a g m u p r */
	uint64_t core;
	int fail_get, fail_map; /* errnos */
	enum lie lie;
	uint64_t page_size;
	int hang; /* dma_map waits for so many seconds */
	struct verbena_peer_segment segments[DEV_PAGES];
};

static struct dev dev = {.lock = PTHREAD_MUTEX_INITIALIZER, .page_size = DEV_PAGE};

static void dev_make(void)
{
	/* Before it and behind it there is nothing either. */
	char *room = mmap(NULL, DEV_SIZE + 3 * DEV_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	dev.addr = (char *)(((uintptr_t)room + 2 * DEV_PAGE - 1) & ~(uintptr_t)(DEV_PAGE - 1));
	dev.memory = mmap(NULL, DEV_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (room == MAP_FAILED || dev.memory == MAP_FAILED)
		abort();
}

/* dev_at returns where a byte of the device is. */
static char *dev_at(uint64_t off)
{
	return dev.memory + (DEV_PAGES - 1 - off / DEV_PAGE) * DEV_PAGE + off % DEV_PAGE;
}

static void dev_note(char what)
{
	pthread_mutex_lock(&dev.lock);
	size_t n = strlen(dev.calls);
	if (n < sizeof dev.calls - 1)
		dev.calls[n] = what, dev.calls[n + 1] = 0;
	pthread_mutex_unlock(&dev.lock);
}

static int dev_acquire(uint64_t addr, uint64_t size, void **context)
{
	uint64_t off = addr - (uintptr_t)dev.addr;
	if (off >= DEV_SIZE || size > DEV_SIZE - off)
		return 0;
	*context = &dev;
	dev_note('a');
	return 1;
}

static int dev_get_pages(uint64_t addr, uint64_t size, int write, int force, void *context, uint64_t core)
{
	if (context != &dev || !write || force > 1 || addr - (uintptr_t)dev.addr >= DEV_SIZE || !size)
		return -EINVAL;
	if (dev.fail_get)
		return -dev.fail_get;
	dev.core = core;
	dev_note('g');
	return 0;
}

static int dev_dma_map(struct verbena_sg_table *sg, void *context)
{
	if (context != &dev || sg->segments || sg->count)
		return -EINVAL;
	if (dev.fail_map)
		return -dev.fail_map;
	if (dev.hang)
		sleep((unsigned int)dev.hang);
	dev_note('m');
	/* Regions of the tests begin in the first page. */
	for (int i = 0; i < DEV_PAGES; i++)
		dev.segments[i] = (struct verbena_peer_segment){(uintptr_t)dev_at((uint64_t)i * DEV_PAGE), DEV_PAGE};
	*sg = (struct verbena_sg_table){dev.segments, DEV_PAGES};
	switch (dev.lie) {
	case TRUTH:
		break;
	case SHORT:
		sg->count = 1;
		break;
	case TWICE:
		dev.segments[1] = dev.segments[0];
		break;
	case WRAPS:
		dev.segments[1].addr = -(uint64_t)DEV_PAGE / 2;
		break;
	case NOWHERE:
		dev.segments[1].addr = 0;
		break;
	case EMPTY:
		dev.segments[1].length = 0;
		break;
	case NO_TABLE:
		sg->segments = NULL;
		break;
	case BEYOND:
		dev.segments[1].addr = (uint64_t)1 << 60;
		break;
	case MANY:
		sg->count = UINT32_MAX;
	}
	return 0;
}

static void dev_dma_unmap(struct verbena_sg_table *sg, void *context)
{
	if (context == &dev && (sg->segments == dev.segments || dev.lie == NO_TABLE))
		dev_note('u');
}

static void dev_put_pages(void *context)
{
	if (context == &dev)
		dev_note('p');
}

static uint64_t dev_page_size(void *context) { return context == &dev ? dev.page_size : 0; }

static void dev_release(void *context)
{
	if (context == &dev)
		dev_note('r');
}

static const struct verbena_peer_memory_client dev_client = {
	.name = "nv_mem",
	.version = "1.3",
	.acquire = dev_acquire,
	.get_pages = dev_get_pages,
	.dma_map = dev_dma_map,
	.dma_unmap = dev_dma_unmap,
	.put_pages = dev_put_pages,
	.get_page_size = dev_page_size,
	.release = dev_release,
};
