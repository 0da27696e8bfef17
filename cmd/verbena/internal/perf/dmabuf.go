package perf

import (
	"errors"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// exported makes buffers of dma-bufs, whose exporter is this program. The region lets its buffer
// move; that it stays is the doing of the program's own mapping, by which it reads and writes the
// bytes too.
func exported(_ *verbs.Device, pd *verbs.PD, n int, access verbs.Access) (buffer, error) {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: uint64(n+4095) &^ 4095, Name: "verbena perf"})
	if err != nil {
		return buffer{}, err
	}
	d, resv := m.Buffer(), m.Buffer().Reservation()
	resv.Lock()
	bytes, err := d.Vmap()
	resv.Unlock()
	if err != nil {
		return buffer{}, errors.Join(err, m.Close())
	}
	clear(bytes) // makes the pages present
	b := buffer{bytes: bytes, free: func() error {
		resv.Lock()
		d.Vunmap()
		resv.Unlock()
		return m.Close()
	}}
	if b.mr, err = pd.RegDMABufMR(verbs.DMABuf{Buffer: d, Length: d.Size()}, access); err != nil {
		return buffer{}, errors.Join(err, b.close())
	}
	b.rkey = b.mr.RKey()
	return b, nil
}
