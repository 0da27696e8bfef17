package peermem

import (
	"cmp"
	"slices"
	"unsafe"
)

// overlap reports whether two of the segments, none of which is empty, share a byte. The addresses
// are only compared. That is sound also if the garbage collector ran meanwhile: it moves no
// memory that slices of other functions refer to.
func overlap(segments [][]byte) bool {
	start := func(s []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(s))) }
	sorted := slices.Clone(segments)
	slices.SortFunc(sorted, func(a, b []byte) int { return cmp.Compare(start(a), start(b)) })
	for i := 1; i < len(sorted); i++ {
		if start(sorted[i])-start(sorted[i-1]) < uintptr(len(sorted[i-1])) {
			return true
		}
	}
	return false
}
