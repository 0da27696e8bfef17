package wire

// PSN is a packet sequence number: 24 bits that wrap. It has no order of its
// own; two PSNs are compared by their signed distance.
type PSN uint32

const psnMask = 1<<24 - 1

// MakePSN keeps the low 24 bits.
func MakePSN(v uint32) PSN { return PSN(v & psnMask) }

// Add returns the PSN n packets later, or earlier for negative n.
func (p PSN) Add(n int) PSN { return PSN((uint32(p) + uint32(n)) & psnMask) }

// Sub returns the signed distance from q to p, -2^23 ≤ d < 2^23. If two PSNs are less
// than half of the number space apart, its sign says which is earlier (IBA 9.7.2).
func (p PSN) Sub(q PSN) int { return int(int32(uint32(p-q)<<8) >> 8) }

// Less reports whether p comes before q.
func (p PSN) Less(q PSN) bool { return p.Sub(q) < 0 }
