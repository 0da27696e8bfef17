package store

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// Client reads and changes the table of a server. All methods are safe for concurrent use; one call at a time is under way. If
// the connection ends, the next call makes another one.
type Client struct {
	address string
	dev     *verbs.Device
	id      uint64
	torn    atomic.Uint64
	dials   atomic.Uint64
	closing sync.WaitGroup // connections that are given up

	mu     sync.Mutex // held by each call; guards what follows
	s      *session   // nil: there is no connection
	closed bool
}

// session is a connection to the server, and what the server has offered.
type session struct {
	*link
	table offer
}

// The buffer of a session.
const (
	bucketAt   = 0
	answerAt   = bucketAt + bucketSize
	requestAt  = answerAt + answerSize
	sessionBuf = requestAt + requestMax
)

// Dial connects to a server. A nil device: package cm opens the one from which the server is reached.
func Dial(ctx context.Context, address string, dev *verbs.Device) (*Client, error) {
	c := &Client{address: address, dev: dev, id: rand.Uint64()}
	var err error
	c.s, err = c.dial(ctx)
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Torn returns how many READs were repeated because a slot was not whole.
func (c *Client) Torn() uint64 { return c.torn.Load() }

// Connections returns how many connections the client has made.
func (c *Client) Connections() uint64 { return c.dials.Load() }

// Close ends the connection, after a call that is under way. Calls after it fail with ErrClosed.
func (c *Client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	var err error
	if c.s != nil {
		err = c.s.conn.Close()
		c.s = nil
	}
	c.closing.Wait()
	return err
}

// tornLimit is how many times in a row a bucket is read. A writer is in a slot for a part of a microsecond, so this many tell of
// something else.
const tornLimit = 10_000

// Get returns the value of a key, and its version. It is a READ of the server's memory, which the server's program does not
// notice. If the connection ends, Get makes another one and reads again, until the context is done.
func (c *Client) Get(ctx context.Context, key string) (value []byte, version uint64, err error) {
	if err := checkKey(key, nil); err != nil {
		return nil, 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for torn := 0; torn < tornLimit; {
		s, err := c.connected(ctx)
		if err != nil {
			return nil, 0, err
		}
		bucket, err := s.read(ctx, bucketOf(key, s.table.buckets))
		if err != nil {
			c.giveUp()
			if ctx.Err() != nil {
				return nil, 0, ctx.Err()
			}
			continue // nothing was changed, so it is tried again
		}
		switch e, found, whole := look(bucket, key); {
		case !whole:
			torn++
			c.torn.Add(1)
			runtime.Gosched() // the writer may be a goroutine of this process
		case !found:
			return nil, 0, ErrNotFound
		default:
			return bytes.Clone(e.value), e.version, nil
		}
	}
	return nil, 0, ErrTorn
}

// Put sets the value of a key, and returns the version of that.
//
// With ErrUnknown the answer did not come. Put does not try again by itself: another client may have changed the key
// meanwhile, and the second attempt would undo that.
func (c *Client) Put(ctx context.Context, key string, value []byte) (version uint64, err error) {
	return c.change(ctx, &request{opPut, key, value})
}

// Delete takes a key out. ErrNotFound: it is not there. For ErrUnknown see Put.
func (c *Client) Delete(ctx context.Context, key string) (version uint64, err error) {
	return c.change(ctx, &request{op: opDelete, key: key})
}

func (c *Client) change(ctx context.Context, r *request) (version uint64, err error) {
	if err := checkKey(r.key, r.value); err != nil {
		return 0, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s, err := c.connected(ctx)
	if err != nil {
		return 0, err // nothing was sent
	}
	got, err := s.call(ctx, r.appendTo(s.buf[requestAt:requestAt]))
	if err != nil {
		c.giveUp()
		return 0, fmt.Errorf("%w: %w", ErrUnknown, err)
	}
	return parseAnswer(got)
}

// read READs a bucket. The bytes are good until the next call.
func (s *session) read(ctx context.Context, bucket int) ([]byte, error) {
	err := s.send(verbs.SendWR{
		Op:         verbs.OpRDMARead,
		SGL:        []verbs.SGE{s.mr.SGE(bucketAt, bucketSize)},
		RemoteAddr: s.table.addr + uint64(bucket)*bucketSize,
		RKey:       s.table.rkey,
	})
	if err != nil {
		return nil, err
	}
	if _, err := s.next(ctx, patience); err != nil {
		return nil, err
	}
	return s.buf[bucketAt:][:bucketSize], nil
}

const (
	patience    = 50 * time.Microsecond  // how long a client polls before it sleeps: some times what an answer takes
	serverProbe = 250 * time.Millisecond // after how long without an answer the server is asked whether it is there
)

// call sends a request, which lies at requestAt in the buffer, and waits for the answer. There are two completions, that of the
// SEND and that of the receive, in any order.
func (s *session) call(ctx context.Context, request []byte) (answer []byte, err error) {
	err = s.send(verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{s.mr.SGE(requestAt, len(request))}})
	if err != nil {
		return nil, err
	}
	for range 2 {
		wc, err := s.next(ctx, patience)
		if err != nil {
			return nil, err
		}
		if wc.Op == verbs.WCRecv {
			answer = bytes.Clone(s.buf[answerAt:][:wc.ByteLen])
		}
	}
	return answer, s.receive(answerAt, answerSize) // for the next answer
}

// dial makes a connection, without trying again. The receive for the first answer is posted before the server can send.
func (c *Client) dial(ctx context.Context) (*session, error) {
	s := &session{}
	cfg := config(c.dev)
	cfg.Private = hello(c.id)
	cfg.Setup = func(conn *cm.Conn) (err error) {
		if s.link, err = newLink(conn, sessionBuf, serverProbe); err != nil {
			return err
		}
		return s.receive(answerAt, answerSize)
	}
	conn, err := cm.Dial(ctx, c.address, &cfg)
	if err != nil {
		return nil, err
	}
	if s.table, err = parseOffer(conn.Private()); err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	c.dials.Add(1)
	return s, nil
}

// giveUp ends the connection. The server may be gone, and then to close takes a second: nobody waits for that.
func (c *Client) giveUp() {
	conn := c.s.conn
	c.s = nil
	c.closing.Go(func() { _ = conn.Close() }) // it has failed already
}

// How long an attempt to connect may take, and the shortest and the longest time between two.
const (
	dialTimeout = time.Second
	minPause    = 10 * time.Millisecond
	maxPause    = 500 * time.Millisecond
)

// connected returns the connection. If there is none, it tries to connect until the context is done: the server may be
// starting again.
func (c *Client) connected(ctx context.Context) (*session, error) {
	if c.closed {
		return nil, ErrClosed
	}
	if c.s != nil {
		select {
		case <-c.s.conn.Done(): // the server has closed it, or is known to be dead
			c.giveUp()
		default:
			return c.s, nil
		}
	}
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		attempt, cancel := context.WithTimeout(ctx, dialTimeout)
		s, err := c.dial(attempt)
		cancel()
		if err == nil {
			c.s = s
			return s, nil
		}
		if ctx.Err() != nil || final(err) {
			return nil, err
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), err)
		}
	}
}

// final reports whether another attempt to connect would fail as this one has.
func final(err error) bool {
	var refused *cm.RejectError
	return errors.Is(err, errProtocol) || errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.ENODEV) ||
		errors.As(err, &refused) && refused.Reason == cm.ReasonProgram
}
