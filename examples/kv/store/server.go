package store

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

// Server lends its table to clients, and changes it for them.
type Server struct {
	table    *Table
	listener *cm.Listener
	ctx      context.Context
	cancel   context.CancelFunc
	all      sync.WaitGroup
	requests atomic.Uint64

	mu      sync.Mutex          // guards table and current
	current map[uint64]*visitor // the connection of each client, by the client's number
}

// Listen serves a table at an address, "host:port". A nil device: package cm opens the one that has the address.
func Listen(ctx context.Context, address string, table *Table, dev *verbs.Device) (*Server, error) {
	cfg := config(dev)
	l, err := cm.Listen(ctx, address, &cfg)
	if err != nil {
		return nil, err
	}
	s := &Server{table: table, listener: l, current: make(map[uint64]*visitor)}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.all.Go(s.accept)
	return s, nil
}

// Addr returns the address.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// Requests returns how many messages clients have sent. GETs are none.
func (s *Server) Requests() uint64 { return s.requests.Load() }

// Close ends the server, and all connections. The table is the caller's.
func (s *Server) Close() error {
	s.cancel()
	err := s.listener.Close()
	s.all.Wait()
	return err
}

// accept takes connections. Each is answered by a goroutine of its own: a client that does not confirm keeps nobody waiting.
func (s *Server) accept() {
	for {
		r, err := s.listener.Next(s.ctx)
		if err != nil {
			return // the server is closed
		}
		s.all.Go(func() { s.welcome(r) })
	}
}

// visitor is a connection of a client.
type visitor struct {
	*link
	client uint64
}

const (
	receives     = 2                // of requests, for each connection
	visitorProbe = 15 * time.Second // after how long a silent client is asked whether it is there
)

// welcome accepts a client, and serves it. The client may READ the table, and that is all that it may do.
func (s *Server) welcome(r *cm.Request) {
	client, err := parseHello(r.Private())
	if err != nil {
		_ = r.Reject(cm.ReasonProgram, []byte(err.Error())) // the client may be gone
		return
	}
	v := &visitor{client: client}
	cfg := config(nil)
	cfg.Access = verbs.AccessRemoteRead
	cfg.Setup = func(conn *cm.Conn) (err error) {
		mr, err := conn.RegMR(s.table.memory, verbs.AccessRemoteRead)
		if err != nil {
			return err
		}
		if v.link, err = newLink(conn, receives*requestMax, visitorProbe); err != nil {
			return err
		}
		for i := range receives {
			if err := v.receive(i*requestMax, requestMax); err != nil {
				return err
			}
		}
		s.enter(v)
		return conn.SetPrivate(offer{mr.Addr(), mr.RKey(), s.table.buckets}.pack())
	}
	conn, err := r.Accept(s.ctx, &cfg)
	if err == nil {
		s.serve(v)
		_ = conn.Close() // it has ended, or is ended with the server
	}
	s.leave(v)
}

// enter makes a connection the only one of its client. What still comes by an earlier one is not done any more: the client
// has given up on it.
func (s *Server) enter(v *visitor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current[v.client] = v
}

func (s *Server) leave(v *visitor) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current[v.client] == v {
		delete(s.current, v.client)
	}
}

// serve answers requests, until the connection ends. It sleeps while the client sends none.
func (s *Server) serve(v *visitor) {
	for {
		wc, err := v.next(s.ctx, 0)
		if err == nil && wc.Op == verbs.WCRecv {
			err = s.answer(v, int(wc.ID), int(wc.ByteLen))
		}
		if err != nil {
			return
		}
	}
}

// answer executes the request that lies in the buffer, and answers it. The receive is posted again first: the client may send
// the next request as soon as it has the answer.
func (s *Server) answer(v *visitor, at, n int) error {
	req, err := parseRequest(v.buf[at:][:n])
	req.value = append([]byte(nil), req.value...) // the next message overwrites the buffer
	if err := v.receive(at, requestMax); err != nil {
		return err
	}
	s.requests.Add(1)
	var version uint64
	if err == nil {
		version, err = s.apply(v, &req)
	}
	return v.send(verbs.SendWR{Op: verbs.OpSend, Inline: answer(version, err)})
}

// apply changes the table, one request at a time. The changes have versions in this order.
func (s *Server) apply(v *visitor, r *request) (version uint64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current[v.client] != v {
		return 0, ErrMalformed // nobody waits for this answer
	}
	if r.op == opDelete {
		return s.table.Delete(r.key)
	}
	return s.table.Put(r.key, r.value)
}
