/*
 * Completion queues and channels.
 *
 * A completion's way: the backend puts it into the queue's ring (backend.h) when it is
 * made, in whatever thread that happens. If it cannot, as when the ring is full, it does
 * so at the next poll that asks it. The program takes the completion from the ring with
 * ibv_poll_cq, or reads it there with ibv_start_poll. Neither enters the backend while
 * the ring has completions, but for the first poll after arming (ready).
 *
 * An event's way: the backend calls vb_on_cq_event, which counts it with the queue,
 * puts the queue into its channel's list and adds one to the channel's eventfd.
 * ibv_get_cq_event takes one from the eventfd and a queue off the list.
 *
 * Arming raises the event at once if there is a completion that has raised none and
 * has not been polled, as with adapters: programs (UCX) poll until there is nothing,
 * arm, and sleep.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "front.h"

#define SAME(field) _Static_assert(offsetof(struct vbe_wc, field) == offsetof(struct ibv_wc, field), #field)
SAME(wr_id);
SAME(status);
SAME(opcode);
SAME(vendor_err);
SAME(byte_len);
SAME(qp_num);
SAME(src_qp);
SAME(pkey_index);
SAME(slid);
SAME(sl);
SAME(dlid_path_bits);
_Static_assert(offsetof(struct vbe_wc, imm_or_key) == offsetof(struct ibv_wc, imm_data), "imm_data");
_Static_assert(offsetof(struct vbe_wc, flags) == offsetof(struct ibv_wc, wc_flags), "wc_flags");
_Static_assert(offsetof(struct vbe_wc, when) == sizeof(struct ibv_wc), "size of ibv_wc");
_Static_assert(offsetof(struct ibv_cq, async_events_completed) == offsetof(struct ibv_cq_ex, async_events_completed),
	       "an extended queue begins as a queue");

/* --- the ring --- */

static inline void cq_lock(struct vb_cq *c)
{
	if (!c->single)
		pthread_mutex_lock(&c->lock);
}

static inline void cq_unlock(struct vb_cq *c)
{
	if (!c->single)
		pthread_mutex_unlock(&c->lock);
}

/* The thread or process that a poll waits for may need this very core. So after some polls
 * in vain (patience) the poller yields. That takes long and helps nothing where the other
 * threads only spin for a lock which the poller's caller holds, as those of UCX. So each yield
 * doubles patience; polls that find something reduce it. */
enum { PATIENCE = 32, MOST_PATIENCE = 4096 };

static inline void found_nothing(struct vb_cq *c)
{
	if (++c->vain < c->patience)
		return;
	sched_yield();
	c->vain = 0;
	c->yielded = true;
	if (c->patience < MOST_PATIENCE)
		c->patience *= 2;
}

static inline void found_some(struct vb_cq *c)
{
	if (c->yielded && c->vain < PATIENCE)
		c->patience = PATIENCE;
	else if (c->patience > PATIENCE)
		c->patience /= 2;
	c->vain = 0;
	c->yielded = false;
}

/* ready returns how many completions the ring has, or a negative errno. If it has none, the
 * backend is asked first. The first poll after arming also asks if there are fewer than
 * wanted: there may be one event for all completions of that time, so the program relies on
 * getting them all. */
static inline int64_t ready(struct vb_cq *c, uint32_t want)
{
	struct vbe_ring *r = c->ring;
	uint32_t n = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE) - r->head;
	if (n && (n >= want || !atomic_load_explicit(&c->armed, memory_order_relaxed)))
		return n;
	atomic_store_explicit(&c->armed, false, memory_order_relaxed);
	static uint32_t polls; /* of all threads, about */
	if (++polls % 4096 == 0)
		vb_guard_signals();
	int64_t e = c->h.backend->vbe_poll_cq(c->h.handle);
	n = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE) - r->head;
	if (e < 0)
		return e;
	if (n)
		found_some(c);
	else
		found_nothing(c);
	return n;
}

