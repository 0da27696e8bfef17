package sys

import "golang.org/x/sys/unix"

// BlockSignals keeps signals from the calling thread, which the caller has locked
// (runtime.LockOSThread). Faults of the thread itself still reach it, and so do those signals by
// which the C library and the runtime change all threads at once.
func BlockSignals() {
	var set unix.Sigset_t
	for i := range set.Val {
		set.Val[i] = ^set.Val[i]
	}
	for _, s := range []unix.Signal{unix.SIGSEGV, unix.SIGBUS, unix.SIGFPE, unix.SIGILL, unix.SIGTRAP, unix.SIGABRT, unix.SIGSYS, 32, 33, 34} {
		set.Val[(s-1)/64] &^= 1 << ((s - 1) % 64)
	}
	_ = unix.PthreadSigmask(unix.SIG_BLOCK, &set, nil) // it fails for bad arguments alone
}
