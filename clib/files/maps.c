/*
 * Calls that replace what is mapped at an address, intercepted before they are made.
 *
 * A registered region stands for the pages that it was registered with. The device
 * accesses them by address, and must not touch what the program maps there later. The
 * kernel reports changes of mappings, but some too late and some not at all. So a call
 * that may replace mapped memory first closes the range: the device's notifier
 * (internal/sys/notifier_close.c) waits until no access is under way, lets no other
 * begin, and after the call learns what has changed.
 *
 * Stages of a call: is there a notifier (one load); which ranges can the call change;
 * close them; the C library's function; report which ranges have changed.
 *
 * Not seen: system calls that the program makes without the C library's functions, and
 * those that the C library makes itself, as in free() and realloc(). posix_madvise is not
 * intercepted: in glibc POSIX_MADV_DONTNEED does nothing.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "../../internal/sys/notifier_hook.h"
#include "dlsym.h"
#include "drm.h"

#define PUBLIC __attribute__((visibility("default")))

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif

_Static_assert(sizeof(off_t) == 8 && sizeof(long) == 8, "system calls here are those of 64-bit machines");

/* The notifier stores its functions here when it starts. */
PUBLIC struct vn_hook verbena_preload_ranges = {.version = VN_HOOK_VERSION};

/* The functions that those below call: the C library's, or a sanitizer's. They are looked
 * up when this library is initialized. An allocator may call those below earlier, even
 * from within dlsym: until then they make the system call themselves. */
static __typeof__(&mmap) next_mmap;
static __typeof__(&munmap) next_munmap;
static __typeof__(&mremap) next_mremap;
static __typeof__(&madvise) next_madvise;
static __typeof__(&shmat) next_shmat;
static __typeof__(&shmdt) next_shmdt;
static __typeof__(&remap_file_pages) next_remap_file_pages;
static __typeof__(&brk) next_brk;
static __typeof__(&sbrk) next_sbrk;

#define FIND(name) (next_##name = (__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void at_load(void)
{
	FIND(mmap), FIND(munmap), FIND(mremap), FIND(madvise), FIND(shmat), FIND(shmdt), FIND(remap_file_pages);
	FIND(brk), FIND(sbrk);
}

/* --- closing --- */

static uintptr_t page_size(void)
{
	static uintptr_t known;
	if (!known)
		known = (uintptr_t)sysconf(_SC_PAGESIZE);
	return known;
}

/* range returns the pages of n bytes at an address. */
static struct vn_range range(const void *addr, size_t n)
{
	uintptr_t page = page_size(), start = (uintptr_t)addr & -page, end;
	if (__builtin_add_overflow((uintptr_t)addr, n, &end) || end > -page)
		end = -page; /* the kernel refuses such a range */
	else
		end = (end + page - 1) & -page;
	return (struct vn_range){start, end};
}

struct closed {
	vn_close_end_function *end; /* NULL: nothing was closed */
	struct vn_closing state;
};

static vn_close_begin_function *notifier(void) { return __atomic_load_n(&verbena_preload_ranges.begin, __ATOMIC_ACQUIRE); }

static struct closed begin(vn_close_begin_function *f, const struct vn_range *ranges, int n)
{
	struct closed c = {NULL};
	if (f(ranges, n, &c.state))
		c.end = __atomic_load_n(&verbena_preload_ranges.end, __ATOMIC_ACQUIRE);
	return c;
}

static void end(struct closed *c, const struct vn_range *changed, int n)
{
	if (c->end)
		c->end(&c->state, changed, n);
}

/* --- mmap, munmap --- */

static void *do_mmap(void *addr, size_t n, int prot, int flags, int fd, off_t off)
{
	if (next_mmap)
		return next_mmap(addr, n, prot, flags, fd, off);
	return (void *)syscall(SYS_mmap, addr, n, prot, flags, fd, off);
}

