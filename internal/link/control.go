package link

// Control messages between the processes of one device: some bytes that only package
// device interprets, and with them perhaps a train that one process hands to the other.

import (
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/shm"
	"github.com/verbena-rdma/verbena/internal/train"
)

// ControlSink is a Sink that takes control messages.
type ControlSink interface {
	Sink
	// Control takes a control message of a process. The bytes, which the peer cannot
	// change any more, and the train, which may be nil, are valid until Control returns.
	Control(process int, words []byte, t *train.Train)
	// Parted is called when a process of this device, or the channel to it, has ended.
	Parted(process int)
}

// MaxControl is the length of the longest control message, without its train.
const MaxControl = 255

// SendControl sends a control message to a process of this device, with a train that
// this process has received, or nil. It reports false if it could not send the message
// now; a fault then says that the train's payload could not be read.
func (s *Shared) SendControl(process int, words []byte, t *train.Train) (ok bool, fault mem.Fault) {
	if process < 0 || process >= MaxNeighbours || len(words) > MaxControl {
		return false, mem.Fault{}
	}
	c := s.home.channels[process].Load()
	if c == nil {
		s.connect(s.home, process)
		return false, mem.Fault{}
	}
	n := 1 + len(words)
	if t != nil {
		n += trainBytes + t.Len
	}
	if n > c.MaxRecord() {
		return false, mem.Fault{}
	}
	if !c.Begin() {
		return false, mem.Fault{}
	}
	defer c.End()
	b, ok := c.Reserve(recControl, n)
	if !ok {
		return false, mem.Fault{}
	}
	b[0] = byte(len(words))
	b = b[1+copy(b[1:], words):]
	if t != nil {
		packIncoming(b, t)
		if t.Len > 0 {
			g := scratches.Get().(*scratch)
			fault = g.copyOut(b[trainBytes:], &t.Payload, 0, t.Len)
			scratches.Put(g)
			if !fault.OK() {
				return false, fault
			}
		}
	}
	c.Commit()
	return true, mem.Fault{}
}

// packIncoming writes the fields of a train that this process has received.
func packIncoming(b []byte, t *train.Train) {
	flow := train.Flow{TClass: t.TClass, HopLimit: t.HopLimit}
	was := t.Flow
	t.Flow = &flow
	packTrain(b, t, t.From, t.To)
	t.Flow = was
}

// takeControl hands a control message of another process to the sink.
func (s *Shared) takeControl(c *shm.Channel, b []byte) {
	from := c.Tag().(*tag)
	sink, ok := s.sink.(ControlSink)
	if len(b) == 0 || !ok || from.dev != s.home {
		s.sink.Drop(DropOther)
		return
	}
	n := int(b[0])
	if n > len(b)-1 {
		s.sink.Drop(DropOther)
		return
	}
	words := s.words[:copy(s.words[:], b[1:1+n])] // the peer may change its copy at any time
	if b = b[1+n:]; len(b) == 0 {
		sink.Control(from.process, words, nil)
		return
	}
	if !unpackTrain(b, &s.t, train.MaxBytes) || s.t.Len != len(b)-trainBytes {
		s.sink.Drop(DropOther)
		return
	}
	if s.t.Len > 0 {
		s.piece[0] = b[trainBytes:]
		s.t.Payload = mem.List{Raw: s.piece[:]}
	}
	sink.Control(from.process, words, &s.t)
	s.t.Reset()
	s.piece[0] = nil
}

// partner tells the sink that a process of this device has ended.
func (s *Shared) partner(process int) {
	if sink, ok := s.sink.(ControlSink); ok {
		sink.Parted(process)
	}
}
