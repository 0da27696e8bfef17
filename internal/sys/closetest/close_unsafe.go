//go:build cgo

package closetest

/*
#cgo CFLAGS: -O2 -Wall
#cgo LDFLAGS: -rdynamic
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>
#include "../notifier_hook.h"

// What the notifier looks for.
__attribute__((visibility("default"))) struct vn_hook verbena_preload_ranges = {.version = VN_HOOK_VERSION};

// ct_map_over maps zeros over a range, closed. With wrong, the call is one that fails.
// It returns an errno, and whether the range was closed.
static int ct_map_over(uintptr_t start, uintptr_t end, int wrong, int *closed)
{
	vn_close_begin_function *begin = __atomic_load_n(&verbena_preload_ranges.begin, __ATOMIC_ACQUIRE);
	struct vn_range r = {start, end};
	struct vn_closing c;

	*closed = begin ? begin(&r, 1, &c) : 0;
	if (*closed && begin(&r, 1, &(struct vn_closing){0})) // the same thread, within
		return EDEADLK;
	void *got = mmap((void *)start, end - start, PROT_READ | PROT_WRITE,
		MAP_ANONYMOUS | MAP_FIXED | (wrong ? 0 : MAP_PRIVATE), -1, 0);
	int err = got == MAP_FAILED ? errno : 0;
	if (*closed)
		verbena_preload_ranges.end(&c, &r, err == 0);
	return err;
}

// ct_child forks; the child reports whether the functions are gone.
static int ct_child(void)
{
	int status;
	pid_t pid = fork();

	if (pid == 0)
		_exit(verbena_preload_ranges.begin == 0 ? 0 : 1);
	while (pid > 0 && waitpid(pid, &status, 0) < 0)
		;
	return pid > 0 && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
*/
import "C"

import "syscall"

// MapOver maps zeros over a range, and reports whether the range was closed meanwhile.
// It is sound if the caller knows that no Go memory lies there: nothing here refers to
// the range.
func MapOver(start, end uintptr) (closed bool, err error) { return mapOver(start, end, 0) }

// FailToMapOver is MapOver with a system call that fails.
func FailToMapOver(start, end uintptr) (closed bool, err error) { return mapOver(start, end, 1) }

func mapOver(start, end uintptr, wrong C.int) (bool, error) {
	var closed C.int
	if e := C.ct_map_over(C.uintptr_t(start), C.uintptr_t(end), wrong, &closed); e != 0 {
		return closed != 0, syscall.Errno(e)
	}
	return closed != 0, nil
}

// Offered reports whether a notifier offers to close ranges.
func Offered() bool { return C.verbena_preload_ranges.begin != nil }

// OfferedInChild reports whether the parent's notifier still offers that in the child of
// a fork, as it must not.
func OfferedInChild() bool { return C.ct_child() != 0 }
