package cmtools

// rping. The client sends where its data is (16 bytes: address, key, length, all big-endian). The server
// READs it, and sends 16 bytes whose contents mean nothing. Then the client sends where it wants the
// data, and the server WRITEs it there and sends 16 bytes again. After the last ping the client
// disconnects.

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	rpingSize     = 64 // of the data, by default
	rpingInfoSize = 16
	rpingMax      = 1 << 20 // more than the program can be told
)

// rpingShape: a message at a time each way, and one READ. The second slot is there so that a receive
// is always posted.
var rpingShape = shape{depth: 2, size: rpingInfoSize, rdatomic: 1}

// rpingInfo is where data is.
type rpingInfo struct {
	addr uint64
	rkey uint32
	size uint32
}

func (i rpingInfo) put(b []byte) {
	binary.BigEndian.PutUint64(b, i.addr)
	binary.BigEndian.PutUint32(b[8:], i.rkey)
	binary.BigEndian.PutUint32(b[12:], i.size)
}

func parseRpingInfo(b []byte) rpingInfo {
	return rpingInfo{binary.BigEndian.Uint64(b), binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])}
}

// rpingData fills b with the data of a ping: its number in words, then letters, then a zero.
func rpingData(b []byte, ping int) {
	const first, last = 'A', 'z'
	n := copy(b, fmt.Sprintf("rdma-ping-%d: ", ping))
	for i := n; i < len(b); i++ {
		b[i] = byte(first + (ping+i-n)%(last-first+1))
	}
	b[len(b)-1] = 0
}

// RpingServer plays the server.
func RpingServer(ctx context.Context, m *Meeting) error {
	m = m.filled(rpingSize)
	return m.serve(ctx, 1, func(r *cm.Request) error {
		l, err := m.accept(ctx, r, rpingShape)
		if err == nil {
			err = m.answerPings(ctx, l)
		}
		if err == nil {
			err = l.untilPeerEnds(ctx)
		}
		return end(err, l)
	})
}

// answerPings serves all pings of a connection.
func (m *Meeting) answerPings(ctx context.Context, l *line) error {
	data := make([]byte, m.Size)
	mr, err := l.conn.RegMR(data, verbs.AccessLocalWrite)
	if err != nil {
		return err
	}
	want := make([]byte, m.Size)
	for ping := range m.Count {
		rpingData(want, ping)
		clear(data)
		for _, op := range []struct {
			op   verbs.Opcode
			done verbs.WCOpcode
		}{{verbs.OpRDMARead, verbs.WCRDMARead}, {verbs.OpRDMAWrite, verbs.WCRDMAWrite}} {
			slot, err := l.message(ctx)
			if err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
			info := parseRpingInfo(l.inSlot(slot))
			if int64(info.size) != int64(m.Size) {
				return fmt.Errorf("ping %d: the client has %d bytes, want %d", ping, info.size, m.Size)
			}
			err = errors.Join(l.receive(slot),
				l.post(verbs.SendWR{Op: op.op, SGL: []verbs.SGE{mr.SGE(0, m.Size)}, RemoteAddr: info.addr, RKey: info.rkey}))
			if err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
			if _, err := l.wait(ctx, op.done); err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
			if !bytes.Equal(data, want) {
				return fmt.Errorf("ping %d: the client's data is %q, want %q", ping, data, want)
			}
			if last := ping == m.Count-1 && op.op == verbs.OpRDMAWrite; last {
				if err = l.send(0); err == nil {
					err = l.lastSent(ctx, 1)
				}
			} else {
				err = l.say(ctx)
			}
			if err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
		}
	}
	return nil
}

// say sends the message in the first slot, and waits for its acknowledgement.
func (l *line) say(ctx context.Context) error {
	if err := l.send(0); err != nil {
		return err
	}
	_, err := l.wait(ctx, verbs.WCSend)
	return err
}

// RpingClient plays the client.
func RpingClient(ctx context.Context, m *Meeting) error {
	m = m.filled(rpingSize)
	if m.Size > rpingMax {
		return fmt.Errorf("rping: %d bytes are too many", m.Size)
	}
	l, err := m.dial(ctx, rpingShape)
	if err == nil {
		err = m.ping(ctx, l)
	}
	return end(err, l)
}

// ping makes all pings.
func (m *Meeting) ping(ctx context.Context, l *line) error {
	source, sink := make([]byte, m.Size), make([]byte, m.Size)
	var infos [2]rpingInfo
	for i, b := range []struct {
		buf    []byte
		access verbs.Access
	}{{source, verbs.AccessRemoteRead}, {sink, verbs.AccessLocalWrite | verbs.AccessRemoteWrite}} {
		mr, err := l.conn.RegMR(b.buf, b.access)
		if err != nil {
			return err
		}
		infos[i] = rpingInfo{mr.Addr(), mr.RKey(), uint32(m.Size)}
	}
	for ping := range m.Count {
		rpingData(source, ping)
		clear(sink)
		for _, info := range infos {
			info.put(l.out)
			if err := l.say(ctx); err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
			slot, err := l.message(ctx)
			if err == nil {
				err = l.receive(slot)
			}
			if err != nil {
				return fmt.Errorf("ping %d: %w", ping, err)
			}
		}
		if !bytes.Equal(source, sink) {
			return fmt.Errorf("ping %d: %q came back, want %q", ping, sink, source)
		}
	}
	return nil
}
