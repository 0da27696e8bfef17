/*
 * The front's own view of the objects of verbs: each contains the structure that programs
 * see (pub), behind what the front needs.
 */
#ifndef VERBENA_FRONT_H
#define VERBENA_FRONT_H

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include "../files/files.h"
#include "backend.h"

/* verbs.h defines these as macros around the symbols that we define. */
#undef ibv_reg_mr
#undef ibv_reg_mr_iova
#undef ibv_query_port
#undef ibv_get_device_list

#define PUBLIC __attribute__((visibility("default")))
#define COLD __attribute__((cold, noinline))

/* Values that only newer headers have. */
#define VB_WR_FLUSH 14
#define VB_WR_ATOMIC_WRITE 15
#define VB_EX_WITH_FLUSH (1 << 11)
#define VB_EX_WITH_ATOMIC_WRITE (1 << 12)
#define VB_ACCESS_FLUSH_GLOBAL (1 << 8)
#define VB_ACCESS_FLUSH_PERSISTENT (1 << 9)
#define VB_PARENT_DOMAIN_ALLOW_CC_UNPROTECTED_ALLOC (1 << 2)
#define VB_ACCESS_ALLOCATE_MR (1 << 30) /* IBV_ACCESS_ALLOCATE_MR of verbena/verbs.h */

/* --- the backend: backend.c --- */

struct backend {
	atomic_bool dead; /* inherited by a child of fork(): it is the parent's */
#define X(result, name, args) result(*name) args;
	VBE_FUNCTIONS(X)
#undef X
};

/* vb_backend returns the backend, which it loads at first use; NULL with errno if it cannot. */
struct backend *vb_backend(void);
struct backend *vb_loaded_backend(void); /* NULL if this process has none yet */
bool vb_has_backend(void);

/* vb_setting returns the value of a variable of the environment, or NULL. vb_settings returns
 * a list of all that the library reads, of which the first with a name counts; NULL if memory
 * is short. The caller frees it (environment.c). */
const char *vb_setting(const char *name);
char *vb_settings(void);

/* vb_hides reports whether VERBENA_HIDE has a word. */
bool vb_hides(const char *word);

/* --- PeerDirect clients: peer_mem.c --- */

void vb_peers(struct backend *b); /* gives the backend all clients, and loads those of VERBENA_PEER_MEM */
bool vb_has_peers(void);	   /* there are clients */
enum vb_file vb_peer_file(const char *path, char *text); /* verbena_file for what shows them */

/* --- software GPUs: gpu.c --- */

bool vb_has_gpus(void);					     /* the program uses them */
enum vb_file vb_gpu_file(const char *path, char *text); /* verbena_file for what shows them */

/* --- memory of CUDA: cuda.c --- */

/* vb_cuda_shown reports whether programs are to see that addresses of CUDA's memory can be registered, if the loaded
 * libcuda is Verbena's (shim), or another one. */
bool vb_cuda_shown(bool shim);

/* vb_cuda_exports stores, for a dma-buf that CUDA has made, where the memory is. */
void vb_cuda_exports(struct vbe_mr *r);

/* --- limits of the process: limits.c --- */

struct vb_descriptors {
	bool noted;	     /* limit is set */
	struct rlimit limit; /* the program's own */
	int above;	     /* descriptors from this number on are out of the program's way */
};

int vb_check_room(void); /* an errno if the backend has no room to start */
void vb_lend_descriptors(struct vb_descriptors *d);
void vb_return_descriptors(const struct vb_descriptors *d);
void vb_prepare_cancel(void);

/* --- where the backend's heap lies: place.c --- */

struct vb_gap {
	void *start;
	size_t size;
};
struct vb_filled {
	int n;
	struct vb_gap gaps[64];
};

/* In a program of OpenSHMEM, vb_fill_below_program maps what is free below the program, and vb_empty_below_program unmaps
 * it. In others they do nothing. */
