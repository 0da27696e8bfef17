package gpu

import (
	"bytes"
	"math"
	"runtime/debug"
	"sync"
	"syscall"
	"testing"
)

const mib = 1 << 20

func TestOpen(t *testing.T) {
	for _, name := range []string{"", "soft", "soft:", "soft:-1", "soft:64", "soft:00", "soft:0x1", "cuda:0", "hard:0"} {
		_, err := Open(name, nil)
		wantErr(t, name, err, syscall.ENODEV)
	}
	for _, cfg := range []Config{{VRAM: math.MaxUint64}, {Host: math.MaxUint64}, {BAR: 3 << 20}, {BAR: 4096}, {Engines: -1}, {Engines: 65}, {Costs: Costs{BAR: Cost{Latency: -1}}}} {
		_, err := Open("soft:0", &cfg)
		wantErr(t, "a configuration that cannot be", err, syscall.EINVAL)
	}
	cfg := Config{VRAM: 4*mib - 5}
	a := must[*Device](t)(Open("soft:0", &cfg))
	if got := a.Config(); got.VRAM != 4*mib || got.Host != 12*mib || a.BAR() != 4*mib || a.Name() != "soft:0" {
		t.Errorf("%s is %+v", a.Name(), got)
	}
	_, err := Open("soft:0", &Config{VRAM: 8 * mib})
	wantErr(t, "another configuration", err, syscall.EBUSY)
	b := must[*Device](t)(Open("soft:0", &cfg))
	c := must[*Device](t)(Open("soft:1", nil))
	x := alloc(t, a, 3*mib)
	if s := b.Stats(); s.VRAMFree != mib || s.Objects != 1 {
		t.Errorf("the second device of the GPU sees %+v", s)
	}
	if s := c.Stats(); s.VRAMFree != DefaultVRAM {
		t.Errorf("another GPU has %+v", s)
	}
	check(t, a.Close())
	check(t, a.Close())
	if s := b.Stats(); s.VRAMFree != 4*mib || s.Objects != 0 {
		t.Errorf("after the owner's end there is %+v", s)
	}
	_, err = a.Alloc(1)
	wantErr(t, "Alloc after Close", err, ErrClosed)
	wantErr(t, "Alloc after Close", err, syscall.ENODEV)
	_, err = a.NewStream()
	wantErr(t, "NewStream after Close", err, ErrClosed)
	wantErr(t, "Free after Close", x.Free(), ErrFreed)
	check(t, b.Close())
	check(t, c.Close())
}

// faults reports whether a load of the CPU faults.
func faults(b *byte) (is bool) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { is = recover() != nil }()
	sink = *b
	return
}

var sink byte

// TestCPU: a load from a buffer's address faults but while the buffer is mapped, and the BAR bounds what can be.
func TestCPU(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 8 * mib, BAR: 2 * mib})
	b := alloc(t, d, mib)
	data := random(mib, 1)
	if _, err := b.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	seen := must[[]byte](t)(b.Map())
	if !bytes.Equal(seen, data) || faults(&seen[5]) {
		t.Error("the CPU does not see the memory")
	}
	seen[0]++
	data[0]++
	holds(t, "after a store of the CPU", b, data)
	if p := must[Pointer](t)(Lookup(b.Addr() + 77)); !p.CPU || p.Offset != 77 || p.Base != b.Addr() || p.Size != mib || p.ID != b.ID() || p.GPU != "soft:0" || !p.Resident {
		t.Errorf("the address is of %+v", p)
	}
	if !bytes.Equal(b.Bytes(), data) {
		t.Error("Bytes returns something else")
	}
	check(t, b.Unmap())
	wantErr(t, "Unmap again", b.Unmap(), syscall.EINVAL)
	if !faults(&seen[5]) || b.Bytes() != nil {
		t.Error("the CPU sees memory that is not mapped")
	}
	large := alloc(t, d, 3*mib)
	_, err := large.Map()
	wantErr(t, "Map of more than the BAR", err, ErrBAR)
	wantErr(t, "Pin of more than the BAR", large.Pin(), syscall.ENOMEM)
	check(t, b.Pin())
	two := alloc(t, d, mib)
	check(t, two.Pin())
	three := alloc(t, d, 4096)
	wantErr(t, "Pin when the BAR is full", three.Pin(), ErrBAR)
	check(t, two.Unpin())
	wantErr(t, "Unpin again", two.Unpin(), syscall.EINVAL)
	check(t, three.Pin())
	holds(t, "after moves within the BAR", b, data)

	wantErr(t, "a BAR of 3 MiB", d.ResizeBAR(3*mib), syscall.EINVAL)
	check(t, d.ResizeBAR(4*mib))
	check(t, three.Unpin())
	check(t, large.Pin())
	wantErr(t, "a smaller BAR", d.ResizeBAR(mib), ErrPinned)
	if d.BAR() != 4*mib {
		t.Errorf("the BAR has %d bytes after a change that was refused", d.BAR())
	}
	check(t, large.Free())
	check(t, three.Free())
	_, err = d.AllocWith(5*mib, AllocOptions{CPU: true})
	wantErr(t, "memory for the CPU, more than the BAR", err, ErrOutOfMemory)
	c := must[*Buffer](t)(d.AllocWith(mib, AllocOptions{CPU: true}))
	if faults(&c.Bytes()[mib-1]) {
		t.Error("the CPU does not see memory that was allocated for it")
	}
}