/* huge widens a range to the huge pages that a call with MAP_HUGETLB takes. */
static struct vn_range huge(struct vn_range r, int flags)
{
	enum { usual = 21 };
	int bits = (flags >> MAP_HUGE_SHIFT) & MAP_HUGE_MASK;
	uintptr_t page = (uintptr_t)1 << (bits ? bits : usual);
	if (r.end <= -page)
		r.end = (r.end + page - 1) & -page;
	return r;
}

static void *mmap_file(void *addr, size_t n, int prot, int flags, int fd, off_t off)
{
	vn_close_begin_function *f = notifier();
	if (!f || !(flags & MAP_FIXED) || flags & MAP_FIXED_NOREPLACE)
		return do_mmap(addr, n, prot, flags, fd, off);
	struct vn_range r = range(addr, n);
	if (flags & MAP_HUGETLB)
		r = huge(r, flags);
	/* Populating takes long, so it follows when the range is open again. It may fail
	 * silently, as mmap's own does. */
	struct closed c = begin(f, &r, 1);
	void *got = do_mmap(addr, n, prot, flags & ~MAP_POPULATE, fd, off);
	int err = errno;
	end(&c, &r, got != MAP_FAILED);
	if (got != MAP_FAILED && flags & MAP_POPULATE && !(flags & MAP_NONBLOCK)) {
		bool writes = prot & PROT_WRITE;
		(void)syscall(SYS_madvise, got, r.end - r.start, writes ? MADV_POPULATE_WRITE : MADV_POPULATE_READ);
	}
	errno = err;
	return got;
}

/* A mapping of a render node shows an object's memory file. */
PUBLIC void *mmap(void *addr, size_t n, int prot, int flags, int fd, off_t off)
{
	int backing;
	if (!vd_mmap(fd, n, prot, flags, off, &backing))
		return mmap_file(addr, n, prot, flags, fd, off);
	if (backing < 0)
		return MAP_FAILED;
	void *got = mmap_file(addr, n, prot, flags, backing, 0);
	syscall(SYS_close, backing);
	return got;
}

PUBLIC void *mmap64(void *addr, size_t n, int prot, int flags, int fd, off_t off)
	__attribute__((alias("mmap")));

PUBLIC int munmap(void *addr, size_t n)
{
	vn_close_begin_function *f = notifier();
	struct vn_range r;
	struct closed c = {NULL};
	if (f) {
		r = range(addr, n);
		c = begin(f, &r, 1);
	}
	int rc = next_munmap ? next_munmap(addr, n) : (int)syscall(SYS_munmap, addr, n);
	end(&c, &r, rc == 0);
	return rc;
}

/* --- mremap --- */

static void *do_mremap(void *old, size_t old_n, size_t new_n, int flags, void *to)
{
	if (next_mremap)
		return next_mremap(old, old_n, new_n, flags, to);
	return (void *)syscall(SYS_mremap, old, old_n, new_n, flags, to);
}

PUBLIC void *mremap(void *old, size_t old_n, size_t new_n, int flags, ...)
{
	va_list more;
	va_start(more, flags);
	void *to = flags & (MREMAP_FIXED | MREMAP_DONTUNMAP) ? va_arg(more, void *) : NULL;
	va_end(more);
	vn_close_begin_function *f = notifier();
	if (!f)
		return do_mremap(old, old_n, new_n, flags, to);
	struct vn_range r[2] = {range(old, old_n)};
	int n = 1;
	if (flags & MREMAP_FIXED)
		r[n++] = range(to, new_n);
	struct closed c = begin(f, r, n);
	void *got = do_mremap(old, old_n, new_n, flags, to);
	if (got == MAP_FAILED) {
		/* What was mapped at the target may be gone nevertheless. The kernel reports that. */
		end(&c, r, 0);
		return got;
	}
	if (old_n == 0) /* shared memory is mapped a second time, the first mapping stays */
		end(&c, r + 1, n - 1);
	else {
		if (got == old) /* in place: only the end, if any, is gone */
			r[0].start = range(old, new_n).end;
		end(&c, r, n);
	}
	return got;
}

/* --- pages that are given up, or others put in their place --- */

