package main

// dma-bufs as memory of ours: the kernel's, of each kind that needs no hardware, and buffers of
// package dmabuf, which move between operations, and during them.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/internal/sys/dmabuftest"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	bufferSize   = 256 << 10
	bufferAddr   = 0x7e00_0000_0000 // in requests
	bufferRights = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic
)

func dmaBufs() (rows []*testCase) {
	ops := []struct {
		name string
		op   verbs.Opcode
	}{{"write", verbs.OpRDMAWrite}, {"read", verbs.OpRDMARead}, {"send", verbs.OpSend}, {"fadd", verbs.OpAtomicFetchAdd}}
	for _, op := range ops {
		for _, kind := range append(dmabuftest.Kinds(), dmabuftest.Kind{Name: "exported", Exporter: "udmabuf", New: newExported}) {
			rows = append(rows, everyWay(testCase{name: "rc/dmabuf/" + kind.Name + "/" + op.name, shortV4: op.op == verbs.OpRDMARead},
				func(s *scene) error {
					return s.onBuffer(op.op, func() (*region, error) { return s.ours.kernelBuffer(kind) })
				})...)
		}
		rows = append(rows, everyWay(testCase{name: "rc/dmabuf/moved/" + op.name},
			func(s *scene) error { return s.onBuffer(op.op, s.ours.movingBuffer) })...)
	}
	rows = append(rows, everyWay(testCase{name: "rc/dmabuf/storm"}, (*scene).movedMeanwhile)...)
	return append(rows, &testCase{name: "rc/dmabuf/vfio/v4/we", family: "v4", run: (*scene).unmappable})
}

// unmappable registers the memory of a PCI device, of which vfio has made a dma-buf: nobody can map it. In Go
// and in C the answer is EOPNOTSUPP, with a reason that names the exporter, and nothing is left behind.
func (s *scene) unmappable() error {
	fd, cleanup, err := dmabuftest.NewVFIO(bufferSize)
	if dmabuftest.Absent(err) {
		return skipError("no dma-buf of a PCI device: " + err.Error())
	}
	if err != nil {
		return err
	}
	defer cleanup()
	info, err := sys.DMABufInfoOf(fd)
	if err != nil || info.Exporter != "vfio_pci_core" || info.Size != bufferSize {
		return fmt.Errorf("the dma-buf is %+v, %w", info, err)
	}
	if b, err := sys.MapDMABuf(fd, bufferSize, true); !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("it can be mapped: %d bytes, %w", len(b), err)
	}
	const reason = "the CPU cannot map the dma-buf of vfio_pci_core"
	for range 3 {
		mr, err := s.ours.pd.RegDMABufMR(verbs.DMABuf{FD: fd, Length: bufferSize, IOVA: bufferAddr}, bufferRights)
		if !errors.Is(err, syscall.EOPNOTSUPP) || !strings.Contains(err.Error(), reason) {
			return fmt.Errorf("RegDMABufMR: %v, %w", mr, err)
		}
	}
	// What is wrong besides is said first, as for any dma-buf.
	if _, err := s.ours.pd.RegDMABufMR(verbs.DMABuf{FD: fd, Offset: 8, Length: 4096, IOVA: 16}, bufferRights); !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("RegDMABufMR at different places of a page: %w", err)
	}
	cmd := exec.Command(verbena, "exec", "--log", "--addr", families[s.family].ours.String(), "--", regFD)
	file, err := sys.DupFile(fd, "dma-buf")
	if err != nil {
		return err
	}
	cmd.ExtraFiles = []*os.File{file}
	out, err := cmd.CombinedOutput()
	_ = file.Close() // it was only read
	if text := string(out); err != nil || !strings.Contains(text, "EOPNOTSUPP\n") || !strings.Contains(text, reason) {
		return fmt.Errorf("ibv_reg_dmabuf_mr: %w, and the program says\n%s", err, text)
	}
	return nil
}

// closer makes a Close of a function.
type closer func()

func (c closer) Close() error { c(); return nil }

// kernelBuffer registers a dma-buf of the kernel. Its descriptor is closed at once, as programs do.
func (o *ours) kernelBuffer(kind dmabuftest.Kind) (*region, error) {
	fd, cleanup, err := kind.New(bufferSize)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", kind.Name, err)
	}
	defer cleanup()
	seen, err := sys.MapDMABuf(fd, bufferSize, true)
	if err != nil {
		return nil, err
	}
	o.keep(closer(func() { _ = sys.Unmap(seen) }))
	mr, err := o.pd.RegDMABufMR(verbs.DMABuf{FD: fd, Length: bufferSize, IOVA: bufferAddr}, bufferRights)
	return o.bufferRegion(mr, err, &region{buf: seen})
}

