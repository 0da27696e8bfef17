/*
 * The verbs of mlx5's own that work if VERBENA_IDENTITY is mlx5: opening and querying a
 * device, queue pairs with mlx5's flags, and dma-bufs. Indirect keys are in mkey.c.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "front.h"

PUBLIC bool mlx5dv_is_supported(struct ibv_device *device)
{
	const char *as = vb_setting("VERBENA_IDENTITY");
	return device && as && !strcmp(as, "mlx5");
}

PUBLIC struct ibv_context *mlx5dv_open_device(struct ibv_device *device, struct mlx5dv_context_attr *attr)
{
	if (!device)
		return vb_fail(EINVAL);
	/* The flag asks for commands to the firmware (DEVX): there are none. Indirect keys do
	 * not need it, neither here nor with current kernels. */
	if (!mlx5dv_is_supported(device) || (attr && (attr->flags || attr->comp_mask)))
		return vb_fail(EOPNOTSUPP);
	return ibv_open_device(device);
}

/* The device has none of these capabilities. So each field that the program asks for becomes
 * 0, and so does the mask, which says which fields are valid. */
PUBLIC int mlx5dv_query_device(struct ibv_context *context, struct mlx5dv_context *to)
{
	if (!live_context(context) || !to)
		return vb_num(-EINVAL);
	if (!mlx5dv_is_supported(context->device))
		return vb_num(-EOPNOTSUPP);
#define NONE(bit, field)                                                                                               \
	if (to->comp_mask & MLX5DV_CONTEXT_MASK_##bit)                                                                 \
	memset(&to->field, 0, sizeof to->field)
	NONE(CQE_COMPRESION, cqe_comp_caps);
	NONE(SWP, sw_parsing_caps);
	NONE(STRIDING_RQ, striding_rq_caps);
	NONE(TUNNEL_OFFLOADS, tunnel_offloads_caps);
	NONE(DYN_BFREGS, max_dynamic_bfregs);
	NONE(CLOCK_INFO_UPDATE, max_clock_info_update_nsec);
	NONE(FLOW_ACTION_FLAGS, flow_action_flags);
	NONE(DC_ODP_CAPS, dc_odp_caps);
	NONE(HCA_CORE_CLOCK, hca_core_clock);
	NONE(NUM_LAG_PORTS, num_lag_ports);
	NONE(SIGNATURE_OFFLOAD, sig_caps);
	NONE(DCI_STREAMS, dci_streams_caps);
	NONE(WR_MEMCPY_LENGTH, max_wr_memcpy_length);
	NONE(CRYPTO_OFFLOAD, crypto_caps);
#undef NONE
	to->version = 0;
	to->flags = 0;
	to->comp_mask = 0;
	return 0;
}

/* check_own checks mlx5's own attributes of a queue pair. */
static int check_own(const struct ibv_qp_init_attr_ex *attr, const struct mlx5dv_qp_init_attr *own)
{
	const uint64_t known = MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS | MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS;
	const uint32_t scatter = MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE | MLX5DV_QP_CREATE_ALLOW_SCATTER_TO_CQE;
	const uint64_t keys =
		MLX5DV_QP_EX_WITH_MR_INTERLEAVED | MLX5DV_QP_EX_WITH_MR_LIST | MLX5DV_QP_EX_WITH_MKEY_CONFIGURE;
	if (own->comp_mask & ~known)
		return EOPNOTSUPP;
	if (own->comp_mask & MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS) {
		if (own->create_flags & ~scatter)
			return EOPNOTSUPP;
		if (own->create_flags == scatter)
			return EINVAL;
	}
	if (own->comp_mask & MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS && own->send_ops_flags &&
	    (own->send_ops_flags & ~keys || attr->qp_type != IBV_QPT_RC))
		return EOPNOTSUPP;
	return 0;
}

/* If the program asks for any ibv_wr_* functions, it gets all of the queue pair's type, as
 * with mlx5. ALLOW_SCATTER_TO_CQE changes nothing: results of READs may always be kept with
 * their completions. */
PUBLIC struct ibv_qp *mlx5dv_create_qp(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr,
				       struct mlx5dv_qp_init_attr *own)
{
	struct mlx5dv_qp_init_attr none = {0};
	enum vb_qp_manner manner = ALL_SEND_OPS;
	if (!live_context(context) || !attr)
		return vb_fail(EINVAL);
	if (!mlx5dv_is_supported(context->device))
		return vb_fail(EOPNOTSUPP);
	if (!own)
		own = &none;
	int err = check_own(attr, own);
	if (err)
		return vb_fail(err);
	if (own->comp_mask & MLX5DV_QP_INIT_ATTR_MASK_QP_CREATE_FLAGS &&
	    own->create_flags & MLX5DV_QP_CREATE_DISABLE_SCATTER_TO_CQE)
		manner |= NO_SCATTER;
	struct ibv_qp *qp = vb_make_qp(context, attr, manner);
	if (qp && own->comp_mask & MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS && own->send_ops_flags)
		vb_fill_dv(to_qp(qp));
	return qp;
}

/* --- dma-bufs --- */

enum { DATA_DIRECT = 1 }; /* MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT: by an engine beside the adapter, which is not here */

PUBLIC struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
				    int access, int mlx5_access) NEWER(mlx5dv_reg_dmabuf_mr);
PUBLIC int get_data_direct_sysfs_path(struct ibv_context *context, char *buf,
				      size_t length) NEWER(mlx5dv_get_data_direct_sysfs_path);

struct ibv_mr *reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
			     int mlx5_access)
{
	if (!pd || !mlx5dv_is_supported(pd->context->device))
		return vb_fail(pd ? EOPNOTSUPP : EINVAL);
	if (mlx5_access & DATA_DIRECT && iova % (uint64_t)sysconf(_SC_PAGESIZE))
		return vb_fail(EOPNOTSUPP);
	if (mlx5_access)
		return vb_fail(EINVAL);
	return ibv_reg_dmabuf_mr(pd, offset, length, iova, fd, access);
}

int get_data_direct_sysfs_path(struct ibv_context *context, char *buf, size_t length)
{
	(void)buf;
	(void)length;
	return context && mlx5dv_is_supported(context->device) ? ENODEV : EOPNOTSUPP;
}
