// Package vm boots Debian's kernels under software emulation, without privilege,
// to run a program inside: tests against drivers that the host's kernel does not
// have.
//
// The way of a run, file by file:
//
//  1. Check names what the host lacks (need.go).
//  2. FindKernel fetches a kernel from the archive that the host's own packages
//     come from, unless it is in the cache (kernel.go).
//  3. Image packs an initramfs of the host's programs and the kernel's modules
//     (image.go, cpio.go), unless that one is in the cache.
//  4. Machine boots it with a directory of the host mounted as /share, where the
//     guest finds its program and leaves its results (machine.go).
//
// The cache is $VERBENA_CACHE, or verbena in the user's cache directory. Whatever
// is in it appears by a rename, whole, so that several runs may share it; it may
// be deleted at any time.
package vm
