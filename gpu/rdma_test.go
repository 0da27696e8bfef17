package gpu

import (
	"bytes"
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/verbs"
)

// side is a queue pair and what belongs to it.
type side struct {
	t   testing.TB
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide(t testing.TB, cfg *verbs.Config) *side {
	t.Helper()
	s := &side{t: t}
	s.dev = must[*verbs.Device](t)(verbs.Open("", cfg))
	t.Cleanup(func() {
		check(t, s.qp.Close())
		check(t, s.cq.Close())
		check(t, s.pd.Close())
		check(t, s.dev.Close())
	})
	s.pd = must[*verbs.PD](t)(s.dev.AllocPD())
	s.cq = must[*verbs.CQ](t)(s.dev.CreateCQ(256, nil))
	s.qp = must[*verbs.QP](t)(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4}}))
	return s
}

// peers returns two queue pairs that are connected.
func peers(t testing.TB, cfg *verbs.Config) (alice, bob *side) {
	t.Helper()
	alice, bob = newSide(t, cfg), newSide(t, cfg)
	check(t, alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(t, bob.qp.Connect(alice.qp.Endpoint(), nil))
	return alice, bob
}

const all = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic

func (s *side) reg(b *Buffer) *verbs.MR {
	s.t.Helper()
	return must[*verbs.MR](s.t)(s.pd.RegGPU(b, all))
}

func (s *side) post(wrs ...verbs.SendWR) {
	s.t.Helper()
	if _, err := s.qp.PostSend(wrs); err != nil {
		s.t.Fatal(err)
	}
}

// wait waits for the next completion.
func (s *side) wait() verbs.WC {
	s.t.Helper()
	wcs := make([]verbs.WC, 1)
	for {
		n, err := s.cq.Poll(wcs)
		check(s.t, err)
		if n == 1 {
			return wcs[0]
		}
		runtime.Gosched()
	}
}

// do executes one request, and returns how it ends.
func (s *side) do(op verbs.Opcode, local *verbs.MR, off, n int, remote *verbs.MR, at uint64) verbs.WCStatus {
	s.t.Helper()
	s.post(verbs.SendWR{Op: op, Flags: verbs.SendSignaled, SGL: []verbs.SGE{local.SGE(off, n)}, RemoteAddr: remote.Addr() + at, RKey: remote.RKey()})
	wc := s.wait()
	return wc.Status
}

func (s *side) wantDone(what string, got verbs.WCStatus, want verbs.WCStatus) {
	s.t.Helper()
	if got != want {
		s.t.Errorf("%s: %v, should be %v", what, got, want)
	}
}

// TestRegister: a peer writes into VRAM and reads it, wherever it lies, at the GPU's own addresses; what is freed is
// refused.
func TestRegister(t *testing.T) {
	for _, c := range []struct {
		name string
		gpu  Config
		nic  verbs.Config
	}{
		{"full BAR", Config{VRAM: 4 * mib}, verbs.Config{}},
		{"small BAR", Config{VRAM: 4 * mib, BAR: mib}, verbs.Config{}},
		{"pinned", Config{VRAM: 4 * mib}, verbs.Config{PinDMABuf: true}},
		{"no peer", Config{VRAM: 4 * mib, Distance: func(any) int { return -1 }}, verbs.Config{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := open(t, "soft:0", c.gpu)
			alice, bob := peers(t, &c.nic)
			alloc(t, d, 2*mib) // so that the next one lies beyond a small BAR
			whole := alloc(t, d, 300_000)
			b := must[*Buffer](t)(whole.Sub(5000, 200_000))
			mr := bob.reg(b)
			if mr.Addr() != b.Addr() {
				t.Errorf("the region begins at %#x, the buffer at %#x", mr.Addr(), b.Addr())
			}
			data, back := random(200_000, 3), make([]byte, 200_000)
			from, to := must[*verbs.MR](t)(alice.pd.RegMR(data, all)), must[*verbs.MR](t)(alice.pd.RegMR(back, all))
			alice.wantDone("WRITE", alice.do(verbs.OpRDMAWrite, from, 0, 200_000, mr, 0), verbs.WCSuccess)
			holds(t, "what a peer has written", b, data)
			if resident := b.Resident(); resident != (c.name != "no peer") {
				t.Errorf("the memory lies in VRAM: %v", resident)
			}
			err := b.Evict(context.Background())
			if c.name == "pinned" {
				wantErr(t, "Evict of what is pinned", err, ErrPinned)
			} else {
				check(t, err)
				if b.Resident() {
					t.Error("evicted memory lies in VRAM")
				}
			}
			alice.wantDone("READ", alice.do(verbs.OpRDMARead, to, 0, 200_000, mr, 0), verbs.WCSuccess)
			if !bytes.Equal(back, data) {
				t.Error("the peer has read other bytes")
			}
			if resident := b.Resident(); resident != (c.name != "no peer") {
				t.Errorf("after a peer's READ the memory lies in VRAM: %v", resident)
			}
			check(t, b.Free())
			alice.wantDone("READ while another Buffer of the object lives", alice.do(verbs.OpRDMARead, to, 0, 1000, mr, 0), verbs.WCSuccess)
			check(t, whole.Free())
			alice.wantDone("READ of what is freed", alice.do(verbs.OpRDMARead, to, 0, 1000, mr, 0), verbs.WCRemAccessErr)
			if s := d.Stats(); s.Objects != 1 || s.HostFree+s.VRAMFree != s.Host+2*mib {
				t.Errorf("a region keeps memory that is freed: %+v", s)
			}
			check(t, mr.Close())
			_, err = bob.pd.RegGPU(whole, all)
			wantErr(t, "registering what is freed", err, ErrFreed)
			_, err = bob.pd.RegGPU(nil, all)
			wantErr(t, "registering nothing", err, syscall.EINVAL)
			check(t, from.Close())
			check(t, to.Close())
		})
	}
}

// TestAttributes: memory of each kind is registered by its attributes.
func TestAttributes(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	alice, bob := peers(t, nil)
	b := alloc(t, d, 10*page)
	data := random(4*int(page), 5)
	_, err := b.WriteAt(data, int64(page))
	check(t, err)
	buf, off, err := b.DMABuf()
	check(t, err)
	defer buf.Put()
	fd := must[int](t)(buf.FD())
	defer sys.CloseFD(fd)
	host := must[*verbs.MR](t)(bob.pd.AllocMR(4*int(page), 0))
	copy(host.Bytes(), data)
	into := make([]byte, 4*page)
	to := must[*verbs.MR](t)(alice.pd.RegMR(into, verbs.AccessLocalWrite))

	const base = 0x10_0000_0000
	inBuffer := verbs.MRAttr{Length: 4 * page, Access: all, DMABuf: &verbs.DMABufAttr{Buffer: buf, Offset: off + page, Base: base}}
	byFD := inBuffer
	byFD.DMABuf = &verbs.DMABufAttr{FD: fd, Offset: off + page, Base: base}
	for _, c := range []struct {
		what string
		attr verbs.MRAttr
		addr uint64
	}{
		{"the process's", verbs.MRAttr{Length: 4 * page, Access: all, Addr: host.Addr()}, host.Addr()},
		{"a GPU's", verbs.MRAttr{Length: 4 * page, Access: all, Device: d, Addr: b.Addr() + page}, b.Addr() + page},
		{"a dma-buf's", inBuffer, base + off + page},
		{"a descriptor's", byFD, base + off + page},
	} {
		mr := must[*verbs.MR](t)(bob.pd.RegMRAttr(c.attr))
		if mr.Addr() != c.addr || mr.Length() != 4*page {
			t.Errorf("%s memory: %d bytes at %#x, should be at %#x", c.what, mr.Length(), mr.Addr(), c.addr)
		}
		clear(into)
		alice.wantDone(c.what, alice.do(verbs.OpRDMARead, to, 0, 4*int(page), mr, 0), verbs.WCSuccess)
		if !bytes.Equal(into, data) {
			t.Errorf("%s memory: other bytes", c.what)
		}
		check(t, mr.Close())
	}

	for what, c := range map[string]struct {
		attr verbs.MRAttr
		want error
	}{
		"no address":          {verbs.MRAttr{Length: page}, syscall.EFAULT},
		"not the GPU's":       {verbs.MRAttr{Length: page, Device: d, Addr: host.Addr()}, ErrForeign},
		"behind the end":      {verbs.MRAttr{Length: 10*page + 1, Device: d, Addr: b.Addr()}, ErrRange},
		"nothing of a GPU":    {verbs.MRAttr{Device: d, Addr: b.Addr()}, ErrRange},
		"behind the dma-buf":  {verbs.MRAttr{Length: 11 * page, DMABuf: &verbs.DMABufAttr{Buffer: buf}}, syscall.EINVAL},
		"a closed descriptor": {verbs.MRAttr{DMABuf: &verbs.DMABufAttr{FD: -1}}, syscall.EBADF},
		"a base that wraps":   {verbs.MRAttr{Length: page, DMABuf: &verbs.DMABufAttr{Buffer: buf, Offset: page, Base: math.MaxUint64}}, syscall.EINVAL},
	} {
		_, err := bob.pd.RegMRAttr(c.attr)
		wantErr(t, what, err, c.want)
	}
	check(t, to.Close())
	check(t, host.Close())
	check(t, b.Free())
}

// TestParts: a dma-buf of a part has its bytes alone, follows the object when that moves, and ends with it.
func TestParts(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	alice, bob := peers(t, nil)
	whole := alloc(t, d, mib)
	at, n := 3*page, 64*page
	b := must[*Buffer](t)(whole.Sub(at, n))
	var mrs [2]*verbs.MR
	for i := range mrs {
		part := must[*dmabuf.Buffer](t)(b.PartDMABuf())
		if part.Size() != n {
			t.Errorf("the dma-buf has %d bytes, should have %d", part.Size(), n)
		}
		_, err := bob.pd.RegDMABufMR(verbs.DMABuf{Buffer: part, Length: n + 1, IOVA: b.Addr()}, verbs.AccessLocalWrite)
		wantErr(t, "a region that passes the part's end", err, syscall.EINVAL)
		mrs[i] = must[*verbs.MR](t)(bob.pd.RegDMABufMR(verbs.DMABuf{Buffer: part, Offset: page, Length: n - page, IOVA: b.Addr() + page}, all))
		back := must[*Buffer](t)(d.Import(part))
		if back.Addr() != b.Addr() || back.Len() != n {
			t.Errorf("the part comes back as %d bytes at %#x, should be %d at %#x", back.Len(), back.Addr(), n, b.Addr())
		}
		check(t, back.Free())
		part.Put()
	}
	for i, mr := range mrs {
		data := random(int(n-page), uint64(i))
		from := must[*verbs.MR](t)(alice.pd.RegMR(data, all))
		alice.wantDone("WRITE", alice.do(verbs.OpRDMAWrite, from, 0, int(n-page), mr, 0), verbs.WCSuccess)
		holds(t, "the part", must[*Buffer](t)(b.Sub(page, n-page)), data)
		holds(t, "what is before it", must[*Buffer](t)(whole.Sub(0, at+page)), make([]byte, at+page))
		check(t, whole.Evict(longTime(t)))
		alice.wantDone("WRITE after a move", alice.do(verbs.OpRDMAWrite, from, 0, int(n-page), mr, 0), verbs.WCSuccess)
		holds(t, "the part", must[*Buffer](t)(b.Sub(page, n-page)), data)
		check(t, whole.Prefetch(longTime(t)))
		check(t, from.Close())
	}
	_, err := must[*Buffer](t)(whole.Sub(1, page)).PartDMABuf()
	wantErr(t, "a part that begins within a page", err, syscall.EINVAL)
	check(t, d.Close())
	from := must[*verbs.MR](t)(alice.pd.RegMR(make([]byte, 8), all))
	alice.wantDone("WRITE to what is freed", alice.do(verbs.OpRDMAWrite, from, 0, 8, mrs[1], 0), verbs.WCRemAccessErr)
	check(t, from.Close())
	for _, mr := range mrs {
		check(t, mr.Close())
	}
	_, err = b.PartDMABuf()
	wantErr(t, "a part of what is freed", err, ErrFreed)
}

// TestPinBeyondBAR: a device that pins is refused when the BAR is full.
func TestPinBeyondBAR(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib, BAR: mib})
	_, bob := peers(t, &verbs.Config{PinDMABuf: true})
	_, err := bob.pd.RegGPU(alloc(t, d, 2*mib), all)
	wantErr(t, "pinning more than the BAR", err, syscall.ENOMEM)
	a, b := alloc(t, d, mib/2), alloc(t, d, mib/2)
	first, second := bob.reg(a), bob.reg(b)
	_, err = bob.pd.RegGPU(alloc(t, d, 4096), all)
	wantErr(t, "pinning when the BAR is full", err, ErrBAR)
	check(t, first.Close())
	third := bob.reg(alloc(t, d, 4096))
	check(t, second.Close())
	check(t, third.Close())
}

