// Package pcap writes packets to a pcapng file, for tshark and Wireshark.
//
// A UDP socket shows payloads alone. The package rebuilds the IP and UDP headers
// around them (internal/wire/ip.go), so that a capture needs no privilege and no
// packet socket. The link type is raw IP, so no Ethernet header is needed.
package pcap

import (
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/verbena-rdma/verbena/internal/wire"
)

// maxUDPPayload is what fits the 16-bit length fields of either IP version.
const maxUDPPayload = 1<<16 - 1 - wire.IPv4Len - wire.UDPLen

// Writer writes packets to a pcapng stream. It may be used by any number of
// goroutines. The first error ends the capture: the Writer logs it, counts the packets
// from there on, and returns it from Close. The file is then readable up to the last
// whole packet.
type Writer struct {
	name string        // what the log calls it
	lost atomic.Uint64 // packets that are not in the capture

	mu     sync.Mutex // guards all below
	closed bool
	out    blocks
	closer io.Closer // what Create opened; nil after New
	err    error     // the first one; nothing is written after it
	logged bool      // err is in the log
}

// Create makes a capture file, or empties one that exists. Packets carry the memory
// of applications, so only the owner may read a new file.
func Create(path string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	w := New(f)
	w.name, w.closer = path, f
	return w, nil
}

// New begins a capture on w. Close writes the rest of the capture to w, and does not
// close w.
func New(w io.Writer) *Writer {
	n := &Writer{name: "capture", out: blocks{to: w}}
	n.out.begin()
	return n
}

// Lost returns how many packets an error has kept out of the capture.
func (w *Writer) Lost() uint64 { return w.lost.Load() }

// Packet writes one datagram. udpPayload is all from the BTH through the ICRC, id is
// the IPv4 identification. Packet returns no error, since its callers on the data path
// could not handle one: the first error is logged, kept for Close, and ends the
// capture.
func (w *Writer) Packet(ts time.Time, src, dst netip.AddrPort, tclass, hopLimit uint8, id uint16, udpPayload []byte) {
	w.mu.Lock()
	defer w.unlock()
	switch {
	case w.closed:
		return
	case w.err != nil:
		w.lost.Add(1)
		return
	}
	if n := len(udpPayload); n > maxUDPPayload {
		w.lost.Add(1)
		w.failLocked(fmt.Errorf("datagram of %d bytes is longer than UDP carries", n))
		return
	}
	w.out.packet(ts, func(b []byte) []byte { return appendPacket(b, src, dst, tclass, hopLimit, id, udpPayload) })
	if len(w.out.waiting) >= enoughWaiting {
		w.flushLocked()
	}
}

func (w *Writer) failLocked(err error) {
	if w.err == nil {
		w.err = fmt.Errorf("pcap: %w", err)
	}
}

// unlock unlocks mu and then logs the first error, without the lock: the log may
// block.
func (w *Writer) unlock() {
	log := w.err != nil && !w.logged
	w.logged = w.logged || log
	err := w.err
	w.mu.Unlock()
	if log {
		slog.Error("verbena: the packet capture ends here: it cannot be written", "file", w.name, "err", err)
	}
}

func appendPacket(b []byte, src, dst netip.AddrPort, tclass, hopLimit uint8, id uint16, udpPayload []byte) []byte {
	s, d := src.Addr().Unmap(), dst.Addr().Unmap()
	if s.Is4() && d.Is4() {
		b = wire.AppendIPv4(b, s, d, tclass, hopLimit, id, len(udpPayload))
		b = wire.AppendUDP4(b, src.Port(), dst.Port(), len(udpPayload))
		return append(b, udpPayload...)
	}
	b = wire.AppendIPv6(b, s, d, tclass, hopLimit, 0, len(udpPayload))
	return wire.AppendUDP6(b, src, dst, udpPayload)
}

// flushLocked writes what waits. It does so also after an error that is not of the
// file: the packets before that error are good.
func (w *Writer) flushLocked() {
	if w.closed {
		return
	}
	lost, err := w.out.flush()
	w.lost.Add(lost)
	if err != nil {
		w.failLocked(err)
	}
}

// Close writes what waits, closes the file if Create opened it, and returns the first
// error since the capture began, with the number of packets that are missing. Later
// packets are dropped; a second Close returns the same error.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.unlock()
	w.flushLocked()
	w.closed = true
	if w.closer != nil {
		if err := w.closer.Close(); err != nil {
			w.failLocked(err)
		}
		w.closer = nil
	}
	if w.err != nil {
		return fmt.Errorf("%w; %d packets are missing from %s", w.err, w.lost.Load(), w.name)
	}
	return nil
}
