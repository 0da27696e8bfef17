// Command engine is what stands behind the C library: built as a C shared library
// (libverbena-engine.so), it is loaded by the C front in ../front at the first verb
// that a program calls, and executes verbs on package internal/device.
//
// The two speak through ../front/engine.h: handles, plain structures, and a ring in
// C memory for the completions of each queue. A call's way:
//
//  1. The front checks what it can without the engine, flattens structures, and
//     calls one of the exported functions (those named vbe_).
//  2. That function finds its objects by their handles (handles.go), translates
//     (convert.go), calls the device in the caller's thread, and translates back.
//  3. Errors become negative errnos; with VERBENA_LOG=1 their words go to standard
//     error, since C has no place for them.
//
// No pointer to Go memory is ever given to C.
package main

import "runtime"

// A thread that has gone back to the program keeps its place among GOMAXPROCS, until the
// runtime finds all places taken and takes it away: then the thread's next verb looks for
// another one, and who makes progress in the background has to be woken to get this one.
// So there are places to spare.
func init() { runtime.GOMAXPROCS(2*runtime.GOMAXPROCS(0) + 2) }

func main() {} // never called: the program is somebody else's
