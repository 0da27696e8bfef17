package importer

import (
	"slices"
	"sync/atomic"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// ExportDM makes a dma-buf of device memory, for other devices to register. As in the kernel,
// an importer must deal with memory that has no pages, it cannot pin the memory, the CPU cannot
// map it, and when the device memory is freed the buffer is revoked.
//
// Errors: EOPNOTSUPP if the device cannot do it; EINVAL if the device memory is freed.
func ExportDM(dm provider.DM) (*dmabuf.Buffer, error) {
	const op = "export_dm"
	m, ok := dm.(interface {
		Lend() (b []byte, giveBack func(), err error)
		OnFree(revoke func()) (cancel func(), err error)
	})
	if !ok {
		return nil, ib.Errorf(op, syscall.EOPNOTSUPP, "the device does not export its memory")
	}
	var revoked bool // guarded by the reservation lock
	var cancel atomic.Pointer[func()]
	ops := dmabuf.Ops{
		Attach: func(a *dmabuf.Attachment) error {
			if !a.PeerToPeer() {
				return ib.Errorf(op, syscall.EOPNOTSUPP, "the importer does not take memory without pages")
			}
			return nil
		},
		Pin: func(*dmabuf.Attachment) error {
			return ib.Errorf(op, syscall.EOPNOTSUPP, "device memory cannot be pinned")
		},
		Unpin: func(*dmabuf.Attachment) {},
		Map: func(a *dmabuf.Attachment, _ dmabuf.Direction) (*dmabuf.Table, error) {
			if revoked {
				return nil, ib.Errorf(op, syscall.ENODEV, "the device memory is freed")
			}
			b, giveBack, err := m.Lend()
			if err != nil {
				return nil, err
			}
			t := dmabuf.NewTable(b).OfDevice()
			lent, _ := a.ExporterPriv.([]loan)
			a.ExporterPriv = append(lent, loan{t, giveBack})
			return t, nil
		},
		Unmap: func(a *dmabuf.Attachment, t *dmabuf.Table, _ dmabuf.Direction) {
			lent := a.ExporterPriv.([]loan)
			i := slices.IndexFunc(lent, func(l loan) bool { return l.table == t })
			lent[i].giveBack()
			a.ExporterPriv = slices.Delete(lent, i, i+1)
		},
		Release: func(*dmabuf.Buffer) {
			if c := cancel.Load(); c != nil {
				(*c)()
			}
		},
	}
	b, err := dmabuf.Export(dmabuf.Config{Ops: ops, Size: dm.Length(), Exporter: "verbena-dm"})
	if err != nil {
		return nil, err
	}
	stop, err := m.OnFree(func() {
		r := b.Reservation()
		r.Lock()
		defer r.Unlock()
		revoked = true
		b.InvalidateMappings()
	})
	if err != nil {
		b.Put()
		return nil, err
	}
	cancel.Store(&stop)
	return b, nil
}

// loan is device memory that an importer has mapped.
type loan struct {
	table    *dmabuf.Table
	giveBack func()
}
