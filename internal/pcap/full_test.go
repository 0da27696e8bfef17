package pcap

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// smallDisk is a file that takes only so many bytes, the first ones of a write that is
// too long among them, as a disk that becomes full.
type smallDisk struct {
	*os.File
	room int
}

func (d *smallDisk) Write(b []byte) (int, error) {
	n, err := d.File.Write(b[:min(len(b), d.room)])
	d.room -= n
	if err == nil && n < len(b) {
		err = &os.PathError{Op: "write", Path: d.Name(), Err: syscall.ENOSPC}
	}
	return n, err
}

// watchLog gathers the log until the test ends.
func watchLog(t *testing.T) *bytes.Buffer {
	t.Helper()
	log, before := new(bytes.Buffer), slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(log, nil)))
	t.Cleanup(func() { slog.SetDefault(before) })
	return log
}

// TestFull: wherever a disk becomes full, the file is readable, every packet is in it or
// is counted, the log says it once and Close says it.
func TestFull(t *testing.T) {
	const packets, size = 12, 700 // two writes, and what waits for Close
	path := filepath.Join(t.TempDir(), "c.pcapng")
	complete := 0
	for room := 1 << 10; complete == 0; room += 13 {
		log := watchLog(t)
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		w := New(&smallDisk{f, room})
		for i := range packets {
			w.Packet(time.Unix(int64(i), 0), src4, dst4, 0, 64, uint16(i), make([]byte, size))
		}
		err = w.Close()
		if e := f.Close(); e != nil {
			t.Fatal(e)
		}
		r, e := os.Open(path)
		if e != nil {
			t.Fatal(e)
		}
		var got []captured
		if st, _ := r.Stat(); st.Size() > 0 { // not even the header had room
			got = read(t, r) // fails if a packet is cut off
		}
		_ = r.Close()
		for i, p := range got {
			if p.ts.Unix() != int64(i) {
				t.Fatalf("room for %d bytes: packet %d is of %v", room, i, p.ts)
			}
		}
		if uint64(len(got))+w.Lost() != packets {
			t.Fatalf("room for %d bytes: %d packets, %d lost, of %d", room, len(got), w.Lost(), packets)
		}
		said := strings.Count(log.String(), "the packet capture ends here")
		if w.Lost() == 0 {
			complete = room
			if err != nil || said != 0 {
				t.Fatalf("room for %d bytes: all packets are there, and %v, %d times in the log", room, err, said)
			}
		} else if !errors.Is(err, syscall.ENOSPC) || said != 1 {
			t.Fatalf("room for %d bytes: Close says %v, the log %d times", room, err, said)
		}
	}
	if complete < packets*size {
		t.Errorf("complete with room for %d bytes", complete)
	}
}

// TestDevFull: the kernel's own disk that is full.
func TestDevFull(t *testing.T) {
	log := watchLog(t)
	w, err := Create("/dev/full")
	if err != nil {
		t.Fatal(err)
	}
	for range 100 {
		w.Packet(time.Now(), src4, dst4, 0, 64, 0, make([]byte, 1000))
	}
	if w.Lost() != 100 {
		t.Errorf("%d packets lost, want 100", w.Lost())
	}
	for range 2 {
		if err := w.Close(); !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "100 packets are missing from /dev/full") {
			t.Errorf("Close says %v", err)
		}
	}
	if n := strings.Count(log.String(), "file=/dev/full"); n != 1 {
		t.Errorf("%d times in the log:\n%s", n, log)
	}
}
