/*
 * dma-bufs registered by libfabric: fi_mr_regattr with FI_MR_DMABUF, on the provider verbs. The server's
 * and the client's memory are dma-bufs, of several pieces, that the CPU does not reach at the address by
 * which libfabric names them, and that move all the while. They are read, written, sent and received into.
 *
 *   ofi server ADDR [KIND]    ofi client ADDR [KIND]    ofi none ADDR (there must be no FI_HMEM)
 *
 * KIND udmabuf takes a dma-buf of the kernel instead, which stays where it is; plain takes ordinary memory, for
 * the side of a device without dma-bufs.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <linux/udmabuf.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>

#include <verbena/verbs.h>

/* Functions of our libibverbs. The side with ordinary memory runs without it. */
#pragma weak verbena_alloc_dmabuf
#pragma weak verbena_dmabuf_fd
#pragma weak verbena_free_dmabuf
#pragma weak verbena_read_dmabuf
#pragma weak verbena_write_dmabuf
#pragma weak verbena_move_dmabuf
#pragma weak verbena_evict_dmabuf
#pragma weak verbena_revoke_dmabuf

#define WANT(cond)                                                                                                     \
	do {                                                                                                           \
		if (!(cond)) {                                                                                         \
			fprintf(stderr, "%s:%d: not so: %s (errno %d)\n", __FILE__, __LINE__, #cond, errno);           \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

/* OK checks what a function of libfabric returns. */
#define OK(call)                                                                                                       \
	do {                                                                                                           \
		long r_ = (long)(call);                                                                                \
		if (r_) {                                                                                              \
			fprintf(stderr, "%s:%d: %s: %ld, %s\n", __FILE__, __LINE__, #call, r_, fi_strerror((int)-r_));  \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

enum { SIZE = 16 * 4096, OFFSET = 4096 + 64, LEN = SIZE - 2 * 4096 };
static uintptr_t base = 0x7eee00000000; /* nothing is there; of ordinary memory, its address */

struct note { /* where the server's memory is */
	uint64_t addr, key;
};

static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_eq *eq;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr, *plain; /* of the dma-buf, and of note */
static struct note *note;
static struct verbena_dmabuf *buffer;
static bool plain_memory;
static char *mapped; /* plain memory, or the memory of a dma-buf of the kernel */

/* --- the buffers --- */

/* make_buffer returns a descriptor of the dma-buf. */
static int make_buffer(void)
{
	if (!mapped) {
		WANT(buffer = verbena_alloc_dmabuf(SIZE, 5));
		return verbena_dmabuf_fd(buffer);
	}
	int dev = open("/dev/udmabuf", O_RDWR), file = memfd_create("ofi", MFD_ALLOW_SEALING);
	WANT(dev >= 0 && file >= 0 && !ftruncate(file, SIZE) && !fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK));
	WANT(mmap(mapped, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0) == mapped);
	struct udmabuf_create c = {.memfd = (uint32_t)file, .flags = UDMABUF_FLAGS_CLOEXEC, .size = SIZE};
	return ioctl(dev, UDMABUF_CREATE, &c);
}

static void put_bytes(const void *from)
{
	if (buffer)
		OK(verbena_write_dmabuf(buffer, OFFSET, from, LEN));
	else
		memcpy(mapped + OFFSET, from, LEN);
}

static void get_bytes(void *to)
{
	if (buffer)
		OK(verbena_read_dmabuf(buffer, OFFSET, to, LEN));
	else
		memcpy(to, mapped + OFFSET, LEN);
}

static void fill(int seed)
{
	static char b[LEN];
	for (int i = 0; i < LEN; i++)
		b[i] = (char)(i * seed + i / 251);
	put_bytes(b);
}

static void expect(const char *what, int seed)
{
	static char b[LEN];
	get_bytes(b);
	for (int i = 0; i < LEN; i++)
		if (b[i] != (char)(i * seed + i / 251)) {
			fprintf(stderr, "%s: byte %d is %#x\n", what, i, b[i]);
			exit(1);
		}
}

static _Atomic int stop;
static long moves;

static void *mover(void *unused)
{
	for (; !stop; moves++) {
		OK(moves % 3 ? verbena_move_dmabuf(buffer) : verbena_evict_dmabuf(buffer));
		usleep(300);
	}
	return unused;
}

/* --- libfabric --- */

static void register_buffer(void)
{
	int fd = make_buffer();
	WANT(fd >= 0);
	struct fi_mr_dmabuf part = {.fd = -1, .offset = OFFSET, .len = LEN, .base_addr = (void *)base};
	struct fi_mr_attr attr = {.dmabuf = &part,
				  .iov_count = 1,
				  .access = FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE,
				  .iface = FI_HMEM_SYSTEM};
	WANT(fi_mr_regattr(domain, &attr, FI_MR_DMABUF, &mr) == -FI_EBADF);
	part.fd = fd;
	part.len = SIZE; /* more than there is from the offset on */
	WANT(fi_mr_regattr(domain, &attr, FI_MR_DMABUF, &mr) == -FI_EINVAL);
	part.len = LEN;
	OK(fi_mr_regattr(domain, &attr, FI_MR_DMABUF, &mr));
	WANT(!close(fd)); /* the region keeps the buffer */
}

static void register_all(void)
{
	if (plain_memory)
		OK(fi_mr_reg(domain, mapped, SIZE, FI_SEND | FI_RECV | FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE,
			     0, 2, 0, &mr, NULL));
	else
		register_buffer();
	WANT(note = calloc(1, 4096));
	OK(fi_mr_reg(domain, note, 4096, FI_SEND | FI_RECV, 0, 1, 0, &plain, NULL));
}

/* wait_for waits for a completion. */
static void wait_for(uint64_t flag)
{
	struct fi_cq_msg_entry e;
	ssize_t n;
	while ((n = fi_cq_sread(cq, &e, 1, NULL, 60000)) == -FI_EAGAIN)
		;
	if (n != 1) {
		struct fi_cq_err_entry err = {0};
		fi_cq_readerr(cq, &err, 0);
		fprintf(stderr, "completion: %zd, %s\n", n, fi_cq_strerror(cq, err.prov_errno, err.err_data, NULL, 0));
		exit(1);
	}
	WANT(e.flags & flag);
}

static struct fi_info *wanted(const char *addr, const char *port, uint64_t flags, int *err)
{
	struct fi_info *hints = fi_allocinfo(), *found = NULL;
	WANT(hints);
	hints->caps = FI_MSG | FI_RMA | (plain_memory ? 0 : FI_HMEM);
	hints->ep_attr->type = FI_EP_MSG;
	hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_HMEM;
	hints->fabric_attr->prov_name = strdup("verbs");
	hints->addr_format = FI_SOCKADDR_IN;
	*err = fi_getinfo(FI_VERSION(1, 20), addr, port, flags, hints, &found);
	fi_freeinfo(hints);
	return found;
}

static void open_domain(struct fi_info *i)
{
	struct fi_cq_attr cq_attr = {.format = FI_CQ_FORMAT_MSG, .wait_obj = FI_WAIT_FD, .size = 64};
	OK(fi_domain(fabric, i, &domain, NULL));
	OK(fi_cq_open(domain, &cq_attr, &cq, NULL));
	OK(fi_endpoint(domain, i, &ep, NULL));
	OK(fi_ep_bind(ep, &eq->fid, 0));
	OK(fi_ep_bind(ep, &cq->fid, FI_SEND | FI_RECV));
	OK(fi_enable(ep));
	register_all();
}

static struct fi_info *next_event(uint32_t want)
{
	uint32_t event;
	struct fi_eq_cm_entry e;
	ssize_t n;
	while ((n = fi_eq_sread(eq, &event, &e, sizeof e, 60000, 0)) == -FI_EAGAIN)
		;
	if (n == -FI_EAVAIL) {
		struct fi_eq_err_entry err = {0};
		fi_eq_readerr(eq, &err, 0);
		fprintf(stderr, "event: %s\n", fi_strerror(err.err));
		exit(1);
	}
	WANT(n >= (ssize_t)sizeof e && event == want);
	return e.info;
}

/* At the server: what the client does with its memory. */
static void serve(const char *addr)
{
	int err;
	struct fid_pep *pep;
	struct fi_eq_attr eq_attr = {.wait_obj = FI_WAIT_UNSPEC};
	WANT(info = wanted(addr, "7471", FI_SOURCE, &err));
	OK(fi_fabric(info->fabric_attr, &fabric, NULL));
	OK(fi_eq_open(fabric, &eq_attr, &eq, NULL));
	OK(fi_passive_ep(fabric, info, &pep, NULL));
	OK(fi_pep_bind(pep, &eq->fid, 0));
	OK(fi_listen(pep));
	puts("listening");
	fflush(stdout);
	open_domain(next_event(FI_CONNREQ));
	OK(fi_recv(ep, note + 1, sizeof *note, fi_mr_desc(plain), 0, NULL)); /* "read and written" */
	OK(fi_accept(ep, NULL, 0));
	next_event(FI_CONNECTED);
	fill(3);
	pthread_t thread;
	if (buffer)
		WANT(!pthread_create(&thread, NULL, mover, NULL));
	*note = (struct note){base + OFFSET, fi_mr_key(mr)};
	OK(fi_send(ep, note, sizeof *note, fi_mr_desc(plain), 0, NULL));
	for (int left = 2; left; left--)
		wait_for(FI_SEND | FI_RECV);
	expect("what the client has written", 5);
	/* Out of the buffer, by SEND, into the client's. */
	fill(7);
	OK(fi_recv(ep, (void *)(base + OFFSET), LEN, fi_mr_desc(mr), 0, NULL));
	OK(fi_send(ep, (void *)(base + OFFSET), LEN, fi_mr_desc(mr), 0, NULL));
	for (int left = 2; left; left--)
		wait_for(FI_SEND | FI_RECV);
	expect("what the client has sent", 11);
	if (buffer) {
		stop = 1;
		WANT(!pthread_join(thread, NULL) && moves > 0);
	}
	OK(fi_send(ep, note, sizeof *note, fi_mr_desc(plain), 0, NULL)); /* the end */
	wait_for(FI_SEND);
	next_event(FI_SHUTDOWN);
	OK(fi_close(&pep->fid));
}

static void ask(const char *addr)
{
	int err;
	struct fi_eq_attr eq_attr = {.wait_obj = FI_WAIT_UNSPEC};
	WANT(info = wanted(addr, "7471", 0, &err));
	OK(fi_fabric(info->fabric_attr, &fabric, NULL));
	OK(fi_eq_open(fabric, &eq_attr, &eq, NULL));
	open_domain(info);
	OK(fi_recv(ep, note, sizeof *note, fi_mr_desc(plain), 0, NULL));
	OK(fi_connect(ep, info->dest_addr, NULL, 0));
	next_event(FI_CONNECTED);
	wait_for(FI_RECV);
	struct note at = *note;
	pthread_t thread;
	if (buffer)
		WANT(!pthread_create(&thread, NULL, mover, NULL));
	void *mine = (void *)(base + OFFSET), *desc = fi_mr_desc(mr);
	for (int i = 0; i < 50; i++) {
		OK(fi_read(ep, mine, LEN, desc, 0, at.addr, at.key, NULL));
		wait_for(FI_READ);
		expect("what was read", 3);
	}
	fill(5);
	OK(fi_write(ep, mine, LEN, desc, 0, at.addr, at.key, NULL));
	wait_for(FI_WRITE);
	OK(fi_recv(ep, mine, LEN, desc, 0, NULL));
	OK(fi_send(ep, note + 1, sizeof *note, fi_mr_desc(plain), 0, NULL));
	for (int left = 2; left; left--)
		wait_for(FI_SEND | FI_RECV);
	expect("what the server has sent", 7);
	fill(11);
	OK(fi_recv(ep, note, sizeof *note, fi_mr_desc(plain), 0, NULL));
	OK(fi_send(ep, mine, LEN, desc, 0, NULL));
	for (int left = 2; left; left--)
		wait_for(FI_SEND | FI_RECV);
	if (buffer) {
		stop = 1;
		WANT(!pthread_join(thread, NULL) && moves > 0);
		/* A buffer that is revoked: the request fails. */
		OK(verbena_revoke_dmabuf(buffer));
		OK(fi_write(ep, mine, LEN, desc, 0, at.addr, at.key, NULL));
		struct fi_cq_msg_entry e;
		ssize_t n;
		while ((n = fi_cq_sread(cq, &e, 1, NULL, 60000)) == -FI_EAGAIN)
			;
		struct fi_cq_err_entry failed = {0};
		WANT(n == -FI_EAVAIL && fi_cq_readerr(cq, &failed, 0) == 1 && failed.prov_errno == IBV_WC_LOC_PROT_ERR);
	}
	OK(fi_shutdown(ep, 0));
}

int main(int argc, char **argv)
{
	WANT(argc == 3 || argc == 4);
	int err;
	if (argc == 4) {
		plain_memory = !strcmp(argv[3], "plain");
		WANT(plain_memory || !strcmp(argv[3], "udmabuf"));
		mapped = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		WANT(mapped != MAP_FAILED);
		if (plain_memory)
			base = (uintptr_t)mapped;
	}
	if (!strcmp(argv[1], "none")) {
		WANT(!wanted(argv[2], "7471", FI_SOURCE, &err) && err == -FI_ENODATA);
		puts("ok");
		return 0;
	}
	if (!strcmp(argv[1], "server"))
		serve(argv[2]);
	else
		ask(argv[2]);
	OK(fi_close(&ep->fid));
	OK(fi_close(&mr->fid));
	OK(fi_close(&plain->fid));
	OK(fi_close(&cq->fid));
	OK(fi_close(&domain->fid));
	OK(fi_close(&eq->fid));
	OK(fi_close(&fabric->fid));
	if (buffer)
		WANT(!verbena_free_dmabuf(buffer));
	printf("%ld moves, libfabric %u.%u\nok\n", moves, FI_MAJOR(fi_version()), FI_MINOR(fi_version()));
	return 0;
}