int vb_poll_cq(struct ibv_cq *cq, int num, struct ibv_wc *wc)
{
	struct vb_cq *c = to_cq(cq);
	if (num < 0 || !vb_usable(&c->h, CQ)) {
		errno = EINVAL;
		return -EINVAL;
	}
	if (num == 0)
		return 0;
	VB_WHOLE;
	cq_lock(c);
	int64_t n = ready(c, (uint32_t)num);
	if (n > num)
		n = num;
	struct vbe_ring *r = c->ring;
	for (int64_t i = 0; i < n; i++)
		memcpy(&wc[i], &r->slot[(r->head + (uint32_t)i) % VBE_RING], sizeof *wc);
	if (n > 0)
		__atomic_store_n(&r->head, r->head + (uint32_t)n, __ATOMIC_RELEASE);
	cq_unlock(c);
	return (int)n;
}

/* forget drops the completions of a queue pair, which is reset or destroyed, from a ring. */
static void forget(struct vb_cq *c, uint32_t qpn)
{
	struct vbe_ring *r = c->ring;
	cq_lock(c);
	/* The backend adds at the tail meanwhile. Completions before the tail are the front's. */
	uint32_t tail = __atomic_load_n(&r->tail, __ATOMIC_ACQUIRE), to = tail;
	for (uint32_t from = tail; from-- != r->head;) {
		if (r->slot[from % VBE_RING].qp_num != qpn) {
			to--;
			if (to != from)
				r->slot[to % VBE_RING] = r->slot[from % VBE_RING];
		}
	}
	__atomic_store_n(&r->head, to, __ATOMIC_RELEASE);
	cq_unlock(c);
}

void vb_forget_completions(struct vb_qp *q)
{
	struct ibv_qp *pub = &q->pub.qp_base;
	if (pub->send_cq)
		forget(to_cq(pub->send_cq), pub->qp_num);
	if (pub->recv_cq && pub->recv_cq != pub->send_cq)
		forget(to_cq(pub->recv_cq), pub->qp_num);
}

/* --- the extended way to poll --- */

static inline struct vb_cq *ex(struct ibv_cq_ex *cq) { return OUTER(vb_cq, cq); }

static void look_at(struct vb_cq *c, uint32_t at)
{
	c->at = at;
	c->cur = &c->ring->slot[at % VBE_RING];
	c->pub.wr_id = c->cur->wr_id;
	c->pub.status = (enum ibv_wc_status)c->cur->status;
}

/* The lock is held from start to end, as the man page lets a provider do. */
static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	struct vb_cq *c = ex(cq);
	if (!vb_usable(&c->h, CQ) || (attr && attr->comp_mask))
		return EINVAL;
	int type = vb_defer_cancel();
	cq_lock(c);
	int64_t n = ready(c, 1);
	if (n <= 0) {
		cq_unlock(c);
		vb_allow_cancel(&type);
		return n < 0 ? (int)-n : ENOENT;
	}
	c->cancel_type = type;
	look_at(c, c->ring->head);
	return 0;
}

/* told_apart reports whether a completion has raised an event that the program has
 * not taken yet. */
static bool told_apart(struct vb_cq *c, const struct vbe_wc *wc)
{
	uint32_t event = __atomic_load_n(&wc->event, __ATOMIC_RELAXED);
	if (!event)
		return false;
	pthread_mutex_lock(&c->pub.mutex);
	bool waits = (int32_t)(event - c->taken) > 0;
	pthread_mutex_unlock(&c->pub.mutex);
	return waits;
}

/* A completion whose event waits (told_apart) is not returned here but by the next
 * start_poll: programs that poll once for each event (ibv_rc_pingpong -t -e) take an event
 * without a completion for an error. */
static int next_poll(struct ibv_cq_ex *cq)
{
	struct vb_cq *c = ex(cq);
	__atomic_store_n(&c->ring->head, c->at + 1, __ATOMIC_RELEASE); /* the program has read cur */
	c->cur = NULL;
	int64_t n = ready(c, 1);
	if (n <= 0 || told_apart(c, &c->ring->slot[c->ring->head % VBE_RING]))
		return n < 0 ? (int)-n : ENOENT;
	look_at(c, c->ring->head);
	return 0;
}

static void end_poll(struct ibv_cq_ex *cq)
{
	struct vb_cq *c = ex(cq);
	if (c->cur)
		__atomic_store_n(&c->ring->head, c->at + 1, __ATOMIC_RELEASE);
	c->cur = NULL;
	int type = c->cancel_type;
	cq_unlock(c);
	vb_allow_cancel(&type);
}

