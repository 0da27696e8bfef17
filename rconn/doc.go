// Package rconn has connections of package net over RDMA: a [Conn] is a net.Conn, and a [Listener] a net.Listener.
//
//	l, err := rconn.Listen(ctx, ":7175", nil)      instead of net.Listen
//	c, err := rconn.Dial(ctx, "host:7175", nil)    instead of net.Dial
//
// Servers and clients that take those run over it as they are: net/http by http.Serve and [Dialer.DialContext], others by
// their option for a dialer.
//
// # How it works
//
// Each side has a ring of memory that the peer writes into. [Conn.Write] copies bytes into a ring of its own and posts a WRITE
// with immediate data from there to the same place in the peer's; [Conn.Read] copies them out. So there is one copy on each
// side, and no call of the receiver's for bytes to arrive. The reader tells the writer now and then how far it has read,
// by a SEND of a few bytes: a writer never writes over what was not read, and never sends a message for which no receive is
// posted.
//
// The files, in the order of the data: wire.go has what the sides tell each other, ring.go the two halves of a connection
// without I/O, conn.go what moves bytes and waits, dial.go how connections are made.
//
// # Ends
//
// [Conn.CloseWrite] tells the peer that nothing more comes: it reads what was written, then io.EOF. [Conn.Close] does the same,
// and what was written before it arrives. If the peer's process dies or its host vanishes, calls fail with ECONNRESET or
// ETIMEDOUT, after what had arrived was read. A connection on which nothing moves asks the peer's device now and then whether
// it is still there ([Config].KeepAlive).
package rconn
