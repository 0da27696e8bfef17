//go:build race

package device

// raceEnabled: atomics are calls into code of the detector, which memory that
// cannot be written ends the program in.
const raceEnabled = true
