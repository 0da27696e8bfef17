// Package sys holds every system call that Verbena makes, each behind a function
// that takes and returns Go values.
//
// Groups of files: udp.go, mmsg_unsafe.go, poll.go and netif.go are what
// the udp link stands on (sockets, batches of datagrams, waiting for them, the
// interfaces they leave by); mlock.go locks memory; procmap.go says what is
// mapped, file.go which of it is files and writes those back; memfd.go, event.go,
// scm.go, watch.go, ptrace.go and process_vm_unsafe.go are what processes share
// memory and messages by.
package sys
