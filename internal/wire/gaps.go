package wire

// Gaps is the payload of a KindGaps packet, by which a queue pair of this library tells another
// which requests it lacks. The packet acknowledges what an Acknowledge with its PSN would. The
// payload says what is known of the packets behind: pairs of numbers of 16 bits, of packets that
// have come, and of packets behind those that are missing. Only the first pair may say that none
// has come, and only the last that none is missing. Of what lies behind the last pair, nothing
// is known.
type Gaps []byte

// MaxGap is the largest number of a pair.
const MaxGap = 1<<16 - 1

// Append appends a pair, of numbers up to MaxGap.
func (g Gaps) Append(come, missing int) Gaps {
	return be.AppendUint16(be.AppendUint16(g, uint16(come)), uint16(missing))
}

// Pairs returns how many pairs there are.
func (g Gaps) Pairs() int { return len(g) / 4 }

// Pair returns pair i.
func (g Gaps) Pair(i int) (come, missing int) {
	return int(be.Uint16(g[4*i:])), int(be.Uint16(g[4*i+2:]))
}

// Check reports whether the pairs are as they must be.
func (g Gaps) Check() bool {
	if len(g) == 0 || len(g)%4 != 0 {
		return false
	}
	for i := range g.Pairs() {
		come, missing := g.Pair(i)
		if come == 0 && i > 0 || missing == 0 && i < g.Pairs()-1 {
			return false
		}
	}
	return true
}
