package ib

// MKeyConfig is what an indirect memory key is made of: a list of pieces, or an
// interleaved pattern. It is plain data; the queue that it is posted to copies it.
type MKeyConfig struct {
	MKey   uint32 // the key, which must be free (new or invalidated) unless Update has MKeyInPlace
	Access Access // what it grants: local writing, the remote rights, FLUSH
	Addr   uint64 // the address of its first byte in requests; usually 0

	// List makes the key the concatenation of pieces, of any length and alignment.
	List []SGE

	// Interleaved, instead of List, makes the key Repeat rounds; each round takes
	// bytes of every source, one source after the other. The description takes the
	// same space however many rounds there are.
	Interleaved []Stride
	Repeat      uint64

	// Update allows the key to be configured already. Zero: it must be free.
	Update MKeyUpdate
}

// MKeyUpdate is how a key that may be configured already is configured.
type MKeyUpdate uint8

const (
	// MKeyInPlace configures a key that need not be free. It is refused while
	// another indirect key is made of this one.
	MKeyInPlace MKeyUpdate = 1 << iota
	// MKeyKeepAccess, with MKeyInPlace: the key keeps its rights. (A free key has
	// none.)
	MKeyKeepAccess
	// MKeyKeepLayout, with MKeyInPlace: the key keeps its bytes. (A free key has
	// none.)
	MKeyKeepLayout
)

// Stride is a source of an interleaved pattern: each round takes the next Bytes of
// it, and skips the Skip bytes after them.
type Stride struct {
	Addr  uint64 // of the first byte, or an offset in a zero-based region
	Bytes uint64
	Skip  uint64
	LKey  uint32 // of the region, or of another indirect key
}

// Pieces returns the number of pieces or sources.
func (c *MKeyConfig) Pieces() int { return max(len(c.List), len(c.Interleaved)) }