void vb_fill_below_program(struct vb_filled *f);
void vb_empty_below_program(struct vb_filled *f);

/* --- the end of the main thread: threads.c --- */

void vb_watch_main(void); /* no effect in other threads */

/* --- memory for objects: object.c --- */

/*
 * Every object begins with a head. Its memory is never freed, only reused for objects of
 * the same kind, so that a stale pointer finds a head that says so.
 */
enum kind { DEAD = 0, CONTEXT, PD, MR, MW, CQ, CHANNEL, QP, SRQ, XRCD, AH, TD, DM, MKEY, DMAH, NUM_KINDS };

struct head {
	uint32_t magic; /* MAGIC + kind while alive */
	uint32_t refs;	/* objects that need this one; guarded by the lock of object.c */
	struct backend *backend;
	uint64_t handle;   /* the backend's */
	struct head *next; /* in the list of free objects */
	void *before;	   /* a copy of the dead object that was here before, or NULL */
	struct head *in;   /* the parent domain that it was made in, or NULL */
};

#define MAGIC 0x5ebe7a00u

void *vb_new(enum kind kind, struct backend *b); /* zeroed; NULL with errno ENOMEM */
void vb_free(enum kind kind, struct head *h);
void vb_ref(struct head *h);
void vb_unref(struct head *h);
bool vb_busy(struct head *h);
struct vb_pd;
void vb_enter(struct head *h, struct vb_pd *p); /* notes the parent domain of an object */

/* vb_is reports whether an object is alive and of that kind. */
static inline bool vb_is(const struct head *h, enum kind kind) { return h->magic == MAGIC + kind; }

/* vb_usable reports whether it also belongs to this process, not to its parent. */
static inline bool vb_usable(const struct head *h, enum kind kind)
{
	return vb_is(h, kind) && !atomic_load_explicit(&h->backend->dead, memory_order_relaxed);
}

/* vb_undo has the backend destroy its side of an object, unless that is the parent
 * process's. It returns a negative errno if the object is stale or in use. */
static inline int64_t vb_undo(struct head *h, enum kind kind)
{
	if (!vb_is(h, kind))
		return -EINVAL;
	return vb_usable(h, kind) ? h->backend->vbe_destroy(h->handle) : 0;
}

/* --- the objects --- */

struct vb_device {
	struct ibv_device pub;
	uint64_t guid;
	char interface[32];
	int index;
};

struct event {
	struct ibv_async_event pub;
	struct event *next;
};

struct vb_context {
	struct head h;
	char name[VBE_NAME]; /* of the context, or of the one that it is imported from; cmd_fd has it */
	bool foreign;	     /* it is imported from another process */
	uint32_t opens;	     /* ibv_open_device and imports; guarded by the lock of device.c */
	int *imported;	     /* descriptors that it was imported by, one less than opens */
	struct vb_context *next_open;
	struct vbe_device_attr attr;
	pthread_mutex_t events_lock; /* guards what follows */
	struct event *first, **last;
	struct verbs_context v; /* must be last: programs have the address of its last member */
};

struct vb_pd {
	struct head h;
	struct ibv_pd pub;
	struct vb_pd *of; /* of a parent domain: the protection domain; otherwise NULL */
	struct vb_td *td;
	struct ibv_parent_domain_init_attr init;
	bool imported;
	bool dmabufs; /* of a parent domain: ibv_alloc_buf makes dma-bufs */
	bool foreign; /* from another process */
};

struct vb_td {
	struct head h;
	struct ibv_td pub;
};

/* Newer headers declare some symbols with types that older headers do not have. So the
 * functions have other names in the source, and the symbols' by NEWER. */
#define NEWER(name) __asm__(#name)

struct vb_mr {
	struct head h;
	struct ibv_mr pub;
	bool foreign; /* imported from another process */
	bool dmabuf;  /* its memory is a dma-buf */
};

struct vb_dm {
	struct head h;
	struct ibv_dm pub;
};

struct vb_mw {
	struct head h;
	struct ibv_mw pub;
};