// newExported makes a buffer of package dmabuf, and a dma-buf of the kernel of it. That is recognised when it is
// registered, so the region is one of the buffer; the mapping of it is the kernel's.
func newExported(size uint64) (fd int, cleanup func(), err error) {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: size, Segments: 5})
	if err != nil {
		return -1, nil, err
	}
	defer func() { _ = m.Close() }() // the descriptor has a reference
	if fd, err = m.Buffer().KernelFD(context.Background()); err != nil {
		return -1, nil, err
	}
	b, err := dmabuf.Get(fd)
	if err == nil && b != m.Buffer() {
		err = errors.New("the descriptor leads to another buffer")
	}
	if err != nil {
		_ = sys.CloseFD(fd) // the first error says more
		return -1, nil, err
	}
	b.Put()
	return fd, func() { _ = sys.CloseFD(fd) }, nil
}

// movingBuffer registers a buffer of several segments.
func (o *ours) movingBuffer() (*region, error) {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: bufferSize, Segments: 5})
	if err != nil {
		return nil, err
	}
	o.keep(m)
	mr, err := o.pd.RegDMABufMR(verbs.DMABuf{Buffer: m.Buffer(), Length: bufferSize, IOVA: bufferAddr}, bufferRights)
	return o.bufferRegion(mr, err, &region{moves: m})
}

func (o *ours) bufferRegion(mr *verbs.MR, err error, r *region) (*region, error) {
	if err != nil {
		return nil, err
	}
	o.keep(mr)
	r.mr, r.addr, r.size, r.lkey, r.rkey = mr, mr.Addr(), bufferSize, mr.LKey(), mr.RKey()
	return r, nil
}

// bufferSides connects, and makes a dma-buf on our side and ordinary memory on the kernel's.
func (s *scene) bufferSides(alloc func() (*region, error)) (i, t *end, local, remote, mine *region, err error) {
	if i, t, err = s.connect(connection{}); err != nil {
		return
	}
	if mine, err = alloc(); err != nil {
		return
	}
	theirs, err := s.kernel.alloc(bufferSize, allRights)
	local, remote = mine, theirs
	if !s.weInit {
		local, remote = theirs, mine
	}
	return i, t, local, remote, mine, err
}

// onBuffer does operations on a dma-buf; one that moves does so before each.
func (s *scene) onBuffer(op verbs.Opcode, alloc func() (*region, error)) error {
	i, t, local, remote, mine, err := s.bufferSides(alloc)
	if err != nil {
		return err
	}
	const rounds = 4
	for round := range uint64(rounds) {
		if mine.moves != nil {
			if err := mine.moves.Move(context.Background()); err != nil {
				return err
			}
		}
		if err := s.exchange(i, t, local, remote, op, bufferSize>>(round%3), round+1); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	if st := mine.mr.PagingStats(); mine.moves != nil && (st.Invalidations != rounds || st.PageFaults != rounds || st.FailedResolutions != 0) {
		return fmt.Errorf("we: after %d moves %+v", rounds, st)
	}
	return nil
}

// movedMeanwhile does operations while our buffer moves.
func (s *scene) movedMeanwhile() error {
	i, t, local, remote, mine, err := s.bufferSides(s.ours.movingBuffer)
	if err != nil {
		return err
	}
	var stop atomic.Bool
	var wg sync.WaitGroup
	var storm error
	wg.Go(func() {
		for k := 0; !stop.Load() && storm == nil; k++ {
			if k%4 == 3 {
				storm = mine.moves.Evict(context.Background())
			} else {
				storm = mine.moves.Move(context.Background())
			}
			time.Sleep(500 * time.Microsecond)
		}
	})
	for round := range uint64(12) {
		op := []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead, verbs.OpSend}[round%3]
		if err = s.exchange(i, t, local, remote, op, bufferSize, round+1); err != nil {
			err = fmt.Errorf("round %d: %w", round, err)
			break
		}
	}
	stop.Store(true)
	wg.Wait()
	if st := mine.mr.PagingStats(); err == nil && (st.FailedResolutions != 0 || st.Invalidations == 0) {
		err = fmt.Errorf("we: after %d moves %+v", mine.moves.Moves(), st)
	}
	return errors.Join(err, storm)
}
