package p2p

import (
	"bytes"
	"context"
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/verbs"
)

// station is a machine with a software GPU and an RDMA device behind one switch, a second RDMA
// device on a root port, and a disk behind the switch.
type station struct {
	t                     *Topology
	gpu, near, away, disk Address
}

func newStation(t *testing.T) *station {
	t.Helper()
	b := NewBuilder(intelMax)
	h := b.HostBridge(q35)
	ports := h.RootPort(nil).Switch(3, nil)
	card := ports[0].Endpoint("card0", idGPU, ClassGPU, BAR{Index: 1, Size: 64 << 20, Is64: true, Prefetchable: true})
	near := ports[1].Endpoint("verbena0", idVerbena, ClassInfiniBand, BAR{Index: 2, Size: 1 << 20, Is64: true, Prefetchable: true})
	disk := ports[2].Endpoint("nvme0", idNVMe, ClassNVMe, regs())
	away := h.RootPort(nil).Endpoint("verbena1", idVerbena, ClassInfiniBand)
	top := must(b.Build())(t)
	return &station{top, card.Address(), near.Address(), away.Address(), disk.Address()}
}

func longTime(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Device memory of an RDMA device is a provider: a disk writes into it, and it vanishes when it is
// freed.
func TestDeviceMemoryAsProvider(t *testing.T) {
	s := newStation(t)
	dev := must(verbs.Open("", nil))(t)
	defer func() { check(t, dev.Close()) }()
	dm := must(dev.AllocDM(64<<10, 0))(t)
	defer func() { check(t, dm.Close()) }()
	buf := must(dm.DMABuf())(t)
	p := must(NewProvider(s.t, s.near))(t)
	ctx := longTime(t)
	wantErr(t, "no buffer", p.AddBuffer(ctx, 2, 0, nil), syscall.EINVAL, "")
	wantErr(t, "outside the BAR", p.AddBuffer(ctx, 2, 1<<20-4096, buf), syscall.EINVAL, "in BAR 2")
	wantErr(t, "not aligned", p.AddBuffer(ctx, 2, 100, buf), syscall.EINVAL, "")
	check(t, p.AddBuffer(ctx, 2, 8192, buf))
	wantErr(t, "the same place again", p.AddBuffer(ctx, 2, 4096, buf), syscall.ENOMEM, "added already")
	buf.Put()
	p.Publish(true)

	var gone int
	disk := NewClient(s.t, s.disk, &ClientConfig{Gone: func(*Mapping) { gone++ }})
	g := must(p.Alloc(10_000))(t)
	m := must(disk.Map(Segment{Peer: g, Offset: 5, Length: 9_000}))(t)
	rdma, _ := s.t.Function(s.near)
	if d := m.DMA(); d[0].Path != PathBus || d[0].Address != uint64(rdma.BARs[0].Address)+8192+5 {
		t.Errorf("%+v", d)
	}
	data := bytes.Repeat([]byte("staging"), 1286)[:9_000]
	check(t, m.Access(func(b [][]byte) error {
		for at := 0; len(b) > 0; b = b[1:] {
			at += copy(b[0], data[at:])
		}
		return nil
	}))
	got := make([]byte, 9_000)
	must(dm.ReadAt(got, 5))(t)
	if !bytes.Equal(got, data) {
		t.Error("the device memory does not have what the disk has written")
	}
	check(t, dm.Close()) // revokes
	if gone != 1 || p.Published() {
		t.Errorf("told %d times, published: %v", gone, p.Published())
	}
	wantErr(t, "an access", m.Access(func([][]byte) error { return nil }), syscall.ENODEV, "vanished")
	_, err := p.Alloc(1)
	wantErr(t, "Alloc", err, syscall.ENODEV, "vanished")
	m.Unmap()
	check(t, g.Free())
	p.Remove()
}

// A software GPU's memory is a provider, and stays in VRAM meanwhile.
func TestGPUMemoryAsProvider(t *testing.T) {
	s := newStation(t)
	places := NewPlaces(s.t)
	dev := must(gpu.Open("soft:0", &gpu.Config{VRAM: 4 << 20, Distance: places.DistanceFunc(s.gpu)}))(t)
	defer func() { check(t, dev.Close()) }()
	b := must(dev.Alloc(1 << 20))(t)
	defer func() { check(t, b.Free()) }()
	buf, off, err := b.DMABuf()
	check(t, err)
	p := must(NewProvider(s.t, s.gpu))(t)
	check(t, p.AddBuffer(longTime(t), 1, off, buf))
	buf.Put()
	p.Publish(true)
	o := NewOrchestrator(s.t, nil)
	check(t, o.AddProvider(p))
	var got []byte
	in, out, err := o.Do(Transfer{
		From: NewClient(s.t, s.disk, nil), To: NewClient(s.t, s.near, nil), Length: 6,
		Produce: func(b [][]byte) error { copy(b[0], "to GPU"); return nil },
		Consume: func(b [][]byte) error { got = bytes.Clone(b[0]); return nil },
	})
	check(t, err)
	vram := make([]byte, 6)
	must(b.ReadAt(vram, 0))(t)
	if in != PathBus || out != PathBus || string(got) != "to GPU" || string(vram) != "to GPU" || !b.Resident() {
		t.Errorf("%q by %v and %v, %q in VRAM, resident: %v", got, in, out, vram, b.Resident())
	}
	p.Remove()
}

// A software GPU whose distances come from a topology: a device behind the same switch accesses
// VRAM, one on another root port moves the memory to system memory.
func TestDistanceOfGPU(t *testing.T) {
	s := newStation(t)
	places := NewPlaces(s.t)
	d := must(gpu.Open("soft:0", &gpu.Config{VRAM: 4 << 20, Distance: places.DistanceFunc(s.gpu)}))(t)
	defer func() { check(t, d.Close()) }()
	second := must(gpu.Open("soft:1", &gpu.Config{VRAM: 4 << 20}))(t)
	defer func() { check(t, second.Close()) }()
	b := must(d.Alloc(1 << 20))(t)
	defer func() { check(t, b.Free()) }()

	near, away, stray := must(verbs.Open("", nil))(t), must(verbs.Open("", nil))(t), must(verbs.Open("", nil))(t)
	check(t, places.Set(near, s.near))
	check(t, places.Set(away, s.away))
	check(t, places.Set(second, s.disk))
	wantErr(t, "nowhere", places.Set(near, Address{Bus: 99}), syscall.ENODEV, "")
	wantErr(t, "no device", places.Set(nil, s.near), syscall.EINVAL, "")
	wantErr(t, "a device that cannot be compared", places.Set([]int{1}, s.near), syscall.EINVAL, "")
	for _, tt := range []struct {
		dev  *verbs.Device
		want bool
	}{{near, true}, {away, false}, {stray, false}} {
		check(t, b.Prefetch(longTime(t)))
		pd := must(tt.dev.AllocPD())(t)
		mr := must(pd.RegGPU(b, verbs.AccessLocalWrite))(t)
		if b.Resident() != tt.want {
			t.Errorf("%v: in VRAM %v, want %v", tt.dev.Addr(), b.Resident(), tt.want)
		}
		check(t, mr.Close())
		check(t, pd.Close())
		check(t, tt.dev.Close())
	}
	distance := places.DistanceFunc(s.gpu)
	if n := distance(second); n != 4 {
		t.Errorf("the second GPU is at %d", n)
	}
	if n := distance([]int{1}); n != -1 {
		t.Errorf("a device that cannot be compared is at %d", n)
	}
	if n := s.t.DistanceFunc(s.gpu, s.near)("whoever"); n != 4 {
		t.Errorf("between two places: %d", n)
	}
}

// An exporter that refuses leaves nothing behind.
func TestBufferRefused(t *testing.T) {
	s := newStation(t)
	attached := 0
	buf := must(dmabuf.Export(dmabuf.Config{Size: 1 << 16, Exporter: "refuses", Ops: dmabuf.Ops{
		Attach:  func(*dmabuf.Attachment) error { attached++; return nil },
		Detach:  func(*dmabuf.Attachment) { attached-- },
		Map:     func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) { return nil, syscall.EIO },
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
		Release: func(*dmabuf.Buffer) {},
	}}))(t)
	defer buf.Put()
	p := must(NewProvider(s.t, s.gpu))(t)
	if err := p.AddBuffer(longTime(t), 1, 0, buf); !errors.Is(err, syscall.EIO) || attached != 0 || p.Size() != 0 {
		t.Errorf("%v, attached: %d", err, attached)
	}
	p.Remove()
	if err := p.AddBuffer(longTime(t), 1, 0, buf); err == nil || attached != 0 {
		t.Errorf("after Remove: %v, attached: %d", err, attached)
	}
}

