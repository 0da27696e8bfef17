// Package host lets the processes of one user on one host share a device, as they would share
// one adapter: it decides which processes belong to the device, and which queue pair numbers
// each of them has.
//
// No process depends on another one being awake. What the processes of a device share lives in
// files that each of them has open:
//
//   - The directory (directory.go) is memory: the processes, the places that they hold (see
//     below) and how many objects they have. Every process reads and changes it word by word,
//     without a lock, and frees what a dead process has left.
//   - The door (door.go) is a listening socket for each address, with the name
//     "verbena/ADDRESS". A newcomer finds the device by that name. Whichever process accepts
//     the connection passes the newcomer these files.
//   - The shelf (sys.Shelf) keeps the UDP sockets of all processes open.
//
// An abstract unix socket belongs to a network namespace, as an address does. The door's name
// vanishes with the last process of the device. The name "verbena/ADDRESS/PID-NONCE" belongs to
// one process (process.go): other processes use it to open a channel to the process, to ask for
// its status or for memory, and to find out whether it lives.
//
// A place is a number of a UDP socket that the kernel chooses by (sys.Place), and all queue pair
// numbers with that place (places.go). Each process holds one place at least, so packets for
// its queue pairs come to its own socket.
//
// Another user's process is refused on both sides, by the credentials that the kernel reports.
package host
