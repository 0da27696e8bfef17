/*
 * The few of mlx5's own verbs that a program may be given: whether a device is one
 * (VERBENA_IDENTITY=mlx5 says yes), and queue pairs with its flags for receives that
 * come in the completion. Those are about speed alone: they change nothing here.
 */
#include <stdlib.h>
#include <string.h>

#include "front.h"

PUBLIC bool mlx5dv_is_supported(struct ibv_device *device)
{
	const char *as = getenv("VERBENA_IDENTITY");
	return device && as && !strcmp(as, "mlx5");
}

enum {
	MASK_CREATE_FLAGS = 1 << 0,
	DISABLE_SCATTER_TO_CQE = 1 << 3,
	ALLOW_SCATTER_TO_CQE = 1 << 4,
};

struct mlx5_qp_init_attr { /* the beginning of struct mlx5dv_qp_init_attr */
	uint64_t comp_mask;
	uint32_t create_flags;
};

PUBLIC struct ibv_qp *mlx5dv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr,
				       struct mlx5_qp_init_attr *own)
{
	if (!live_context(context) || !attr)
		return vb_fail(EINVAL);
	if (!mlx5dv_is_supported(context->device))
		return vb_fail(EOPNOTSUPP);
	if (own) {
		const uint32_t both = DISABLE_SCATTER_TO_CQE | ALLOW_SCATTER_TO_CQE;
		uint32_t flags = own->comp_mask & MASK_CREATE_FLAGS ? own->create_flags : 0;
		if (own->comp_mask & ~(uint64_t)MASK_CREATE_FLAGS || flags & ~both)
			return vb_fail(EOPNOTSUPP);
		if (flags == both)
			return vb_fail(EINVAL);
	}
	return vb_create_qp_ex(context, attr);
}
