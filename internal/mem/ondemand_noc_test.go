//go:build !cgo

package mem_test

var kindsOfC []kindOfMemory
