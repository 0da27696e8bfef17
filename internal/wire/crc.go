package wire

import (
	"hash/crc32"
	"time"
)

// There are two ways to compute a CRC-32. hash/crc32 multiplies polynomials with an
// instruction of the processor: 4 KiB take an eighth of a microsecond. Where that
// instruction is emulated, as in a virtual machine without hardware support, it is
// eight times slower than eight tables are. So the two are timed once, and the
// quicker one is used.

// update returns crc continued with the bytes of b.
func update(crc uint32, b []byte) uint32 {
	if useTables {
		return updateTables(crc, b)
	}
	return crc32.Update(crc, crc32.IEEETable, b)
}

// eight[k] is the contribution to the CRC of each byte value that k bytes follow.
var eight = makeEight()

var useTables = tablesAreQuicker()

func makeEight() *[8][256]uint32 {
	t := new([8][256]uint32)
	for v := range 256 {
		t[0][v] = crc32.IEEETable[v]
	}
	for k := 1; k < 8; k++ {
		for v := range 256 {
			c := t[k-1][v]
			t[k][v] = t[0][byte(c)] ^ c>>8
		}
	}
	return t
}

// updateTables is update by tables, eight bytes at a time.
func updateTables(crc uint32, b []byte) uint32 {
	crc = ^crc
	t := eight
	for len(b) >= 8 {
		low := crc ^ (uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24)
		crc = t[0][b[7]] ^ t[1][b[6]] ^ t[2][b[5]] ^ t[3][b[4]] ^
			t[4][low>>24] ^ t[5][low>>16&0xff] ^ t[6][low>>8&0xff] ^ t[7][low&0xff]
		b = b[8:]
	}
	return ^feed(crc, b)
}

// tablesAreQuicker times both ways on a packet, which takes some ten microseconds
// where nothing is emulated. The best of a few tries counts, and the tables must be
// twice as quick, so that chance hardly decides. Both ways give the same results.
func tablesAreQuicker() bool {
	b := make([]byte, MaxPayload)
	best := func(f func()) time.Duration {
		d := time.Duration(1<<63 - 1)
		for range 3 {
			start := time.Now()
			f()
			d = min(d, time.Since(start))
		}
		return d
	}
	instruction := best(func() { crc32.Update(0, crc32.IEEETable, b) })
	tables := best(func() { updateTables(0, b) })
	return tables < instruction/2
}
