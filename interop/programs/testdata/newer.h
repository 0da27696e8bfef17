/*
 * What verbs.h of newer rdma-core declares, for programs that are compiled with an older one.
 */
struct attr { /* struct ibv_mr_init_attr */
	size_t length;
	int access;
	uint64_t mask, iova;
	void *addr;
	int fd;
	uint64_t fd_offset;
	void *dmah, *buf;
};
enum { MASK_IOVA = 1, MASK_ADDR = 2, MASK_FD = 4, MASK_FD_OFFSET = 8, MASK_DMAH = 16, MASK_BUF = 32 };

struct ibv_mr *reg_mr_ex(struct ibv_pd *pd, struct attr *a) __asm__("ibv_reg_mr_ex");
void *alloc_buf(struct ibv_pd *pd, size_t size, void **buf) __asm__("ibv_alloc_buf");
void free_buf(void *buf) __asm__("ibv_free_buf");
struct ibv_mr *reg_buf_mr(struct ibv_pd *pd, void *buf, void *addr, size_t n, int access) __asm__("ibv_reg_buf_mr");
int dm_export(struct ibv_dm *dm) __asm__("ibv_dm_export_dmabuf_fd");
int buf_export(void *buf) __asm__("ibv_export_buf_dmabuf_fd");