// TestImporters: one who is no peer forces the memory to system memory for all, a static one holds it there, and it comes
// back after them.
func TestImporters(t *testing.T) {
	far := "far"
	d := open(t, "soft:0", Config{VRAM: 4 * mib, Distance: func(device any) int {
		if device == far {
			return -1
		}
		return 2
	}})
	_, bob := peers(t, nil)
	b := alloc(t, d, mib)
	data := random(mib, 9)
	if _, err := b.WriteAt(data, 0); err != nil {
		t.Fatal(err)
	}
	mr := bob.reg(b)
	if !b.Resident() {
		t.Error("a peer does not reach VRAM")
	}
	buf, off, err := b.DMABuf()
	check(t, err)
	if off != 0 || buf.Size() != mib || buf.Exporter() != "softgpu" {
		t.Errorf("a dma-buf of %d bytes, at %d, of %s", buf.Size(), off, buf.Exporter())
	}
	a := must[*dmabuf.Attachment](t)(buf.DynamicAttach(far, dmabuf.Importer{AllowPeer2Peer: true, InvalidateMappings: func(*dmabuf.Attachment) {}}))
	r := buf.Reservation()
	r.Lock()
	table := must[*dmabuf.Table](t)(a.Map(longTime(t), dmabuf.ToDevice))
	a.Unmap(table, dmabuf.ToDevice)
	r.Unlock()
	if b.Resident() {
		t.Error("an importer that is no peer was shown VRAM")
	}
	if mr.PagingStats().Invalidations != 1 {
		t.Error("the region was not told of the move")
	}
	wantErr(t, "Prefetch", b.Prefetch(longTime(t)), nil)
	holds(t, "after the moves", b, data)
	a.Detach()

	static := must[*dmabuf.Attachment](t)(buf.Attach("static"))
	r.Lock()
	table = must[*dmabuf.Table](t)(static.Map(longTime(t), dmabuf.ToDevice))
	r.Unlock()
	if b.Resident() || !bytes.Equal(table.At(0, mib), data) {
		t.Error("a static importer does not see the memory in system memory")
	}
	wantErr(t, "Prefetch of what is mapped for good", b.Prefetch(longTime(t)), ErrPinned)
	wantErr(t, "Pin in VRAM of what is pinned in system memory", b.Pin(), ErrPinned)
	check(t, b.Free())
	if !bytes.Equal(table.At(0, mib), data) {
		t.Error("memory is gone that an importer holds")
	}
	r.Lock()
	static.Unmap(table, dmabuf.ToDevice)
	_, err = static.Map(longTime(t), dmabuf.ToDevice)
	r.Unlock()
	wantErr(t, "Map of what is freed", err, syscall.ENODEV)
	static.Detach()
	check(t, mr.Close())
	buf.Put()
	if s := d.Stats(); s.Objects != 0 || s.VRAMFree != s.VRAM || s.HostFree != s.Host {
		t.Errorf("memory is left: %+v", s)
	}
}

