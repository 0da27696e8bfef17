package host

// Tests of places: sockets, their numbers, and what becomes of both when processes come and go.

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// A place is used again when its process has gone, with its sockets, and goes on with numbers that
// no process has had, however many processes have had the place.
func TestPlacesAgain(t *testing.T) {
	stays := join(t, addr(20), addr(21))
	seen := map[uint32]bool{}
	for i := range 200 {
		j := join(t, addr(20), addr(21))
		r := j.lease(t)
		if p := r / rangesOfPlace; p != 1 || seen[r] || j.udp.bound != 2*max(0, 1-i) {
			t.Errorf("process %d: range %d of place %d, %d sockets bound", i, r, p, j.udp.bound)
		}
		seen[r] = true
		j.udp.close()
		_ = j.Close()
	}
	_ = stays
}

// A process that is killed while it gets a place costs none: the next one takes the sockets that
// are bound, at the place that they have.
func TestPlacesOrphaned(t *testing.T) {
	outer, stays := t, join(t, addr(32), addr(33))
	list := addr(32).String() + "," + addr(33).String()
	for _, tt := range []struct {
		moments      string // at which one process after the other is killed
		found, bound int
	}{
		{"early0 early0", 0, 2}, {"held0 held0", 0, 2}, {"bound0", 1, 1}, {"held0 bound0 early1 early1", 1, 1},
		{"early1 held1 held1", 1, 1}, {"held1 bound1", 2, 0}, {"bound1", 2, 0},
	} {
		t.Run(tt.moments, func(t *testing.T) {
			for _, when := range strings.Fields(tt.moments) {
				c := startWith(t, childEnv+"="+list, -1, modeEnv+"="+when)
				stays.buried(t, c)
			}
			j := join(outer, addr(32), addr(33)) // which keeps its place
			at := j.lease(t) / rangesOfPlace
			for i, s := range j.udp.socks {
				if is, err := s.FindPlace(0, random()); err != nil || is != at {
					t.Errorf("socket %d is at place %d, %v, want %d", i, is, err, at)
				}
			}
			places := 0
			for p := range stays.dir.place {
				if stays.dir.place[p].socket[0].Load() != 0 {
					places++
				}
			}
			if int(at) != places-1 || j.udp.found != tt.found || j.udp.bound != tt.bound {
				t.Errorf("place %d of %d, %d sockets found and %d bound", at, places, j.udp.found, j.udp.bound)
			}
			if j.dir.process[j.Slot()].isBinding() {
				t.Error("the sockets are still noted as being bound")
			}
		})
	}
	// One that is killed when it has entered the place, before the sockets or after them.
	for _, entered := range []bool{false, true} {
		j := join(t, addr(32), addr(33))
		p, own := j.lease(t)/rangesOfPlace, &j.dir.process[j.Slot()]
		for i := range own.binding {
			own.binding[i].Store(j.dir.place[p].socket[i].Load())
			if !entered {
				j.dir.place[p].socket[i].Store(0)
			}
		}
		j.udp.close()
		j.life.Unlock()
		next := join(t, addr(32), addr(33))
		if at := next.lease(t) / rangesOfPlace; at != p || next.udp.bound != 0 || (next.udp.found == 2) == entered {
			t.Errorf("place %d, want %d; %d sockets found and %d bound", at, p, next.udp.found, next.udp.bound)
		}
		j.life, _ = sys.LockByte(j.dir.fd, placesByte+placesLocks) // for Close
	}
}

