/*
 * Requests that are being built between ibv_wr_start and ibv_wr_complete: wr.c has
 * those of verbs, mkey.c those that configure indirect keys.
 */
#ifndef VERBENA_BUILDER_H
#define VERBENA_BUILDER_H

#include "front.h"

struct builder {
	pthread_mutex_t lock; /* held from start to complete or abort; guards all of it */
	int cancel_type; /* of the thread between wr_start and wr_complete */
	struct vbe_send_wr *wrs;
	struct ibv_sge *sges;  /* max_send_sge for each */
	uint8_t *inline_bytes; /* max_inline_data for each */
	uint32_t room, count;
	int err; /* the first mistake */

	/* What keys become. Until the end, what points to these is a number, from 1 on,
	 * and a layout's pieces begin at one: the stores may move. */
	struct vbe_layout *layouts;
	struct vbe_piece *pieces;
	size_t num_layouts, num_pieces, room_layouts, room_pieces;
	uint32_t setters; /* that the last request still needs */
	uint32_t max;	  /* pieces that its key was made for */
};

/* begin adds a request; NULL if there is no room for it, or something is wrong. */
struct vbe_send_wr *vb_begin(struct vb_qp *q, uint32_t opcode);

/* wrong notes a mistake, if it is the first one. */
static inline void vb_wrong(struct builder *b, int err)
{
	if (!b->err)
		b->err = err;
}

void vb_place_layouts(struct builder *b); /* mkey.c: numbers become addresses */

#endif