static enum ibv_wc_opcode read_opcode(struct ibv_cq_ex *cq) { return (enum ibv_wc_opcode)ex(cq)->cur->opcode; }
static uint32_t read_vendor_err(struct ibv_cq_ex *cq) { return ex(cq)->cur->vendor_err; }
static uint32_t read_byte_len(struct ibv_cq_ex *cq) { return ex(cq)->cur->byte_len; }
static __be32 read_imm_data(struct ibv_cq_ex *cq) { return ex(cq)->cur->imm_or_key; }
static uint32_t read_qp_num(struct ibv_cq_ex *cq) { return ex(cq)->cur->qp_num; }
static uint32_t read_src_qp(struct ibv_cq_ex *cq) { return ex(cq)->cur->src_qp; }
static unsigned int read_wc_flags(struct ibv_cq_ex *cq) { return ex(cq)->cur->flags; }
static uint32_t read_slid(struct ibv_cq_ex *cq) { return ex(cq)->cur->slid; }
static uint8_t read_sl(struct ibv_cq_ex *cq) { return ex(cq)->cur->sl; }
static uint8_t read_dlid_path_bits(struct ibv_cq_ex *cq) { return ex(cq)->cur->dlid_path_bits; }
static uint64_t read_completion_ts(struct ibv_cq_ex *cq) { return ex(cq)->cur->when; }

static uint64_t read_wallclock(struct ibv_cq_ex *cq)
{
	struct timespec mono, real;
	clock_gettime(CLOCK_MONOTONIC, &mono);
	clock_gettime(CLOCK_REALTIME, &real);
	int64_t apart = ((int64_t)real.tv_sec - mono.tv_sec) * 1000000000 + real.tv_nsec - mono.tv_nsec;
	return ex(cq)->cur->when + (uint64_t)apart;
}

/* --- making and unmaking --- */

/* What ibv_create_cq_ex accepts: no VLANs, flow tags or tag matching. */
#define TIMES (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
#define KNOWN_WC_FLAGS                                                                                                 \
	(IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM | IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |                \
	 IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL | IBV_WC_EX_WITH_DLID_PATH_BITS | TIMES)

static void set_readers(struct vb_cq *c)
{
	struct ibv_cq_ex *p = &c->pub;
	uint64_t f = c->wc_flags;
	p->start_poll = start_poll;
	p->next_poll = next_poll;
	p->end_poll = end_poll;
	p->read_opcode = read_opcode;
	p->read_vendor_err = read_vendor_err;
	p->read_wc_flags = read_wc_flags;
	p->read_byte_len = f & IBV_WC_EX_WITH_BYTE_LEN ? read_byte_len : NULL;
	p->read_imm_data = f & IBV_WC_EX_WITH_IMM ? read_imm_data : NULL;
	p->read_qp_num = f & IBV_WC_EX_WITH_QP_NUM ? read_qp_num : NULL;
	p->read_src_qp = f & IBV_WC_EX_WITH_SRC_QP ? read_src_qp : NULL;
	p->read_slid = f & IBV_WC_EX_WITH_SLID ? read_slid : NULL;
	p->read_sl = f & IBV_WC_EX_WITH_SL ? read_sl : NULL;
	p->read_dlid_path_bits = f & IBV_WC_EX_WITH_DLID_PATH_BITS ? read_dlid_path_bits : NULL;
	p->read_completion_ts = f & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP ? read_completion_ts : NULL;
	p->read_completion_wallclock_ns =
		f & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK ? read_wallclock : NULL;
}

