//go:build race

package mem

// RaceEnabled tells tests that everything takes ten times as long.
const RaceEnabled = true
