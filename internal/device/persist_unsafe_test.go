package device

// ATOMIC WRITE and FLUSH, on the links that there are: with real memory, a real
// file, and storage that takes as long as a test wants it to.

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// onLinks runs a test with two connected ends, on each link.
func onLinks(t *testing.T, test func(t *testing.T, a, b *end)) {
	for _, l := range []string{linkLoop, linkUDP} {
		t.Run(l, func(t *testing.T) {
			x, y := openDevice(t, provider.Config{Link: l}), openDevice(t, provider.Config{Link: l})
			a, b := connected(t, x, y, ib.RC, 64<<10, nil)
			test(t, a, b)
		})
	}
}

// word loads 8 bytes that the device may store at any time.
func (e *end) word(off int) uint64 { return atomic.LoadUint64((*uint64)(unsafe.Pointer(&e.buf[off]))) }

// postAsIs posts a request with the flags that it has: without SendSignaled it makes no
// completion.
func (e *end) postAsIs(wr ib.SendWR) {
	e.t.Helper()
	if _, err := e.qp.PostSend([]ib.SendWR{wr}); err != nil {
		e.t.Fatal(err)
	}
}

func (e *end) atomicWrite(o *end, off int, v uint64) ib.SendWR {
	return ib.SendWR{Op: ib.OpAtomicWrite, Flags: ib.SendSignaled, Inline: binary.NativeEndian.AppendUint64(nil, v),
		RemoteAddr: o.mr.Addr() + uint64(off), RKey: o.mr.RKey()}
}

// An ATOMIC WRITE is never seen in part, and never before what was written
// before it.
func TestAtomicWriteIsWhole(t *testing.T) {
	onLinks(t, func(t *testing.T, a, b *end) {
		const deep = 20
		rounds := uint64(lastingOps(200, 2000))
		const word, data = 4096, 1024
		pattern := func(i uint64) uint64 { return i%250*0x0101010101010101 + 0x0101010101010101 }
		binary.NativeEndian.PutUint64(b.buf[word:], pattern(0))
		var stop atomic.Bool
		var wg sync.WaitGroup
		wg.Go(func() {
			seen := 0
			for last := uint64(0); seen == 0 || !stop.Load(); seen++ {
				v := b.word(word)
				if v&0xff*0x0101010101010101 != v {
					t.Errorf("half a word: %#x", v)
					return
				}
				// What it publishes is there: the data holds at least that round.
				// (250 rounds later the same word stands for another.)
				if d := b.word(data); v != last && d%250 < v&0xff-1 && v&0xff-1-d%250 < 100 {
					t.Errorf("round %d was published, and the data is of %d", v&0xff-1, d%250)
					return
				}
				last = v
				runtime.Gosched() // the peer needs a processor, too
			}
		})
		for i := uint64(1); i <= rounds; i++ {
			at := data + int(i%deep)*8 // each request's data stays as it is
			binary.NativeEndian.PutUint64(a.buf[at:], i)
			wr := a.write(b, at, 8)
			wr.RemoteAddr = b.mr.Addr() + data
			a.postAsIs(wr)
			a.postAsIs(a.atomicWrite(b, word, pattern(i)))
			if i%deep == 0 || i == rounds {
				for range min(deep, i) {
					if wc := a.ok(); wc.Op != ib.WCAtomicWrite {
						t.Fatalf("%+v", wc)
					}
				}
			}
		}
		stop.Store(true)
		wg.Wait()
		if got := b.word(word); got != pattern(rounds) {
			t.Errorf("%#x was left", got)
		}
	})
}

// From a list too, and refused where it must be.
func TestAtomicWriteErrors(t *testing.T) {
	onLinks(t, func(t *testing.T, a, b *end) {
		copy(a.buf, "ABCDEFGH")
		wr := a.atomicWrite(b, 8, 0)
		wr.Inline, wr.SGL = nil, []ib.SGE{a.sge(0, 3)[0], a.sge(3, 5)[0]}
		a.post(wr)
		a.ok()
		if got, want := b.word(8), binary.NativeEndian.Uint64([]byte("ABCDEFGH")); got != want {
			t.Errorf("%#x was written, not %#x", got, want)
		}
		wr = a.atomicWrite(b, 12, 1)
		a.post(wr)
		a.status(ib.WCRemInvReqErr)
		wantEvent(t, b.dev, ib.AsyncEvent{Type: ib.EventQPReqErr, QPN: b.qp.Number()})
	})
}