PUBLIC int madvise(void *addr, size_t n, int advice)
{
	vn_close_begin_function *f = notifier();
	struct vn_range r;
	struct closed c = {NULL};
	if (f && (advice == MADV_DONTNEED || advice == MADV_FREE || advice == MADV_REMOVE || advice == MADV_DONTNEED_LOCKED ||
		  advice == MADV_GUARD_INSTALL)) {
		r = range(addr, n);
		c = begin(f, &r, 1);
	}
	int rc = next_madvise ? next_madvise(addr, n, advice) : (int)syscall(SYS_madvise, addr, n, advice);
	end(&c, &r, rc == 0 || errno == ENOMEM); /* ENOMEM: done, except where nothing is mapped */
	return rc;
}

PUBLIC int remap_file_pages(void *addr, size_t n, int prot, size_t page, int flags)
{
	vn_close_begin_function *f = notifier();
	struct vn_range r;
	struct closed c = {NULL};
	if (f) {
		r = range(addr, n);
		c = begin(f, &r, 1);
	}
	int rc = next_remap_file_pages ? next_remap_file_pages(addr, n, prot, page, flags)
				       : (int)syscall(SYS_remap_file_pages, addr, n, prot, page, flags);
	end(&c, &r, rc == 0);
	return rc;
}

/* --- the heap's end --- */

/* System calls cannot replace these two: the C library keeps the heap's end in a variable. */
static __typeof__(&brk) the_brk(void) { return next_brk ? next_brk : FIND(brk); }
static __typeof__(&sbrk) the_sbrk(void) { return next_sbrk ? next_sbrk : FIND(sbrk); }

/* shrinking returns the range that the heap loses if its end moves from now to wanted. */
static struct vn_range shrinking(uintptr_t now, uintptr_t wanted)
{
	uintptr_t page = page_size();
	if (wanted >= now)
		return (struct vn_range){0, 0};
	return (struct vn_range){(wanted + page - 1) & -page, (now + page - 1) & -page};
}

PUBLIC int brk(void *addr)
{
	vn_close_begin_function *f = notifier();
	if (!f)
		return the_brk()(addr);
	uintptr_t now = (uintptr_t)the_sbrk()(0);
	struct vn_range r = shrinking(now, (uintptr_t)addr);
	struct closed c = begin(f, &r, 1);
	int rc = the_brk()(addr);
	/* For an address below the heap brk returns 0 and changes nothing. */
	r = shrinking(now, (uintptr_t)the_sbrk()(0));
	end(&c, &r, 1);
	return rc;
}

PUBLIC void *sbrk(intptr_t by)
{
	vn_close_begin_function *f = notifier();
	if (!f || by >= 0)
		return the_sbrk()(by);
	uintptr_t now = (uintptr_t)the_sbrk()(0);
	struct vn_range r = shrinking(now, now + (uintptr_t)by);
	struct closed c = begin(f, &r, 1);
	void *got = the_sbrk()(by);
	end(&c, &r, got != (void *)-1);
	return got;
}

/* --- shared memory of System V --- */

PUBLIC void *shmat(int id, const void *addr, int flags)
{
	vn_close_begin_function *f = notifier();
	struct shmid_ds about;
	struct closed c = {NULL};
	struct vn_range r = {0, 0};
	int err = errno;
	/* A caller that may not read the size of the segment may not attach it either. */
	if (f && flags & SHM_REMAP && !shmctl(id, IPC_STAT, &about)) {
		uintptr_t at = (uintptr_t)addr;
		if (flags & SHM_RND)
			at -= at % (uintptr_t)SHMLBA;
		r = range((void *)at, about.shm_segsz);
		c = begin(f, &r, 1);
	}
	errno = err;
	void *got = next_shmat ? next_shmat(id, addr, flags) : (void *)syscall(SYS_shmat, id, addr, flags);
	/* With ENOMEM it may have unmapped what was there. */
	end(&c, &r, got != (void *)-1 || errno == ENOMEM);
	return got;
}

