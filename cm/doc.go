// Package cm connects queue pairs by IP address and port, in the manner of package net: a program
// listens, another one dials, and both have a [Conn] with a queue pair that is ready.
//
//	l, err := cm.Listen(ctx, ":7174", nil)
//	conn, err := l.Accept(ctx)
//
//	conn, err := cm.Dial(ctx, "host:7174", nil)
//
// The peer may be any program that connects by rdma_cm, over a device that speaks RoCE v2: one in Go, or
// one that was built for librdmacm. Ports are those of rdma_cm; they have nothing to do with the ports
// of TCP and UDP.
//
// A connection has a queue pair, and what that needs, all of it its own unless the [Config] says
// otherwise: [Conn.QP], [Conn.PD], [Conn.SendCQ], [Conn.RecvCQ]. What is done with them is package
// verbs. Receives that must be there before the peer's first message are posted by Setup in the
// Config.
//
// # Private data
//
// Both sides may say a few bytes while they connect: a version, a name, the address and key of a
// region. [Config] has what this side says; [Request.Private], [Conn.Private] and [RejectError] have what
// the peer said. The messages have no length: the receiver gets all of the room, padded with zeros.
//
// # Ends
//
// [Conn.Close] tells the peer. There [Conn.Done] is closed, and all requests of the queue pair complete.
// The same happens when the peer's process dies and another process has its device open. Nothing tells of
// the last process of a device, or of a host, that has died: requests to it fail when their retries are
// used up.
//
// # Datagrams
//
// [Announce] lets peers find a UD queue pair by address and port, and [Resolve] finds it. [Join] makes it a
// member of a multicast group.
//
// # Errors
//
// Functions return *net.OpError, in which errors.Is and errors.As find what happened: [ErrRefused] and
// [*RejectError], syscall.ETIMEDOUT, the error of the context, [ErrClosed].
package cm
