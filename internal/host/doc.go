// Package host lets the processes of one user on one host share a device, as
// they would share one adapter: it decides which processes belong to the device, which queue
// pair numbers each of them has, and which one owns the UDP port.
//
// Everything begins with names. An abstract unix socket belongs to a network
// namespace, as an address does, and vanishes with its process:
//
//   - "verbena/ADDRESS" belongs to the owner of the address (owner.go). The process that
//     opens the address first gets it; the others find the owner by it and join.
//   - "verbena/ADDRESS/PID-NONCE" belongs to one process (process.go). Others use it to
//     open a channel to the process, and to ask for its status or for memory.
//
// The owner hands out a directory (directory.go), memory that all of them share:
// the processes, the ranges of queue pair numbers that they hold, how many
// objects they have. The owner writes it, one word at a time, but for the object counts, the
// domains and the packets flag of a process, which that process writes; all processes read it
// without asking. The directory outlives the owner: when the owner goes, the connections to
// it end, one of the others gets the name and goes on with the same directory, and the rest
// join that process again (member.go).
//
// Another user's process is refused on both sides, by the credentials that the
// kernel reports.
package host