struct vb_dmah {
	struct head h;
	struct vb_dmah_pub {
		struct ibv_context *context;
	} pub; /* struct ibv_dmah of rdma-core 60 */
};

struct vb_mkey {
	struct head h;
	struct ibv_pd *pd;
	uint32_t max; /* pieces */
	struct mlx5dv_mkey pub;
};

struct vb_channel {
	struct head h;
	pthread_mutex_t lock; /* guards the list of events, and pending of its queues */
	struct vb_cq *first, *last;
	struct ibv_comp_channel pub;
};

struct vb_cq {
	struct head h;
	struct vbe_ring *ring;
	bool single; /* one thread alone uses it: no lock */
	atomic_bool armed;    /* and the backend not asked for completions since */
	pthread_mutex_t lock; /* guards the head of the ring, and cur */
	uint32_t vain;	      /* polls that found nothing, in a row; guarded by lock, as the next two */
	uint32_t patience;    /* how many of them until the poller yields */
	bool yielded;	      /* the poller has, since a poll found something */
	uint32_t pending;     /* events not yet taken; guarded by the channel's lock */
	struct vb_cq *next;   /* in the channel's list */
	uint32_t taken;	      /* completion events taken; guarded by pub.mutex */
	uint32_t async_taken; /* guarded by pub.mutex */
	uint64_t wc_flags;
	const struct vbe_wc *cur; /* the completion that the program reads, after ibv_start_poll */
	uint32_t at;		  /* its position in the ring */
	int cancel_type;	  /* of the thread between ibv_start_poll and ibv_end_poll; guarded by lock */
	struct ibv_cq_ex pub;
};

struct vb_srq {
	struct head h;
	uint32_t number;
	uint32_t async_taken; /* guarded by pub.mutex */
	enum ibv_srq_type type;
	struct vb_cq *cq;
	struct vb_xrcd *xrcd;
	struct ibv_srq pub;
};

struct vb_xrcd {
	struct head h;
	struct ibv_xrcd pub;
};

struct vb_ah {
	struct head h;
	struct ibv_ah pub;
};

/* vb_clear zeroes a request in parts. For the whole the compiler uses a string instruction,
 * which takes longer to begin than the rest of a post takes here. */
static inline void vb_clear(struct vbe_send_wr *w)
{
	enum { A = offsetof(struct vbe_send_wr, remote_addr), B = offsetof(struct vbe_send_wr, flush_type) };
	memset(w, 0, A);
	memset((char *)w + A, 0, B - A);
	memset((char *)w + B, 0, sizeof *w - B);
}

struct builder; /* builder.h */

struct vb_qp {
	struct head h;
	bool extended; /* has ibv_wr_* */
	struct vb_xrcd *xrcd;
	struct ibv_qp_cap cap;
	uint32_t max_inline;
	int sig_all;
	uint32_t async_taken; /* guarded by pub.qp_base.mutex */
	struct builder *builder;
	struct mlx5dv_qp_ex dv;
	struct ibv_qp_ex pub;
	void *newer[4]; /* functions that later headers have at the end of ibv_qp_ex */
};

#define OUTER(type, pub_ptr) ((struct type *)((char *)(pub_ptr)-offsetof(struct type, pub)))

static inline struct vb_context *to_context(struct ibv_context *c)
{
	return (struct vb_context *)((char *)c - offsetof(struct vb_context, v.context));
}
static inline struct vb_cq *to_cq(struct ibv_cq *c) { return OUTER(vb_cq, c); }
static inline struct vb_qp *to_qp(struct ibv_qp *q) { return OUTER(vb_qp, q); }

/* LIVE returns the object around a public structure, or NULL if the pointer is NULL, stale
 * or of the parent process. */