// TestImport: a GPU works on another exporter's memory, which moves and is revoked, and on another GPU's.
func TestImport(t *testing.T) {
	d, other := open(t, "soft:0", Config{VRAM: mib}), open(t, "soft:1", Config{VRAM: mib})
	m := must[*dmabuf.Memory](t)(dmabuf.Alloc(dmabuf.MemoryConfig{Size: 100_000, Segments: 5}))
	b := must[*Buffer](t)(d.Import(m.Buffer()))
	if p := must[Pointer](t)(Lookup(b.Addr() + 5)); !p.Imported || p.Size != 100_000 {
		t.Errorf("the address is of %+v", p)
	}
	s := newStream(t, d)
	data := random(100_000, 4)
	check(t, s.Copy(b.All(), Host(data)))
	check(t, s.Sync(longTime(t)))
	check(t, m.Move(longTime(t)))
	check(t, s.Fill(b.At(0, 100), 1))
	check(t, s.Sync(longTime(t)))
	copy(data, bytes.Repeat([]byte{1}, 100))
	got := make([]byte, 100_000)
	if _, err := m.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
		t.Errorf("the exporter sees other bytes: %v", err)
	}
	wantErr(t, "Pin of imported memory", b.Pin(), syscall.EOPNOTSUPP)
	wantErr(t, "Evict of imported memory", b.Evict(longTime(t)), syscall.EOPNOTSUPP)
	_, err := b.Map()
	wantErr(t, "Map of imported memory", err, syscall.EOPNOTSUPP)

	// Operations go on while the exporter moves the memory.
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			if err := m.Move(context.Background()); err != nil {
				t.Error(err)
				return
			}
		}
	})
	for i := range 200 {
		check(t, s.Fill(b.At(uint64(i*100), 90_000-uint64(i*100)), byte(i)))
		if i%20 == 0 {
			check(t, s.Sync(longTime(t)))
		}
	}
	check(t, s.Sync(longTime(t)))
	stop.Store(true)
	wg.Wait()
	holds(t, "after moves at the same time", must[*Buffer](t)(b.Sub(19900, 1000)), bytes.Repeat([]byte{199}, 1000))

	theirs := alloc(t, other, 5000)
	buf, _, err := theirs.DMABuf()
	check(t, err)
	mine := must[*Buffer](t)(d.Import(buf))
	check(t, s.Copy(mine.At(0, 5000), b.At(19900, 5000)))
	check(t, s.Sync(longTime(t)))
	holds(t, "another GPU's memory", theirs, bytes.Repeat([]byte{199}, 5000))
	check(t, theirs.Free())
	check(t, s.Fill(mine.At(0, 10), 1))
	wantErr(t, "another GPU's memory that is freed", s.Sync(longTime(t)), syscall.ENODEV)
	wantErr(t, "the stream", s.Reset(), syscall.ENODEV)
	again := must[*Buffer](t)(other.Import(buf2(t, alloc(t, other, 77))))
	if again.Len() != 77 || must[Pointer](t)(Lookup(again.Addr())).Imported {
		t.Error("a GPU's own memory does not come back as its own")
	}
	buf.Put()

	check(t, m.Revoke(longTime(t)))
	_, err = b.ReadAt(got, 0)
	wantErr(t, "what is revoked", err, syscall.ENODEV)
	_, err = d.Import(nil)
	wantErr(t, "nothing", err, syscall.EINVAL)
	check(t, b.Free())
	check(t, m.Close())
}