// Sockets behind all places, which a process has had bound that is dead, are dropped: the next one
// takes a place that is free.
func TestPlacesBehindAll(t *testing.T) {
	a, b := join(t, addr(60)), join(t, addr(60))
	a.buried(t, startWith(t, childEnv+"="+addr(60).String(), -1, modeEnv+"=bound0"))
	b.udp.close()
	_ = b.Close()
	u := udp{addrs: []netip.Addr{addr(60)}}
	defer u.close()
	m, err := Join(Config{Addrs: u.addrs, Limits: manyObjects(), Listen: func(w *Sockets) (int, error) {
		p, err := u.listen(w)
		if w.Adopt == nil {
			p = sys.NumPlaces
		}
		return p, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = m.Close() }()
	if u.found != 1 || u.bound != 0 || m.places.place != 1 {
		t.Errorf("place %d; %d sockets found and %d bound", m.places.place, u.found, u.bound)
	}
	for i := range a.dir.process {
		if a.dir.process[i].isBinding() {
			t.Errorf("sockets are noted as being bound for entry %d", i)
		}
	}
}

// A process that waits for its turn to take a place waits as long as others get theirs.
func TestLockInTurn(t *testing.T) {
	d := newDirectory(t)
	synctest.Test(t, func(t *testing.T) {
		other := d.lock()
		var got atomic.Pointer[sys.ByteLock]
		go func() { got.Store(d.lock()) }()
		for range 10 {
			time.Sleep(lockTime * 2 / 3)
			d.turns[0].Add(1) // as if other processes took the lock
			if got.Load() != nil {
				t.Fatal("it does not wait")
			}
		}
		other.Unlock()
		time.Sleep(lockTime / 2)
		l := got.Load()
		if l == nil || d.turns[0].Load() != 12 {
			t.Fatalf("it has got %v, turn %d", l, d.turns[0].Load())
		}
		l.Unlock()
	})
}

// If the holder of the lock is stopped, the others take places one at a time all the same.
func TestLockHolderStopped(t *testing.T) {
	d := newDirectory(t)
	synctest.Test(t, func(t *testing.T) {
		for stopped := range placesLocks {
			l, err := sys.LockByte(d.fd, placesByte+int64(stopped))
			if l == nil || err != nil {
				t.Fatal(l, err)
			}
			defer l.Unlock()
			var wg sync.WaitGroup
			var holders, with atomic.Int32
			for range 20 {
				wg.Go(func() {
					l := d.lock()
					if l == nil {
						return
					}
					with.Add(1)
					if n := holders.Add(1); n != 1 {
						t.Errorf("%d have the lock", n)
					}
					time.Sleep(lockTime / 3)
					holders.Add(-1)
					l.Unlock()
				})
			}
			wg.Wait()
			want := int32(20)
			if stopped == placesLocks-1 { // of all locks
				want = 0
			}
			if with.Load() != want {
				t.Errorf("%d stopped: %d have got a lock, want %d", stopped+1, with.Load(), want)
			}
		}
	})
}

func newDirectory(t *testing.T) *directory {
	t.Helper()
	d, err := createDirectory(addr(61), mem.RandomPermKey(), [2]uint64{1, 2}, manyObjects())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = d.close() })
	return d
}

// waiting returns how many bytes of packets the socket of a place holds.
func (j *joined) waiting(t *testing.T, place uint32) (bytes int) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/udp")
	if err != nil {
		t.Fatal(err)
	}
	inode := fmt.Sprint(j.dir.place[place].socket[0].Load())
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 9 && f[9] == inode {
			if _, err := fmt.Sscanf(f[4], "%x:%x", new(int), &bytes); err != nil {
				t.Fatal(err)
			}
			return bytes
		}
	}
	t.Fatalf("no socket %s", inode)
	return 0
}

// flood sends packets to a place.
func flood(t *testing.T, a netip.Addr, place uint32, n int) {
	t.Helper()
	tx, err := net.Dial("udp", netip.AddrPortFrom(a, 4791).String())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Close()
	for i := range n {
		var b [1000]byte
		binary.BigEndian.PutUint32(b[4:], sys.PlaceNumber(place, uint32(i)))
		if _, err := tx.Write(b[:]); err != nil {
			t.Fatal(err)
		}
	}
}

// received returns how many packets a process's socket has.
func (j *joined) received() (n int) {
	b := sys.NewRecvBatch(1, 1<<16)
	for k := 1; k > 0; n += k {
		if k, _ = j.udp.socks[0].Recv(b, 1); k <= 0 {
			return n
		}
	}
	return n
}

// The sockets of a process that has left, or was killed, hold no memory, and the process that takes
// them over gets no packet that was for that one.
func TestPlacesQuiet(t *testing.T) {
	a := join(t, addr(34))
	const many = 500 // more than the buffer of a socket holds here
	for range 3 {    // each time with the same socket
		killed := start(t, addr(34), -1)
		killed.expect(t, "slot")
		id := a.of(t, killed)
		_ = killed.cmd.Process.Kill()
		a.buried(t, killed)
		flood(t, addr(34), 1, many)
		if a.waiting(t, 1) == 0 {
			t.Fatal("the socket of a killed process does not receive")
		}
		a.Gone(id.slot())
		eventually(t, "the socket holds nothing", func() bool { return a.waiting(t, 1) == 0 })
		flood(t, addr(34), 1, many)
		if n := a.waiting(t, 1); n != 0 {
			t.Errorf("the socket of a dead process holds %d bytes", n)
		}

		again := start(t, addr(34), -1)
		again.expect(t, "slot")
		if a.dir.place[1].holder.Load() != uint64(a.of(t, again)) {
			t.Error("another place")
		}
		_ = again.cmd.Process.Kill()
		a.buried(t, again)
		flood(t, addr(34), 1, many)
		j := join(t, addr(34)) // notices the death by itself
		if p := j.lease(t) / rangesOfPlace; p != 1 {
			t.Fatalf("place %d", p)
		}
		drops, err := j.udp.socks[0].Overflows()
		if n := j.received(); n != 0 || drops != 0 || err != nil {
			t.Errorf("%d packets of an earlier process, %d dropped, %v", n, drops, err)
		}
		flood(t, addr(34), 1, 10)
		eventually(t, "it receives", func() bool { return a.waiting(t, 1) > 0 })
		if n := j.received(); n != 10 {
			t.Errorf("%d packets", n)
		}
		j.udp.close()
		_ = j.Close()
		flood(t, addr(34), 1, many)
		if n := a.waiting(t, 1); n != 0 {
			t.Errorf("the socket of a process that has left holds %d bytes", n)
		}
	}
}

