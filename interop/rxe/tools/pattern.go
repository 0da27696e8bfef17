package tools

import "encoding/binary"

// pattern fills b with the contents of one message: each 8 bytes are a hash of the message's
// name and of their place, so that bytes of another message or place are noticed.
func pattern(b []byte, name uint64) {
	name *= 0xd6e8feb86659fd93
	for i := 0; i < len(b); i += 8 {
		x := name + uint64(i)
		x = (x ^ x>>32) * 0xd6e8feb86659fd93
		x = (x ^ x>>29) * 0x9fb21c651e98df25
		x ^= x >> 32
		if i+8 <= len(b) {
			binary.LittleEndian.PutUint64(b[i:], x)
			continue
		}
		var last [8]byte
		binary.LittleEndian.PutUint64(last[:], x)
		copy(b[i:], last[:])
	}
}

// firstDifference returns the first index where two slices of one length differ,
// or -1.
func firstDifference(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}