// TestStaging is device memory as the staging buffer of a peer device: a disk writes into the memory of
// an RDMA device, which sends it from there to another host; and the other way round. No byte is in
// system memory on the way.
func TestStaging(t *testing.T) {
	const n = 32 << 10
	s := newStation(t)
	near, host := must(verbs.Open("", nil))(t), must(verbs.Open("", nil))(t)
	defer func() { check(t, near.Close()); check(t, host.Close()) }()
	dm := must(near.AllocDM(n, 0))(t)
	defer func() { check(t, dm.Close()) }()
	pd, hostPD := must(near.AllocPD())(t), must(host.AllocPD())(t)
	defer func() { check(t, pd.Close()); check(t, hostPD.Close()) }()
	staged := must(pd.RegDMMR(dm, 0, n, verbs.AccessLocalWrite|verbs.AccessZeroBased))(t)
	defer func() { check(t, staged.Close()) }()
	remote := make([]byte, n)
	remoteMR := must(hostPD.RegMR(remote, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessRemoteRead))(t)
	defer func() { check(t, remoteMR.Close()) }()
	cq, hostCQ := must(near.CreateCQ(4, nil))(t), must(host.CreateCQ(4, nil))(t)
	defer func() { check(t, cq.Close()); check(t, hostCQ.Close()) }()
	limits := verbs.QPCap{MaxSendWR: 1, MaxRecvWR: 1, MaxSendSGE: 1}
	qp := must(pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: cq, RecvCQ: cq, Cap: limits}))(t)
	hostQP := must(hostPD.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: hostCQ, RecvCQ: hostCQ, Cap: limits}))(t)
	defer func() { check(t, qp.Close()); check(t, hostQP.Close()) }()
	check(t, qp.Connect(hostQP.Endpoint(), nil))
	check(t, hostQP.Connect(qp.Endpoint(), nil))
	request := func(op verbs.Opcode) error {
		if _, err := qp.PostSend([]verbs.SendWR{{Op: op, Flags: verbs.SendSignaled, SGL: []verbs.SGE{staged.SGE(0, n)}, RemoteAddr: remoteMR.Addr(), RKey: remoteMR.RKey()}}); err != nil {
			return err
		}
		for wc := make([]verbs.WC, 1); ; {
			if k, err := cq.Poll(wc); err != nil {
				return err
			} else if k == 1 {
				return wc[0].Err()
			}
		}
	}

	buf := must(dm.DMABuf())(t)
	p := must(NewProvider(s.t, s.near))(t)
	check(t, p.AddBuffer(longTime(t), 2, 0, buf))
	buf.Put()
	defer p.Remove()
	p.Publish(true)
	o := NewOrchestrator(s.t, nil)
	check(t, o.AddProvider(p))
	disk, adapter := NewClient(s.t, s.disk, nil), NewClient(s.t, s.near, nil)
	stored := bytes.Repeat([]byte("from the disk, "), n)[:n]
	out, in, err := o.Do(Transfer{From: disk, To: adapter, Length: n,
		Produce: func(b [][]byte) error { copy(b[0], stored); return nil },
		Consume: func([][]byte) error { return request(verbs.OpRDMAWrite) }, // the device reads its own memory
	})
	check(t, err)
	if !bytes.Equal(remote, stored) || out != PathBus || in != PathBus {
		t.Errorf("the other host has %q, by %v and %v", remote[:20], out, in)
	}
	copy(remote, bytes.Repeat([]byte("to the disk, "), n))
	_, _, err = o.Do(Transfer{From: adapter, To: disk, Length: n,
		Produce: func([][]byte) error { return request(verbs.OpRDMARead) },
		Consume: func(b [][]byte) error { copy(stored, b[0]); return nil },
	})
	check(t, err)
	if st := o.Stats(); !bytes.Equal(remote, stored) || st.SystemBytes != 0 || st.BusBytes != 4*n || st.Transfers != 2 {
		t.Errorf("the disk has %q, %+v", stored[:20], st)
	}
}