/* A mapping, as a line of /proc/self/maps has it. */
struct mapping {
	uintptr_t start, end, offset;
	uint64_t device, inode;
};

/* hex reads a number and skips the character that ends it. It returns the rest. */
static const char *hex(const char *s, uint64_t *n, int base)
{
	char *rest;
	*n = strtoull(s, &rest, base);
	return *rest ? rest + 1 : rest;
}

static struct mapping parse(const char *line)
{
	struct mapping m;
	uint64_t start, end, offset, major, minor;
	line = hex(line, &start, 16);
	line = hex(line, &end, 16);
	while (*line && *line != ' ') /* the rights */
		line++;
	line = hex(line, &offset, 16);
	line = hex(line, &major, 16);
	line = hex(line, &minor, 16);
	hex(line, &m.inode, 10);
	m.start = start, m.end = end, m.offset = offset, m.device = major << 32 | minor;
	return m;
}

/* attached returns the range that shmdt(addr) detaches: the segment's parts that are still
 * where they were attached. It reads /proc/self/maps by system calls that are allowed in a
 * signal handler and are no cancellation points. */
static struct vn_range attached(uintptr_t addr)
{
	struct vn_range r = {0, 0};
	struct mapping first = {0};
	char buf[4096];
	size_t have = 0;
	int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return r;
	for (ssize_t n; (n = syscall(SYS_read, fd, buf + have, sizeof buf - 1 - have)) > 0;) {
		char *line = buf, *nl;
		have += (size_t)n;
		buf[have] = 0;
		for (; (nl = memchr(line, '\n', have - (size_t)(line - buf))); line = nl + 1) {
			*nl = 0;
			struct mapping m = parse(line);
			if (!strstr(line, " /SYSV") || m.start < addr || m.start - addr != m.offset)
				continue;
			if (r.end == 0)
				first = m, r.start = m.start;
			else if (m.device != first.device || m.inode != first.inode)
				continue;
			r.end = m.end;
		}
		have -= (size_t)(line - buf);
		if (have == sizeof buf - 1)
			have = 0; /* a line longer than the buffer: its rest is no mapping */
		memmove(buf, line, have);
	}
	syscall(SYS_close, fd);
	return r;
}

PUBLIC int shmdt(const void *addr)
{
	vn_close_begin_function *f = notifier();
	struct closed c = {NULL};
	struct vn_range r = {0, 0};
	int err = errno;
	if (f) {
		r = attached((uintptr_t)addr);
		c = begin(f, &r, 1);
	}
	errno = err;
	int rc = next_shmdt ? next_shmdt(addr) : (int)syscall(SYS_shmdt, addr);
	end(&c, &r, rc == 0);
	return rc;
}

/* --- functions that are looked up --- */

/*
 * UCX, Open MPI and libfabric watch what a program unmaps: they look these functions up by RTLD_DEFAULT, and put a jump
 * at their beginning. They mean the C library's functions, which free() calls, too. With a jump in those here they would
 * miss free(), and keep registrations of memory that is gone; and a call would no longer close its range first. So
 * vb_look_memory answers with the functions behind those here.
 */
struct vb_look vb_look_memory(void *go_on, const char *name, const char *version)
{
#define ONE(name) {#name, (void *)name}
	static const struct {
		const char *name;
		void *ours;
	} functions[] = {ONE(mmap), ONE(mmap64), ONE(munmap), ONE(mremap), ONE(madvise), ONE(brk), ONE(sbrk), ONE(shmat),
			 ONE(shmdt), ONE(remap_file_pages)};
#undef ONE
	struct vb_look look = {go_on, NULL};
	for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
		if (!vb_same(name, functions[i].name))
			continue;
		/* A program with such a function of its own gets that. */
		void *behind = vb_find_symbol(RTLD_NEXT, name, version);
		if (behind && vb_find_symbol(RTLD_DEFAULT, name, version) == functions[i].ours)
			look = (struct vb_look){NULL, behind};
		break;
	}
	return look;
}
