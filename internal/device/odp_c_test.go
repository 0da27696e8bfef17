//go:build cgo

package device

import "github.com/verbena-rdma/verbena/internal/sys/ctest"

func init() { forkChild = ctest.Fork }
