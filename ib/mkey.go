package ib

// MKeyConfig says what an indirect memory key is made of: a list of pieces, or an
// interleaved pattern. It is plain data; the queue that it is posted to copies it.
type MKeyConfig struct {
	MKey   uint32 // the key, which must be free: new, or invalidated
	Access Access // what it grants: local writing, the remote rights, FLUSH
	Addr   uint64 // the address of its first byte in requests; usually 0

	// List makes the key the concatenation of pieces, of any length and alignment.
	List []SGE

	// Interleaved makes it, instead of List, Repeat rounds, each of which takes
	// from every source in turn. The description takes the same space however many
	// rounds there are.
	Interleaved []Stride
	Repeat      uint64
}

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
