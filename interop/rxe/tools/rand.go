package tools

import "time"

// randStream is the sequence of rand(3) of the GNU C library, with its default generator: an
// additive feedback generator, where each number is the sum, modulo 2^32, of those 3 and 31
// places before. rand returns all but the lowest bit of it. The first 31 numbers come from a
// linear congruential generator, and the next 310 are discarded.
type randStream struct {
	state [randDegree]uint32
	at    int // the oldest number, which is replaced next
}

const (
	randDegree    = 31
	randDistance  = 3
	randThrowAway = 310
)

func newRandStream(seed uint32) *randStream {
	if seed == 0 {
		seed = 1
	}
	s := new(randStream)
	word := int32(seed)
	s.state[0] = uint32(word)
	for i := 1; i < randDegree; i++ {
		// 16807 × word modulo 2^31−1, without overflow (Schrage).
		word = 16807*(word%127773) - 2836*(word/127773)
		if word < 0 {
			word += 1<<31 - 1
		}
		s.state[i] = uint32(word)
	}
	s.at = randDistance // the first three numbers stand for three more
	for range randThrowAway {
		s.next()
	}
	return s
}

func (s *randStream) next() uint32 {
	back := s.at + randDegree - randDistance
	if back >= randDegree {
		back -= randDegree
	}
	s.state[s.at] += s.state[back]
	v := s.state[s.at] >> 1
	if s.at++; s.at == randDegree {
		s.at = 0
	}
	return v
}

// fill fills b with the low bytes of the next numbers.
func (s *randStream) fill(b []byte) {
	for i := range b {
		b[i] = byte(s.next())
	}
}

// peerBuffer is the beginning of perftest's buffer for one seed. at extends it.
type peerBuffer struct {
	stream *randStream
	bytes  []byte
}

// maxPeerBuffer bounds how much of a peer's buffer is computed.
const maxPeerBuffer = 32 << 20

// at returns n bytes of the buffer, or nil beyond maxPeerBuffer.
func (p *peerBuffer) at(off, n int) []byte {
	if off > maxPeerBuffer-n {
		return nil
	}
	if have := len(p.bytes); off+n > have {
		p.bytes = append(p.bytes, make([]byte, off+n-have)...)
		p.stream.fill(p.bytes[have:])
	}
	return p.bytes[off : off+n]
}

// seeds returns the possible seeds of a peer that has filled its buffer between two times: all
// seconds between them, and one more on either side for clocks that differ a little.
func seeds(from, to time.Time) []uint32 {
	const most = 600 // the seed of a peer that took longer is not found
	var s []uint32
	for t := from.Unix() - 1; t <= to.Unix()+1 && len(s) < most; t++ {
		s = append(s, uint32(t))
	}
	return s
}
