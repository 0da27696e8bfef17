// Package pcap writes packets to a pcapng file, as a network analyser reads it.
//
// A UDP socket shows payloads alone; the IP and UDP headers around them are
// rebuilt (internal/wire/ip.go), so that a capture needs no privilege and no
// packet socket. Link type is raw IP: there is no Ethernet header to invent.
package pcap

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"

	"github.com/verbena-rdma/verbena/internal/wire"
)

// maxUDPPayload is what fits the 16-bit length fields of either IP version.
const maxUDPPayload = 1<<16 - 1 - wire.IPv4Len - wire.UDPLen

// Writer writes packets to a pcapng stream. It may be used by any number of
// goroutines.
type Writer struct {
	mu     sync.Mutex       // guards all below
	ng     *pcapgo.NgWriter // nil when closed
	closer io.Closer        // what Create opened; nil after New
	err    error            // the first one; nothing is written after it
	buf    []byte
}

// Create makes a capture file, or empties one that is there. Packets carry the
// memory of applications, so nobody but the owner may read a new file.
func Create(path string) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	w, err := New(f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	w.closer = f
	return w, nil
}

// New begins a capture on w, which Close flushes and does not close.
func New(w io.Writer) (*Writer, error) {
	ng, err := pcapgo.NewNgWriterInterface(w,
		pcapgo.NgInterface{Name: "verbena", OS: runtime.GOOS, LinkType: layers.LinkTypeRaw, TimestampResolution: 9},
		pcapgo.NgWriterOptions{SectionInfo: pcapgo.NgSectionInfo{Application: "verbena", OS: runtime.GOOS, Hardware: runtime.GOARCH}})
	if err != nil {
		return nil, fmt.Errorf("pcap: %w", err)
	}
	return &Writer{ng: ng}, nil
}

// Packet writes one datagram. The udpPayload is all from the BTH through the
// ICRC, id is the IPv4 identification. Nothing on the data path can do anything
// about a failure: the first one is kept for Flush and Close, and ends the
// capture.
func (w *Writer) Packet(ts time.Time, src, dst netip.AddrPort, tclass, hopLimit uint8, id uint16, udpPayload []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ng == nil || w.err != nil {
		return
	}
	if n := len(udpPayload); n > maxUDPPayload {
		w.err = fmt.Errorf("pcap: datagram of %d bytes is longer than UDP carries", n)
		return
	}
	w.buf = appendPacket(w.buf[:0], src, dst, tclass, hopLimit, id, udpPayload)
	ci := gopacket.CaptureInfo{Timestamp: ts, CaptureLength: len(w.buf), Length: len(w.buf)}
	if err := w.ng.WritePacket(ci, w.buf); err != nil {
		w.err = fmt.Errorf("pcap: %w", err)
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

// Flush hands what is buffered to the file, and returns the first error.
func (w *Writer) Flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flushLocked()
	return w.err
}

// flushLocked flushes after an error, too: what came before it is good.
func (w *Writer) flushLocked() {
	if w.ng == nil {
		return
	}
	if err := w.ng.Flush(); err != nil && w.err == nil {
		w.err = fmt.Errorf("pcap: %w", err)
	}
}

// Close flushes, closes what Create opened, and returns the first error since
// the capture began. Packets that come later are dropped; a second Close returns
// the same error again.
func (w *Writer) Close() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.flushLocked()
	w.ng = nil
	if w.closer != nil {
		if err := w.closer.Close(); err != nil && w.err == nil {
			w.err = fmt.Errorf("pcap: %w", err)
		}
		w.closer = nil
	}
	return w.err
}
