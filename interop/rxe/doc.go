// Package rxe tests Verbena's packets against the Linux kernel: its soft RoCE device, rxe,
// in a virtual machine, against ours, in both directions.
//
// The host's part is here: Run builds the guest's programs (package guest, kverbs, cmpeer
// and udpfloor), boots a kernel with them (package vm) and passes the results on as they come.
// The cases are in package guest. docs/interop.md explains how to run all of them, or one by
// hand, and what was found.
package rxe
