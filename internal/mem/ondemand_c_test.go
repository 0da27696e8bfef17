//go:build cgo

package mem_test

import (
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys/ctest"
)

func init() { forkChild = ctest.Fork }

var kindsOfC = []kindOfMemory{
	{name: "C heap", make: func(_ testing.TB, n uint64) ([]byte, func()) { return ctest.Malloc(n) }},
	{name: "stack of a C thread", make: func(_ testing.TB, n uint64) ([]byte, func()) { return ctest.Stack(n) }},
}
