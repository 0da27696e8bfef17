//go:build !race

package qp

// raceEnabled reports whether the race detector is on: everything takes ten times as long.
const raceEnabled = false
