// Package archtest holds the rules of the source tree that the linter's
// configuration cannot express: where unsafe code, cgo and system calls may
// stand. It has tests only.
//
// Which package may import which is in .golangci.yml.
package archtest
