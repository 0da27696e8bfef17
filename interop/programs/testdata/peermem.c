/*
 * PeerDirect: memory that the CPU cannot load from is registered by its address. The argument says
 * who the client is: "program", this one; "plugin", a shared object that VERBENA_PEER_MEM names;
 * "hang", this one, which does not answer.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <setjmp.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "peerdev.h"
#include "self.h"

enum { ALL = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC };
enum { OFF = 40, N = 2 * DEV_PAGE }; /* the region: three pages */

static struct dev *d = &dev;
static void *registration;
static verbena_invalidate_peer_memory *freed;

static struct ibv_mr *reg(struct self *s) { return ibv_reg_mr(s->pd, d->addr + OFF, N, ALL); }

/* called checks the calls since the last time. */
#define CALLED(want)                                                                                                   \
	do {                                                                                                           \
		if (strcmp(d->calls, want)) {                                                                          \
			fprintf(stderr, "%s:%d: calls %s, not %s\n", __FILE__, __LINE__, d->calls, want);              \
			exit(1);                                                                                       \
		}                                                                                                      \
		d->calls[0] = 0;                                                                                       \
	} while (0)

#define REFUSED(err, call)                                                                                             \
	do {                                                                                                           \
		errno = 0;                                                                                             \
		WANT(!(call) && errno == (err));                                                                       \
	} while (0)

static char *page_of(uint64_t off) /* dev_at, for the device of a shared object, too */
{
	return d->memory + (DEV_PAGES - 1 - off / DEV_PAGE) * DEV_PAGE + off % DEV_PAGE;
}

/* post posts a request and returns its status. */
static enum ibv_wc_status post(struct self *s, struct ibv_send_wr *wr, struct ibv_sge *sge)
{
	struct ibv_send_wr *bad;
	struct ibv_wc wc;
	int k, recv = wr->opcode == IBV_WR_SEND;
	wr->wr_id = 1, wr->sg_list = sge, wr->num_sge = 1, wr->send_flags = IBV_SEND_SIGNALED;
	WANT(!ibv_post_send(s->qp[0], wr, &bad));
	enum ibv_wc_status status = IBV_WC_GENERAL_ERR;
	for (int left = 1 + recv; left;) {
		while (!(k = ibv_poll_cq(s->cq, 1, &wc)))
			;
		WANT(k == 1);
		if (wc.wr_id == 1)
			status = wc.status;
		left--;
	}
	return status;
}

static void traffic(struct self *s)
{
	char *bytes = malloc(N);
	WANT(bytes);
	struct ibv_mr *plain = ibv_reg_mr(s->pd, bytes, N, ALL), *mr = reg(s);
	WANT(plain && mr && mr->addr == d->addr + OFF && mr->length == N);
	CALLED("agm");
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_attr a = {.qp_access_flags = ALL & ~IBV_ACCESS_LOCAL_WRITE};
		WANT(!ibv_modify_qp(s->qp[i], &a, IBV_QP_ACCESS_FLAGS));
	}
	for (int i = 0; i < N; i++)
		bytes[i] = (char)(i / 13 * 7);
	uint64_t at = (uintptr_t)mr->addr;
	struct ibv_sge out = {(uintptr_t)bytes, N, plain->lkey}, in = {at, N, mr->lkey};
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {at, mr->rkey}};
	WANT(post(s, &wr, &out) == IBV_WC_SUCCESS);
	for (int i = 0; i < N; i++)
		WANT(*page_of(OFF + i) == bytes[i]);
	memset(bytes, 0, N);
	wr.opcode = IBV_WR_RDMA_READ;
	WANT(post(s, &wr, &out) == IBV_WC_SUCCESS);
	for (int i = 0; i < N; i++)
		WANT(*page_of(OFF + i) == bytes[i] && bytes[i] == (char)(i / 13 * 7));
	memset(bytes, 5, N);
	struct ibv_recv_wr recv = {.wr_id = 2, .sg_list = &in, .num_sge = 1}, *bad;
	WANT(!ibv_post_recv(s->qp[1], &recv, &bad));
	wr = (struct ibv_send_wr){.opcode = IBV_WR_SEND};
	WANT(post(s, &wr, &out) == IBV_WC_SUCCESS && *page_of(OFF) == 5 && *page_of(OFF + N - 1) == 5);
	*(uint64_t *)page_of(OFF) = 40;
	struct ibv_sge old = {(uintptr_t)bytes, 8, plain->lkey};
	wr = (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD, .wr.atomic = {at, 2, 0, mr->rkey}};
	WANT(post(s, &wr, &old) == IBV_WC_SUCCESS && *(uint64_t *)bytes == 40 && *(uint64_t *)page_of(OFF) == 42);
	wr = (struct ibv_send_wr){.opcode = IBV_WR_ATOMIC_CMP_AND_SWP, .wr.atomic = {at, 42, 7, mr->rkey}};
	WANT(post(s, &wr, &old) == IBV_WC_SUCCESS && *(uint64_t *)bytes == 42 && *(uint64_t *)page_of(OFF) == 7);
	wr = (struct ibv_send_wr){.opcode = IBV_WR_RDMA_WRITE, .wr.rdma = {(uintptr_t)bytes, plain->rkey}};
	WANT(post(s, &wr, &in) == IBV_WC_SUCCESS && *(uint64_t *)bytes == 7 && bytes[N - 1] == 5);

	/* Not to be registered again. */
	errno = 0;
	WANT(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, ALL) == IBV_REREG_MR_ERR_INPUT && errno == EOPNOTSUPP);
	CALLED("");
	WANT(!ibv_dereg_mr(mr) && !ibv_dereg_mr(plain));
	CALLED("upr");
	free(bytes);
}

