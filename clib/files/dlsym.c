/*
 * dlsym and dlvsym, in front of the C library's: programs find CUDA's functions by them (cuda.c), and libraries that
 * watch memory find the C library's munmap and the like (maps.c). For any other name they cost a look at its first two
 * letters.
 *
 *  1. The program calls dlsym or dlvsym: a few instructions of assembler, which keep the arguments and call
 *     verbena_dlsym_look.
 *  2. That returns an answer, or where to go on.
 *  3. The assembler jumps there, with the program's arguments and its return address: by the latter the C library sees
 *     what RTLD_NEXT and RTLD_DEFAULT mean.
 *
 * Allocators and sanitizers call dlsym before constructors have run, and within malloc. So nothing here is initialized,
 * allocates, or calls dlsym by its name, which is ours. Nor does it call other functions of the C library: a sanitizer
 * has some in front of those, which call dlsym at first. The C library's dlsym is looked up in its table of symbols.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "dlsym.h"

typedef void *find_function(void *, const char *);
typedef void *find_version_function(void *, const char *, const char *);

/* --- the C library's functions --- */

/* The tables of a loaded library in which a symbol is looked up. */
struct tables {
	const uint32_t *hash; /* DT_GNU_HASH */
	const ElfW(Sym) *symbols;
	const char *names;
	const ElfW(Half) *versions; /* NULL: it has none */
};

static struct tables tables_of(const struct link_map *lib)
{
	struct tables t = {NULL};
	for (const ElfW(Dyn) *d = lib->l_ld; d && d->d_tag != DT_NULL; d++) {
		uintptr_t at = d->d_un.d_ptr;
		const void *p = (const void *)(at < lib->l_addr ? at + lib->l_addr : at); /* usually the loader has added it */
		switch (d->d_tag) {
		case DT_GNU_HASH:
			t.hash = p;
			break;
		case DT_SYMTAB:
			t.symbols = p;
			break;
		case DT_STRTAB:
			t.names = p;
			break;
		case DT_VERSYM:
			t.versions = p;
			break;
		}
	}
	return t;
}

static bool begins(const char *s, const char *with)
{
	while (*with && *s == *with)
		s++, with++;
	return !*with;
}

static uint32_t gnu_hash(const char *name)
{
	uint32_t h = 5381;
	for (const unsigned char *c = (const unsigned char *)name; *c; c++)
		h = h * 33 + *c;
	return h;
}

/* defined returns a function of a library, of the version that programs are linked to today; NULL if it has none. */
static void *defined(const struct link_map *lib, const char *name)
{
	enum { HIDDEN = 0x8000 }; /* in versions: kept for programs that were linked long ago */
	struct tables t = tables_of(lib);
	if (!t.hash || !t.symbols || !t.names)
		return NULL;
	uint32_t count = t.hash[0], first = t.hash[1], bloom = t.hash[2], hash = gnu_hash(name);
	const uint32_t *buckets = t.hash + 4 + bloom * (sizeof(ElfW(Addr)) / 4), *chain = buckets + count;
	uint32_t i = count ? buckets[hash % count] : 0;
	for (bool more = i >= first && i; more; i++) {
		const ElfW(Sym) *s = &t.symbols[i];
		more = !(chain[i - first] & 1);
		if ((chain[i - first] | 1) == (hash | 1) && vb_same(t.names + s->st_name, name) && s->st_shndx != SHN_UNDEF &&
		    ELF64_ST_TYPE(s->st_info) == STT_FUNC && !(t.versions && t.versions[i] & HIDDEN))
			return (void *)(lib->l_addr + s->st_value);
	}
	return NULL;
}

/* is_c_library reports whether a file is the C library. Before glibc 2.34 the functions of dlfcn.h are in libdl. */
static bool is_c_library(const char *path)
{
	const char *file = path;
	for (; *path; path++)
		if (*path == '/')
			file = path + 1;
	return begins(file, "libc.so.") || begins(file, "libdl.so.");
}

/* c_library returns a function of the C library. */
static void *c_library(const char *name)
{
	void *f = NULL;
	for (const struct link_map *l = _r_debug.r_map; l && !f; l = l->l_next)
		if (l->l_name && is_c_library(l->l_name))
			f = defined(l, name);
	return f;
}

/* next_dlsym and next_dlvsym return what is behind our functions: those of another preloaded library, or the C
 * library's. */
static find_function *next_dlsym(void)
{
	static find_function *found; /* accessed atomically: two threads store the same */
	find_function *f = __atomic_load_n(&found, __ATOMIC_RELAXED);
	if (f)
		return f;
	if (!(f = (find_function *)c_library("dlsym")))
		return NULL;
	find_function *behind = (find_function *)f(RTLD_NEXT, "dlsym");
	f = behind ? behind : f;
	__atomic_store_n(&found, f, __ATOMIC_RELAXED);
	return f;
}

static find_version_function *next_dlvsym(void)
{
	static find_version_function *found; /* accessed atomically, as above */
	find_version_function *f = __atomic_load_n(&found, __ATOMIC_RELAXED);
	if (f || !next_dlsym())
		return f;
	f = (find_version_function *)next_dlsym()(RTLD_NEXT, "dlvsym");
	__atomic_store_n(&found, f, __ATOMIC_RELAXED);
	return f;
}

