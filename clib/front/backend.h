/*
 * The interface between the C front and the Go backend. Both include this file, and
 * share nothing else: numbers and plain structures, no pointers into Go.
 *
 * Functions return 0 or a handle, which is never 0, and a negative errno if they fail.
 */
#ifndef VERBENA_BACKEND_H
#define VERBENA_BACKEND_H

#include <stdint.h>

#include "../files/files.h" /* enum vb_cuda */
#include "../include/verbena/gpu.h"
#include "../include/verbena/peer_mem.h"

#define VBE_VERSION 10 /* of this file: the front refuses a backend with another one */

/* A handle is a kind, in the upper half, and a number, in the lower one. Programs see the
 * number. */
#define VBE_CONTEXT 1
#define VBE_PD 2
#define VBE_MR 3
#define VBE_MW 4
#define VBE_CQ 5
#define VBE_SRQ 6
#define VBE_XRCD 7
#define VBE_QP 8
#define VBE_AH 9
#define VBE_DM 10
#define VBE_MKEY 11
#define VBE_CM 12 /* a channel of the connection manager */
#define VBE_DMAH 13
#define VBE_PEER 14 /* a PeerDirect client */
#define VBE_MEMORY 15 /* memory of an exporter of dma-bufs */
#define VBE_STREAM 16 /* a stream of a software GPU */
#define VBE_EVENT 17  /* an event of streams */
#define VBE_HANDLE(kind, number) ((uint64_t)(kind) << 32 | (number))

#define VBE_THREAD "verbena-backend" /* the name of the runtime's threads */
#define VBE_THREADS "verbena-"	    /* names of all threads of the backend begin with this */

#define VBE_NAME 256 /* room for the name of a context */

struct vbe_device {
	char name[64];
	char interface[32];
	uint64_t guid;
};

struct vbe_device_attr {
	char fw[64];
	uint64_t node_guid, image_guid;
	uint64_t max_mr_size, page_size_cap, max_dm_size;
	uint32_t vendor_id, vendor_part_id, hw_ver;
	uint32_t caps; /* of verbs.h, IBV_DEVICE_* */
	uint32_t atomic_cap;
	int32_t max_qp, max_qp_wr, max_sge, max_sge_rd, max_inline;
	int32_t max_cq, max_cqe, max_mr, max_mw, max_pd, max_ah;
	int32_t max_srq, max_srq_wr, max_srq_sge;
	int32_t max_rd_atom, max_init_rd_atom, max_res_rd_atom;
	int32_t max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach;
	int32_t max_pkeys, ack_delay, ports;
	uint32_t odp_general, odp_rc, odp_uc, odp_ud, odp_xrc;
	uint32_t flush; /* 1: the device has FLUSH */
	uint32_t atomic_write;
};

struct vbe_port_attr {
	int32_t state, max_mtu, active_mtu, gids, pkeys;
	uint32_t max_msg, bad_pkey, bad_qkey;
	char interface[32];
};

/* A region. vbe_reg_mr is given addr to exported_size, and returns handle, lkey and rkey. */
struct vbe_mr {
	uint64_t addr, length, iova;
	uint32_t access;
	uint32_t kind;	   /* VBE_MEM_* */
	int32_t fd;	   /* VBE_MEM_DMABUF: the buffer's descriptor, in which addr is an offset */
	uint64_t share;	   /* VBE_MEM_SHARED: where the handle's text is */
	uint64_t dm;	   /* device memory, in which iova is an offset; 0: none */
	uint64_t dmah;	   /* a DMA handle; 0: none */
	uint64_t exported; /* VBE_MEM_DMABUF: the address of the buffer's first byte, if CUDA has exported it; 0: unknown */
	uint64_t exported_size;
	uint64_t handle;
	uint32_t lkey, rkey;
};

