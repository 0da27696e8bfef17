// Package rxe holds Verbena's wire to the Linux kernel's: its soft RoCE device,
// rxe, in a virtual machine, against ours, in both directions.
//
// The host's part is here: Run builds the guest's programs (package guest and
// kverbs/kverbs.c), boots a kernel with them (package vm) and returns the results
// as they come. The cases are in package guest. docs/interop.md tells how to run
// them, one by hand too, and what was found.
package rxe
