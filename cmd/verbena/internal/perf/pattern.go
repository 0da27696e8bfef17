package perf

import (
	"encoding/binary"
	"fmt"
)

// mix is the finaliser of a 64-bit hash: neighbouring inputs give unrelated
// outputs, so that a byte in the wrong place never looks right by chance.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// fill writes the pattern of a seed: each 8 bytes are a hash of the seed and their
// offset.
func fill(b []byte, seed uint64) {
	var word [8]byte
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(word[:], mix(seed+uint64(i)))
		copy(b[i:], word[:])
	}
}

// verify returns an error if b differs from the pattern of a seed.
func verify(b []byte, seed uint64) error {
	var word [8]byte
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(word[:], mix(seed+uint64(i)))
		for k := 0; k < 8 && i+k < len(b); k++ {
			if b[i+k] != word[k] {
				return fmt.Errorf("byte %d of %d is %#02x, not %#02x", i+k, len(b), b[i+k], word[k])
			}
		}
	}
	return nil
}

// seedOf returns the pattern's seed of a slot: every queue pair, slot and phase
// has data of its own.
func seedOf(phase, qp, slot int) uint64 {
	return mix(uint64(phase)<<48 | uint64(qp)<<32 | uint64(slot))
}
