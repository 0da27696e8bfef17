// Package ctest gives tests memory as C programs have it, on the C heap and on stacks of
// C threads, and forks as C programs do. Without cgo it is empty.
package ctest
