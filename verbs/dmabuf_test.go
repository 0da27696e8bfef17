package verbs_test

import (
	"errors"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// What happens to requests, by what the exporter does to the buffer: the table of docs/dmabuf.md.
func TestDMABufRequests(t *testing.T) {
	type memory = dmabuf.Memory
	moved := verbs.PagingStats{Invalidations: 1, PageFaults: 1}
	gone := verbs.PagingStats{Invalidations: 1}
	for _, tt := range []struct {
		name   string
		pinned bool
		act    func(t *testing.T, m *memory) error
		errno  syscall.Errno // of act; 0: it succeeds
		// remote is the status of a peer's READ, local that of a WRITE out of the buffer.
		remote, local verbs.WCStatus
		counted       verbs.PagingStats
	}{
		{name: "left alone", act: func(*testing.T, *memory) error { return nil }},
		{name: "moved", act: func(t *testing.T, m *memory) error { return m.Move(t.Context()) }, counted: moved},
		{name: "evicted", act: func(t *testing.T, m *memory) error { return m.Evict(t.Context()) }, counted: moved},
		{name: "revoked", act: func(t *testing.T, m *memory) error { return m.Revoke(t.Context()) },
			remote: verbs.WCRemAccessErr, local: verbs.WCLocProtErr, counted: gone},
		{name: "pinned, moved", pinned: true, act: func(t *testing.T, m *memory) error { return m.Move(t.Context()) }, errno: syscall.EBUSY},
		{name: "pinned, evicted", pinned: true, act: func(t *testing.T, m *memory) error { return m.Evict(t.Context()) }, errno: syscall.EBUSY},
		{name: "pinned, revoked", pinned: true, act: func(t *testing.T, m *memory) error { return m.Revoke(t.Context()) },
			remote: verbs.WCRemAccessErr, local: verbs.WCLocProtErr, counted: gone},
		{name: "beside a static importer, moved", errno: syscall.EBUSY, act: func(t *testing.T, m *memory) error {
			defer mapStatically(t, m.Buffer())()
			return m.Move(t.Context())
		}},
		{name: "beside a static importer, revoked", errno: syscall.EBUSY, act: func(t *testing.T, m *memory) error {
			defer mapStatically(t, m.Buffer())()
			return m.Revoke(t.Context())
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, local := range []bool{false, true} {
				m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 4096})
				if err != nil {
					t.Fatal(err)
				}
				status, counted := onDMABuf(t, m.Buffer(), tt.pinned, local, func() {
					if err := tt.act(t, m); tt.errno == 0 && err != nil || tt.errno != 0 && !errors.Is(err, tt.errno) {
						t.Errorf("the exporter: %v, want errno %d", err, int(tt.errno))
					}
				})
				want := tt.remote
				if local {
					want = tt.local
				}
				if status != want {
					t.Errorf("local %v: %q, want %q", local, status, want)
				}
				if counted.Invalidations != tt.counted.Invalidations || counted.PageFaults != tt.counted.PageFaults || counted.FailedResolutions != 0 {
					t.Errorf("local %v: counted %+v, want %+v", local, counted, tt.counted)
				}
				if err := m.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// mapStatically maps the buffer as a static importer does, until the function is called that it
// returns.
func mapStatically(t *testing.T, b *dmabuf.Buffer) (unmap func()) {
	t.Helper()
	a, err := b.Attach(nil)
	if err != nil {
		t.Fatal(err)
	}
	b.Reservation().Lock()
	table, err := a.Map(t.Context(), dmabuf.ToDevice)
	b.Reservation().Unlock()
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		b.Reservation().Lock()
		a.Unmap(table, dmabuf.ToDevice)
		b.Reservation().Unlock()
		a.Detach()
	}
}

// Requests fail that meet a buffer whose exporter refuses to map it again.
func TestDMABufNotMappedAgain(t *testing.T) {
	for _, local := range []bool{false, true} {
		memory, refuse := make([]byte, 4096), false // guarded by the reservation lock
		b, err := dmabuf.Export(dmabuf.Config{Size: uint64(len(memory)), Exporter: "test", Ops: dmabuf.Ops{
			Map: func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) {
				if refuse {
					return nil, syscall.ENOMEM
				}
				return dmabuf.NewTable(memory), nil
			},
			Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
			Release: func(*dmabuf.Buffer) {},
		}})
		if err != nil {
			t.Fatal(err)
		}
		status, counted := onDMABuf(t, b, false, local, func() {
			b.Reservation().Lock()
			defer b.Reservation().Unlock()
			refuse = true
			b.InvalidateMappings()
		})
		want := verbs.WCRemAccessErr
		if local {
			want = verbs.WCLocProtErr
		}
		if status != want || counted.Invalidations != 1 || counted.PageFaults != 0 || counted.FailedResolutions == 0 {
			t.Errorf("local %v: %q, want %q; counted %+v", local, status, want, counted)
		}
		b.Put()
	}
}

// AdviseMR maps a buffer that was evicted, so that no request has to wait for it.
func TestDMABufAdvice(t *testing.T) {
	side := newSide(verbs.RC)
	pinning := openSide(verbs.RC, &verbs.Config{PinDMABuf: true})
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 8192, Segments: 2})
	check(err)
	part := verbs.DMABuf{Buffer: m.Buffer(), Length: 8192}
	mr, err := side.pd.RegDMABufMR(part, verbs.AccessLocalWrite)
	check(err)
	readOnly, err := side.pd.RegDMABufMR(part, verbs.AccessRemoteRead)
	check(err)
	advise := func(pd *verbs.PD, advice verbs.Advice, mr *verbs.MR, want syscall.Errno) {
		t.Helper()
		err := pd.AdviseMR(advice, verbs.AdviseFlush, mr.SGE(100, 1000))
		if want == 0 && err != nil || want != 0 && !errors.Is(err, want) {
			t.Errorf("AdviseMR: %v, want errno %d", err, int(want))
		}
	}
	for range 3 {
		check(m.Evict(t.Context()))
		advise(side.pd, verbs.AdvisePrefetchWrite, mr, 0)
	}
	if s := mr.PagingStats(); s.Prefetches != 3 || s.PrefetchPages != 6 || s.Invalidations != 3 || s.PageFaults != 0 {
		t.Errorf("the region has counted %+v", s)
	}
	advise(side.pd, verbs.AdvisePrefetch, readOnly, 0)
	advise(side.pd, verbs.AdvisePrefetchWrite, readOnly, syscall.EPERM)
	other, err := side.dev.AllocPD()
	check(err)
	advise(other, verbs.AdvisePrefetch, mr, syscall.EPERM)
	check(other.Close())
	held, err := pinning.pd.RegDMABufMR(part, verbs.AccessLocalWrite)
	check(err)
	advise(pinning.pd, verbs.AdvisePrefetch, held, syscall.EINVAL)
	check(m.Revoke(t.Context()))
	advise(side.pd, verbs.AdvisePrefetch, mr, syscall.EFAULT)
	check(readOnly.Close())
	side.close(mr)
	pinning.close(held)
	check(m.Close())
}

