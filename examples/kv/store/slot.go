package store

// A table is an array of buckets, and a bucket is four slots. A key belongs to one bucket, and lies in any of its slots. So a
// client finds a key by one READ of one bucket, whatever else is in the table.
//
//	slot:  sum, 8 bytes | version, 8 | length of the key, 2 | of the value, 2 | 4 zeros | key | value
//
// The server writes a slot while clients read it, and neither waits for the other. So a client may see a slot of which one part
// is old and another part new: a torn read. The sum, a CRC-64 of what follows it, does not fit then. The version makes two writes
// of the same bytes differ.

import (
	"encoding/binary"
	"hash/crc64"
	"hash/fnv"
)

// MaxKey and MaxValue are the lengths that a key and a value may have, in bytes.
const (
	MaxKey   = 40
	MaxValue = slotSize - slotHead - MaxKey
)

const (
	slotSize   = 256 // divides a page: see Table.write
	slotHead   = 24
	slots      = 4 // of a bucket
	bucketSize = slots * slotSize
)

var crcTable = crc64.MakeTable(crc64.ECMA)

// entry is what a slot holds. Without a key the slot is free, and the version is that of the DELETE, or 0.
type entry struct {
	version    uint64
	key, value []byte
}

// encode returns the bytes of a slot.
func (e *entry) encode() (b [slotSize]byte) {
	binary.BigEndian.PutUint64(b[8:], e.version)
	binary.BigEndian.PutUint16(b[16:], uint16(len(e.key)))
	binary.BigEndian.PutUint16(b[18:], uint16(len(e.value)))
	n := slotHead + copy(b[slotHead:], e.key)
	n += copy(b[n:], e.value)
	binary.BigEndian.PutUint64(b[:], crc64.Checksum(b[8:n], crcTable))
	return b
}

// decode returns what a slot holds, and whether it is whole. In a torn slot the lengths may be of anything, so they are checked
// before the sum is. The key and the value are parts of the slot's bytes.
func decode(slot []byte) (e entry, whole bool) {
	k, v := int(binary.BigEndian.Uint16(slot[16:])), int(binary.BigEndian.Uint16(slot[18:]))
	if k > MaxKey || v > MaxValue {
		return e, false
	}
	used := slot[:slotHead+k+v]
	if binary.BigEndian.Uint64(used) != crc64.Checksum(used[8:], crcTable) {
		return e, false
	}
	return entry{binary.BigEndian.Uint64(used[8:]), used[slotHead:][:k], used[slotHead+k:]}, true
}

// look finds a key in a bucket that was read. If the key was deleted and put again meanwhile, it may be there twice: the later
// one counts. whole is false if the key was not found but may be in a slot that is torn.
func look(bucket []byte, key string) (e entry, found, whole bool) {
	whole = true
	for i := range slots {
		got, ok := decode(bucket[i*slotSize:][:slotSize])
		switch {
		case !ok:
			whole = false
		case len(got.key) > 0 && string(got.key) == key && (!found || got.version > e.version):
			e, found = got, true
		}
	}
	return e, found, whole || found
}

// bucketOf returns the bucket of a key. Both sides compute it.
func bucketOf(key string, buckets int) int {
	h := fnv.New64a()
	h.Write([]byte(key)) // never fails
	return int(h.Sum64() % uint64(buckets))
}

func checkKey(key string, value []byte) error {
	if key == "" || len(key) > MaxKey || len(value) > MaxValue {
		return ErrTooLong
	}
	return nil
}
