/*
 * Fences by their descriptors: the calls of verbena/verbs.h.
 */
#include "front.h"

int verbena_create_fence(struct ibv_context *context);
int verbena_signal_fence(struct ibv_context *context, int fd, int err);
int verbena_fence_status(struct ibv_context *context, int fd);
int verbena_post_wait_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int timeout_ms, unsigned int send_flags);
int verbena_post_signal_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int send_flags);

enum { MAX_ERRNO = 4095 };

PUBLIC int verbena_create_fence(struct ibv_context *context)
{
	struct vb_context *c = live_context(context);
	int64_t fd = c ? c->h.backend->vbe_fence(VBE_FENCE_CREATE, -1, 0) : -EINVAL;
	if (fd >= 0)
		return (int)fd;
	errno = (int)-fd;
	return -1;
}

PUBLIC int verbena_signal_fence(struct ibv_context *context, int fd, int err)
{
	struct vb_context *c = live_context(context);
	if (!c || err < 0 || err > MAX_ERRNO)
		return vb_num(-EINVAL);
	return vb_num(c->h.backend->vbe_fence(VBE_FENCE_SIGNAL, fd, err));
}

PUBLIC int verbena_fence_status(struct ibv_context *context, int fd)
{
	struct vb_context *c = live_context(context);
	int64_t r = c ? c->h.backend->vbe_fence(VBE_FENCE_STATUS, fd, 0) : -EINVAL;
	return r > 1 ? (int)(1 - r) : (int)r;
}

static int post(struct ibv_qp *qp, const struct vbe_fence_wr *wr)
{
	struct vb_qp *q = LIVE(vb_qp, QP, qp);
	if (!q)
		return vb_num(-EINVAL);
	VB_WHOLE;
	return vb_num(q->h.backend->vbe_post_fence(q->h.handle, (struct vbe_fence_wr *)wr));
}

PUBLIC int verbena_post_wait_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int timeout_ms,
				   unsigned int send_flags)
{
	return post(qp, &(struct vbe_fence_wr){
				.id = wr_id, .timeout = timeout_ms * UINT64_C(1000000), .flags = send_flags, .fd = fd});
}

PUBLIC int verbena_post_signal_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int send_flags)
{
	return post(qp, &(struct vbe_fence_wr){.id = wr_id, .flags = send_flags, .signals = 1, .fd = fd});
}
