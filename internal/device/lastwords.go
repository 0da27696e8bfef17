package device

// Last words: what the peers of a process that has died hear, from another process of the device, or
// from its watcher.

import (
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/internal/cm"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// repeatPauses are the pauses before last words are said again: nobody is left who could take an answer,
// and networks lose packets.
var repeatPauses = [...]time.Duration{100 * time.Millisecond, time.Second, 3 * time.Second}

// lastMADs returns the datagrams for connections of a process that has died.
func lastMADs(addrs []netip.Addr, words []host.LastWords) (all []provider.MAD) {
	for i := range words {
		w := &words[i]
		if w.Addr < 0 || w.Addr >= len(addrs) {
			continue // another process may have written anything
		}
		b, ok := cm.LastWords(&cm.Last{State: cm.State(w.State), GUID: GUID(addrs[0]), ID: w.Local, Peer: w.Remote, RemoteQPN: w.QPN}, rand.Uint64())
		if ok {
			all = append(all, provider.MAD{From: addrs[w.Addr], To: w.Peer, Bytes: b[:]})
		}
	}
	return all
}

func sayLast(all []provider.MAD, send func(*provider.MAD) error) {
	for i := range all {
		_ = send(&all[i]) // it is repeated
	}
}

// repeatLast says last words again, until stop is closed.
func repeatLast(all []provider.MAD, send func(*provider.MAD) error, stop <-chan struct{}) {
	for _, pause := range repeatPauses {
		select {
		case <-time.After(pause):
		case <-stop:
			return
		}
		sayLast(all, send)
	}
}

// lastWords are those that a device says for other processes of it.
type lastWords struct {
	stop chan struct{} // closed with closed
	wg   sync.WaitGroup

	mu     sync.Mutex // guards closed, and that no goroutine begins after it is set
	closed bool
}

// died tells the peers of connections that the process which had them has died.
func (m *management) died(words []host.LastWords) {
	w := &m.words
	w.mu.Lock()
	closed := w.closed
	if !closed {
		w.wg.Add(1)
	}
	w.mu.Unlock()
	if closed {
		return
	}
	all := lastMADs(m.dev.addrs, words)
	sayLast(all, m.Send)
	go func() {
		defer w.wg.Done()
		repeatLast(all, m.Send, w.stop)
	}()
}

// close ends the repetition.
func (w *lastWords) close() {
	w.mu.Lock()
	if !w.closed {
		w.closed = true
		if w.stop != nil {
			close(w.stop)
		}
	}
	w.mu.Unlock()
	w.wg.Wait()
}
