// Package forktest forks as a C program does, for tests. Without cgo it is empty.
package forktest