void *vb_find_symbol(void *handle, const char *name, const char *version)
{
	/* Neither is a sibling call: by its return address the C library knows that this library asks. */
	void *volatile at = version ? next_dlvsym() ? next_dlvsym()(handle, name, version) : NULL
			    : next_dlsym() ? next_dlsym()(handle, name)
					   : NULL;
	return at;
}

/* --- ours --- */

struct vb_look verbena_dlsym_look(void *handle, const char *name, const char *version, int versioned);

/* verbena_dlsym_look is called by the assembler below. Without a C library's function the answer is that there is no
 * such symbol. */
__attribute__((used)) struct vb_look verbena_dlsym_look(void *handle, const char *name, const char *version, int versioned)
{
	struct vb_look go_on = {versioned ? (void *)next_dlvsym() : (void *)next_dlsym(), NULL};
	if (!go_on.go_on || !name || (versioned && !version))
		return go_on;
	if (name[0] == 'c' && name[1] == 'u')
		return vb_look_cuda(go_on.go_on, handle, name, versioned ? version : NULL);
	if (handle == RTLD_DEFAULT && (name[0] == 'm' || name[0] == 's' || name[0] == 'b' || name[0] == 'r'))
		return vb_look_memory(go_on.go_on, name, versioned ? version : NULL);
	return go_on;
}

#if defined(__x86_64__)
#define HOOK(name, versioned)                                                                                          \
	__asm__(".text\n.globl " #name "\n.type " #name ", @function\n" #name ":\n"                                     \
		"	.cfi_startproc\n"                                                                              \
		"	endbr64\n"                                                                                     \
		"	subq $40, %rsp\n"                                                                              \
		"	.cfi_adjust_cfa_offset 40\n"                                                                   \
		"	movq %rdi, 8(%rsp)\n"                                                                          \
		"	movq %rsi, 16(%rsp)\n"                                                                         \
		"	movq %rdx, 24(%rsp)\n"                                                                         \
		"	movl $" #versioned ", %ecx\n"                                                                  \
		"	call verbena_dlsym_look\n"                                                                     \
		"	testq %rax, %rax\n"                                                                            \
		"	je 1f\n"                                                                                       \
		"	movq 8(%rsp), %rdi\n"                                                                          \
		"	movq 16(%rsp), %rsi\n"                                                                         \
		"	movq 24(%rsp), %rdx\n"                                                                         \
		"	.cfi_remember_state\n"                                                                         \
		"	addq $40, %rsp\n"                                                                              \
		"	.cfi_adjust_cfa_offset -40\n"                                                                  \
		"	jmp *%rax\n"                                                                                   \
		"1:	.cfi_restore_state\n"                                                                          \
		"	movq %rdx, %rax\n"                                                                             \
		"	addq $40, %rsp\n"                                                                              \
		"	.cfi_adjust_cfa_offset -40\n"                                                                  \
		"	ret\n"                                                                                         \
		"	.cfi_endproc\n"                                                                                \
		".size " #name ", . - " #name "\n")
#elif defined(__aarch64__)
#define HOOK(name, versioned)                                                                                          \
	__asm__(".text\n.globl " #name "\n.type " #name ", %function\n.p2align 2\n" #name ":\n"                         \
		"	.cfi_startproc\n"                                                                              \
		"	hint #34\n" /* bti c */                                                                        \
		"	stp x29, x30, [sp, #-48]!\n"                                                                   \
		"	.cfi_def_cfa_offset 48\n"                                                                      \
		"	.cfi_offset x29, -48\n"                                                                        \
		"	.cfi_offset x30, -40\n"                                                                        \
		"	mov x29, sp\n"                                                                                 \
		"	stp x0, x1, [sp, #16]\n"                                                                       \
		"	str x2, [sp, #32]\n"                                                                           \
		"	mov w3, #" #versioned "\n"                                                                     \
		"	bl verbena_dlsym_look\n"                                                                       \
		"	mov x16, x0\n"                                                                                 \
		"	cbz x16, 1f\n"                                                                                 \
		"	ldp x0, x1, [sp, #16]\n"                                                                       \
		"	ldr x2, [sp, #32]\n"                                                                           \
		"	.cfi_remember_state\n"                                                                         \
		"	ldp x29, x30, [sp], #48\n"                                                                     \
		"	.cfi_def_cfa_offset 0\n"                                                                       \
		"	.cfi_restore x29\n"                                                                            \
		"	.cfi_restore x30\n"                                                                            \
		"	br x16\n"                                                                                      \
		"1:	.cfi_restore_state\n"                                                                          \
		"	mov x0, x1\n"                                                                                  \
		"	ldp x29, x30, [sp], #48\n"                                                                     \
		"	.cfi_def_cfa_offset 0\n"                                                                       \
		"	.cfi_restore x29\n"                                                                            \
		"	.cfi_restore x30\n"                                                                            \
		"	ret\n"                                                                                         \
		"	.cfi_endproc\n"                                                                                \
		".size " #name ", . - " #name "\n")
#else
#error "dlsym.c has no assembler for this processor"
#endif

HOOK(dlsym, 0);
HOOK(dlvsym, 1);
