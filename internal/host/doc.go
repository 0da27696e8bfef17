// Package host lets the processes of one user on one host share a device, as
// they would share one adapter: it decides who they are, which queue pair
// numbers belong to whom, and who of them owns the UDP port.
//
// Everything begins with names. An abstract unix socket belongs to a network
// namespace, as an address does, and vanishes with its process:
//
//   - "verbena/ADDRESS" belongs to the owner of the address (owner.go). Who opens
//     the address first gets it; everybody else finds the owner by it and joins.
//   - "verbena/ADDRESS/PID-NONCE" belongs to each process (process.go), for
//     others to open a channel to it or to ask what it is doing.
//
// The owner hands out a directory (directory.go), memory that all of them share:
// the processes, the ranges of queue pair numbers that they hold, how many
// objects they have. Only the owner writes it, one word at a time, and everybody
// reads it without asking. It outlives its writer: when the owner goes, the
// connections to it end, one of the others gets the name, goes on with the same
// directory, and the rest joins it again (member.go).
//
// Another user's process is refused on both sides, by the credentials that the
// kernel reports.
package host
