// Package sys holds every system call that Verbena makes, each behind a function
// that takes and returns Go values.
//
// Three groups of files: udp.go, mmsg_unsafe.go, poll.go and netif.go are what
// the udp link stands on (sockets, batches of datagrams, waiting for them, the
// interfaces they leave by); mlock.go locks memory; procmap.go says what is
// mapped, file.go which of it is files and writes those back.
package sys
