package rconn

// inbound is the ring that the peer writes into, and what has come. All counts are of the connection's whole life.
type inbound struct {
	ring     []byte
	came     uint64 // bytes that have arrived
	read     uint64 // of them, bytes that were read
	messages uint64 // messages that have arrived, and whose receives were posted again
	told     control
	end      bool // the peer sends nothing more
}

// arrive notes a message of n bytes. It reports false if the peer writes what it may not.
func (in *inbound) arrive(n uint64) bool {
	if in.end || n == 0 || n > uint64(len(in.ring))-(in.came-in.read) {
		return false
	}
	in.came += n
	in.messages++
	return true
}

// next returns what can be read, up to the end of the ring.
func (in *inbound) next() []byte {
	at := in.read & uint64(len(in.ring)-1)
	return in.ring[at:min(at+in.came-in.read, uint64(len(in.ring)))]
}

// due reports whether it is time to tell the peer how far this side is: a quarter of the ring, or of the messages, has become
// free since it was told last.
func (in *inbound) due() bool {
	return in.read-in.told.bytes >= uint64(len(in.ring))/4 || in.messages-in.told.messages >= messages/4
}

// maxMessage is how long a message is at most: the device moves one while the next is copied into the ring.
const maxMessage = 64 << 10

// outbound is the ring that this side writes from, and how far the peer is.
type outbound struct {
	ring  []byte
	peer  hello
	put   uint64 // bytes that were put in, and posted
	sent  uint64 // bytes that the device has done with
	taken uint64 // bytes that the peer has read

	messages      uint64 // messages that were posted
	messagesTaken uint64 // that the peer has taken
	posted        uint64 // requests that were posted, of all kinds
	completed     uint64 // that have completed
	unsignaled    uint64 // since the last that asks for a completion
	unasked       uint64 // bytes of them
}

// room returns where the next message goes: as far as this side's ring goes on, and the peer's. It is empty if there is none.
func (o *outbound) room() []byte {
	if o.messages-o.messagesTaken >= uint64(o.peer.messages) || o.posted-o.completed >= sends-sends/4 {
		return nil
	}
	here, there := uint64(len(o.ring)), uint64(o.peer.size)
	at := o.put & (here - 1)
	n := min(here-(o.put-o.sent), here-at, there-(o.put-o.taken), there-o.put&(there-1), maxMessage)
	return o.ring[at:][:n]
}

// hear takes what the peer tells. It reports false if that cannot be.
func (o *outbound) hear(c control) bool {
	if c.bytes < o.taken || c.bytes > o.put || c.messages < o.messagesTaken || c.messages > o.messages {
		return false
	}
	o.taken, o.messagesTaken = c.bytes, c.messages
	return true
}

// signal counts a request of n bytes, and reports whether it has to ask for a completion.
func (o *outbound) signal(n uint64, always bool) bool {
	o.posted++
	o.unsignaled++
	o.unasked += n
	if !always && o.unsignaled < signalEvery && o.unasked < uint64(len(o.ring))/4 {
		return false
	}
	o.unsignaled, o.unasked = 0, 0
	return true
}
