/*
 * Verbs of early on-demand paging, and of the first proposals for dma-bufs, which
 * infiniband/verbs.h does not have. Most are a few lines on verbs that it has, so that programs and
 * examples of that time compile.
 */
#ifndef VERBENA_VERBS_H
#define VERBENA_VERBS_H

#include <errno.h>
#include <stdint.h>
#include <string.h>

#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
	ODP_SUPPORT = IBV_ODP_SUPPORT,
	ODP_SUPPORT_SEND = IBV_ODP_SUPPORT_SEND,
	ODP_SUPPORT_RECV = IBV_ODP_SUPPORT_RECV,
	ODP_SUPPORT_WRITE = IBV_ODP_SUPPORT_WRITE,
	ODP_SUPPORT_READ = IBV_ODP_SUPPORT_READ,
	ODP_SUPPORT_ATOMIC = IBV_ODP_SUPPORT_ATOMIC,
};

/*
 * ibv_query_odp_caps stores what on-demand paging the device supports, a part of what
 * ibv_query_device_ex returns. It returns 0 or an errno: EINVAL if caps_size is not
 * that of the structure.
 */
static inline int ibv_query_odp_caps(struct ibv_context *context, struct ibv_odp_caps *caps, size_t caps_size)
{
	struct ibv_device_attr_ex attr;
	int err;

	if (!caps || caps_size != sizeof(*caps))
		return EINVAL;
	err = ibv_query_device_ex(context, NULL, &attr);
	if (!err)
		*caps = attr.odp_caps;
	return err;
}

/* The range that ibv_prefetch_mr brings in; flags are 0 or IBV_ACCESS_LOCAL_WRITE. */
struct ibv_prefetch_attr {
	uint32_t comp_mask;
	int flags;
	void *addr;
	size_t length;
};

/*
 * ibv_prefetch_mr brings pages of an on-demand region into memory, by ibv_advise_mr.
 * It returns 0 or an errno: EFAULT if the range is not inside the region or not
 * mapped, EINVAL for an unknown flag or size.
 */
static inline int ibv_prefetch_mr(struct ibv_mr *mr, struct ibv_prefetch_attr *attr, size_t attr_size)
{
	enum { PIECE = 1 << 30 }; /* an element of a list has 32 bits for its length */
	uint64_t addr;
	size_t left;

	if (!mr || !attr || attr_size != sizeof(*attr) || attr->comp_mask || (attr->flags & ~IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	addr = (uintptr_t)attr->addr;
	left = attr->length;
	while (left) {
		struct ibv_sge piece;
		int err;

		piece.addr = addr;
		piece.length = (uint32_t)(left < PIECE ? left : PIECE);
		piece.lkey = mr->lkey;
		err = ibv_advise_mr(mr->pd,
				    attr->flags ? IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE : IBV_ADVISE_MR_ADVICE_PREFETCH,
				    IBV_ADVISE_MR_FLAG_FLUSH, &piece, 1);
		if (err)
			return err;
		addr += piece.length;
		left -= piece.length;
	}
	return 0;
}

/* What kind of descriptor ibv_reg_mr_fd is given. */
enum ibv_mr_fd_type {
	IBV_MR_FD_DMABUF = 0,
};

/*
 * ibv_reg_mr_fd registers memory that a descriptor stands for: length bytes of a dma-buf from the
 * offset addr on, which is their address in requests, too. It fails as ibv_reg_dmabuf_mr
 * does; EOPNOTSUPP for a kind of descriptor that there is not.
 */
static inline struct ibv_mr *ibv_reg_mr_fd(struct ibv_pd *pd, void *addr, size_t length, enum ibv_mr_fd_type fd_type,
					   int fd, int access)
{
	if (fd_type != IBV_MR_FD_DMABUF) {
		errno = EOPNOTSUPP;
		return NULL;
	}
	return ibv_reg_dmabuf_mr(pd, (uintptr_t)addr, length, (uintptr_t)addr, fd, access);
}

int verbena_rereg_mr_fd(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length, int fd, int access);

/*
 * ibv_rereg_mr_fd registers a region anew: as ibv_rereg_mr does, with the memory of
 * ibv_reg_mr_fd. The region's former memory may be of any kind. It returns 0 or an
 * ibv_rereg_mr_err_code, and sets errno.
 */
static inline int ibv_rereg_mr_fd(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length,
				  enum ibv_mr_fd_type fd_type, int fd, int access)
{
	if (fd_type != IBV_MR_FD_DMABUF) {
		errno = EOPNOTSUPP;
		return IBV_REREG_MR_ERR_INPUT;
	}
	return verbena_rereg_mr_fd(mr, flags, pd, addr, length, fd, access);
}

#ifdef __cplusplus
}
#endif

#endif