#define VBE_MEM_RANGE 0	   /* addr and length */
#define VBE_MEM_IMPLICIT 1 /* the whole address space */
#define VBE_MEM_NULL 2	   /* no memory: ibv_alloc_null_mr */
#define VBE_MEM_DMABUF 3   /* a dma-buf */
#define VBE_MEM_ALLOC 4	   /* memory that the backend allocates; it returns addr */
#define VBE_MEM_SHARED 5   /* memory of another process, by a handle of vbe_share_mr; it returns addr and length */

#define VBE_REREG_TRANSLATION 1 /* of ibv_rereg_mr_flags */
#define VBE_REREG_PD 2
#define VBE_REREG_ACCESS 4

#define VBE_REREG_OLD (-1)	/* of ibv_rereg_mr_err_code: the old region is valid */
#define VBE_REREG_NEW (-3)	/* the new region is valid */
#define VBE_REREG_UNUSABLE (-4) /* neither is */

struct vbe_path {
	uint8_t dgid[16];
	uint32_t flow_label;
	uint8_t sgid_index, hop_limit, traffic_class, sl, port;
};

struct vbe_qp_cap {
	uint32_t send_wr, recv_wr, send_sge, recv_sge, inline_data;
};

struct vbe_qp_new {
	uint64_t pd, send_cq, recv_cq, srq, xrcd;
	uint64_t cookie; /* the front's object, for asynchronous events */
	uint32_t type;	 /* of verbs.h, IBV_QPT_* */
	uint32_t signal_all;
	uint32_t no_scatter;   /* 1: no messages or results are kept with their completions */
	struct vbe_qp_cap cap; /* in: wanted; out: given */
	uint32_t number;       /* out; in: the XRC target to open, 0: a new queue pair */
};

/* All numbers are those of verbs.h. */
struct vbe_qp_attr {
	uint32_t state, cur_state, path_mtu;
	uint32_t qkey, rq_psn, sq_psn, dest_qpn, access;
	struct vbe_qp_cap cap;
	struct vbe_path av;
	uint16_t pkey_index;
	uint8_t sqd_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer;
	uint8_t port, timeout, retry_cnt, rnr_retry;
};

struct vbe_srq_new {
	uint64_t pd, xrcd, cq, cookie;
	uint32_t max_wr, max_sge, limit;
	uint32_t number; /* out */
};

/* A send request, flattened. sgl points to an array of struct ibv_sge. */
struct vbe_send_wr {
	uint64_t id;
	uint64_t sgl, inline_data;
	uint32_t num_sge, inline_len;
	uint32_t opcode, flags; /* of verbs.h */
	uint32_t imm;		/* host order */
	uint32_t inv_key;
	uint64_t remote_addr;
	uint64_t compare_add, swap;
	uint32_t rkey, srqn;
	uint64_t ah;
	uint32_t qpn, qkey;
	uint32_t flush_type, flush_level, flush_len;
	uint32_t mw_key, mw_new_key, mw_lkey, mw_access;
	uint64_t mw_addr, mw_length;
	uint64_t layout; /* IBV_WR_DRIVER1: a struct vbe_layout */
};

/* The layout of an indirect key: rounds over its pieces. Each round takes the next bytes of
 * each piece, and skips some behind them. A list of pieces is one round. */
struct vbe_piece {
	uint64_t addr, bytes, skip;
	uint32_t lkey;
};

struct vbe_layout {
	uint64_t pieces; /* struct vbe_piece */
	uint64_t repeat; /* rounds */
	uint32_t num, key, access;
	uint32_t keep; /* VBE_KEEP_*: what does not change */
};

#define VBE_KEEP_ACCESS 1
#define VBE_KEEP_LAYOUT 2

struct vbe_recv_wr {
	uint64_t id, sgl;
	uint32_t num_sge;
};

/* A request about the fence of a descriptor. */
struct vbe_fence_wr {
	uint64_t id, timeout; /* timeout: in nanoseconds; 0: the usual one */
	uint32_t flags;	      /* of verbs.h */
	uint32_t signals;     /* 1: it signals the fence; 0: it waits for it */
	int32_t fd;
};