// Another program's socket of the same user in the group moves places when it closes. Then no
// process gets the place of another one.
func TestPlacesMoved(t *testing.T) {
	foreign, err := sys.OpenUDP(netip.AddrPortFrom(addr(29), 4791), sys.UDPOptions{Held: func(int) error { return nil }})
	if err != nil {
		t.Fatal(err)
	}
	a, b := join(t, addr(29)), join(t, addr(29)) // places 1 and 2
	_ = foreign.Close()                          // b is at place 0 now
	if pa, pb := a.lease(t)/rangesOfPlace, b.lease(t)/rangesOfPlace; pa != 1 || pb != 2 {
		t.Errorf("places %d and %d", pa, pb)
	}
	u := udp{addrs: []netip.Addr{addr(29)}}
	defer u.close()
	if m, err := Join(Config{Addrs: u.addrs, Listen: u.listen}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("%v", err)
		_ = m.Close()
	}
}

// A device with many addresses is shared as one with a single address.
func TestManyAddresses(t *testing.T) {
	var addrs []netip.Addr
	for i := range byte(maxAddrs + 2) {
		addrs = append(addrs, addr(100+i))
	}
	a, b := join(t, addrs...), join(t, addrs...)
	if a.ID() != b.ID() || a.lease(t)/rangesOfPlace == b.lease(t)/rangesOfPlace {
		t.Error("they do not share the device")
	}
}

// The last process leaves while another one comes. The places are then what the kernel has.
func TestLastLeaves(t *testing.T) {
	for i := range 100 {
		last := join(t, addr(30))
		var wg sync.WaitGroup
		wg.Go(func() {
			last.udp.close()
			_ = last.Close()
		})
		if i%2 == 0 {
			runtime.Gosched()
		}
		next := join(t, addr(30))
		wg.Wait()
		third := join(t, addr(30))
		for _, j := range []*joined{next, third} {
			at, err := j.udp.socks[0].FindPlace(0, random())
			if want := j.lease(t) / rangesOfPlace; err != nil || at != want {
				t.Fatalf("round %d: place %d, %v, and numbers of place %d", i, at, err, want)
			}
			j.udp.close()
			_ = j.Close()
		}
	}
}

// A process that needs more numbers than a place has gets another place.
func TestManyRanges(t *testing.T) {
	j := join(t, addr(26))
	seen := map[uint32]bool{}
	for range 2*rangesOfPlace + 1 {
		seen[j.lease(t)] = true
	}
	if len(seen) != 2*rangesOfPlace+1 || j.udp.bound != 3 {
		t.Errorf("%d ranges, %d sockets bound", len(seen), j.udp.bound)
	}
}

// A process gets places for more receivers, each with numbers of its own, as long as half of the
// device's places are free.
func TestMorePlaces(t *testing.T) {
	j := join(t, addr(31))
	seen := map[uint32]bool{j.lease(t) / rangesOfPlace: true}
	for range 3 {
		l, err := j.MorePlaces(j.udp.listen)
		if err != nil {
			t.Fatal(err)
		}
		r, err := l.Lease()
		if err != nil || seen[r/rangesOfPlace] {
			t.Errorf("range %d, %v", r, err)
		}
		seen[r/rangesOfPlace] = true
	}
	for p := len(seen); p < sys.NumPlaces/2; p++ {
		j.dir.place[p].holder.Store(uint64(j.self))
	}
	if _, err := j.MorePlaces(j.udp.listen); !errors.Is(err, syscall.EUSERS) {
		t.Errorf("with half of the places in use: %v", err)
	}
	j.dir.place[len(seen)].holder.Store(0) // the one that the kernel gives next
	if _, err := j.MorePlaces(j.udp.listen); err != nil {
		t.Errorf("with one place less in use: %v", err)
	}
}
