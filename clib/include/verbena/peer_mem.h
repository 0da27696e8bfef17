/*
 * PeerDirect clients: drivers of memory that programs register by its address, though the CPU
 * finds nothing there. docs/dmabuf.md has the rules.
 *
 * A client is a program itself, which calls verbena_register_peer_memory_client, or a shared
 * object that VERBENA_PEER_MEM names: a list of paths, separated by colons. The library loads it
 * before the first region is registered, and calls its function verbena_peer_mem_init.
 *
 * If ibv_reg_mr finds that an address is no memory of the process, it asks the clients, in the
 * order of their registration:
 *
 *   acquire, get_pages, dma_map, get_page_size     at registration
 *   dma_unmap, put_pages, release                  at deregistration, or after a failure
 *
 * For one region these are called one after the other; for several regions at the same time, by
 * any thread. A client that does not answer for 10 seconds makes the verb fail (ETIMEDOUT); what
 * it has begun is undone when it does answer.
 */
#ifndef VERBENA_PEER_MEM_H
#define VERBENA_PEER_MEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define VERBENA_PEER_MEM_NAME_MAX 64
#define VERBENA_PEER_MEM_VERSION_MAX 16

/* A part of the memory that lies together: whole pages of the client's size. */
struct verbena_peer_segment {
	uint64_t addr; /* where the CPU finds it */
	uint64_t length;
};

/* Where memory is. The segments belong to the client, which keeps them until dma_unmap has
 * returned. */
struct verbena_sg_table {
	const struct verbena_peer_segment *segments;
	uint32_t count;
};

/* invalidate calls neither dma_unmap nor put_pages: the client does what is needed when it has
 * returned. */
#define VERBENA_PEER_MEM_INVALIDATE_UNMAPS 1

struct verbena_peer_memory_client {
	char name[VERBENA_PEER_MEM_NAME_MAX]; /* a word; no two clients have the same */
	char version[VERBENA_PEER_MEM_VERSION_MAX];
	uint32_t flags; /* VERBENA_PEER_MEM_* */

	/* acquire returns 1 if the bytes are the client's, and stores what the other functions are
	 * given; otherwise 0. */
	int (*acquire)(uint64_t addr, uint64_t size, void **client_context);
	/* get_pages holds the memory in place until put_pages. write is 1; force is 1 if the region
	 * gives no right to write. core_context is for invalidate. It returns 0 or a negative
	 * errno. */
	int (*get_pages)(uint64_t addr, uint64_t size, int write, int force, void *client_context, uint64_t core_context);
	/* dma_map stores where the pages are, from the one with the first byte on. It returns 0 or a
	 * negative errno. */
	int (*dma_map)(struct verbena_sg_table *sg, void *client_context);
	void (*dma_unmap)(struct verbena_sg_table *sg, void *client_context);
	void (*put_pages)(void *client_context);
	/* get_page_size returns the size of a page, a power of two and at least that of the system's.
	 * NULL: they are the system's. */
	uint64_t (*get_page_size)(void *client_context);
	void (*release)(void *client_context); /* may be NULL */
};

/*
 * verbena_invalidate_peer_memory is called by the client when memory is freed that is registered.
 * When it returns, no device accesses the memory any more; dma_unmap and put_pages were called from
 * within. core_context may be stale: then nothing happens. It waits for a registration that is under
 * way, so the client must not hold a lock that its functions take. It returns 0 or a negative errno.
 */
typedef int verbena_invalidate_peer_memory(void *registration, uint64_t core_context);

/*
 * verbena_register_peer_memory_client makes a client known, and copies the structure. If invalidate
 * is not NULL the client may take memory away, and gets the function for that. It returns NULL with
 * errno: EINVAL if a function is missing that is not marked above, or the name is not as it must be;
 * EEXIST for a second client of that name.
 */
void *verbena_register_peer_memory_client(const struct verbena_peer_memory_client *client,
					  verbena_invalidate_peer_memory **invalidate);

/*
 * verbena_unregister_peer_memory_client ends it, and waits until the client's last region is
 * deregistered: then none of its functions is called any more. It returns 0 or an errno: ETIMEDOUT if
 * there are still regions after 10 seconds; EINVAL for what is no registration.
 */
int verbena_unregister_peer_memory_client(void *registration);

/* What a shared object is given: it need not be linked to libibverbs. */
struct verbena_peer_mem_core {
	uint32_t size; /* of the structure: later versions have more */
	void *(*register_client)(const struct verbena_peer_memory_client *client,
				 verbena_invalidate_peer_memory **invalidate);
	int (*unregister_client)(void *registration);
};

/* A shared object in VERBENA_PEER_MEM defines this function. It returns 0, or a negative errno with
 * which it is left out. It must not register memory itself. */
typedef int verbena_peer_mem_init_function(const struct verbena_peer_mem_core *core);
verbena_peer_mem_init_function verbena_peer_mem_init;

#ifdef __cplusplus
}
#endif

#endif
