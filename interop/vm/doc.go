// Package vm boots Debian's kernels in an emulator, without privileges, and runs a program in
// them: for tests against drivers that the host's kernel does not have.
//
// A run, file by file:
//
//  1. Check names what the host lacks (need.go).
//  2. FindKernel fetches a kernel from the archive that the host's own packages
//     come from, unless it is in the cache (kernel.go).
//  3. Image packs an initramfs of the host's programs and the kernel's modules
//     (image.go, cpio.go), unless that one is in the cache. For a guest with another processor
//     (arch.go) the programs are those of packages (packages.go).
//  4. Machine boots it with a directory of the host mounted as /share, where the
//     guest finds its program and leaves its results (machine.go).
//
// The cache is $VERBENA_CACHE, or verbena in the user's cache directory. Files appear in it
// by a rename, complete, so that several runs may share it. It may be deleted at any time.
package vm
