/*
 * Verbs that infiniband/verbs.h does not have: of early on-demand paging, of the first proposals for
 * dma-bufs, and for fences. Most of the first two kinds are a few lines on verbs that it has, so that
 * programs and examples of that time compile.
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

/*
 * A right of ibv_reg_mr and ibv_rereg_mr: the library allocates the memory. The address that is
 * passed is NULL, mr->addr is where the memory is, and ibv_dereg_mr frees it. Not on demand, and not
 * zero-based: EINVAL. With ibv_rereg_mr both the translation and the rights change.
 */
#define IBV_ACCESS_ALLOCATE_MR (1 << 30)

/* For future extensions of ibv_rereg_mr: 0. */
struct ibv_rereg_mr_attr {
	uint32_t comp_mask;
};

/*
 * verbena_rereg_mr is ibv_rereg_mr as early documents have it, with seven arguments. It returns 0 or an
 * errno; EINVAL for an attr with a comp_mask. Those documents leave the region undefined after an error.
 * Here it is as it was, unless neither it nor the new one can be used any more.
 *
 * ibv_rereg_mr with seven arguments is this function; with six it is that of libibverbs.
 */
static inline int verbena_rereg_mr(struct ibv_mr *mr, int flags, struct ibv_pd *pd, void *addr, size_t length,
				   uint64_t access, struct ibv_rereg_mr_attr *attr)
{
	if (access >> 31 || (attr && attr->comp_mask))
		return EINVAL;
	errno = 0;
	if (!ibv_rereg_mr(mr, flags, pd, addr, length, (int)access))
		return 0;
	return errno ? errno : EIO;
}

#define VERBENA_SEVENTH(a, b, c, d, e, f, g, name, ...) name
#define ibv_rereg_mr(...) VERBENA_SEVENTH(__VA_ARGS__, verbena_rereg_mr, ibv_rereg_mr, )(__VA_ARGS__)

/*
 * Memory that was allocated with IBV_ACCESS_ALLOCATE_MR can be shared with other processes of the same
 * user on this host. verbena_share_mr writes a handle, a string that the process passes on; who has it
 * can read and write the memory. VERBENA_SHARE_ROOM bytes are enough for it. It returns 0 or an errno:
 * EINVAL for other memory, ENOSPC if there is too little room.
 *
 * verbena_reg_shared_mr registers the memory, in this process or another one, with rights and keys of its
 * own. addr is NULL: the library chooses where it is mapped (mr->addr). The memory lives as long as one
 * of its regions. It returns NULL with errno: EINVAL for a handle that is none, ENOENT if the memory is
 * not shared any more, EACCES for another user. A region that gets other memory by ibv_rereg_mr is no
 * shared one any more.
 *
 * Some vendors name such a region by 32 bits that anybody can guess. These cannot be guessed.
 */
#define VERBENA_SHARE_ROOM 256
int verbena_share_mr(struct ibv_mr *mr, char *handle, size_t size);
struct ibv_mr *verbena_reg_shared_mr(const char *handle, struct ibv_pd *pd, void *addr, int access);

/*
 * An exporter of dma-bufs, for programs that test what they do with them. verbena_alloc_dmabuf makes a
 * buffer of so many pieces (0: one), all zero. It returns NULL with errno.
 *
 * verbena_dmabuf_fd returns a new descriptor of it, or -1 with errno. The descriptor can be registered, also
 * by another process, and closed at any time.
 */
struct verbena_dmabuf;
struct verbena_dmabuf *verbena_alloc_dmabuf(size_t size, uint32_t segments);
int verbena_dmabuf_fd(struct verbena_dmabuf *buffer);

/*
 * What an exporter may do while the buffer is registered: move it to another place, move it to where no
 * device reaches it until one needs it, and take it away for good. The old place is filled with 0xdb. They
 * return 0 or an errno: EBUSY while it is pinned, ENODEV if it is revoked already, ETIMEDOUT if an importer
 * keeps it for more than 10 seconds.
 */
int verbena_move_dmabuf(struct verbena_dmabuf *buffer);
int verbena_evict_dmabuf(struct verbena_dmabuf *buffer);
int verbena_revoke_dmabuf(struct verbena_dmabuf *buffer);

/* verbena_read_dmabuf and verbena_write_dmabuf copy bytes as the owner of the memory. They return 0 or an
 * errno: EINVAL if the bytes are not inside the buffer, ENODEV if it is revoked. */
int verbena_read_dmabuf(struct verbena_dmabuf *buffer, uint64_t offset, void *to, size_t n);
int verbena_write_dmabuf(struct verbena_dmabuf *buffer, uint64_t offset, const void *from, size_t n);

/* verbena_free_dmabuf ends the program's use of it. Regions and descriptors keep the memory. */
int verbena_free_dmabuf(struct verbena_dmabuf *buffer);

/*
 * Fences: work that ends some time. A fence has a descriptor, which poll finds readable (POLLIN) once
 * the fence is signalled, in whatever process it was sent to. A work request can wait for a fence, and
 * signal one. No adapter has these calls: they are verbena's own.
 *
 * Where a descriptor is waited for, it may be one of verbena_create_fence, in whatever process; what
 * DMA_BUF_IOCTL_EXPORT_SYNC_FILE has returned; any other sync file of the kernel; or an eventfd, which
 * counts as signalled when it is readable.
 */

/* The opcodes of their completions. */
#define VERBENA_WC_WAIT_FENCE IBV_WC_DRIVER2
#define VERBENA_WC_SIGNAL_FENCE IBV_WC_DRIVER3

/*
 * verbena_create_fence returns the descriptor of a new fence, which is pending, or -1 and errno. The
 * fence is this process's: if the process ends, those who wait for it find it readable, and
 * failed with EOWNERDEAD. The descriptor is closed on exec, and the caller closes it; when all copies
 * are closed, and no request signals it, the fence is gone.
 */
int verbena_create_fence(struct ibv_context *context);

/*
 * verbena_signal_fence ends the work of a fence, with success (err 0), or failed with an errno. It
 * returns 0 or an errno: EBADF; EINVAL if it is no fence of this process that is pending, and no eventfd.
 */
int verbena_signal_fence(struct ibv_context *context, int fd, int err);

/*
 * verbena_fence_status returns 0 if the fence of a descriptor is pending, 1 if it was signalled, and the
 * negative errno if its work has failed; -EBADF and -EINVAL, too, if the descriptor is that of no fence.
 */
int verbena_fence_status(struct ibv_context *context, int fd);

/*
 * verbena_post_wait_fence posts a request behind which nothing begins before a fence is signalled, be it
 * with an error or not. If that takes longer than timeout_ms milliseconds (0: ten seconds), the
 * request fails with IBV_WC_RESP_TIMEOUT_ERR, and what is behind it is flushed. send_flags are those of
 * ibv_post_send. The descriptor may be closed at once. It returns 0 or an errno: EBADF, EINVAL as above;
 * EINVAL for a queue pair that is neither RC nor UC; ENOMEM if the send queue is full.
 */
int verbena_post_wait_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int timeout_ms,
			    unsigned int send_flags);

/*
 * verbena_post_signal_fence posts a request that signals a fence when all requests before it are done:
 * of RC, when their bytes are placed. If they fail, so does the fence, with ECANCELED. The descriptor is
 * one that verbena_signal_fence takes, and may be closed at once. It returns 0 or an errno, as above.
 */
int verbena_post_signal_fence(struct ibv_qp *qp, uint64_t wr_id, int fd, unsigned int send_flags);

#ifdef __cplusplus
}
#endif

#endif