func buf2(t *testing.T, b *Buffer) *dmabuf.Buffer {
	buf, _, err := b.DMABuf()
	check(t, err)
	t.Cleanup(buf.Put)
	return buf
}

// TestPipeline: the producer's stream, the queue pair and the consumer's stream wait for each other by fences; the
// program waits for the end alone.
func TestPipeline(t *testing.T) {
	d, far := open(t, "soft:0", Config{VRAM: mib}), open(t, "soft:1", Config{VRAM: mib})
	alice, bob := peers(t, nil)
	from, to := alloc(t, d, 100_000), alloc(t, far, 100_000)
	fromMR, toMR := alice.reg(from), bob.reg(to)
	produce, consume := newStream(t, d), newStream(t, far)
	sums := make([]byte, 4*8)
	result := alloc(t, far, 4)
	gate := NewFence("go")
	check(t, produce.Wait(gate))
	var read Fence
	for i := range 8 {
		arrived := NewFence("arrived")
		if read != nil {
			check(t, produce.Wait(read))
		}
		check(t, produce.Fill(from.All(), byte(i+1)))
		made := must[*Event](t)(produce.Record())
		alice.post(verbs.SendWR{Op: verbs.OpWaitFence, Fence: made},
			verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{fromMR.SGE(0, 100_000)}, RemoteAddr: toMR.Addr(), RKey: toMR.RKey()},
			verbs.SendWR{Op: verbs.OpSignalFence, Fence: arrived})
		check(t, consume.Wait(arrived))
		check(t, consume.Reduce(result.All(), to.All(), Uint32))
		check(t, consume.Copy(Host(sums[4*i:][:4]), result.All()))
		read = must[*Event](t)(consume.Record())
	}
	gate.Signal(nil)
	check(t, consume.Sync(longTime(t)))
	for i := range uint32(8) {
		var want uint32
		for range 25_000 {
			want += (i + 1) * 0x01010101
		}
		if got := uint32(sums[4*i]) | uint32(sums[4*i+1])<<8 | uint32(sums[4*i+2])<<16 | uint32(sums[4*i+3])<<24; got != want {
			t.Errorf("round %d: the sum is %d, should be %d", i, got, want)
		}
	}

	// A circle by way of the queue pair is refused, and named.
	x, y := NewFence("x"), NewFence("y")
	alice.post(verbs.SendWR{Op: verbs.OpWaitFence, Fence: x}, verbs.SendWR{Op: verbs.OpSignalFence, Fence: y})
	check(t, produce.Wait(y))
	err := produce.Signal(x)
	wantErr(t, "a stream and a queue pair", err, ErrDeadlock)
	if err == nil || !strings.Contains(err.Error(), "QP 0x") {
		t.Errorf("%v names no queue pair", err)
	}
	check(t, consume.Wait(y))
	check(t, consume.Signal(NewFence("other")))
	x.Signal(nil)
	check(t, produce.Sync(longTime(t)))

	p, q := NewFence("p"), NewFence("q")
	check(t, consume.Wait(p))
	check(t, consume.Signal(q))
	n, err := alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpWaitFence, Fence: q}, {Op: verbs.OpSignalFence, Fence: p}})
	wantErr(t, "a queue pair that closes a circle", err, ErrDeadlock)
	wantErr(t, "a queue pair that closes a circle", err, syscall.EDEADLK)
	if n != 1 {
		t.Errorf("request %d is refused, not 1", n)
	}
	p.Signal(nil)
	check(t, consume.Sync(longTime(t)))
	_, err = alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSignalFence, Fence: must[*Event](t)(consume.Record())}})
	wantErr(t, "a queue pair signals an event", err, syscall.EINVAL)
	check(t, fromMR.Close())
	check(t, toMR.Close())
}

