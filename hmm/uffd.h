// What older headers of the kernel do not have of userfaultfd and of /proc.

#ifndef VERBENA_HMM_UFFD_H
#define VERBENA_HMM_UFFD_H

#include <linux/ioctl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>

#define VH_UFFD_POISON (1 << 14)
#define VH_UFFD_MOVE (1 << 16)
#define VH_USER_MODE_ONLY 1

struct vh_uffdio_move {
	uint64_t dst, src, len, mode;
	int64_t move;
};
#define VH_UFFDIO_MOVE _IOWR(UFFDIO, 0x05, struct vh_uffdio_move)
#define VH_MOVE_DONTWAKE 1
#define VH_MOVE_HOLES 2

struct vh_uffdio_poison {
	struct uffdio_range range;
	uint64_t mode;
	int64_t updated;
};
#define VH_UFFDIO_POISON _IOWR(UFFDIO, 0x08, struct vh_uffdio_poison)

struct vh_procmap_query {
	uint64_t size, query_flags, query_addr;
	uint64_t vma_start, vma_end, vma_flags, vma_page_size, vma_offset, inode;
	uint32_t dev_major, dev_minor, vma_name_size, build_id_size;
	uint64_t vma_name_addr, build_id_addr;
};
#define VH_PROCMAP_QUERY _IOWR('f', 17, struct vh_procmap_query)

struct vh_page_region {
	uint64_t start, end, categories;
};
struct vh_pm_scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};
#define VH_PAGEMAP_SCAN _IOWR('f', 16, struct vh_pm_scan)
#define VH_PM_PRESENT (1 << 3)
#define VH_PM_ZERO (1 << 5)
#define VH_PM_HUGE (1 << 6)

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif

#endif
