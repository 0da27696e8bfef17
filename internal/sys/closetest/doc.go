// Package closetest takes the place of the library that "verbena exec" preloads, in
// tests: it closes ranges of addresses before it maps something there. Without cgo it is
// empty.
package closetest
