/*
 * Memory for objects, with one list of free objects for each kind. A freed object goes to
 * the end of the list, and new ones come from its front: so a stale pointer is recognized
 * for as long as possible. The memory never becomes anything else.
 *
 * Functions in verbs.h call functions by way of such a pointer or its context. So what a
 * dead object holds stays there, also after a failed attempt to make another object in its
 * memory: vb_new keeps a copy, and vb_free restores it if the other was not handed out.
 */
#include <stdlib.h>
#include <string.h>

#include "front.h"

static const size_t sizes[NUM_KINDS] = {
	[CONTEXT] = sizeof(struct vb_context), [PD] = sizeof(struct vb_pd),	[MR] = sizeof(struct vb_mr),
	[MW] = sizeof(struct vb_mw),	       [CQ] = sizeof(struct vb_cq),	[CHANNEL] = sizeof(struct vb_channel),
	[QP] = sizeof(struct vb_qp),	       [SRQ] = sizeof(struct vb_srq),	[XRCD] = sizeof(struct vb_xrcd),
	[AH] = sizeof(struct vb_ah),	       [TD] = sizeof(struct vb_td),	[DM] = sizeof(struct vb_dm),
	[MKEY] = sizeof(struct vb_mkey),       [DMAH] = sizeof(struct vb_dmah),
};

/* Where each kind has a pointer that is NULL until the object is handed out. */
#define HANDED_OUT(kind, type, field) [kind] = offsetof(struct type, field)
static const size_t handed_out[NUM_KINDS] = {
	HANDED_OUT(CONTEXT, vb_context, v.context.device), HANDED_OUT(PD, vb_pd, pub.context),
	HANDED_OUT(MR, vb_mr, pub.context),		   HANDED_OUT(MW, vb_mw, pub.context),
	HANDED_OUT(CQ, vb_cq, pub.context),		   HANDED_OUT(CHANNEL, vb_channel, pub.context),
	HANDED_OUT(QP, vb_qp, pub.qp_base.context),	   HANDED_OUT(SRQ, vb_srq, pub.context),
	HANDED_OUT(XRCD, vb_xrcd, pub.context),		   HANDED_OUT(AH, vb_ah, pub.context),
	HANDED_OUT(TD, vb_td, pub.context),		   HANDED_OUT(DM, vb_dm, pub.context),
	HANDED_OUT(MKEY, vb_mkey, pd),			   HANDED_OUT(DMAH, vb_dmah, pub.context),
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the lists, and refs of all heads */
static struct {
	struct head *first, *last;
	size_t count;
} spare[NUM_KINDS];

/* How many objects of a kind must be free before one is used again. */
enum { REST = 16 };

void *vb_new(enum kind kind, struct backend *b)
{
	struct head *h = NULL;
	pthread_mutex_lock(&lock);
	if (spare[kind].count > REST) {
		h = spare[kind].first;
		spare[kind].first = h->next;
		spare[kind].count--;
	}
	pthread_mutex_unlock(&lock);
	void *before = h ? malloc(sizes[kind]) : NULL;
	if (before)
		memcpy(before, h, sizes[kind]);
	if (h)
		memset(h, 0, sizes[kind]);
	else if (!(h = calloc(1, sizes[kind])))
		return vb_fail(ENOMEM);
	h->before = before;
	h->backend = b;
	h->magic = MAGIC + kind;
	return h;
}

void vb_free(enum kind kind, struct head *h)
{
	void *before = h->before;
	void **mark = (void **)((char *)h + handed_out[kind]);
	pthread_mutex_lock(&lock);
	if (h->in)
		h->in->refs--;
	h->in = NULL;
	if (before && !*mark)
		memcpy(h, before, sizes[kind]);
	free(before);
	h->before = NULL;
	h->magic = MAGIC + DEAD;
	h->next = NULL;
	if (spare[kind].count++)
		spare[kind].last->next = h;
	else
		spare[kind].first = h;
	spare[kind].last = h;
	pthread_mutex_unlock(&lock);
}

void vb_ref(struct head *h)
{
	pthread_mutex_lock(&lock);
	h->refs++;
	pthread_mutex_unlock(&lock);
}

void vb_unref(struct head *h)
{
	pthread_mutex_lock(&lock);
	h->refs--;
	pthread_mutex_unlock(&lock);
}

bool vb_busy(struct head *h)
{
	pthread_mutex_lock(&lock);
	bool busy = h->refs > 0;
	pthread_mutex_unlock(&lock);
	return busy;
}

/* Only users of parent domains are counted here; the backend counts those of others. */
void vb_enter(struct head *h, struct vb_pd *p)
{
	pthread_mutex_lock(&lock);
	if (h->in)
		h->in->refs--;
	h->in = p && p->of ? &p->h : NULL;
	if (h->in)
		h->in->refs++;
	pthread_mutex_unlock(&lock);
}

static void before_fork(void) { pthread_mutex_lock(&lock); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&lock); }
static void after_fork_in_child(void) { pthread_mutex_init(&lock, NULL); }

__attribute__((constructor)) static void at_load(void)
{
	pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}
