// Package ctest has memory as C programs have it, for tests: on the C heap and on
// stacks of C threads; and forks as C programs fork. Without cgo it is empty.
package ctest