// mappedFile maps a new file, and registers it.
func mappedFile(t *testing.T, e *end, n int, access ib.Access) ([]byte, provider.MR) {
	t.Helper()
	dir, err := os.MkdirTemp("/var/tmp", "verbena") // /tmp may be memory
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	f, err := os.Create(filepath.Join(dir, "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close() // the mapping keeps it
	if err := f.Truncate(int64(n)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	addr := uintptr(unsafe.Pointer(&b[0]))
	mr := must[provider.MR](t)(e.pd.RegMRAddr(addr, uint64(n), uint64(addr), access))
	t.Cleanup(func() {
		closeAll(t, mr)
		_ = unix.Munmap(b)
	})
	return b, mr
}

// dirtyKiB returns how much of a mapping has not reached its file, by the kernel's count.
func dirtyKiB(t *testing.T, b []byte) (sum int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut("\n"+string(text), fmt.Sprintf("\n%08x-", uintptr(unsafe.Pointer(&b[0]))))
	if !ok {
		t.Fatal("the mapping is not in /proc/self/smaps")
	}
	for _, name := range []string{"\nShared_Dirty:", "\nPrivate_Dirty:"} {
		_, line, _ := strings.Cut(rest, name)
		var n int
		if _, err := fmt.Sscan(line, &n); err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

func flush(mr provider.MR, off uint64, n uint32, typ ib.FlushType) ib.SendWR {
	return ib.SendWR{Op: ib.OpFlush, Flags: ib.SendSignaled, RemoteAddr: mr.Addr() + off, RKey: mr.RKey(),
		RemoteLength: n, FlushType: typ, FlushLevel: ib.FlushRange}
}

// FLUSH to persistence writes the file, the range and no more; to global
// visibility it does not.
func TestFlushFile(t *testing.T) {
	onLinks(t, func(t *testing.T, a, b *end) {
		const size, page = 64 << 10, 4 << 10
		file, mr := mappedFile(t, b, size, ib.AccessLocalWrite|ib.AccessRemoteWrite|ib.AccessFlush)
		for i := range a.buf {
			a.buf[i] = byte(i * 7)
		}
		writeAll := ib.SendWR{Op: ib.OpRDMAWrite, SGL: a.sge(0, size), RemoteAddr: mr.Addr(), RKey: mr.RKey()}
		for _, c := range []struct {
			name  string
			wr    ib.SendWR
			clean int // pages
		}{
			{"global", flush(mr, 0, size, ib.FlushGlobal), 0},
			{"range", flush(mr, 5*page+1, page, ib.FlushPersistent), 2},
			{"all", flush(mr, 0, size, ib.FlushPersistent|ib.FlushGlobal), size / page},
			{"region", func() ib.SendWR {
				wr := flush(mr, 1<<40, 0, ib.FlushPersistent)
				wr.FlushLevel = ib.FlushMR
				return wr
			}(), size / page},
		} {
			a.postAsIs(writeAll)
			a.post(c.wr)
			if wc := a.ok(); wc.Op != ib.WCFlush {
				t.Fatalf("%s: %+v", c.name, wc)
			}
			if got := dirtyKiB(t, file); got != size/1024-c.clean*page/1024 {
				t.Errorf("%s: %d KiB are dirty, %d pages should be clean", c.name, got, c.clean)
			}
			if string(file) != string(a.buf) {
				t.Errorf("%s: other bytes", c.name)
			}
		}
		// What the region does not grant.
		a.post(flush(b.mr, 0, 8, ib.FlushGlobal))
		a.status(ib.WCRemAccessErr)
	})
}

func TestFlushRegistration(t *testing.T) {
	d := openDevice(t, provider.Config{Link: linkLoop})
	e := newEnd(t, d, ib.RC, 4096)
	defer e.close()
	_, err := e.pd.RegMR(make([]byte, 4096), ib.AccessFlushPersistent)
	wantErrno(t, "a slice as persistent memory", err, syscall.EINVAL)
	closeAll(t, must[provider.MR](t)(e.pd.RegMR(make([]byte, 4096), ib.AccessFlushGlobal)))
	want := ib.CapAtomicWrite | ib.CapFlushGlobal | ib.CapFlushPersistent
	if d.Attr().Caps&want != want {
		t.Errorf("capabilities %#x", d.Attr().Caps)
	}
}

// slowDisk is memory with storage that waits until the test lets it go on.
type slowDisk struct {
	*mem.Host
	begun chan struct{}
	end   chan error
}

func (s *slowDisk) Durable() bool { return true }

func (s *slowDisk) Persist(uint64, uint64) error {
	s.begun <- struct{}{}
	return <-s.end
}

func (e *end) slowRegion(t *testing.T) (*slowDisk, *mem.Region) {
	h, err := mem.NewHostBytes(make([]byte, 4096), ib.AccessLocalWrite, ib.LockOff)
	if err != nil {
		t.Fatal(err)
	}
	s := &slowDisk{h, make(chan struct{}, 64), make(chan error)}
	r, err := e.dev.table.Register(mem.RegionConfig{PD: e.pd.(*PD).id, Access: ib.AccessLocalWrite | ib.AccessRemote | ib.AccessFlush, IOVA: 0x10000, Length: 4096, Backing: s})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	return s, r
}

func flushRegion(r *mem.Region) ib.SendWR {
	return ib.SendWR{Op: ib.OpFlush, Flags: ib.SendSignaled, RKey: r.Key(), FlushType: ib.FlushPersistent, FlushLevel: ib.FlushMR}
}

// While storage works only the FLUSH waits: other queue pairs, the same
// queue pair's later requests on this side, the closing of the region.
func TestFlushSlowStorage(t *testing.T) {
	onLinks(t, func(t *testing.T, a, b *end) {
		c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
		disk, r := b.slowRegion(t)
		a.post(flushRegion(r))
		<-disk.begun

		wr := a.write(b, 0, 64)
		a.buf[0] = 99
		a.postAsIs(wr) // behind the FLUSH: executed, and acknowledged after it
		eventually(t, "the WRITE behind the FLUSH", func() bool { return b.word(0)&0xff == 99 })
		goesOn(t, c, d)
		b.post(b.read(a, 0, 64))
		b.ok()
		closed := make(chan error, 1)
		go func() { closed <- r.Close() }()
		select {
		case err := <-closed:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(5 * time.Second):
			t.Error("closing the region waits for storage")
		}
		if n, _ := a.cq.Poll(make([]ib.WC, 1)); n != 0 {
			t.Error("the FLUSH completed before storage did")
		}
		disk.end <- nil
		if wc := a.ok(); wc.Op != ib.WCFlush {
			t.Errorf("%+v", wc)
		}
	})
}

// Storage takes longer than all retries together: the peer hears that it is at
// work, and waits. The FLUSH is carried out once.
func TestFlushOutlastsRetries(t *testing.T) {
	flushSlowly := func(t *testing.T, x, y *Device) {
		a, b := connected(t, x, y, ib.RC, 4096, func(e *end) { e.timeout, e.retries, e.pause = 14, 1, virtualPause }) // 67 ms, twice
		disk, r := b.slowRegion(t)
		a.post(flushRegion(r))
		<-disk.begun
		time.Sleep(5 * time.Second)
		disk.end <- nil
		a.ok()
		if len(disk.begun) != 0 {
			t.Errorf("it was carried out %d times more", len(disk.begun))
		}
	}
	bubble(t, "loop", func(t *testing.T) {
		flushSlowly(t, openDevice(t, provider.Config{Link: linkLoop}), openDevice(t, provider.Config{Link: linkLoop}))
	})
	bubble(t, "packets", func(t *testing.T) {
		_, devs := simulated(t, 2, link.FaultyConfig{MinDelay: near, MaxDelay: near}, nil)
		flushSlowly(t, devs[0], devs[1])
	})
}

// Storage fails, and queue pairs and devices go away while it is at work.
func TestFlushEndings(t *testing.T) {
	onLinks(t, func(t *testing.T, a, b *end) {
		c, d := connected(t, a.dev, b.dev, ib.RC, 4096, nil)
		disk, r := b.slowRegion(t)
		other, r2 := d.slowRegion(t)
		c.post(flushRegion(r2))
		<-other.begun
		if err := d.qp.Close(); err != nil { // does not wait
			t.Error(err)
		}
		a.post(flushRegion(r))
		<-disk.begun
		disk.end <- syscall.EIO
		a.status(ib.WCRemOpErr)
		wantEvent(t, b.dev, ib.AsyncEvent{Type: ib.EventQPFatal, QPN: b.qp.Number()})
		other.end <- nil // the device's closing would wait for it
	})
}
