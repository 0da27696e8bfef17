package ib

// MKeyConfig says what an indirect memory key is made of: a list of pieces, or an
// interleaved pattern. It is plain data; the queue that it is posted to copies it.
type MKeyConfig struct {
	MKey   uint32 // the key, which must be free, new or invalidated, unless Update says otherwise
	Access Access // what it grants: local writing, the remote rights, FLUSH
	Addr   uint64 // the address of its first byte in requests; usually 0

	// List makes the key the concatenation of pieces, of any length and alignment.
	List []SGE

	// Interleaved makes it, instead of List, Repeat rounds, each of which takes
	// from every source in turn. The description takes the same space however many
	// rounds there are.
	Interleaved []Stride
	Repeat      uint64

	// Update lets the key be one that is configured already. Zero: it must be free.
	Update MKeyUpdate
}

// MKeyUpdate says how a key is configured that may be configured already.
type MKeyUpdate uint8

const (
	// MKeyInPlace makes the key another one without its being invalidated before;
	// it is still refused while another indirect key stands on it.
	MKeyInPlace MKeyUpdate = 1 << iota
	// MKeyKeepAccess, with MKeyInPlace: it keeps its rights, of which a free key has
	// none.
	MKeyKeepAccess
	// MKeyKeepLayout, with MKeyInPlace: it keeps its bytes, of which a free key has
	// none.
	MKeyKeepLayout
)

// Stride is a source of an interleaved pattern: in each round it gives Bytes, and
// then Skip are left out.
type Stride struct {
	Addr  uint64 // of the first byte, or an offset in a zero-based region
	Bytes uint64
	Skip  uint64
	LKey  uint32 // of the region, or of another indirect key
}

// Pieces returns the number of pieces or sources.
func (c *MKeyConfig) Pieces() int { return max(len(c.List), len(c.Interleaved)) }
