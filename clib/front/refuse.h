/*
 * Functions that exist because programs link to them, and only fail. Their arguments do
 * not matter, so they are declared without any; files that use these macros include no
 * header with the real declarations.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define PUBLIC __attribute__((visibility("default")))

/* verbs that return a pointer, an errno, nothing */
#define REFUSE_POINTER(name)                                                                                           \
	PUBLIC void *name(void)                                                                                        \
	{                                                                                                              \
		errno = EOPNOTSUPP;                                                                                    \
		return NULL;                                                                                           \
	}
#define REFUSE_ERRNO(name)                                                                                             \
	PUBLIC int name(void) { return errno = EOPNOTSUPP; }
#define REFUSE_VOID(name)                                                                                              \
	PUBLIC void name(void) {}
