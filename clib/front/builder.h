/*
 * Requests that are being built between ibv_wr_start and ibv_wr_complete: wr.c has
 * those of verbs, mkey.c those that configure indirect keys.
 */
#ifndef VERBENA_BUILDER_H
#define VERBENA_BUILDER_H

#include "front.h"

struct builder {
	pthread_mutex_t lock; /* held from wr_start to wr_complete or wr_abort; guards all of it */
	int cancel_type; /* of the thread that holds the lock; restored at the end */
	struct vbe_send_wr *wrs;
	struct ibv_sge *sges;  /* max_send_sge for each */
	uint8_t *inline_bytes; /* max_inline_data for each */
	uint32_t room, count;
	int err; /* the first mistake */

	/* The configurations of indirect keys. Both stores may move when they grow, so until
	 * vb_place_layouts requests and layouts hold indexes: vbe_send_wr.layout counts from 1
	 * (0: none), vbe_layout.pieces from 0. */
	struct vbe_layout *layouts;
	struct vbe_piece *pieces;
	size_t num_layouts, num_pieces, room_layouts, room_pieces;
	uint32_t setters; /* how many the last request still needs */
	uint32_t max;	  /* how many pieces its key may have */
};

/* vb_begin adds a request; NULL if there is no room for it, or after a mistake. */
struct vbe_send_wr *vb_begin(struct vb_qp *q, uint32_t opcode);

/* vb_wrong notes a mistake, if it is the first one. */
static inline void vb_wrong(struct builder *b, int err)
{
	if (!b->err)
		b->err = err;
}

void vb_place_layouts(struct builder *b); /* mkey.c: indexes become addresses */

#endif
