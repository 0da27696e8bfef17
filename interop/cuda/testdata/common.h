/*
 * What the programs here share. They judge RDMA on GPU memory, on a card and on software GPUs.
 *
 *   runner.c   runs cases: each in a process of its own, which the runner ends after a time limit
 *   kinds.c    allocates memory of every kind, and registers it in every way
 *   node.c     one end of the traffic: memory, queue pairs and requests, in this process or in another one
 *   pattern.c  the bytes that are moved, and the clock
 *
 * A case is a function that gives orders to nodes. A node of another process gets its orders by a socket, a node of this
 * process by a function call, so that a case is written once for both.
 *
 * A program prints a line for each case: "PASS name", "FAIL name: why" or "SKIP name: why".
 */
#ifndef COMMON_H
#define COMMON_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

#include <cuda.h>
#include <infiniband/verbs.h>

#ifdef __cplusplus
extern "C" {
#endif

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* ---- cases: runner.c ---- */

struct test {
	char name[80];
	void (*run)(const struct test *);
	int peers;	    /* how many other processes it has, which start before the case touches CUDA */
	const char *env[2]; /* a variable and its value, which the case's processes get */
	int arg[4];	    /* what the function makes of them */
	int limit;	    /* in seconds, if CASE_LIMIT is too short */
};

/* run_tests is the whole program: it runs the cases that the arguments name, and returns the exit status.
 *
 *   --seed N   the seed of the bytes (else VERBENA_SEED, else the time)
 *   --list     print the names of the cases
 *   --max N    leave out messages of more than N bytes, where a case has many sizes
 *   NAME       a case, or by a pattern of the shell several
 */
int run_tests(int argc, char **argv, const struct test *tests, int n);

/* The limit of one case, and of one wait within it, in seconds. */
enum { CASE_LIMIT = 30, WAIT_LIMIT = 20 };

/* failed and skipped end the case. */
void failed(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));
void skipped(const char *format, ...) __attribute__((noreturn, format(printf, 1, 2)));