static struct vb_cq *create(struct ibv_context *context, int64_t cqe, void *cq_context,
			    struct ibv_comp_channel *channel, uint32_t vector, bool single, uint64_t wc_flags)
{
	struct vb_context *ctx = live_context(context);
	struct vb_channel *ch = channel ? LIVE(vb_channel, CHANNEL, channel) : NULL;
	if (!ctx || (channel && (!ch || channel->context != context)))
		return vb_fail(EINVAL);
	if (vector >= (uint32_t)context->num_comp_vectors || cqe < 1)
		return vb_fail(EINVAL);
	struct vb_cq *c = vb_new(CQ, ctx->h.backend);
	if (!c)
		return NULL;
	int64_t h = -ENOMEM;
	if (!posix_memalign((void **)&c->ring, 64, sizeof *c->ring)) {
		memset(c->ring, 0, sizeof *c->ring);
		uint32_t how = (wc_flags & TIMES ? VBE_CQ_TIMES : 0) | (ch ? VBE_CQ_EVENTS : 0);
		h = ctx->h.backend->vbe_create_cq(ctx->h.handle, cqe, c->ring, (uintptr_t)c, how);
	}
	if (h < 0) {
		free(c->ring);
		vb_free(CQ, &c->h);
		return vb_fail((int)-h);
	}
	pthread_mutex_init(&c->lock, NULL);
	c->h.handle = (uint64_t)h;
	c->single = single;
	c->patience = PATIENCE;
	c->wc_flags = wc_flags;
	struct ibv_cq_ex *p = &c->pub;
	p->context = context;
	p->channel = channel;
	p->cq_context = cq_context;
	p->handle = (uint32_t)h;
	p->cqe = (int)cqe;
	pthread_mutex_init(&p->mutex, NULL);
	pthread_cond_init(&p->cond, NULL);
	if (ch) {
		vb_ref(&ch->h);
		pthread_mutex_lock(&context->mutex);
		channel->refcnt++;
		pthread_mutex_unlock(&context->mutex);
	}
	return c;
}

PUBLIC struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				    struct ibv_comp_channel *channel, int vector)
{
	struct vb_cq *c = create(context, cqe, cq_context, channel, (uint32_t)vector, false, 0);
	return c ? (struct ibv_cq *)&c->pub : NULL;
}

struct ibv_cq_ex *vb_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	if (!attr)
		return vb_fail(EINVAL);
	bool single = false;
	if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
		return vb_fail(EINVAL);
	if (attr->wc_flags & ~(uint64_t)KNOWN_WC_FLAGS)
		return vb_fail(EOPNOTSUPP);
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS) {
		if (attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED)
			return vb_fail(EOPNOTSUPP);
		single = attr->flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED;
	}
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_PD) {
		struct vb_pd *p = LIVE(vb_pd, PD, attr->parent_domain);
		if (!p || !p->of)
			return vb_fail(EINVAL);
		single = single || p->td;
	}
	struct vb_cq *c = create(context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector, single,
				 attr->wc_flags);
	if (!c)
		return NULL;
	set_readers(c);
	return &c->pub;
}

PUBLIC int ibv_resize_cq(struct ibv_cq *cq, int cqe)
{
	struct vb_cq *c = cq && vb_usable(&to_cq(cq)->h, CQ) ? to_cq(cq) : NULL;
	if (!c || cqe < 1)
		return vb_num(-EINVAL);
	cq_lock(c);
	uint32_t here = __atomic_load_n(&c->ring->tail, __ATOMIC_ACQUIRE) - c->ring->head;
	int64_t r = (int64_t)here > cqe ? -EINVAL : c->h.backend->vbe_resize_cq(c->h.handle, cqe);
	if (r >= 0)
		c->pub.cqe = cqe;
	cq_unlock(c);
	return vb_num(r);
}

/* Moderation of events is not supported. */
int vb_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
	(void)cq;
	(void)attr;
	return vb_num(-EOPNOTSUPP);
}

PUBLIC int ibv_destroy_cq(struct ibv_cq *cq)
{
	if (!cq || !vb_is(&to_cq(cq)->h, CQ))
		return vb_num(-EINVAL);
	struct vb_cq *c = to_cq(cq);
	struct vb_channel *ch = cq->channel ? OUTER(vb_channel, cq->channel) : NULL;
	if (vb_usable(&c->h, CQ)) {
		int64_t r = c->h.backend->vbe_destroy(c->h.handle);
		if (r < 0)
			return vb_num(r);
		if (ch) { /* drop the events that the program has not taken; those taken are awaited below */
			pthread_mutex_lock(&ch->lock);
			struct vb_cq *before = NULL;
			for (struct vb_cq *o = ch->first; o; before = o, o = o->next)
				if (o == c) {
					*(before ? &before->next : &ch->first) = c->next;
					if (ch->last == c)
						ch->last = before;
					break;
				}
			c->pending = 0;
			pthread_mutex_unlock(&ch->lock);
		}
		pthread_mutex_lock(&cq->mutex);
		while (c->taken != cq->comp_events_completed)
			pthread_cond_wait(&cq->cond, &cq->mutex);
		pthread_mutex_unlock(&cq->mutex);
		vb_await_acks(to_context(cq->context), cq, &cq->mutex, &cq->cond, &c->async_taken,
			      &cq->async_events_completed);
	}
	if (ch) {
		vb_unref(&ch->h);
		pthread_mutex_lock(&cq->context->mutex);
		cq->channel->refcnt--;
		pthread_mutex_unlock(&cq->context->mutex);
	}
	free(c->ring);
	c->ring = NULL;
	vb_free(CQ, &c->h);
	return 0;
}