/* What vbe_fence does with the descriptor of a fence. */
#define VBE_FENCE_CREATE 0 /* returns a new one */
#define VBE_FENCE_SIGNAL 1 /* with an errno, or 0 */
#define VBE_FENCE_STATUS 2 /* returns 0 if it is pending, 1 if it was signalled, and 1 + errno if it has failed */

/* A completion: the first 48 bytes are those of struct ibv_wc. */
struct vbe_wc {
	uint64_t wr_id;
	uint32_t status, opcode, vendor_err, byte_len;
	uint32_t imm_or_key; /* immediate data in network order, or the invalidated key */
	uint32_t qp_num, src_qp, flags;
	uint16_t pkey_index, slid;
	uint8_t sl, dlid_path_bits;
	uint64_t when;	/* nanoseconds of CLOCK_MONOTONIC at which it was made */
	uint32_t event; /* which event of its queue it has raised, counted from 1; 0: none.
			 * The backend may set it while the completion is in the ring */
	uint32_t solicited; /* 1: it is solicited, or has failed */
};

/*
 * Completions on their way to the program. The backend writes slots from the tail on and
 * moves the tail, the front moves the head. Both only grow, modulo 2^32.
 */
#define VBE_RING 128
struct vbe_ring {
	uint32_t head;
	uint8_t apart[60]; /* the two ends are written by different threads */
	uint32_t tail;
	uint8_t apart2[60];
	struct vbe_wc slot[VBE_RING];
};

#define VBE_CQ_TIMES 1	/* of vbe_create_cq: completions have timestamps */
#define VBE_CQ_EVENTS 2 /* the queue has a channel */

/* Events: the backend calls these functions, from any thread. The thread may be in a verb
 * that holds the lock of a completion queue or a builder, so they take neither. */
#define VBE_OF_CQ 1 /* what an asynchronous event is about */
#define VBE_OF_QP 2
#define VBE_OF_SRQ 3
#define VBE_OF_PORT 4
struct vbe_front {
	int32_t descriptors; /* the runtime's descriptors move to this number, or higher ones */
	const char *settings; /* of the first call: variables of the environment, strings NAME=VALUE, ended by an empty one */
	void (*cq_event)(uint64_t cookie);
	void (*async_event)(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type);
};

#define VBE_MEMORY_MOVE 1 /* of vbe_memory_do */
#define VBE_MEMORY_EVICT 2
#define VBE_MEMORY_REVOKE 3

#define VBE_GPU_DESTROY 0 /* of vbe_gpu_stream_do and vbe_gpu_event_do */
#define VBE_GPU_SYNC 1
#define VBE_GPU_QUERY 2
#define VBE_GPU_RECORD 3
#define VBE_GPU_WAIT 4

#define VBE_PEER_STATS 7 /* counters of a PeerDirect client, in the order of peermem.Stats.All */

/* vbe_cuda_gone is verbena_cuda_gone of files.h. When it returns, no request accesses that memory, and none will. */

/*
 * The connection manager. vbe_cm_open makes a channel, and duplicates an eventfd, which it makes
 * readable while there are events. vbe_cm_command executes a command of ucma, with its body, and
 * returns the length of the answer. Its last argument is, for MIGRATE_ID, the channel that the
 * id is on, and for GET_EVENT whether the eventfd was read. SET_OPTION's body is followed by the
 * option. GET_EVENT returns -EAGAIN if there is no event, or the eventfd has to be read first.
 * vbe_cm_close destroys the ids of a channel.
 */
#define VBE_CM_ALL 0 /* of vbe_cm_close: all channels, at the end of the process */

/* vbe_write_stats writes the counters of VERBENA_STATS of all devices that are open, when the process ends. It never waits. */