// TestRDMAUnderPressure: peers write and read, streams compute, objects are evicted, moved and freed, with twice as much
// memory as there is VRAM. Every byte is compared.
func TestRDMAUnderPressure(t *testing.T) {
	const (
		objects = 32
		size    = 64 << 10
	)
	for _, bar := range []uint64{BARFull, mib} {
		d := open(t, "soft:0", Config{VRAM: max(bar, mib), Host: 4 * mib, BAR: bar})
		start := seed(t)
		var wg sync.WaitGroup
		var stop atomic.Bool
		var bufs []*Buffer
		for range objects {
			bufs = append(bufs, alloc(t, d, size))
		}
		for g := range 2 {
			alice, bob := peers(t, nil)
			mine := bufs[g*objects/2 : (g+1)*objects/2]
			var mrs []*verbs.MR
			for _, b := range mine {
				mrs = append(mrs, bob.reg(b))
			}
			data, back := make([]byte, size), make([]byte, size)
			from, to := must[*verbs.MR](t)(alice.pd.RegMR(data, all)), must[*verbs.MR](t)(alice.pd.RegMR(back, all))
			s := newStream(t, d)
			rng := rand.New(rand.NewPCG(start, uint64(g)))
			wg.Go(func() {
				want := make([][]byte, len(mine))
				for i := range want {
					want[i] = make([]byte, size)
				}
				for round := range 300 {
					i := rng.IntN(len(mine))
					off := rng.IntN(size/2) &^ 3
					n := (1 + rng.IntN(size/2-8)) &^ 3
					if n == 0 {
						n = 4
					}
					copy(data, random(n, start+uint64(round)))
					if st := alice.do(verbs.OpRDMAWrite, from, 0, n, mrs[i], uint64(off)); st != verbs.WCSuccess {
						t.Errorf("WRITE: %v", st)
						return
					}
					copy(want[i][off:], data[:n])
					if round%3 == 0 { // the GPU works on it, too
						j := rng.IntN(len(mine))
						if err := s.Copy(mine[j].At(0, size/2), mine[i].At(0, size/2)); err != nil {
							t.Error(err)
						}
						if err := s.Sync(context.Background()); err != nil {
							t.Error(err)
							return
						}
						copy(want[j], want[i][:size/2])
					}
					j := rng.IntN(len(mine))
					if st := alice.do(verbs.OpRDMARead, to, 0, size, mrs[j], 0); st != verbs.WCSuccess {
						t.Errorf("READ: %v", st)
						return
					}
					if !bytes.Equal(back, want[j]) {
						t.Errorf("round %d: object %d has lost bytes", round, j)
						return
					}
				}
				for _, mr := range append(mrs, from, to) {
					if err := mr.Close(); err != nil {
						t.Error(err)
					}
				}
			})
		}
		var mover sync.WaitGroup
		mover.Go(func() {
			rng := rand.New(rand.NewPCG(start, 99))
			for !stop.Load() {
				b := bufs[rng.IntN(objects)]
				switch rng.IntN(4) {
				case 0:
					_ = b.Evict(context.Background()) // system memory may be full
				case 1:
					_ = b.Prefetch(context.Background()) // VRAM may be in use
				case 2:
					if err := d.Defragment(context.Background()); err != nil {
						t.Error(err)
					}
				case 3:
					if extra, err := d.Alloc(256 << 10); err == nil {
						_ = extra.Free()
					}
				}
				runtime.Gosched()
			}
		})
		wg.Wait()
		stop.Store(true)
		mover.Wait()
		if s := d.Stats(); s.Evictions == 0 || s.Moves < 10 {
			t.Errorf("there was no pressure: %+v", s)
		}
		check(t, d.Close())
	}
}
