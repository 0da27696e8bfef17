/*
 * Asynchronous events. The backend calls vb_on_async_event, which appends the event to
 * the context's list and adds one to its eventfd. ibv_get_async_event takes it from both.
 * An object is not destroyed until the events that were taken are acknowledged.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "front.h"

int vb_start_events(struct vb_context *c)
{
	c->v.context.async_fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
	if (c->v.context.async_fd < 0)
		return errno;
	pthread_mutex_init(&c->events_lock, NULL);
	c->first = NULL;
	c->last = &c->first;
	return 0;
}

int vb_renew_events(struct vb_context *c)
{
	int fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
	if (fd < 0 || dup3(fd, c->v.context.async_fd, O_CLOEXEC) < 0) {
		int err = errno;
		if (fd >= 0)
			close(fd);
		return err;
	}
	close(fd);
	pthread_mutex_init(&c->events_lock, NULL);
	c->first = NULL; /* the events were the parent's */
	c->last = &c->first;
	return 0;
}

void vb_end_events(struct vb_context *c)
{
	if (c->v.context.async_fd < 0)
		return;
	close(c->v.context.async_fd);
	while (c->first) {
		struct event *e = c->first;
		c->first = e->next;
		free(e);
	}
}

void vb_on_async_event(uint64_t context, uint32_t of, uint64_t cookie, uint32_t type)
{
	struct vb_context *c = (struct vb_context *)(uintptr_t)context;
	struct event *e = calloc(1, sizeof *e);
	if (!e)
		return;
	e->pub.event_type = (enum ibv_event_type)type;
	switch (of) {
	case VBE_OF_CQ:
		e->pub.element.cq = (struct ibv_cq *)&((struct vb_cq *)(uintptr_t)cookie)->pub;
		break;
	case VBE_OF_QP:
		e->pub.element.qp = &((struct vb_qp *)(uintptr_t)cookie)->pub.qp_base;
		break;
	case VBE_OF_SRQ:
		e->pub.element.srq = &((struct vb_srq *)(uintptr_t)cookie)->pub;
		break;
	default:
		e->pub.element.port_num = 1;
	}
	uint64_t one = 1;
	pthread_mutex_lock(&c->events_lock);
	*c->last = e;
	c->last = &e->next;
	if (syscall(SYS_write, c->v.context.async_fd, &one, sizeof one) < 0) { /* write() is a cancellation point, and Go calls this */
		/* The counter is full, at 2^64 - 2: the reader is woken anyway. */
	}
	pthread_mutex_unlock(&c->events_lock);
}

/* count counts an event with the object that it is about, as taken or acknowledged. */
static void count(struct ibv_async_event *e, bool ack)
{
	pthread_mutex_t *mu;
	pthread_cond_t *cond;
	uint32_t *taken, *acked;
	switch (e->event_type) {
	case IBV_EVENT_CQ_ERR: {
		struct vb_cq *c = to_cq(e->element.cq);
		mu = &c->pub.mutex, cond = &c->pub.cond, taken = &c->async_taken, acked = &c->pub.async_events_completed;
		break;
	}
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_QP_REQ_ERR:
	case IBV_EVENT_QP_ACCESS_ERR:
	case IBV_EVENT_COMM_EST:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_PATH_MIG:
	case IBV_EVENT_PATH_MIG_ERR:
	case IBV_EVENT_QP_LAST_WQE_REACHED: {
		struct vb_qp *q = to_qp(e->element.qp);
		struct ibv_qp *p = &q->pub.qp_base;
		mu = &p->mutex, cond = &p->cond, taken = &q->async_taken, acked = &p->events_completed;
		break;
	}
	case IBV_EVENT_SRQ_ERR:
	case IBV_EVENT_SRQ_LIMIT_REACHED: {
		struct vb_srq *s = OUTER(vb_srq, e->element.srq);
		mu = &s->pub.mutex, cond = &s->pub.cond, taken = &s->async_taken, acked = &s->pub.events_completed;
		break;
	}
	default:
		return;
	}
	pthread_mutex_lock(mu);
	++*(ack ? acked : taken);
	if (ack)
		pthread_cond_signal(cond);
	pthread_mutex_unlock(mu);
}

PUBLIC int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct vb_context *c = live_context(context);
	if (!c || !event) {
		errno = EINVAL;
		return -1;
	}
	for (;;) {
		uint64_t one;
		if (read(context->async_fd, &one, sizeof one) != sizeof one)
			return -1;
		pthread_mutex_lock(&c->events_lock);
		struct event *e = c->first;
		if (e) {
			c->first = e->next;
			if (!c->first)
				c->last = &c->first;
			*event = e->pub;
			count(event, false);
		}
		pthread_mutex_unlock(&c->events_lock);
		if (e) {
			free(e);
			return 0;
		} /* the event was of an object that is destroyed */
	}
}

PUBLIC void ibv_ack_async_event(struct ibv_async_event *event)
{
	if (event)
		count(event, true);
}

void vb_await_acks(struct vb_context *c, void *pub, pthread_mutex_t *mu, pthread_cond_t *cond, uint32_t *taken,
		   uint32_t *acked)
{
	pthread_mutex_lock(&c->events_lock);
	for (struct event **p = &c->first; *p;) {
		struct event *e = *p;
		if ((void *)e->pub.element.cq == pub) { /* a union: pub may be of another type */
			*p = e->next;
			free(e);
		} else
			p = &e->next;
	}
	c->last = &c->first;
	while (*c->last)
		c->last = &(*c->last)->next;
	pthread_mutex_unlock(&c->events_lock);
	pthread_mutex_lock(mu);
	while (*taken != *acked)
		pthread_cond_wait(cond, mu);
	pthread_mutex_unlock(mu);
}