static void refusals(struct self *s)
{
	REFUSED(EFAULT, ibv_reg_mr(s->pd, d->addr - 4096, 100, ALL)); /* nobody's */
	REFUSED(EFAULT, ibv_reg_mr(s->pd, d->addr, DEV_SIZE + 1, ALL));
	REFUSED(EINVAL, ibv_reg_mr(s->pd, d->addr, 0, ALL));
	CALLED("");
	REFUSED(EINVAL, ibv_reg_mr(s->pd, d->addr, 100, ALL | IBV_ACCESS_MW_BIND));
	CALLED("agmupr");
	struct ibv_mr *odp = ibv_reg_mr(s->pd, d->addr, 100, ALL | IBV_ACCESS_ON_DEMAND); /* any address will do */
	WANT(odp && !ibv_dereg_mr(odp));
	CALLED("");
	d->fail_get = ENOMEM;
	REFUSED(ENOMEM, reg(s));
	CALLED("ar");
	d->fail_get = 0, d->fail_map = EBUSY;
	REFUSED(EBUSY, reg(s));
	CALLED("agpr");
	d->fail_map = 100000; /* no errno */
	REFUSED(EIO, reg(s));
	CALLED("agpr");
	d->fail_map = 0;
	for (enum lie lie = SHORT; lie <= MANY; lie++) {
		d->lie = lie;
		REFUSED(EINVAL, reg(s));
		CALLED("agmupr");
	}
	d->lie = TRUTH;
	static const uint64_t sizes[] = {0, 1, 2048, 3 * 4096, DEV_PAGE - 1, (uint64_t)DEV_PAGE * 64, (uint64_t)1 << 63, UINT64_MAX};
	for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
		d->page_size = sizes[i];
		REFUSED(EINVAL, reg(s));
		CALLED("agmupr");
	}
	d->page_size = DEV_PAGE;
	struct verbena_peer_memory_client bad = dev_client;
	REFUSED(EEXIST, verbena_register_peer_memory_client(&bad, NULL));
	strcpy(bad.name, "other");
	bad.dma_map = NULL;
	REFUSED(EINVAL, verbena_register_peer_memory_client(&bad, NULL));
	bad.dma_map = dev_client.dma_map;
	memset(bad.name, 'x', sizeof bad.name);
	REFUSED(EINVAL, verbena_register_peer_memory_client(&bad, NULL));
	strcpy(bad.name, "a/b");
	REFUSED(EINVAL, verbena_register_peer_memory_client(&bad, NULL));
	REFUSED(EINVAL, verbena_register_peer_memory_client(NULL, NULL));
	WANT(verbena_unregister_peer_memory_client(&bad) == EINVAL && verbena_unregister_peer_memory_client(NULL) == EINVAL);
	WANT(freed(&bad, 1) == -EINVAL);
}

/* --- invalidation --- */

static struct self *loaded;
static struct ibv_mr *target, *source;
static _Atomic int written;

static void *load(void *result)
{
	enum ibv_wc_status *status = result;
	do {
		*status = write_to(loaded, source->addr, source->lkey, (uintptr_t)target->addr, target->rkey, N);
		written++;
	} while (*status == IBV_WC_SUCCESS);
	return NULL;
}

static void invalidation(void)
{
	struct self s = connect_self();
	char *bytes = malloc(N);
	WANT(bytes);
	memset(bytes, 0x55, N);
	loaded = &s;
	WANT((source = ibv_reg_mr(s.pd, bytes, N, ALL)) && (target = reg(&s)));
	uint32_t key = target->rkey;
	pthread_t thread;
	enum ibv_wc_status status = IBV_WC_SUCCESS;
	WANT(!pthread_create(&thread, NULL, load, &status));
	while (written < 50)
		usleep(100);
	WANT(!freed(registration, d->core));
	memset(d->memory, 0, DEV_SIZE); /* it is another's now */
	CALLED("agmup");
	WANT(!freed(registration, d->core) && !freed(registration, 12345678)); /* once, and never of another */
	CALLED("");
	WANT(!pthread_join(thread, NULL) && status == IBV_WC_REM_ACCESS_ERR && target->rkey == key);
	for (int i = 0; i < DEV_SIZE; i++)
		WANT(!d->memory[i]);
	WANT(!ibv_dereg_mr(target));
	CALLED("r");
	WANT(!freed(registration, d->core));
	CALLED("");
	WANT(!ibv_dereg_mr(source));
	close_self(&s);
	free(bytes);
}

