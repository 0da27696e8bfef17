/*
 * The distribution's librdmacm.so.1 speaks to the kernel's connection manager by open, write,
 * fstat and close of a file. To give it ours (ucma.c), its slots for these functions, in its
 * global offset table, get other addresses.
 *
 *  1. librdmacm calls ibv_get_device_list before it opens the file. That, and
 *     ibv_read_sysfs_file, call vb_patch_librdmacm.
 *  2. It looks at all loaded files for one with that SONAME. There may be several, and one
 *     may be unloaded and loaded again, so nothing is remembered: slots that have the new
 *     address already are left alone.
 *  3. The slots of a library that was linked with full RELRO are read-only. Their pages are
 *     made writable for the moment of the store. A store is one aligned word: a thread that
 *     calls the function meanwhile gets the old one or the new one.
 *
 * The loader's lock is held all the time, by dl_iterate_phdr: no other thread patches, and
 * the library is not unloaded.
 */
#define _GNU_SOURCE
#include <link.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "front.h"
#include "ucma.h"

#define LIBRARY "librdmacm.so.1"

#if defined(__x86_64__)
enum { GLOB_DAT = R_X86_64_GLOB_DAT, JUMP_SLOT = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { GLOB_DAT = R_AARCH64_GLOB_DAT, JUMP_SLOT = R_AARCH64_JUMP_SLOT };
#else
#error "which relocations fill the slots of functions?"
#endif

/* The functions, each with what it is for. Of each purpose at least one must be there. */
enum purpose { OPEN, WRITE, FSTAT, CLOSE, PURPOSES };
static const struct {
	const char *name;
	enum purpose purpose;
	void *ours;
} functions[] = {
	{"open", OPEN, (void *)vb_cm_open},	     {"open64", OPEN, (void *)vb_cm_open},
	{"__open_2", OPEN, (void *)vb_cm_open},	     {"__open64_2", OPEN, (void *)vb_cm_open},
	{"write", WRITE, (void *)vb_cm_write},	     {"fstat", FSTAT, (void *)vb_cm_fstat},
	{"fstat64", FSTAT, (void *)vb_cm_fstat},     {"__fxstat", FSTAT, (void *)vb_cm_fxstat},
	{"__fxstat64", FSTAT, (void *)vb_cm_fxstat}, {"close", CLOSE, (void *)vb_cm_close},
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

/* A loaded file, as its dynamic section describes it. */
struct loaded {
	uintptr_t base;
	const char *strings;
	const ElfW(Sym) *symbols;
	const char *soname;
	const ElfW(Rela) *rela[2]; /* GLOB_DAT are in the first table, JUMP_SLOT in the second */
	size_t size[2];
	uintptr_t fixed, fixed_end; /* pages that the loader has made read-only */
};

/* at returns the address that an entry of the dynamic section stands for. The loader has
 * added the base, on most systems. */
static const void *at(uintptr_t base, ElfW(Addr) p) { return (const void *)(p < base ? base + p : p); }

static void read_dynamic(struct loaded *l, const ElfW(Dyn) *d)
{
	size_t soname = 0;
	bool named = false;
	for (; d->d_tag != DT_NULL; d++)
		switch (d->d_tag) {
		case DT_STRTAB:
			l->strings = at(l->base, d->d_un.d_ptr);
			break;
		case DT_SYMTAB:
			l->symbols = at(l->base, d->d_un.d_ptr);
			break;
		case DT_SONAME:
			soname = d->d_un.d_val;
			named = true;
			break;
		case DT_RELA:
			l->rela[0] = at(l->base, d->d_un.d_ptr);
			break;
		case DT_RELASZ:
			l->size[0] = d->d_un.d_val;
			break;
		case DT_JMPREL:
			l->rela[1] = at(l->base, d->d_un.d_ptr);
			break;
		case DT_PLTRELSZ:
			l->size[1] = d->d_un.d_val;
			break;
		}
	if (named && l->strings)
		l->soname = l->strings + soname;
}

static void read_headers(struct loaded *l, const struct dl_phdr_info *info)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	l->base = info->dlpi_addr;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		uintptr_t start = l->base + p->p_vaddr;
		if (p->p_type == PT_DYNAMIC)
			read_dynamic(l, (const ElfW(Dyn) *)start);
		else if (p->p_type == PT_GNU_RELRO) { /* whole pages, both ends rounded down: as the loader does */
			l->fixed = start & ~(page - 1);
			l->fixed_end = (start + p->p_memsz) & ~(page - 1);
		}
	}
}