/* WANT ends the case unless something is so. */
#define WANT(cond)                                                                                                     \
	do {                                                                                                           \
		if (!(cond))                                                                                           \
			failed("%s:%d: not so: %s (errno %d, %s)", __FILE__, __LINE__, #cond, errno, strerror(errno)); \
	} while (0)

/* OK ends the case unless a call of CUDA succeeds. */
#define OK(call) cuda_ok((call), #call, __FILE__, __LINE__)
void cuda_ok(CUresult r, const char *call, const char *file, int line);

/* ---- bytes and time: pattern.c ---- */

extern uint64_t seed;
extern uint64_t max_message; /* of --max */

/* pattern_word returns the 8 bytes at an offset, a multiple of 8, of the message of a round. */
uint64_t pattern_word(uint64_t round, size_t off);
/* pattern_fill writes the n bytes that belong to a round; pattern_check returns the offset of the first one that is
 * different, or -1. */
void pattern_fill(void *to, size_t n, uint64_t round);
int64_t pattern_check(const void *from, size_t n, uint64_t round);
double now(void); /* in seconds */

/* ---- memory: kinds.c ---- */

enum kind { PLAIN, PAGE_LOCKED, HOST_REGISTERED, DEVICE_MEMORY, ALLOCATED_MR, GPU, VMM, VMM_FD, MANAGED, KINDS };

enum way {
	BY_ADDRESS,
	BY_DMABUF,  /* of the whole allocation */
	BY_PART,    /* a dma-buf of the memory from the second page on */
	BY_OFFSET,  /* a dma-buf of the whole allocation, registered from the second page on */
	BY_IOVA,    /* a dma-buf; its address in requests is another one than the GPU's */
	NO_WAY,     /* not registered */
	WAYS,
};

extern const char *const kind_names[KINDS], *const way_names[WAYS];

enum { ALL_RIGHTS = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };

struct memory {
	enum kind kind;
	enum way way;
	size_t size;
	unsigned char *host; /* NULL unless the CPU loads and stores there */
	CUdeviceptr device;  /* 0 unless it is CUDA's; the first byte of the region */
	struct ibv_dm *dm;
	struct ibv_mr *mr;
	uint64_t addr; /* of the region's first byte in requests */

	/* what is to be freed */
	void *block;
	CUdeviceptr base;
	size_t reserved;
	unsigned long long handle;
	bool gone; /* freed under the region */
};

/* is_gpu reports whether the CPU does not load and store in such memory. */
bool is_gpu(enum kind kind);

/* cuda_start makes the primary context of the first GPU the thread's current one, also if that was done. */
void cuda_start(void);

/* memory_open allocates and registers. It returns 0 or an errno: ENOTSUP if libcuda does not have such memory. */
int memory_open(struct memory *m, struct ibv_pd *pd, enum kind kind, enum way way, size_t size, int access);
/* memory_free frees the memory under its region; memory_close deregisters it, too. They return 0 or an errno. */
int memory_free(struct memory *m);
int memory_close(struct memory *m);
/* memory_put and memory_get copy as the owner of the memory does. */
void memory_put(struct memory *m, size_t off, const void *from, size_t n);
void memory_get(struct memory *m, size_t off, void *to, size_t n);
/* export_range returns a dma-buf of GPU memory. */
int export_range(CUdeviceptr p, size_t n);

/* ---- one end of the traffic: node.c ---- */

enum { MAX_SGE = 4, DEPTH = 64 };

struct node; /* in this process, or another one's */

extern struct node *nodes[4]; /* of the case: nodes[0] is always in this process */

/* A region of a node, as others know it. */
struct region {
	struct node *at;
	int id;
	uint64_t addr;
	uint32_t lkey, rkey;
	size_t size;
};

/* A queue pair of a node. */
struct queue {
	struct node *at;
	int id;
	uint32_t qpn;
	union ibv_gid gid;
};

enum { QP_SRQ = 1, QP_UD = 2, QP_MLX5 = 4 };

struct piece {
	const struct region *of;
	size_t off;
	uint32_t n;
};

/* What a request is; the pieces end with the first of length 0. */
struct request {
	enum ibv_wr_opcode opcode;
	struct piece piece[MAX_SGE];
	uint64_t to;
	uint32_t rkey, imm;
	uint64_t compare, swap;
	unsigned flags;
	uint32_t ud_qpn; /* to which a UD queue pair sends */
};

/* What has become of one. */
struct outcome {
	int status; /* enum ibv_wc_status */
	int opcode;
	uint32_t bytes, imm;
	uint64_t count; /* of the requests that have succeeded, where there were several */
};

struct node *local_node(void);		 /* in this process */
int64_t node_error(struct node *at);	 /* errno of the last call that returned an error */

struct region region_open(struct node *at, enum kind kind, enum way way, size_t size, int access);
struct region region_try(struct node *at, enum kind kind, enum way way, size_t size, int access); /* at NULL: refused */
void region_free(const struct region *r);  /* frees the memory under it */
void region_close(const struct region *r); /* also if its memory is freed */
void region_fill(const struct region *r, size_t off, size_t n, uint64_t round);
void region_check(const struct region *r, size_t off, size_t n, uint64_t round);
bool region_has(const struct region *r, size_t off, size_t n, uint64_t round);
void region_set(const struct region *r, size_t off, uint64_t value); /* 8 bytes */
/* region_rereg gives the region r the memory of another one, which is not registered. */
struct region region_rereg(const struct region *r, const struct region *memory);

struct queue queue_open(struct node *at, int flags);
void queue_connect(const struct queue *q, const struct queue *to);
void queue_link(struct queue *a, struct node *from, struct queue *b, struct node *to, int flags);
void queue_close(const struct queue *q);

void post(const struct queue *q, const struct request *r);
void post_receive(const struct queue *q, const struct piece *pieces); /* NULL: of no bytes */
struct outcome await(const struct queue *q, int n);
struct outcome await_receive(const struct queue *q);
/* request_on posts one request and waits for it. */
struct outcome request_on(const struct queue *q, const struct request *r);
void must(const struct queue *q, const struct request *r);

/* window_open binds a type 2 window to a part of a region, by a queue pair of the same node. */
uint32_t window_open(const struct queue *q, const struct region *r, size_t off, size_t n, int access);
/* mkey_open makes an indirect key of pieces, by a queue pair with QP_MLX5. The pieces repeat so often, each with skip bytes
 * behind it; 0: the key is a list of them. Its addresses begin with 0. */
struct region mkey_open(const struct queue *q, const struct piece *pieces, int repeat, uint32_t skip);
void mkey_close(const struct region *key);

/* Orders that take their time. begin_... returns at once; finish waits for the result. A node has one at a time. */
struct traffic {
	struct queue q[8];
	int queues;
	struct request what;
	uint64_t rounds; /* of each queue; 0: until one fails, or */
	double seconds;	 /* until so much time has passed, if that is not 0 */
	bool by_cas;	 /* add 1 by CMP_SWAP, whose first guess is 0 */
};
void begin_traffic(struct node *at, const struct traffic *t);
struct outcome finish(struct node *at);

/* node_usable checks that CUDA works in the node's process: allocates, copies both ways, compares and frees. */
void node_usable(struct node *at);
/* node_context makes another context the current one of the node's process; node_destroy destroys it. */
void node_context(struct node *at);
void node_destroy(struct node *at);
void node_signal(struct node *at, int sig);
void node_gone(struct node *at); /* waits until a process that was killed is gone */

/* What a program calls on its own, in its process. */
struct ibv_context *node_verbs(struct node *at);
struct ibv_pd *node_pd(struct node *at);
struct memory *node_memory(const struct region *r);
struct ibv_qp *node_qp(const struct queue *q);
struct ibv_cq *node_cq(const struct queue *q);

/* ---- between runner.c and node.c ---- */
void nodes_start(int peers, const int *sockets, const pid_t *pids);
void nodes_serve(int socket) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif

#endif
