package cmtools

// Programs that exchange messages without contents, over one connection or many: ucmatose, rdma_server
// with rdma_client, and cmtime.

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	ucmatoseSize     = 100
	ucmatoseMessages = 10
	rdmaServerSize   = 16
)

// sendAll sends as many messages as there are slots, and waits for their acknowledgements.
func (l *line) sendAll(ctx context.Context) error {
	if err := l.postAll(); err != nil {
		return err
	}
	for range l.depth {
		if _, err := l.wait(ctx, verbs.WCSend); err != nil {
			return err
		}
	}
	return nil
}

// postAll posts as many messages as there are slots.
func (l *line) postAll() error {
	for slot := range l.depth {
		if err := l.send(slot); err != nil {
			return err
		}
	}
	return nil
}

// lastSent waits for the acknowledgements of n messages after which the peer may disconnect. A peer that
// has received them may do so before its device has acknowledged them, and then they are flushed. (Linux's
// rxe shows a program a message first, and acknowledges it then.) Whether they have come is for the
// program to say.
func (l *line) lastSent(ctx context.Context, n int) error {
	for range n {
		wc, err := l.wait(ctx, verbs.WCSend)
		if wc.Status == verbs.WCWRFlushErr {
			return l.untilPeerEnds(ctx)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// receiveAll waits for as many messages.
func (l *line) receiveAll(ctx context.Context) error {
	for n := range l.depth {
		if _, err := l.message(ctx); err != nil {
			return fmt.Errorf("message %d: %w", n, err)
		}
	}
	return nil
}

// each calls f for each line until it fails.
func each(lines []*line, f func(*line) error) error {
	for i, l := range lines {
		if err := f(l); err != nil {
			return fmt.Errorf("connection %d: %w", i, err)
		}
	}
	return nil
}

// UcmatoseServer plays the server of ucmatose: it sends 10 messages on each connection, takes as many,
// and disconnects.
func UcmatoseServer(ctx context.Context, m *Meeting) error {
	m = m.filled(ucmatoseSize)
	var lines []*line
	err := m.serve(ctx, m.Count, func(r *cm.Request) error {
		l, err := m.accept(ctx, r, shape{depth: ucmatoseMessages, size: m.Size})
		lines = append(lines, l)
		return err
	})
	if err == nil {
		err = each(lines, func(l *line) error { return l.sendAll(ctx) })
	}
	if err == nil {
		err = each(lines, func(l *line) error { return l.receiveAll(ctx) })
	}
	return end(err, lines...)
}

// UcmatoseClient plays the client of ucmatose: it takes 10 messages on each connection, sends as many,
// and waits for the server to disconnect.
func UcmatoseClient(ctx context.Context, m *Meeting) (err error) {
	m = m.filled(ucmatoseSize)
	var lines []*line
	for range m.Count {
		l, err := m.dial(ctx, shape{depth: ucmatoseMessages, size: m.Size})
		lines = append(lines, l)
		if err != nil {
			return end(err, lines...)
		}
	}
	for _, f := range []func(*line) error{
		func(l *line) error { return l.receiveAll(ctx) },
		(*line).postAll,
		func(l *line) error { return l.lastSent(ctx, l.depth) },
		func(l *line) error { return l.untilPeerEnds(ctx) },
	} {
		if err = each(lines, f); err != nil {
			break
		}
	}
	return end(err, lines...)
}

// RdmaServer plays rdma_server: it takes a message and sends one. The program is the one to disconnect.
func RdmaServer(ctx context.Context, m *Meeting) error { return rdmaServer(ctx, m, false) }

// RdmaServerLeaves is RdmaServer, but this side disconnects too, as soon as its message is acknowledged.
func RdmaServerLeaves(ctx context.Context, m *Meeting) error { return rdmaServer(ctx, m, true) }

// RdmaClient plays rdma_client: it sends a message and takes one. The program is the one to disconnect.
func RdmaClient(ctx context.Context, m *Meeting) error { return rdmaClient(ctx, m, false) }

// RdmaClientLeaves is RdmaClient, but this side disconnects too, as soon as it has the message. Its device
// must acknowledge the message all the same. (The program looks at the number of its completions, and
// not at their status.)
func RdmaClientLeaves(ctx context.Context, m *Meeting) error {
	before := acknowledgements(m.Device)
	err := rdmaClient(ctx, m, true)
	if err == nil && acknowledgements(m.Device) == before {
		err = errors.New("the device has acknowledged no message")
	}
	return err
}

// acknowledgements returns how many acknowledgements a device has sent.
func acknowledgements(dev *verbs.Device) uint64 {
	for _, c := range dev.Counters() {
		if c.Name == "acks_sent" {
			return c.Value
		}
	}
	return 0
}

func rdmaServer(ctx context.Context, m *Meeting, leaves bool) error {
	m = m.filled(rdmaServerSize)
	return m.serve(ctx, 1, func(r *cm.Request) error {
		l, err := m.accept(ctx, r, shape{depth: 1, size: m.Size})
		if err == nil {
			err = l.receiveAll(ctx)
		}
		if err == nil {
			err = l.postAll()
		}
		if err == nil {
			err = l.lastSent(ctx, l.depth)
		}
		if err == nil && !leaves {
			err = l.untilPeerEnds(ctx)
		}
		return end(err, l)
	})
}

func rdmaClient(ctx context.Context, m *Meeting, leaves bool) error {
	m = m.filled(rdmaServerSize)
	l, err := m.dial(ctx, shape{depth: 1, size: m.Size})
	if err == nil {
		err = l.postAll()
	}
	if err == nil {
		err = l.receiveAll(ctx)
	}
	if err == nil {
		err = l.lastSent(ctx, l.depth)
	}
	if err == nil && !leaves {
		err = l.untilPeerEnds(ctx)
	}
	return end(err, l)
}

// CmtimeServer plays the server of cmtime: it accepts connections until the client ends them.
func CmtimeServer(ctx context.Context, m *Meeting) error {
	m = m.filled(0)
	var lines []*line
	err := m.serve(ctx, m.Count, func(r *cm.Request) error {
		l, err := m.accept(ctx, r, shape{depth: 1})
		lines = append(lines, l)
		return err
	})
	if err == nil {
		err = each(lines, func(l *line) error { return l.untilPeerEnds(ctx) })
	}
	return end(err, lines...)
}

// CmtimeClient plays the client of cmtime: it makes connections, all at once, and ends them.
func CmtimeClient(ctx context.Context, m *Meeting) error {
	m = m.filled(0)
	first, err := m.dial(ctx, shape{depth: 1}) // from now on the program listens
	lines, errs := make([]*line, m.Count), make([]error, m.Count)
	lines[0], errs[0] = first, err
	var wg sync.WaitGroup
	if err == nil {
		for i := 1; i < m.Count; i++ {
			wg.Go(func() { lines[i], errs[i] = m.dial(ctx, shape{depth: 1}) })
		}
	}
	wg.Wait()
	for i, l := range lines {
		wg.Go(func() { errs[i] = end(errs[i], l) })
	}
	wg.Wait()
	return errors.Join(errs...)
}
