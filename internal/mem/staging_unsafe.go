package mem

import "unsafe"

// wholePiece returns a piece of staging bytes, by its first byte. It is sound: newPiece has made so
// many bytes, of the class that was noted with the piece, in one allocation that begins there.
func wholePiece(first *byte, class int) []byte {
	return unsafe.Slice(first, skew+stagingSizes[class].bytes)
}

// wholeBehind is wholePiece, by the first byte that callers get. It is sound: that lies skew bytes
// behind the first one of the allocation.
func wholeBehind(first *byte, class int) []byte {
	return wholePiece((*byte)(unsafe.Add(unsafe.Pointer(first), -skew)), class)
}
