/*
 * What the two files of kverbs share. kverbs.c explains the program.
 */
#ifndef KVERBS_H
#define KVERBS_H

#include <errno.h>
#include <infiniband/verbs.h>
#include <stdint.h>

#define MAX_ID 1024 /* objects of each kind */

/* ---- arguments and answers ---- */

const char *str(const char *key); /* NULL if there is no such key */
uint64_t num(const char *key, uint64_t otherwise);

void ok(const char *format, ...) __attribute__((format(printf, 1, 2)));
void fail(int code, const char *what); /* answers "err" with an errno */
void done(int code, const char *what); /* answers for a verb that returns an errno, or -1 and sets errno */

/* ---- objects ---- */

extern struct ibv_context *ctx;
extern struct ibv_pd *pds[MAX_ID];
extern struct ibv_mr *mrs[MAX_ID];
extern struct ibv_mw *mws[MAX_ID];
extern struct ibv_comp_channel *chans[MAX_ID];
extern struct ibv_cq *cqs[MAX_ID];
extern struct ibv_srq *srqs[MAX_ID];
extern struct ibv_qp *qps[MAX_ID];
extern struct ibv_ah *ahs[MAX_ID];

/* SLOT finds a free place for a new object, which "id" names. */
#define SLOT(table)                                            \
	uint64_t id = num("id", 0);                            \
	if (id >= MAX_ID || (table)[id]) {                     \
		fail(id >= MAX_ID ? ERANGE : EEXIST, "id");    \
		return;                                        \
	}

/* FIND finds an existing object, which key names. */
#define FIND(var, table, key)                                  \
	typeof((table)[0]) var = NULL;                         \
	if (num(key, 0) < MAX_ID)                              \
		var = (table)[num(key, 0)];                    \
	if (!var) {                                            \
		fail(ENOENT, key);                             \
		return;                                        \
	}

/* MADE keeps a new object, or answers why there is none. */
#define MADE(table, object, what)                              \
	if (!((table)[id] = (object))) {                       \
		fail(errno, what);                             \
		return;                                        \
	}

/* pattern_word returns word i, of 8 bytes, of the pattern that a seed gives. Package guest
 * computes the same. */
uint64_t pattern_word(uint64_t seed, uint64_t i);

/* ---- the commands of queues.c ---- */

void do_chan(void);
void do_cq(void);
void do_arm(void);
void do_event(void);
void do_poll(void);
void do_srq(void);
void do_ah(void);
void do_qp(void);
void do_init(void);
void do_rtr(void);
void do_rts(void);
void do_state(void);
void do_query(void);
void do_send(void);
void do_atomic_write(void);
void do_flush(void);
void do_recv(void);

#endif
