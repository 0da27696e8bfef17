/* Calls of the functions of PeerDirect clients, for Go, which cannot call C function pointers. */
#include <stdlib.h>

#include "call.h"

/* claim is memory that a client has claimed. */
struct claim {
	struct verbena_peer_memory_client *client;
	void *context;
	struct verbena_sg_table sg;
};

static struct claim *at(uint64_t number) { return (struct claim *)(uintptr_t)number; }

int peer_whole(struct verbena_peer_memory_client *c)
{
	return c->acquire && c->get_pages && c->dma_map && c->dma_unmap && c->put_pages;
}

uint64_t peer_acquire(struct verbena_peer_memory_client *c, uint64_t addr, uint64_t size)
{
	struct claim *new = calloc(1, sizeof *new);
	if (!new)
		return 0;
	new->client = c;
	if (c->acquire(addr, size, &new->context) <= 0) {
		free(new);
		return 0;
	}
	return (uintptr_t)new;
}

int64_t peer_get_pages(uint64_t claim, uint64_t addr, uint64_t size, int write, int force, uint64_t core)
{
	struct claim *c = at(claim);
	return c->client->get_pages(addr, size, write, force, c->context, core);
}

int64_t peer_dma_map(uint64_t claim)
{
	struct claim *c = at(claim);
	c->sg = (struct verbena_sg_table){0};
	return c->client->dma_map(&c->sg, c->context);
}

uint64_t peer_count(uint64_t claim) { return at(claim)->sg.segments ? at(claim)->sg.count : 0; }

void peer_segment(uint64_t claim, uint64_t i, uint64_t *addr, uint64_t *length)
{
	*addr = at(claim)->sg.segments[i].addr;
	*length = at(claim)->sg.segments[i].length;
}

void peer_dma_unmap(uint64_t claim) { at(claim)->client->dma_unmap(&at(claim)->sg, at(claim)->context); }
void peer_put_pages(uint64_t claim) { at(claim)->client->put_pages(at(claim)->context); }
uint64_t peer_page_size(uint64_t claim) { return at(claim)->client->get_page_size(at(claim)->context); }

void peer_release(uint64_t claim)
{
	struct claim *c = at(claim);
	if (c->client->release)
		c->client->release(c->context);
	free(c);
}