/* The backend's functions: X(result, name, arguments) */
#define VBE_FUNCTIONS(X)                                                                                   \
	X(int64_t, vbe_version, (struct vbe_front *))                                                      \
	X(int64_t, vbe_list, (struct vbe_device *, int64_t))                                               \
	X(int64_t, vbe_open, (char *, uint64_t))                                                           \
	X(int64_t, vbe_name, (uint64_t, char *, int64_t))                                                  \
	X(int64_t, vbe_import, (char *, uint64_t, struct vbe_device *))                                    \
	X(int64_t, vbe_import_pd, (uint64_t, uint32_t))                                                    \
	X(int64_t, vbe_import_mr, (uint64_t, uint32_t, struct vbe_mr *))                                   \
	X(int64_t, vbe_unimport, (uint64_t))                                                               \
	X(int64_t, vbe_close, (uint64_t))                                                                  \
	X(int64_t, vbe_query_device, (uint64_t, struct vbe_device_attr *))                                 \
	X(int64_t, vbe_query_port, (uint64_t, uint32_t, struct vbe_port_attr *))                           \
	X(int64_t, vbe_gids, (uint64_t, uint8_t *, int64_t))                                               \
	X(int64_t, vbe_gids_of, (char *, uint8_t *, int64_t))                                              \
	X(int64_t, vbe_destroy, (uint64_t))                                                                \
	X(int64_t, vbe_has, (uint64_t, uint64_t))                                                          \
	X(int64_t, vbe_alloc_pd, (uint64_t))                                                               \
	X(int64_t, vbe_reg_mr, (uint64_t, struct vbe_mr *))                                                \
	X(int64_t, vbe_rereg_mr, (uint64_t, uint32_t, uint64_t, struct vbe_mr *, int32_t *))               \
	X(int64_t, vbe_query_mr, (uint64_t, struct vbe_mr *))                                              \
	X(int64_t, vbe_share_mr, (uint64_t, char *, uint64_t))                                             \
	X(int64_t, vbe_memory_alloc, (uint64_t, uint32_t))                                                 \
	X(int64_t, vbe_memory_fd, (uint64_t))                                                              \
	X(int64_t, vbe_memory_do, (uint64_t, uint32_t))                                                    \
	X(int64_t, vbe_memory_copy, (uint64_t, uint64_t, uint64_t, uint64_t, uint32_t))                    \
	X(int64_t, vbe_memory_free, (uint64_t))                                                            \
	X(int64_t, vbe_alloc_dm, (uint64_t, uint64_t, uint32_t))                                           \
	X(int64_t, vbe_export_dm, (uint64_t))                                                              \
	X(int64_t, vbe_export_file, (int))                                                                 \
	X(int64_t, vbe_dmabuf_file, (int))                                                                 \
	X(int64_t, vbe_copy_dm, (uint64_t, uint64_t, uint64_t, uint64_t, uint32_t))                        \
	X(int64_t, vbe_advise, (uint64_t, uint32_t, uint32_t, uint64_t, uint32_t))                         \
	X(int64_t, vbe_alloc_dmah, (uint64_t, uint32_t, uint32_t, uint32_t, uint32_t))                     \
	X(int64_t, vbe_alloc_mw, (uint64_t, uint32_t, uint32_t *))                                         \
	X(int64_t, vbe_create_mkey, (uint64_t, uint32_t, uint32_t, uint32_t *))                            \
	X(int64_t, vbe_bind_mw, (uint64_t, uint64_t, struct vbe_send_wr *, uint32_t *))                    \
	X(int64_t, vbe_create_cq, (uint64_t, int64_t, struct vbe_ring *, uint64_t, uint32_t))              \
	X(int64_t, vbe_resize_cq, (uint64_t, int64_t))                                                     \
	X(int64_t, vbe_arm_cq, (uint64_t, uint32_t))                                                       \
	X(int64_t, vbe_poll_cq, (uint64_t))                                                                \
	X(int64_t, vbe_create_srq, (uint64_t, struct vbe_srq_new *))                                       \
	X(int64_t, vbe_modify_srq, (uint64_t, int64_t, int64_t))                                           \
	X(int64_t, vbe_query_srq, (uint64_t, uint32_t *, uint32_t *, uint32_t *))                          \
	X(int64_t, vbe_post_srq_recv, (uint64_t, struct vbe_recv_wr *, int64_t, int64_t *))                \
	X(int64_t, vbe_open_xrcd, (uint64_t, int64_t, uint32_t))                                           \
	X(int64_t, vbe_create_qp, (uint64_t, struct vbe_qp_new *))                                         \
	X(int64_t, vbe_modify_qp, (uint64_t, struct vbe_qp_attr *, uint32_t))                              \
	X(int64_t, vbe_query_qp, (uint64_t, struct vbe_qp_attr *))                                         \
	X(int64_t, vbe_post_send, (uint64_t, struct vbe_send_wr *, int64_t, int64_t *))                    \
	X(int64_t, vbe_post_recv, (uint64_t, struct vbe_recv_wr *, int64_t, int64_t *))                    \
	X(int64_t, vbe_post_fence, (uint64_t, struct vbe_fence_wr *))                                      \
	X(int64_t, vbe_fence, (uint32_t, int32_t, int32_t))                                                \
	X(int64_t, vbe_mcast, (uint64_t, uint8_t *, uint32_t))                                             \
	X(int64_t, vbe_create_ah, (uint64_t, struct vbe_path *))                                           \
	X(int64_t, vbe_peer_register, (struct verbena_peer_memory_client *, uint32_t))                     \
	X(int64_t, vbe_peer_unregister, (uint64_t))                                                        \
	X(int64_t, vbe_peer_invalidate, (uint64_t, uint64_t))                                              \
	X(int64_t, vbe_peer_stats, (uint64_t, uint64_t *))                                                 \
	X(int64_t, vbe_gpu_init, (void))                                                                   \
	X(int64_t, vbe_gpu_info, (int32_t, struct verbena_gpu_info *))                                     \
	X(int64_t, vbe_gpu_alloc, (int32_t, uint64_t, int32_t, uint64_t *))                                \
	X(int64_t, vbe_gpu_free, (uint64_t, uint32_t))                                                     \
	X(int64_t, vbe_gpu_register, (uint64_t, uint64_t))                                                 \
	X(int64_t, vbe_gpu_unregister, (uint64_t))                                                         \
	X(int64_t, vbe_gpu_lookup, (uint64_t, struct verbena_gpu_pointer *))                               \
	X(int64_t, vbe_gpu_copy, (uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t))             \
	X(int64_t, vbe_gpu_fill, (uint64_t, uint64_t, uint32_t, uint32_t, uint64_t))                       \
	X(int64_t, vbe_gpu_stream, (int32_t))                                                              \
	X(int64_t, vbe_gpu_stream_do, (uint64_t, uint32_t))                                                \
	X(int64_t, vbe_gpu_stream_call, (uint64_t, uint64_t, uint64_t))                                    \
	X(int64_t, vbe_gpu_event, (void))                                                                  \
	X(int64_t, vbe_gpu_event_do, (uint64_t, uint64_t, uint32_t))                                       \
	X(int64_t, vbe_gpu_elapsed, (uint64_t, uint64_t, int64_t *))                                       \
	X(int64_t, vbe_gpu_export, (uint64_t, uint64_t, uint64_t *))                                       \
	X(int64_t, vbe_gpu_ipc_get, (uint64_t, uint8_t *))                                                 \
	X(int64_t, vbe_gpu_ipc_open, (int32_t, uint8_t *, uint64_t *))                                     \
	X(int64_t, vbe_cuda_gone, (uint32_t, uint64_t, uint64_t))                                          \
	X(int64_t, vbe_cm_open, (int))                                                                     \
	X(int64_t, vbe_cm_command, (uint64_t, uint32_t, uint8_t *, uint32_t, uint8_t *, uint32_t, int64_t)) \
	X(int64_t, vbe_cm_close, (uint64_t))                                                               \
	X(int64_t, vbe_write_stats, (void))

#endif
