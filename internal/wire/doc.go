// Package wire is RoCE v2 as bytes: the headers and the checksum that a UDP datagram
// carries around the application's data. It uses neither queue pairs nor sockets.
//
// The parts of a packet, top-down:
//
//  1. kind.go names what a packet is for: transport, kind, position, extra.
//  2. opcode.go is the one table of opcodes: from those names to the number,
//     and from the number to all that follows from it.
//  3. header.go reads and writes the BTH and the headers that the opcode calls
//     for, with every length checked before it is used.
//  4. icrc.go makes and checks the checksum at the packet's end.
//
// Beside it: psn.go (sequence numbers), rnr.go (encoded times), ip.go (the IP
// and UDP headers, for captures and for UD receive buffers).
//
// Nothing here allocates, except that appending to a full slice does.
package wire