func TestBadMemory(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib, Host: mib})
	for _, n := range []uint64{0, mib + 1, math.MaxUint64, math.MaxUint64 - 4095, 1 << 63} {
		_, err := d.Alloc(n)
		want := error(ErrOutOfMemory)
		if n == 0 {
			want = syscall.EINVAL
		}
		wantErr(t, "Alloc", err, want)
	}
	_, err := d.AllocWith(1, AllocOptions{Placement: 9})
	wantErr(t, "a placement", err, syscall.EINVAL)
	b := alloc(t, d, 10000)
	for _, r := range [][2]uint64{{0, 0}, {10000, 1}, {9999, 2}, {math.MaxUint64, 2}, {1, math.MaxUint64}, {10001, 0}} {
		_, err := b.Sub(r[0], r[1])
		wantErr(t, "Sub", err, ErrRange)
		if r[1] == 0 {
			continue // all of it
		}
		if _, err = d.BufferAt(b.Addr()+r[0], r[1]); err == nil {
			t.Errorf("BufferAt %v", r)
		}
	}
	_, err = b.ReadAt(make([]byte, 2), 9999)
	wantErr(t, "ReadAt", err, ErrRange)
	_, err = b.ReadAt(make([]byte, 2), -1)
	wantErr(t, "ReadAt", err, ErrRange)
	_, err = b.WriteAt(make([]byte, 2), math.MaxInt64)
	wantErr(t, "WriteAt", err, syscall.EFAULT)
	sub := must[*Buffer](t)(b.Sub(5000, 100))
	check(t, b.Free())
	wantErr(t, "Free again", b.Free(), ErrFreed)
	_, err = b.Sub(0, 1)
	wantErr(t, "Sub of what is freed", err, ErrFreed)
	_, err = b.ReadAt(make([]byte, 1), 0)
	wantErr(t, "ReadAt of what is freed", err, ErrFreed)
	wantErr(t, "Pin of what is freed", b.Pin(), ErrFreed)
	_, _, err = b.DMABuf()
	wantErr(t, "DMABuf of what is freed", err, ErrFreed)
	if _, err := sub.WriteAt([]byte("alive"), 95); err != nil {
		t.Errorf("a part of what is freed: %v", err)
	}
	at := must[*Buffer](t)(d.BufferAt(sub.Addr()+95, 0))
	if at.Len() != 10000-5095 {
		t.Errorf("the rest of the object has %d bytes", at.Len())
	}
	holds(t, "by its address", at, []byte("alive"))
	addr := sub.Addr()
	check(t, sub.Free())
	check(t, at.Free())
	for _, a := range []uint64{addr, 0, math.MaxUint64, addr - 5001, 4096} {
		_, err := Lookup(a)
		wantErr(t, "a foreign address", err, ErrForeign)
		_, err = d.BufferAt(a, 1)
		wantErr(t, "a foreign address", err, syscall.EFAULT)
	}
	if again := alloc(t, d, 10000); again.Addr() == addr-5000 {
		t.Error("a freed address comes again at once")
	} else {
		holds(t, "new memory", again, make([]byte, 10000))
	}
	var none *Buffer
	wantErr(t, "nil", none.Free(), syscall.EINVAL)
	wantErr(t, "nil", none.Pin(), syscall.EINVAL)
}

