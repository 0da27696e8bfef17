//go:build !race

package device

// raceEnabled: atomics are the processor's own.
const raceEnabled = false