/* --- channels and events --- */

PUBLIC struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct vb_context *ctx = live_context(context);
	if (!ctx)
		return vb_fail(EINVAL);
	struct vb_channel *ch = vb_new(CHANNEL, ctx->h.backend);
	if (!ch)
		return NULL;
	ch->pub.fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
	if (ch->pub.fd < 0) {
		int err = errno;
		vb_free(CHANNEL, &ch->h);
		return vb_fail(err);
	}
	pthread_mutex_init(&ch->lock, NULL);
	ch->pub.context = context;
	return &ch->pub;
}

PUBLIC int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
	if (!channel || !vb_is(&OUTER(vb_channel, channel)->h, CHANNEL))
		return vb_num(-EINVAL);
	struct vb_channel *ch = OUTER(vb_channel, channel);
	if (vb_busy(&ch->h))
		return vb_num(-EBUSY);
	close(channel->fd);
	vb_free(CHANNEL, &ch->h);
	return 0;
}

int vb_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	struct vb_cq *c = to_cq(cq);
	if (!vb_usable(&c->h, CQ) || !cq->channel)
		return vb_num(-EINVAL);
	VB_WHOLE;
	int64_t r = c->h.backend->vbe_arm_cq(c->h.handle, solicited_only != 0);
	atomic_store(&c->armed, true);
	return vb_num(r);
}

void vb_on_cq_event(uint64_t cookie)
{
	struct vb_cq *c = (struct vb_cq *)(uintptr_t)cookie;
	struct vb_channel *ch = OUTER(vb_channel, c->pub.channel);
	uint64_t one = 1;
	pthread_mutex_lock(&ch->lock);
	if (!c->pending++) {
		c->next = NULL;
		*(ch->last ? &ch->last->next : &ch->first) = c;
		ch->last = c;
	}
	pthread_mutex_unlock(&ch->lock);
	if (syscall(SYS_write, ch->pub.fd, &one, sizeof one) < 0) { /* write() is a cancellation point, and Go calls this */
		/* The counter is full, at 2^64 - 2: the reader is woken anyway. */
	}
}

PUBLIC int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
	struct vb_channel *ch = LIVE(vb_channel, CHANNEL, channel);
	if (!ch || !cq) {
		errno = EINVAL;
		return -1;
	}
	for (;;) {
		uint64_t one;
		ssize_t n = read(channel->fd, &one, sizeof one); /* blocks, unless the program has set O_NONBLOCK */
		if (n != sizeof one)
			return -1;
		pthread_mutex_lock(&ch->lock);
		struct vb_cq *c = ch->first;
		if (c) {
			ch->first = c->next;
			if (!ch->first)
				ch->last = NULL;
			if (--c->pending) { /* it has more: behind the channel's other queues */
				c->next = NULL;
				*(ch->last ? &ch->last->next : &ch->first) = c;
				ch->last = c;
			}
			pthread_mutex_lock(&c->pub.mutex);
			c->taken++;
			pthread_mutex_unlock(&c->pub.mutex);
		}
		pthread_mutex_unlock(&ch->lock);
		if (c) {
			*cq = (struct ibv_cq *)&c->pub;
			if (cq_context)
				*cq_context = c->pub.cq_context;
			return 0;
		} /* the event was of a queue that is destroyed */
	}
}

PUBLIC void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int n)
{
	if (!cq || !vb_is(&to_cq(cq)->h, CQ))
		return;
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += n;
	pthread_cond_signal(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}