// TestSpent: VRAM and system memory run out together, and freed memory is zero when it comes again.
func TestSpent(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib, Host: mib})
	var all []*Buffer
	for {
		b, err := d.Alloc(64 << 10)
		if err != nil {
			wantErr(t, "too much", err, ErrOutOfMemory)
			break
		}
		if _, err := b.WriteAt(bytes.Repeat([]byte{byte(len(all) + 1)}, 64<<10), 0); err != nil {
			t.Fatal(err)
		}
		all = append(all, b)
	}
	if len(all) != 32 {
		t.Errorf("%d objects of 64 KiB in 2 MiB", len(all))
	}
	for i, b := range all {
		holds(t, "one of many", b, bytes.Repeat([]byte{byte(i + 1)}, 64<<10))
		check(t, b.Free())
	}
	if s := d.Stats(); s.VRAMFree != mib || s.HostFree != mib || s.LargestFree != mib || s.Objects != 0 || s.Resident != 0 {
		t.Errorf("after all is freed there is %+v", s)
	}
	holds(t, "new memory", alloc(t, d, mib), make([]byte, mib))

	no := open(t, "soft:1", Config{VRAM: mib, NoEvict: true})
	alloc(t, no, mib-4096)
	_, err := no.Alloc(4097)
	wantErr(t, "VRAM is full", err, ErrOutOfMemory)
	alloc(t, no, 4096)
}

// TestEviction: what was not used for longest is evicted, pinned objects are not, and all bytes survive.
func TestEviction(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	var all []*Buffer
	var data [][]byte
	for i := range 4 {
		all = append(all, alloc(t, d, mib))
		data = append(data, random(mib, uint64(i)))
		if _, err := all[i].WriteAt(data[i], 0); err != nil {
			t.Fatal(err)
		}
	}
	check(t, all[0].Pin())
	holds(t, "used last", all[1], data[1])
	more := alloc(t, d, mib)
	if all[2].Resident() || !all[0].Resident() || !all[1].Resident() || !all[3].Resident() || !more.Resident() {
		t.Error("not the object that was not used for longest was evicted")
	}
	if s := d.Stats(); s.Evictions != 1 || s.Moves != 1 || s.MovedBytes != mib || s.Resident != 4 {
		t.Errorf("after an eviction: %+v", s)
	}
	holds(t, "the evicted one, served where it lies", all[2], data[2])
	if s := d.Stats(); s.InPlace != 1 || s.Returns != 0 || s.Thrash != 1 {
		t.Errorf("after a use of it: %+v", s)
	}
	holds(t, "once more: now it is used more often than others", all[2], data[2])
	if s := d.Stats(); s.Returns != 1 || !all[2].Resident() {
		t.Errorf("after another use: %+v", s)
	}
	check(t, more.Free())
	for i := range all {
		holds(t, "in the end", all[i], data[i])
	}
	if s := d.Stats(); s.Resident != 4 {
		t.Errorf("with enough VRAM: %+v", s)
	}
	host := must[*Buffer](t)(d.AllocWith(mib, AllocOptions{Placement: InHost}))
	holds(t, "in system memory", host, make([]byte, mib))
	if host.Resident() {
		t.Error("memory that is to lie in system memory lies in VRAM")
	}
}