static bool is_fixed(const struct loaded *l, const void *slot)
{
	return (uintptr_t)slot >= l->fixed && (uintptr_t)slot < l->fixed_end;
}

/* store sets a slot, and reports whether it could. */
static bool store(const struct loaded *l, void **slot, void *value)
{
	void *pages = (void *)l->fixed;
	size_t size = l->fixed_end - l->fixed;
	bool fixed = is_fixed(l, slot);
	if (fixed && mprotect(pages, size, PROT_READ | PROT_WRITE))
		return false;
	__atomic_store_n(slot, value, __ATOMIC_RELEASE);
	if (fixed)
		mprotect(pages, size, PROT_READ);
	return true;
}

static int function_of(const char *name)
{
	for (int i = 0; i < FUNCTIONS; i++)
		if (!strcmp(functions[i].name, name))
			return i;
	return -1;
}

/* patch replaces all slots of a library. It returns NULL, or what was in the way. */
static const char *patch(const struct loaded *l)
{
	static const char *const missing[PURPOSES] = {"it does not call open", "it does not call write",
						      "it does not call fstat", "it does not call close"};
	bool found[PURPOSES] = {false};
	if (!l->symbols)
		return "it has no symbols";
	for (int t = 0; t < 2; t++)
		for (size_t i = 0; l->rela[t] && i < l->size[t] / sizeof *l->rela[t]; i++) {
			const ElfW(Rela) *r = &l->rela[t][i];
			uint32_t type = (uint32_t)ELF64_R_TYPE(r->r_info);
			if (type != GLOB_DAT && type != JUMP_SLOT)
				continue;
			int f = function_of(l->strings + l->symbols[ELF64_R_SYM(r->r_info)].st_name);
			void **slot = (void **)(l->base + r->r_offset);
			if (f < 0)
				continue;
			if ((uintptr_t)slot % sizeof *slot)
				return "a slot is not aligned";
			found[functions[f].purpose] = true;
			if (__atomic_load_n(slot, __ATOMIC_RELAXED) != functions[f].ours && !store(l, slot, functions[f].ours))
				return "its memory cannot be made writable";
		}
	for (int p = 0; p < PURPOSES; p++)
		if (!found[p])
			return missing[p];
	return NULL;
}

/* contains reports whether an address is in a file's memory. */
static bool contains(const struct dl_phdr_info *info, uintptr_t address)
{
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *p = &info->dlpi_phdr[i];
		if (p->p_type == PT_LOAD && address - (info->dlpi_addr + p->p_vaddr) < p->p_memsz)
			return true;
	}
	return false;
}

struct search {
	uintptr_t caller;
	const char *why; /* the library cannot be patched */
	bool callers;	 /* and the caller is in it */
};

static int look(struct dl_phdr_info *info, size_t size, void *arg)
{
	(void)size;
	struct search *s = arg;
	struct loaded l = {0};
	read_headers(&l, info);
	if (!l.soname || strcmp(l.soname, LIBRARY))
		return 0;
	const char *why = patch(&l);
	if (why) {
		s->why = why;
		s->callers |= contains(info, s->caller);
	}
	return 0;
}

int vb_patch_librdmacm(const void *caller)
{
	static bool said;
	struct search s = {.caller = (uintptr_t)caller};
	dl_iterate_phdr(look, &s);
	if (!s.why)
		return 0;
	if (!__atomic_exchange_n(&said, true, __ATOMIC_RELAXED))
		fprintf(stderr, "libibverbs (Verbena): %s cannot be given a connection manager: %s; rdma_* functions fail\n",
			LIBRARY, s.why);
	return s.callers ? ENODEV : 0;
}
