// Command backend is the Go half of the C library: it executes verbs on package
// internal/device. It is built as a C shared library (libverbena-backend.so), which the C
// front in ../front loads at the first verb that needs a device.
//
// The interface between the two is ../front/backend.h: handles, plain structures, and a ring
// in C memory for the completions of each queue. A call, step by step:
//
//  1. The front checks what it can without the backend, flattens structures, and
//     calls one of the exported functions (those named vbe_).
//  2. That function finds its objects by their handles (handles.go), translates
//     (convert.go), calls the device in the caller's thread, and translates back.
//  3. Errors become negative errnos. With VERBENA_LOG=1 their texts go to standard error.
//
// No pointer to Go memory is ever passed to C.
package main

import (
	"os"
	"runtime"
	"runtime/debug"
)

// A thread that has returned to the program keeps its P, one of GOMAXPROCS. If all Ps are in
// use, the runtime takes it away: then the thread's next verb looks for another P, and the
// background receiver has to be woken to get this one. So there are Ps to spare.
func init() { runtime.GOMAXPROCS(2*runtime.GOMAXPROCS(0) + 2) }

// A program begins with making objects, and for that little heap the runtime would collect garbage again
// and again: six times for 1,000 connections. So the first collection comes at 16 MB, not at 4.
// From then on it is as usual: the heap grows by as much as is live.
func init() {
	if os.Getenv("GOGC") != "" {
		return
	}
	const first = 400 // of 4 MB
	usual := debug.SetGCPercent(first)
	runtime.SetFinalizer(&[16]byte{}, func(*[16]byte) { debug.SetGCPercent(usual) })
}

func main() {} // never called: the process has the program's main
