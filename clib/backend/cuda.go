package main

// #include "call.h"
import "C"

// vbe_cuda_gone is told what memory of CUDA the program is about to free. Memory of CUDA's driver cannot be registered
// yet, so there is nothing to end: the program's software GPUs (gpu.go) end access to their memory themselves.
//
//export vbe_cuda_gone
func vbe_cuda_gone(what C.uint32_t, addr, size C.uint64_t) C.int64_t { return 0 }
