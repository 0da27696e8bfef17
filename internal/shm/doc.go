// Package shm connects processes of one host and one user by memory that they
// share. It moves records of bytes, whatever they mean.
//
// The way of a record, top-down:
//
//  1. channel.go: the sender takes the channel (Begin), asks for room in the
//     ring to its peer (Reserve), fills it, and makes it visible (Commit).
//  2. writer.go: the ring, as its one writer sees it.
//  3. bell.go: the sender sets the ring's bit in the peer's inbox, unless it is set, and
//     wakes a peer that sleeps.
//  4. inbox.go: the peer polls its inbox, whose bits show which rings may have records.
//     sleep.go is how it sleeps without missing one.
//  5. reader.go: the ring, as its one reader sees it. It trusts nothing that the
//     writer wrote.
//
// handshake.go makes a channel of a unix socket. lifetime.go takes the channel down when the
// peer closes it or ends, and life.go finds out whether a peer process has ended. copy.go
// copies what is too large for a ring from the memory of the peer, and reach.go permits peers
// to do that where the kernel asks for permission. grant.go lets a peer access memory of this
// process by itself. endlock.go is the lock of a ring's end.
//
// # What is shared
//
// Each process has one inbox segment, which all its peers map, and each channel
// one ring segment for each direction, made by the process that reads from it.
// A segment is a sealed memory file (sys.NewMemfd). A process that maps one checks its seals
// and its size first, so that no peer can make an access fault.
//
// Nothing in shared memory is a lock. A process that dies between any two instructions leaves
// behind records that are whole, or not there at all; its peer reads what was committed, then
// learns of the death from the socket or the process's descriptor. Only the owner of a grant
// waits, for a live process that is inside.
//
// # Trust
//
// Peers run under the same user, which the kernel attests: they could do worse to each other
// than write nonsense into a ring. Nonsense there, and in
// any other shared word, must still not crash this process or make it touch
// memory outside the ring: every word is read once and checked before it is
// used, and a ring that makes no sense ends its channel. What nonsense can do
// is delay a peer, by clearing its bits in an inbox.
package shm
