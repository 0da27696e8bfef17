// Package store is a key-value store over RDMA: a server with a table in its memory, and clients that read the table by
// themselves.
//
// A GET is one RDMA READ of the table. The server's program does nothing for it. A PUT and a DELETE are messages to the server,
// which is the only one that writes the table. So GETs need no lock, and two PUTs of the same key are done one after the other.
//
// The files, in the order in which they are best read: slot.go is what lies in the table, table.go the server's end of it,
// wire.go what the sides say to each other, link.go how either waits for a completion; then server.go and client.go.
//
// What the store promises:
//
//   - A GET that begins after a PUT has returned sees that PUT, or a later one of the same key. It never sees a part of one.
//   - PUTs and DELETEs have versions, numbers that only grow. The order of the versions is the order in which they were done.
//   - A PUT whose answer did not come ([ErrUnknown]) was done, or is done before the client's next call, or never will be.
//   - With a file, a table survives the server's process, also one that is killed. It does not survive a loss of power: nothing
//     is forced to the disk.
//
// It has no authentication, as RoCE has none: whoever reaches the server's address reads the table.
package store

import "errors"

// Why a call fails. Errors of package cm, and those of a context, come as they are.
var (
	ErrNotFound  = errors.New("no such key")
	ErrFull      = errors.New("the bucket of this key is full")
	ErrTooLong   = errors.New("the key or the value is too long, or the key is empty")
	ErrMalformed = errors.New("the server does not understand the request")
	ErrStorage   = errors.New("the server cannot write its file")
	ErrTorn      = errors.New("the bucket of this key is never whole")
	ErrUnknown   = errors.New("no answer: the change was made, or was not")
	ErrClosed    = errors.New("the client is closed")
)
