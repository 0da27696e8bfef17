//go:build !race

package importer_test

// raceEnabled reports whether the race detector is on.
const raceEnabled = false
