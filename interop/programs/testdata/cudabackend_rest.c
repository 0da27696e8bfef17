/*
 * Functions of a backend that cudabackend.c has none of: they succeed, and do nothing.
 */
#include "../../../clib/front/backend.h"

#define NOTHING(result, name, args)                                                                                    \
	__attribute__((weak)) result name args { return 0; }
VBE_FUNCTIONS(NOTHING)
