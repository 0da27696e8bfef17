package pcap

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
)

var (
	src4 = netip.MustParseAddrPort("127.77.0.1:49152")
	dst4 = netip.MustParseAddrPort("127.77.0.2:4791")
	src6 = netip.MustParseAddrPort("[fd00::1]:49152")
	dst6 = netip.MustParseAddrPort("[fd00::2]:4791")
)

type captured struct {
	ts   time.Time
	data []byte
}

// read returns the packets of a capture, read by gopacket.
func read(t *testing.T, r io.Reader) []captured {
	t.Helper()
	ng, err := pcapgo.NewNgReader(r, pcapgo.DefaultNgReaderOptions)
	if err != nil {
		t.Fatal(err)
	}
	if ng.LinkType() != layers.LinkTypeRaw {
		t.Fatalf("link type %v", ng.LinkType())
	}
	var all []captured
	for {
		data, ci, err := ng.ReadPacketData()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if ci.CaptureLength != ci.Length || ci.Length != len(data) {
			t.Fatalf("lengths %d, %d of %d bytes", ci.CaptureLength, ci.Length, len(data))
		}
		all = append(all, captured{ci.Timestamp, data})
	}
}

// TestPacket holds a packet of each family against gopacket's decoder.
func TestPacket(t *testing.T) {
	payload := []byte("any payload, also of an odd length")[:33]
	ts := time.Unix(1_700_000_000, 123_456_789)
	for _, c := range []struct {
		name     string
		src, dst netip.AddrPort
	}{
		{"IPv4", src4, dst4},
		{"IPv4 mapped", netip.AddrPortFrom(netip.AddrFrom16(src4.Addr().As16()), 49152), dst4},
		{"IPv6", src6, dst6},
	} {
		t.Run(c.name, func(t *testing.T) {
			var buf bytes.Buffer
			w := New(&buf)
			w.Packet(ts, c.src, c.dst, 0x6a, 63, 0xbeef, payload)
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			got := read(t, &buf)
			if len(got) != 1 || !got[0].ts.Equal(ts) {
				t.Fatalf("%d packets, the first of %v", len(got), got[0].ts)
			}
			p := gopacket.NewPacket(got[0].data, layers.LinkTypeRaw, gopacket.Default)
			if e := p.ErrorLayer(); e != nil {
				t.Fatal(e.Error())
			}
			if ip, ok := p.Layer(layers.LayerTypeIPv4).(*layers.IPv4); ok {
				if ip.TOS != 0x6a || ip.TTL != 63 || ip.Id != 0xbeef || ip.Flags != layers.IPv4DontFragment || ip.FragOffset != 0 {
					t.Errorf("IPv4 %+v", ip)
				}
			} else if ip, ok := p.Layer(layers.LayerTypeIPv6).(*layers.IPv6); ok {
				if ip.TrafficClass != 0x6a || ip.HopLimit != 63 || ip.FlowLabel != 0 {
					t.Errorf("IPv6 %+v", ip)
				}
			} else {
				t.Fatal("no IP header")
			}
			flow, want := p.NetworkLayer().NetworkFlow(), c.src.Addr().Unmap().String()+"->"+c.dst.Addr().String()
			if flow.String() != want {
				t.Errorf("flow %v, want %v", flow, want)
			}
			udp := p.Layer(layers.LayerTypeUDP).(*layers.UDP)
			if uint16(udp.SrcPort) != c.src.Port() || uint16(udp.DstPort) != c.dst.Port() || !bytes.Equal(udp.Payload, payload) {
				t.Errorf("UDP %+v", udp)
			}
			if zero := udp.Checksum == 0; zero != c.dst.Addr().Is4() {
				t.Errorf("UDP checksum %#x", udp.Checksum)
			}
		})
	}
}

// TestConcurrent: packets of many goroutines arrive whole, each one's in order.
func TestConcurrent(t *testing.T) {
	const writers, each = 8, 250
	path := filepath.Join(t.TempDir(), "c.pcapng")
	w, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for g := range writers {
		wg.Go(func() {
			b := make([]byte, 16+100*g)
			for i := range b {
				b[i] = byte(g)
			}
			for i := range each {
				binary.BigEndian.PutUint32(b, uint32(i))
				w.Packet(time.Now(), src4, dst4, 0, 64, uint16(g), b)
			}
		})
	}
	wg.Wait()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if st, err := f.Stat(); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", st.Mode(), err)
	}
	var next [writers]uint32
	all := read(t, f)
	if len(all) != writers*each {
		t.Fatalf("%d packets, want %d", len(all), writers*each)
	}
	for _, p := range all {
		g, b := int(binary.BigEndian.Uint16(p.data[4:])), p.data[28:]
		if len(b) != 16+100*g || binary.BigEndian.Uint32(b) != next[g] || bytes.Count(b[4:], []byte{byte(g)}) != len(b)-4 {
			t.Fatalf("writer %d: packet of %d bytes, number %d, want %d", g, len(b), binary.BigEndian.Uint32(b), next[g])
		}
		next[g]++
	}
}

// limited takes n bytes and then fails.
type limited struct{ n int }

var errFull = errors.New("no space left")

func (l *limited) Write(b []byte) (int, error) {
	if len(b) > l.n {
		return 0, errFull
	}
	l.n -= len(b)
	return len(b), nil
}

// TestErrors: Close returns the first error; nothing is written after it, nor after
// Close.
func TestErrors(t *testing.T) {
	w := New(&limited{n: 10_000})
	for range 10 {
		w.Packet(time.Now(), src4, dst4, 0, 64, 0, make([]byte, 4000))
	}
	for _, call := range []func() error{w.Close, w.Close} {
		if err := call(); !errors.Is(err, errFull) {
			t.Errorf("error %v, want %v", err, errFull)
		}
	}

	var buf bytes.Buffer
	w = New(&buf)
	w.Packet(time.Now(), src4, dst4, 0, 64, 0, make([]byte, maxUDPPayload))
	if err := w.Close(); err != nil {
		t.Errorf("longest datagram: %v", err)
	}
	n := buf.Len()
	w.Packet(time.Now(), src4, dst4, 0, 64, 0, make([]byte, 16))
	if err := w.Close(); err != nil || buf.Len() != n {
		t.Errorf("after Close: %v, %d bytes more", err, buf.Len()-n)
	}
	if got := read(t, &buf); len(got) != 1 || len(got[0].data) != 65535 {
		t.Errorf("read back %d packets", len(got))
	}

	buf.Reset()
	w = New(&buf)
	for _, n := range []int{16, maxUDPPayload + 1, 20} {
		w.Packet(time.Now(), src6, dst6, 0, 64, 0, make([]byte, n))
	}
	if err := w.Close(); err == nil {
		t.Error("a datagram longer than UDP carries was written")
	}
	if got := read(t, &buf); len(got) != 1 || len(got[0].data) != 40+8+16 {
		t.Errorf("%d packets, want the one before the error", len(got))
	}

	if _, err := Create(filepath.Join(t.TempDir(), "no", "such", "folder")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Create in a missing folder: %v", err)
	}
}
