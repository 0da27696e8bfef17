package device

import (
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/train"
)

// noLink is the link of a device that reaches its own process only: it has addresses, and the
// background goroutine can wait on it, but it carries nothing.
type noLink struct {
	addrs []netip.Addr
	wake  chan struct{}
	timer *time.Timer // of the goroutine that waits
}

func newNoLink(addrs []netip.Addr) *noLink {
	return &noLink{addrs: addrs, wake: make(chan struct{}, 1), timer: time.NewTimer(0)}
}

func (l *noLink) Prepare(f *train.Flow) error {
	return fmt.Errorf("%v is not a device of this process, and the device has no network link: %w", f.Dst, syscall.EHOSTUNREACH)
}
func (l *noLink) Send(ts []*train.Train) (int, error) { return len(ts), nil }
func (l *noLink) Poll(link.Sink, int) int             { return 0 }

func (l *noLink) Wait(d time.Duration) {
	if d < 0 {
		<-l.wake
		return
	}
	l.timer.Reset(d)
	select {
	case <-l.wake:
	case <-l.timer.C:
	}
}

func (l *noLink) Wake() {
	select {
	case l.wake <- struct{}{}:
	default:
	}
}

func (l *noLink) MTU() int            { return ib.MTU4096.Bytes() }
func (l *noLink) Window(int) int      { return loopWindow }
func (l *noLink) Addrs() []netip.Addr { return l.addrs }
func (l *noLink) Offloads() []string  { return nil }
func (l *noLink) Close() error        { l.timer.Stop(); return nil }