#define LIVE(type, kind, ptr) live_##type(ptr)
#define DEFINE_LIVE(type, kind, public_type)                                                                           \
	static inline struct type *live_##type(public_type *p)                                                         \
	{                                                                                                              \
		struct type *o = (struct type *)((uintptr_t)p - offsetof(struct type, pub));                           \
		return p && vb_usable(&o->h, kind) ? o : NULL;                                                         \
	}
DEFINE_LIVE(vb_td, TD, struct ibv_td)
DEFINE_LIVE(vb_mr, MR, struct ibv_mr)
DEFINE_LIVE(vb_mw, MW, struct ibv_mw)
DEFINE_LIVE(vb_dm, DM, struct ibv_dm)
DEFINE_LIVE(vb_dmah, DMAH, struct vb_dmah_pub)
DEFINE_LIVE(vb_mkey, MKEY, struct mlx5dv_mkey)
DEFINE_LIVE(vb_ah, AH, struct ibv_ah)
DEFINE_LIVE(vb_qp, QP, struct ibv_qp)
DEFINE_LIVE(vb_srq, SRQ, struct ibv_srq)
DEFINE_LIVE(vb_xrcd, XRCD, struct ibv_xrcd)
DEFINE_LIVE(vb_channel, CHANNEL, struct ibv_comp_channel)

/*
 * A child of fork() may go on using its parent's contexts and protection domains, as it
 * could with an adapter: at first use these functions make them again in the child's own
 * backend, or return NULL. All other objects stay the parent's.
 */
struct vb_context *vb_revive_context(struct vb_context *c);
struct vb_pd *vb_revive_pd(struct vb_pd *p);

static inline struct vb_context *live_context(struct ibv_context *pub)
{
	struct vb_context *c = (struct vb_context *)((uintptr_t)pub - offsetof(struct vb_context, v.context));
	if (!pub)
		return NULL;
	return vb_usable(&c->h, CONTEXT) ? c : vb_revive_context(c);
}

static inline struct vb_pd *live_vb_pd(struct ibv_pd *pub)
{
	struct vb_pd *p = (struct vb_pd *)((uintptr_t)pub - offsetof(struct vb_pd, pub));
	if (!pub)
		return NULL;
	return vb_usable(&p->h, PD) ? p : vb_revive_pd(p);
}

/* vb_say prints why a verb fails, if VERBENA_LOG is 1. It is for failures that the backend,
 * which prints its own, does not see. */
void vb_say(const char *why);

/* vb_fail sets errno and returns NULL: for verbs that return pointers. */
static inline void *vb_fail(int err)
{
	errno = err;
	return NULL;
}

/* vb_num sets errno for a negative r and returns it, otherwise 0: for verbs that return an
 * errno. */
static inline int vb_num(int64_t r)
{
	if (r >= 0)
		return 0;
	errno = (int)-r;
	return (int)-r;
}

/*
 * A thread with PTHREAD_CANCEL_ASYNCHRONOUS can be cancelled at any instruction. It must not
 * be while it holds a lock or is in the backend, since Go's frames cannot be unwound. VB_WHOLE
 * at the head of a function defers a cancellation to its end. It costs 3 ns if the thread has
 * the default type; disabling cancellation would cost 24.
 */
static inline int vb_defer_cancel(void)
{
	int type = PTHREAD_CANCEL_DEFERRED;
	pthread_setcanceltype(PTHREAD_CANCEL_DEFERRED, &type);
	return type;
}

static inline void vb_allow_cancel(const int *type)
{
	if (__builtin_expect(*type != PTHREAD_CANCEL_DEFERRED, 0))
		pthread_setcanceltype(*type, NULL); /* a deferred cancellation happens here */
}

#define VB_WHOLE __attribute__((cleanup(vb_allow_cancel), unused)) const int cancel_type = vb_defer_cancel()

/* --- between the files --- */

/* How a queue pair is made: as the attributes say; with every ibv_wr_* function of its type;
 * with no messages or results kept with their completions. */
enum vb_qp_manner { USUAL = 0, ALL_SEND_OPS = 1, NO_SCATTER = 2 };
enum { VB_MAX_GIDS = 256 };