/* --- files --- */

static unsigned long long number(const char *name)
{
	char path[256];
	unsigned long long n;
	snprintf(path, sizeof path, "/sys/kernel/mm/memory_peers/nv_mem/%s", name);
	FILE *f = fopen(path, "r");
	WANT(f && fscanf(f, "%llu", &n) == 1 && !fclose(f));
	return n;
}

static void files(struct self *s)
{
	struct stat st;
	char text[16];
	const char *version = "/sys/kernel/mm/memory_peers/nv_mem/version";
	WANT(!access(version, F_OK) && !stat(version, &st) && S_ISREG(st.st_mode)); /* as UCX and NCCL look */
	WANT(!stat("/sys/kernel/mm/memory_peers", &st) && S_ISDIR(st.st_mode));
	WANT(!stat("/sys/kernel/mm/memory_peers/nv_mem", &st) && S_ISDIR(st.st_mode));
	int fd = open(version, O_RDONLY);
	WANT(fd >= 0 && read(fd, text, sizeof text) == 4 && !memcmp(text, "1.3\n", 4) && !close(fd));
	WANT(access("/sys/kernel/mm/memory_peers/nv_mem/versions", F_OK) && errno == ENOENT);
	WANT(access("/sys/kernel/mm/memory_peers/nv_memo/version", F_OK) && errno == ENOENT);
	unsigned long long mrs = number("num_alloc_mrs"), pages = number("num_reg_pages"), bytes = number("num_reg_bytes");
	WANT(mrs == number("num_dealloc_mrs") && pages == number("num_dereg_pages") && bytes == number("num_dereg_bytes"));
	struct ibv_mr *mr = reg(s);
	WANT(mr && number("num_alloc_mrs") == mrs + 1 && number("num_reg_pages") == pages + 3 && number("num_reg_bytes") == bytes + N);
	WANT(number("num_dealloc_mrs") == mrs);
	WANT(!ibv_dereg_mr(mr) && number("num_dealloc_mrs") == mrs + 1 && number("num_dereg_bytes") == bytes + N);
	CALLED("agmupr");
	WANT(number("num_free_callbacks") == 4);
}

/* A child has a backend of its own, which knows the clients, too. */
static void child(void)
{
	fflush(NULL);
	pid_t pid = fork();
	WANT(pid >= 0);
	if (!pid) {
		struct self s = connect_self();
		traffic(&s);
		close_self(&s);
		_exit(0);
	}
	int status;
	WANT(waitpid(pid, &status, 0) == pid && status == 0);
}

static sigjmp_buf out;
static void on_fault(int sig) { siglongjmp(out, sig); }

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "program";
	struct self s = connect_self();
	if (!strcmp(how, "plugin")) {
		static char byte;
		struct ibv_mr *any = ibv_reg_mr(s.pd, &byte, 1, 0); /* which has it loaded */
		WANT(any && !ibv_dereg_mr(any));
		void *lib = dlopen(getenv("VERBENA_PEER_MEM"), RTLD_NOW | RTLD_NOLOAD);
		WANT(lib && (d = *(struct dev **)dlsym(lib, "peer_device")));
		registration = *(void **)dlsym(lib, "peer_registration");
		freed = *(verbena_invalidate_peer_memory **)dlsym(lib, "peer_invalidate");
	} else {
		WANT(access("/sys/kernel/mm/memory_peers/nv_mem/version", F_OK) && errno == ENOENT);
		dev_make();
		REFUSED(EFAULT, reg(&s));
		WANT(registration = verbena_register_peer_memory_client(&dev_client, &freed));
	}
	WANT(registration && freed);
	if (!strcmp(how, "hang")) {
		d->hang = 12;
		REFUSED(ETIMEDOUT, reg(&s));
		for (int i = 0; i < 600 && strcmp(d->calls, "agmupr"); i++)
			usleep(100000);
		CALLED("agmupr");
		d->hang = 0;
	}
	struct sigaction act = {.sa_handler = on_fault}, was;
	WANT(!sigaction(SIGSEGV, &act, &was));
	if (!sigsetjmp(out, 1)) {
		*(volatile char *)d->addr = 1;
		WANT(!"the CPU reaches the memory");
	}
	WANT(!sigaction(SIGSEGV, &was, NULL));

	traffic(&s);
	refusals(&s);
	invalidation();
	if (strcmp(how, "hang"))
		files(&s);
	traffic(&s);
	child();
	close_self(&s);
	WANT(!verbena_unregister_peer_memory_client(registration));
	WANT(verbena_unregister_peer_memory_client(registration) == EINVAL);
	WANT(access("/sys/kernel/mm/memory_peers/nv_mem/version", F_OK) && errno == ENOENT);
	puts("ok");
	return 0;
}
