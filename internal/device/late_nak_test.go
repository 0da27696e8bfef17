package device

import (
	"sync"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// goneSource is memory whose first reader is stopped until the test lets it go, and finds the
// memory gone then.
type goneSource struct {
	*mem.Host
	once       sync.Once
	begun, end chan struct{}
}

func (s *goneSource) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	s.once.Do(func() {
		close(s.begun)
		<-s.end
	})
	return nil, mem.FaultDead
}

// The answer to a READ is being sent, with the NAK of the request behind it, when the program
// resets the queue pair. The memory is gone, so neither leaves. The NAK is of the earlier
// connection: the queue pair, which is in state ERR and has no peer, does not send it.
func TestNakFromBeforeReset(t *testing.T) {
	a, b := connected(t, openFor(t, linkUDP), openFor(t, linkUDP), ib.RC, 4096, hurry)
	h := must[*mem.Host](t)(mem.NewHostBytes(make([]byte, 8), ib.AccessLocalWrite, ib.LockOff))
	gone := &goneSource{Host: h, begun: make(chan struct{}), end: make(chan struct{})}
	r := must[*mem.Region](t)(b.dev.table.Register(mem.RegionConfig{PD: b.pd.(*PD).id, Access: allRemote,
		IOVA: 0x10000, Length: 8, Backing: gone}))
	t.Cleanup(func() { must0(t, r.Close()) })
	good := a.read(b, 0, 8)
	good.RemoteAddr, good.RKey = 0x10000, r.Key()
	bad := a.read(b, 0, 8)
	bad.RKey = 0
	if _, err := a.qp.PostSend([]ib.SendWR{good, bad}); err != nil {
		t.Fatal(err)
	}
	<-gone.begun
	b.modify(ib.QPAttr{State: ib.QPReset}, 0)
	b.modify(ib.QPAttr{State: ib.QPErr}, 0)
	close(gone.end)
	q := b.qp.(*QP)
	eventually(t, "the sender has left", func() bool { return q.tx.Load() == txIdle })
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.core.Answering() {
		t.Error("a queue pair without a peer has an answer to send")
	}
}
