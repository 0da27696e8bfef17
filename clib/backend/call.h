#include "../front/backend.h"

/* The functions of struct vbe_front: Go does not call pointers to functions. */
void set_front(struct vbe_front *f);
void call_cq_event(uint64_t cookie);
void call_async_event(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type);

int cuda_is_watched(void); /* the preloaded library will call verbena_cuda_gone */

void call_gpu(uint64_t function, uint64_t arg, int error); /* a function of verbena/gpu.h's caller */

/* PeerDirect clients: peer.c. A claim is what a client has claimed, as a number. */
int peer_whole(struct verbena_peer_memory_client *c); /* it has all functions that it needs */
uint64_t peer_acquire(struct verbena_peer_memory_client *c, uint64_t addr, uint64_t size); /* 0: not its own */
int64_t peer_get_pages(uint64_t claim, uint64_t addr, uint64_t size, int write, int force, uint64_t core);
int64_t peer_dma_map(uint64_t claim);
uint64_t peer_count(uint64_t claim); /* segments of its table */
void peer_segment(uint64_t claim, uint64_t i, uint64_t *addr, uint64_t *length);
void peer_dma_unmap(uint64_t claim);
void peer_put_pages(uint64_t claim);
uint64_t peer_page_size(uint64_t claim);
void peer_release(uint64_t claim);
