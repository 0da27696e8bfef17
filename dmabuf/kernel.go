package dmabuf

import (
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
)

func fromKernel(op string, fd int) (*Buffer, error) {
	return nil, ib.Errorf(op, syscall.EINVAL, "descriptor %d is not that of a dma-buf", fd)
}
