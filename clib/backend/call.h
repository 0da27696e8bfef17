#include "../front/backend.h"

void set_front(struct vbe_front *f);
void call_cq_event(uint64_t cookie);
void call_async_event(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type);
