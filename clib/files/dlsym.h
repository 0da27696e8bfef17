/*
 * The C library's dlsym and dlvsym, which dlsym.c stands in front of.
 */
#ifndef VERBENA_DLSYM_H
#define VERBENA_DLSYM_H

#include <stdbool.h>

/* vb_same reports whether two names are the same. A sanitizer may have a strcmp of its own, which calls dlsym. */
static inline bool vb_same(const char *a, const char *b)
{
	while (*a && *a == *b)
		a++, b++;
	return *a == *b;
}

/* vb_find_symbol is dlsym if version is NULL, otherwise dlvsym, without our functions in front of them. RTLD_NEXT means
 * what is behind this library. */
void *vb_find_symbol(void *handle, const char *name, const char *version);

/* What a program's dlsym or dlvsym does: if go_on is not NULL, it goes on there, as if the program had called that;
 * otherwise it returns result. */
struct vb_look {
	void *go_on, *result;
};

/* vb_look_cuda decides about a name that begins with "cu" (cuda.c). go_on is the C library's function. */
struct vb_look vb_look_cuda(void *go_on, void *handle, const char *name, const char *version);

/* vb_look_memory decides about a name that is looked up by RTLD_DEFAULT and may be that of a function of maps.c. */
struct vb_look vb_look_memory(void *go_on, const char *name, const char *version);

#endif
