// What the library that "verbena exec" preloads (clib/files/maps.c) and the notifier
// (notifier_close.c) say to each other.
//
// The preloaded library sees a system call that will replace what is mapped at some
// addresses, before it is made. It closes these ranges: from then on nobody accesses
// registered memory. It makes the call, and tells what the call has changed.

#ifndef VERBENA_NOTIFIER_HOOK_H
#define VERBENA_NOTIFIER_HOOK_H

#include <stdint.h>

// Addresses from start to before end.
struct vn_range {
	uintptr_t start, end;
};

// What a closing has to keep until it ends: the thread's signal mask.
struct vn_closing {
	uint64_t signals;
};

// vn_close_begin closes ranges, if memory in one of them is watched, and returns 1;
// then vn_close_end must follow, in the same thread, and signals are blocked until
// then. It returns 0 if there is nothing to close. It may be called in any thread, in
// a signal handler too, and keeps errno.
typedef int vn_close_begin_function(const struct vn_range *ranges, int n, struct vn_closing *c);

// vn_close_end opens them again. What lies in the ranges given here is not what it
// was; after a call that has changed nothing there are none.
typedef void vn_close_end_function(struct vn_closing *c, const struct vn_range *changed, int n);

#define VN_HOOK_VERSION 1

// verbena_preload_ranges is defined by the preloaded library. The notifier stores the
// functions there, end first, when it starts; in the child of a fork begin is NULL.
struct vn_hook {
	uint64_t version; // VN_HOOK_VERSION, by the preloaded library
	vn_close_begin_function *begin;
	vn_close_end_function *end;
};

#endif