/* vb_find_device finds a device that was listed, by its name or that of its node in /dev. */
struct vb_device *vb_find_device(const char *name, bool by_node);

/* vb_import makes another object for a handle of the backend; NULL with errno ENOENT if the
 * context has no such handle, or EOPNOTSUPP if the context is imported from another
 * process. */
void *vb_import(enum kind kind, struct ibv_context *context, uint64_t handle);

void vb_set_ops(struct vb_context *c); /* device.c fills the tables with: */

int vb_poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc);
int vb_req_notify_cq(struct ibv_cq *cq, int solicited_only);
struct ibv_cq_ex *vb_create_cq_ex(struct ibv_context *ctx, struct ibv_cq_init_attr_ex *attr);
int vb_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
void vb_forget_completions(struct vb_qp *q); /* drops those of a queue pair from the rings */
void vb_on_cq_event(uint64_t cookie);

int vb_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int vb_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int vb_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
struct ibv_qp *vb_create_qp_ex(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr);
struct ibv_qp *vb_make_qp(struct ibv_context *ctx, struct ibv_qp_init_attr_ex *attr, enum vb_qp_manner manner);
struct ibv_qp *vb_open_qp(struct ibv_context *ctx, struct ibv_qp_open_attr *attr);
int vb_start_builder(struct vb_qp *q, uint64_t ops); /* wr.c */
void vb_end_builder(struct vb_qp *q);

struct ibv_srq *vb_create_srq_ex(struct ibv_context *ctx, struct ibv_srq_init_attr_ex *attr);
int vb_get_srq_num(struct ibv_srq *srq, uint32_t *num);
struct ibv_xrcd *vb_open_xrcd(struct ibv_context *ctx, struct ibv_xrcd_init_attr *attr);
int vb_close_xrcd(struct ibv_xrcd *xrcd);

/* on is NULL, or device memory in which iova is an offset. */
struct ibv_mr *vb_reg_mr(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access,
			 struct vb_dm *on);
struct ibv_mr *vb_reg_mr_hinted(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned int access,
				uint64_t dmah);
struct ibv_mr *vb_reg_dmabuf_hinted(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access,
				    uint64_t dmah);
struct ibv_mr *vb_alloc_null_mr(struct ibv_pd *pd);
struct ibv_dm *vb_alloc_dm(struct ibv_context *ctx, struct ibv_alloc_dm_attr *attr);
int vb_free_dm(struct ibv_dm *dm);
struct ibv_mr *vb_reg_dm_mr(struct ibv_pd *pd, struct ibv_dm *dm, uint64_t offset, size_t length, unsigned int access);
struct ibv_mw *vb_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int vb_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int vb_dealloc_mw(struct ibv_mw *mw);
int vb_advise_mr(struct ibv_pd *pd, enum ibv_advise_mr_advice advice, uint32_t flags, struct ibv_sge *sgl, uint32_t n);
struct ibv_pd *vb_alloc_parent_domain(struct ibv_context *ctx, struct ibv_parent_domain_init_attr *attr);
struct ibv_td *vb_alloc_td(struct ibv_context *ctx, struct ibv_td_init_attr *attr);
int vb_dealloc_td(struct ibv_td *td);

void vb_fill_dv(struct vb_qp *q); /* mkey.c */

int vb_start_events(struct vb_context *c);
int vb_renew_events(struct vb_context *c); /* in a child of fork(): the descriptor gets an eventfd of its own */
void vb_end_events(struct vb_context *c);
void vb_on_async_event(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type);
/* vb_await_acks drops an object's events that the program has not taken, and waits until it
 * has acknowledged the others. */
void vb_await_acks(struct vb_context *c, void *pub, pthread_mutex_t *mu, pthread_cond_t *cond, uint32_t *taken,
		   uint32_t *acked);


void vb_start_guard(void *in_backend); /* signals.c */
void vb_guard_signals(void);

#endif