// TestDefragment: free VRAM becomes one piece, bytes and addresses stay.
func TestDefragment(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib, NoEvict: true})
	var all []*Buffer
	var data [][]byte
	sizes := []uint64{300 << 10, 12 << 10, 700 << 10, 64 << 10, 4096, 500 << 10, 1000 << 10, 800 << 10}
	for i, n := range sizes {
		all = append(all, alloc(t, d, n))
		data = append(data, random(int(n), uint64(i)))
		if _, err := all[i].WriteAt(data[i], 0); err != nil {
			t.Fatal(err)
		}
	}
	for _, i := range []int{0, 2, 4, 6} {
		check(t, all[i].Free())
	}
	before := d.Stats()
	_, err := d.AllocWith(before.VRAMFree, AllocOptions{Contiguous: true})
	wantErr(t, "all that is free, in one piece", err, ErrOutOfMemory)
	// In pieces it is there.
	pieces := alloc(t, d, before.VRAMFree)
	check(t, pieces.Free())
	check(t, d.Defragment(longTime(t)))
	after := d.Stats()
	if after.LargestFree != after.VRAMFree || after.VRAMFree != before.VRAMFree || after.Moves == 0 {
		t.Errorf("the free VRAM is not in one piece: %+v", after)
	}
	for _, i := range []int{1, 3, 5, 7} {
		holds(t, "what was moved", all[i], data[i])
	}
	whole := must[*Buffer](t)(d.AllocWith(before.VRAMFree, AllocOptions{Contiguous: true}))
	holds(t, "new memory", whole, make([]byte, before.VRAMFree))
}

func TestPool(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: mib})
	p := must[*Pool](t)(NewPool(alloc(t, d, 10000)))
	a, b := must[*Buffer](t)(p.Alloc(1)), must[*Buffer](t)(p.Alloc(300))
	if b.Addr()-a.Addr() != 256 {
		t.Errorf("parts at %#x and %#x", a.Addr(), b.Addr())
	}
	_, err := p.Alloc(0)
	wantErr(t, "no bytes", err, syscall.EINVAL)
	for _, n := range []uint64{9985, math.MaxUint64} {
		_, err = p.Alloc(n)
		wantErr(t, "too many", err, ErrOutOfMemory)
	}
	check(t, p.Free(a))
	wantErr(t, "Free again", p.Free(a), ErrFreed)
	if c := must[*Buffer](t)(p.Alloc(256)); c.Addr() != b.Addr()-256 {
		t.Error("a part that was given back does not come again")
	}
	check(t, p.Close())
	check(t, p.Close())
	_, err = p.Alloc(1)
	wantErr(t, "Alloc after Close", err, ErrFreed)
	wantErr(t, "Free after Close", b.Free(), ErrFreed)
	if s := d.Stats(); s.Objects != 0 {
		t.Errorf("%d objects are left", s.Objects)
	}
	_, err = NewPool(alloc(t, d, 255))
	wantErr(t, "a small pool", err, syscall.EINVAL)
}

// TestAtOnce allocates, uses, frees and defragments from several goroutines, with twice as much memory as there is
// VRAM, against a model.
func TestAtOnce(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 2 * mib, Host: 8 * mib})
	start := seed(t)
	var wg sync.WaitGroup
	for g := range uint64(4) {
		wg.Go(func() {
			for round := range uint64(30) {
				var all []*Buffer
				for i := range uint64(4) {
					b, err := d.Alloc(256<<10 - i*5000)
					if err != nil {
						t.Errorf("Alloc: %v", err)
						return
					}
					if _, err := b.WriteAt(random(1000, start+g*1000+round*10+i), int64(i*5000)); err != nil {
						t.Error(err)
					}
					all = append(all, b)
				}
				if round%8 == g {
					if err := d.Defragment(longTime(t)); err != nil {
						t.Errorf("Defragment: %v", err)
					}
				}
				for i, b := range all {
					got := make([]byte, 1000)
					if _, err := b.ReadAt(got, int64(i*5000)); err != nil || !bytes.Equal(got, random(1000, start+g*1000+round*10+uint64(i))) {
						t.Errorf("goroutine %d, round %d, object %d has lost its bytes: %v", g, round, i, err)
					}
					if err := b.Free(); err != nil {
						t.Error(err)
					}
				}
			}
		})
	}
	wg.Wait()
	s := d.Stats()
	if s.Objects != 0 || s.VRAMFree != 2*mib || s.HostFree != 8*mib || s.LargestFree != 2*mib {
		t.Errorf("in the end there is %+v", s)
	}
	if s.Evictions == 0 {
		t.Error("nothing was evicted")
	}
}
