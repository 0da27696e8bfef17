//go:build !race

package mem

// RaceEnabled reports whether the race detector is on: then everything takes ten times as long.
const RaceEnabled = false