// onDMABuf registers a buffer of a page on Bob's device and calls act. It returns how a request
// ends that comes then, a READ of Alice's or, if local is set, a WRITE of Bob's out of the
// buffer, and what the region has counted.
func onDMABuf(t *testing.T, b *dmabuf.Buffer, pinned, local bool, act func()) (verbs.WCStatus, verbs.PagingStats) {
	t.Helper()
	const iova = 0x10000
	alice, bob := newSide(verbs.RC), openSide(verbs.RC, &verbs.Config{PinDMABuf: pinned})
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	plain := alice.register(make([]byte, 4096))
	mr, err := bob.pd.RegDMABufMR(verbs.DMABuf{Buffer: b, Length: 4096, IOVA: iova}, verbs.AccessLocalWrite|verbs.AccessRemoteRead)
	check(err)
	act()
	by, wr := alice, verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{plain.SGE(0, 4096)}, RemoteAddr: iova, RKey: mr.RKey()}
	if local {
		by, wr = bob, verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{mr.SGE(0, 4096)}, RemoteAddr: plain.Addr(), RKey: plain.RKey()}
	}
	wr.Flags = verbs.SendSignaled
	_, err = by.qp.PostSend([]verbs.SendWR{wr})
	check(err)
	status, counted := by.wait().Status, mr.PagingStats()
	alice.close(plain)
	bob.close(mr)
	return status, counted
}
