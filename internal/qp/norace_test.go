//go:build !race

package qp

// raceEnabled tells tests that everything takes ten times as long.
const raceEnabled = false
