// Package nvmeof judges package nvme/fabrics by Linux: in a virtual machine the kernel's host (nvme-rdma) uses the
// target of examples/nvmet, and the host of nvme/fabrics uses the kernel's target (nvmet-rdma). The kernel's device is rxe.
//
// The kernel's NVMe over RDMA knows only the first network namespace. So rxe is there, and our device in another
// one.
package nvmeof
