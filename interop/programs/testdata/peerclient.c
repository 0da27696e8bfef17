/*
 * A shared object with a PeerDirect client, for VERBENA_PEER_MEM. A program finds the device by the
 * symbol peer_device.
 */
#include "peerdev.h"

struct dev *peer_device;
void *peer_registration;
verbena_invalidate_peer_memory *peer_invalidate;

int verbena_peer_mem_init(const struct verbena_peer_mem_core *core)
{
	if (core->size < sizeof *core)
		return -EINVAL;
	dev_make();
	peer_registration = core->register_client(&dev_client, &peer_invalidate);
	if (!peer_registration)
		return -errno;
	peer_device = &dev;
	return 0;
}
