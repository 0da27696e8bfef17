package p2p

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/sys"
)

func wantErr(t *testing.T, what string, err error, want syscall.Errno, detail string) {
	t.Helper()
	if !errors.Is(err, want) || !strings.Contains(err.Error(), detail) {
		t.Errorf("%s: %v; want %v and %q", what, err, want, detail)
	}
}

// provider makes the disk of a bench a provider of all of its BAR 2.
func (b *bench) provider(t *testing.T) *Provider {
	t.Helper()
	p := must(NewProvider(b.t, b.disk.Address()))(t)
	check(t, p.AddResource(2, 0, 0, nil))
	p.Publish(true)
	t.Cleanup(p.Remove)
	return p
}

// TestAddResource has the errors of pci_p2pdma_add_resource.
func TestAddResource(t *testing.T) {
	b := NewBuilder(intelMax)
	h := b.HostBridge(q35)
	disk := h.RootPort(nil).Endpoint("", idNVMe, ClassNVMe, regs(), cmb(16<<20))
	disk.Function.BARs = append(disk.Function.BARs, BAR{Index: 4, Size: 1 << 20})
	sealed := h.RootPort(nil).Endpoint("", idNVMe, ClassNVMe, cmb(16<<20))
	sealed.Function.NonMappableBARs = true
	top := must(b.Build())(t)
	s := top.Spec()
	for i := range s.Functions {
		if f := &s.Functions[i]; f.Address == disk.Address() {
			f.BARs = append(f.BARs, BAR{Index: 5, Size: 16, IO: true})
		}
	}
	top = must(New(s))(t)
	p := must(NewProvider(top, disk.Address()))(t)
	for _, tt := range []struct {
		bar          int
		size, offset uint64
		memory       []byte
		want         syscall.Errno
		detail       string
	}{
		{1, 0, 0, nil, syscall.EINVAL, "no memory in BAR 1"},
		{5, 0, 0, nil, syscall.EINVAL, "no memory in BAR 5"},
		{2, 0, 16 << 20, nil, syscall.EINVAL, "offset 0x1000000"},
		{2, 4 << 20, 14 << 20, nil, syscall.EINVAL, "4194304 bytes at 0xe00000"},
		{2, ^uint64(0), 2 << 20, nil, syscall.EINVAL, "in BAR 2"}, // whose sum wraps
		{2, 4 << 20, 1 << 20, nil, syscall.EINVAL, "multiples of 2 MiB"},
		{2, 1 << 20, 0, nil, syscall.EINVAL, "multiples of 2 MiB"},
		{4, 0, 0, nil, syscall.EINVAL, "multiples of 2 MiB"},
		{2, 4 << 20, 0, make([]byte, 7), syscall.EINVAL, "7 bytes of memory"},
	} {
		wantErr(t, "AddResource", p.AddResource(tt.bar, tt.size, tt.offset, tt.memory), tt.want, tt.detail)
	}
	check(t, p.AddResource(2, 4<<20, 4<<20, nil))
	wantErr(t, "the same again", p.AddResource(2, 2<<20, 6<<20, nil), syscall.ENOMEM, "added already")
	check(t, p.AddResource(2, 0, 8<<20, nil)) // the rest
	check(t, p.AddResource(2, 4<<20, 0, nil))
	if p.Size() != 16<<20 || p.Available() != 16<<20 {
		t.Errorf("%d of %d bytes are free", p.Available(), p.Size())
	}
	p.Remove()
	wantErr(t, "after Remove", p.AddResource(2, 0, 0, nil), syscall.ENODEV, "removed")
	q := must(NewProvider(top, sealed.Address()))(t)
	wantErr(t, "BARs that cannot be mapped", q.AddResource(2, 0, 0, nil), syscall.EOPNOTSUPP, "cannot map")
	_, err := NewProvider(top, Address{Bus: 99})
	wantErr(t, "no function", err, syscall.ENODEV, "no PCI function")
}

func TestAlloc(t *testing.T) {
	b := newBench(intelMax, q35, q35).build(t)
	p := b.provider(t)
	_, err := p.Alloc(0)
	wantErr(t, "no bytes", err, syscall.EINVAL, "no bytes")
	_, err = p.Alloc(p.Size() + 1)
	wantErr(t, "too much", err, syscall.ENOMEM, "no 67108865 bytes free")
	_, err = p.Alloc(^uint64(0))
	wantErr(t, "far too much", err, syscall.ENOMEM, "")
	one := must(p.Alloc(1))(t)
	two := must(p.Alloc(4097))(t)
	bar := uint64(b.disk.Function.BARs[1].Address)
	if one.BusAddress() != bar || two.BusAddress() != bar+4096 || two.Len() != 4097 || p.Available() != p.Size()-3*4096 {
		t.Errorf("at %#x and %#x, %d free of %d", one.BusAddress(), two.BusAddress(), p.Available(), p.Size())
	}
	check(t, one.Free())
	check(t, one.Free())
	if again := must(p.Alloc(4096))(t); again.BusAddress() != bar {
		t.Errorf("the first free page is at %#x", again.BusAddress())
	}
	rest := must(p.Alloc(p.Size() - 3*4096))(t)
	_, err = p.Alloc(1)
	wantErr(t, "full", err, syscall.ENOMEM, "")
	check(t, rest.Free())
	p.Publish(false)
	if p.Published() {
		t.Error("still published")
	}
}

// A client gets the bus address behind the switch, the CPU's address through the host bridge, an
// address of the IOMMU if that is on, and a refusal with the reason.
func TestMap(t *testing.T) {
	for _, iommu := range []bool{false, true} {
		b := newBench(intelMax, skylake, q35)
		b.Spec.IOMMU = iommu
		b.build(t)
		s := b.t.Spec()
		for i := range s.Functions { // the CPU and the bus have different addresses
			if f := &s.Functions[i]; f.Address == b.disk.Address() {
				on := f.BARs[1].Address - 1<<44
				f.BARs[1].Bus = &on
			}
		}
		b.t = must(New(s))(t)
		p := b.provider(t)
		g := must(p.Alloc(3 * 4096))(t)
		cpu := uint64(b.disk.Function.BARs[1].Address)
		system := make([]byte, 100)

		near := NewClient(b.t, b.same.Address(), nil)
		m := must(near.Map(Segment{Peer: g, Offset: 10, Length: 4096}, Segment{System: system, Address: 0x7123}))(t)
		d := m.DMA()
		if d[0] != (DMA{cpu - 1<<44 + 10, 4096, PathBus}) || d[1].Path != PathSystem || d[1].Length != 100 || (d[1].Address == 0x7123) == iommu || d[1].Address%4096 != 0x123 {
			t.Errorf("IOMMU %v: %+v", iommu, d)
		}
		check(t, m.Access(func(b [][]byte) error {
			if len(b) != 2 || len(b[0]) != 4096 || &b[1][0] != &system[0] {
				t.Errorf("%d segments", len(b))
			}
			copy(b[0], "through the switch")
			return nil
		}))
		wantErr(t, "free while it is mapped", g.Free(), syscall.EBUSY, "1 clients")
		m.Unmap()
		m.Unmap()
		wantErr(t, "access after Unmap", m.Access(func([][]byte) error { return nil }), syscall.EINVAL, "unmapped")

		other := NewClient(b.t, b.other.Address(), nil)
		var first uint64
		for range 2 {
			m = must(other.Map(Segment{Peer: g, Offset: 10}))(t)
			d = m.DMA()
			if d[0].Path != PathHostBridge || d[0].Length != 3*4096-10 || (d[0].Address == cpu+10) == iommu || d[0].Address%4096 != 10 {
				t.Errorf("IOMMU %v: %+v", iommu, d)
			}
			if first != 0 && d[0].Address != first {
				t.Errorf("addresses are not used again: %#x and %#x", first, d[0].Address)
			}
			first = d[0].Address
			check(t, m.Access(func(b [][]byte) error {
				if !bytes.HasPrefix(b[0], []byte("through the switch")) {
					t.Errorf("%q", b[0][:20])
				}
				return nil
			}))
			m.Unmap()
		}

		far := NewClient(b.t, b.far.Address(), nil)
		_, err := far.Map(Segment{System: system}, Segment{Peer: g})
		wantErr(t, "a host bridge that is not listed", err, syscall.EREMOTEIO, "host bridge pci0000:80, [8086:29c0 at 0000:80:00.0], is not on the kernel's list")
		rxe := NewClient(b.t, Address{Domain: 0xffff}, nil)
		_, err = rxe.Map(Segment{Peer: g})
		wantErr(t, "a client that is no PCI device", err, syscall.EREMOTEIO, "is no PCI function")
		must(rxe.Map(Segment{System: system}))(t).Unmap()

		for _, bad := range [][]Segment{nil, {{}}, {{Peer: g, Offset: 3 * 4096}}, {{Peer: g, Offset: 4096, Length: 2*4096 + 1}}, {{Peer: g, Offset: 1, Length: ^uint64(0)}}} {
			_, err = near.Map(bad...)
			wantErr(t, "a bad list", err, syscall.EINVAL, "")
		}
		check(t, g.Free())
		_, err = near.Map(Segment{Peer: g})
		wantErr(t, "a range that is freed", err, syscall.EINVAL, "freed")
	}
}

// A provider that vanishes: the access under way ends first, then the client is told, and nothing
// works any more.
func TestVanish(t *testing.T) {
	b := newBench(intelMax, q35, q35).build(t)
	p := b.provider(t)
	g := must(p.Alloc(4096))(t)
	var mu sync.Mutex
	var order []string
	note := func(s string) {
		mu.Lock()
		defer mu.Unlock()
		order = append(order, s)
	}
	var told *Mapping
	c := NewClient(b.t, b.same.Address(), &ClientConfig{Gone: func(m *Mapping) {
		told = m
		wantErr(t, "an access by one who is told", m.Access(func([][]byte) error { return nil }), syscall.ENODEV, "vanished")
		note("told")
	}})
	m := must(c.Map(Segment{Peer: g}))(t)
	inside, leave, removed := make(chan bool), make(chan bool), make(chan bool)
	go func() {
		check(t, m.Access(func(b [][]byte) error {
			close(inside)
			<-leave
			b[0][0] = 1 // the memory is still there
			note("access")
			return nil
		}))
	}()
	<-inside
	go func() {
		p.Remove()
		note("removed")
		close(removed)
	}()
	for { // until Remove has begun
		if _, err := p.Alloc(1); errors.Is(err, syscall.ENODEV) {
			break
		}
	}
	close(leave)
	<-removed
	if want := []string{"access", "told", "removed"}; !slices.Equal(order, want) || told != m {
		t.Errorf("%v, want %v", order, want)
	}
	_, err := p.Alloc(1)
	wantErr(t, "Alloc", err, syscall.ENODEV, "vanished")
	_, err = c.Map(Segment{Peer: g})
	wantErr(t, "Map", err, syscall.ENODEV, "vanished")
	wantErr(t, "Access", m.Access(func([][]byte) error { return nil }), syscall.ENODEV, "vanished")
	m.Unmap()
	check(t, g.Free())
	p.Remove()
	if p.Published() || p.Size() != 0 || p.Available() != 0 {
		t.Error("it is still there")
	}
}

func TestOrchestrator(t *testing.T) {
	b := newBench(intelMax, q35, q35).build(t)
	p := b.provider(t)
	from, to := NewClient(b.t, b.nested.Address(), nil), NewClient(b.t, b.same.Address(), nil)
	outside := NewClient(b.t, b.other.Address(), nil)
	data := make([]byte, 100_000)
	r, _ := seeds(t)
	for i := range data {
		data[i] = byte(r.Uint32())
	}
	var got []byte
	transfer := Transfer{From: from, To: to, Length: uint64(len(data)),
		Produce: func(b [][]byte) error { copy(b[0], data); return nil },
		Consume: func(b [][]byte) error { got = bytes.Clone(b[0]); return nil },
	}
	strict := NewOrchestrator(b.t, nil)
	_, _, err := strict.Do(transfer)
	wantErr(t, "without a provider", err, syscall.ENODEV, "no provider has published memory")
	check(t, strict.AddProvider(p))
	wantErr(t, "the same provider again", strict.AddProvider(p), syscall.EEXIST, "")
	if found, sum, err := strict.Find(from, to); err != nil || found != p || sum != 10 {
		t.Errorf("%v at %d: %v", found, sum, err)
	}
	in, out, err := strict.Do(transfer)
	check(t, err)
	if in != PathBus || out != PathBus || !bytes.Equal(got, data) {
		t.Errorf("by %v and %v", in, out)
	}
	bad := transfer
	bad.To = outside
	_, _, err = strict.Do(bad)
	wantErr(t, "a client that is not reached", err, syscall.ENODEV, "not on the kernel's list")
	bad = transfer
	bad.Length = p.Size() + 1
	_, _, err = strict.Do(bad)
	wantErr(t, "more than there is", err, syscall.ENOMEM, "")
	bad = transfer
	bad.Length = 0
	_, _, err = strict.Do(bad)
	wantErr(t, "nothing", err, syscall.EINVAL, "")
	bad = transfer
	broken := errors.New("broken")
	bad.Consume = func([][]byte) error { return broken }
	if _, _, err = strict.Do(bad); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	s := strict.Stats()
	if s.Transfers != 1 || s.BusBytes != 200_000 || s.SystemBytes != 0 || s.Fallbacks != 0 || len(s.Refusals) != 3 {
		t.Errorf("%+v", s)
	}
	if p.Available() != p.Size() {
		t.Errorf("%d bytes are left behind", p.Size()-p.Available())
	}

	// The same with a way out.
	lax := NewOrchestrator(b.t, &OrchestratorConfig{Fallback: true})
	check(t, lax.AddProvider(p))
	bad = transfer
	bad.To, got = outside, nil
	in, out, err = lax.Do(bad)
	check(t, err)
	if in != PathSystem || out != PathSystem || !bytes.Equal(got, data) {
		t.Errorf("by %v and %v", in, out)
	}
	// The provider vanishes between the two legs: the transfer is begun again with system memory.
	got = nil
	again := transfer
	removed, calls := make(chan bool), 0
	again.Produce = func(b [][]byte) error {
		copy(b[0], data)
		if calls++; calls > 1 {
			return nil
		}
		go func() {
			p.Remove() // waits for this access
			close(removed)
		}()
		for {
			if _, err := p.Alloc(1); errors.Is(err, syscall.ENODEV) {
				return nil
			}
		}
	}
	in, out, err = lax.Do(again)
	<-removed
	check(t, err)
	if in != PathSystem || out != PathSystem || calls != 2 || !bytes.Equal(got, data) {
		t.Errorf("by %v and %v, produced %d times", in, out, calls)
	}
	_, _, err = strict.Do(transfer)
	wantErr(t, "after it", err, syscall.ENODEV, "no provider has published memory")
	s = lax.Stats()
	why := strings.Join(slices.Sorted(maps.Keys(s.Refusals)), "; ")
	if s.Fallbacks != 2 || s.Transfers != 2 || s.SystemBytes != 400_000 || s.BusBytes != 0 || len(s.Refusals) != 2 ||
		!strings.Contains(why, "not on the kernel's list") || !strings.Contains(why, "has vanished") {
		t.Errorf("%+v", s)
	}
	if err := NewOrchestrator(newBench(zen, q35, q35).build(t).t, nil).AddProvider(p); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a provider of another topology: %v", err)
	}
}

// However many lengths and clients are refused, the reasons that are counted are few. What system memory cannot hold is
// refused, and does not end the program.
func TestManyRefusals(t *testing.T) {
	b := newBench(zen, q35, q35).build(t)
	p := b.provider(t)
	o := NewOrchestrator(b.t, &OrchestratorConfig{Fallback: true})
	check(t, o.AddProvider(p))
	near := NewClient(b.t, b.same.Address(), nil)
	must(p.Alloc(p.Size()))(t) // all of it
	const calls = 400
	for i := range uint64(calls) {
		check(t, must(o.Alloc(1+i, near))(t).Free())
	}
	s := o.Stats()
	why := fmt.Sprintf("the provider %v has no free range of the length", p.Address())
	if len(s.Refusals) != 1 || s.Refusals[why] != calls || s.Fallbacks != calls {
		t.Errorf("%+v", s)
	}
	for i := range uint32(calls) {
		check(t, must(o.Alloc(1, NewClient(b.t, Address{Domain: 1 + i}, nil)))(t).Free())
	}
	s = o.Stats()
	if len(s.Refusals) != mostReasons+1 || s.Refusals[otherReasons] != calls-mostReasons+1 || s.Fallbacks != 2*calls {
		t.Errorf("%d reasons, %d are others, %d fallbacks", len(s.Refusals), s.Refusals[otherReasons], s.Fallbacks)
	}
	for _, n := range []uint64{sys.TotalMemory() + 1, 1 << 46, 1 << 62, 1<<64 - 1} {
		_, err := o.Alloc(n, near)
		wantErr(t, fmt.Sprintf("%d bytes", n), err, syscall.ENOMEM, "of system memory")
	}
	if got := o.Stats().Fallbacks; got != s.Fallbacks {
		t.Errorf("%d fallbacks that were none", got-s.Fallbacks)
	}
}

// Many transfers while providers come and go: the data is right or the transfer has failed.
func TestStorm(t *testing.T) {
	b := newBench(zen, q35, q35).build(t)
	o := NewOrchestrator(b.t, &OrchestratorConfig{Fallback: true, Seed: 5})
	clients := []*Client{
		NewClient(b.t, b.same.Address(), nil), NewClient(b.t, b.nested.Address(), nil),
		NewClient(b.t, b.other.Address(), nil), NewClient(b.t, b.far.Address(), nil),
	}
	var workers sync.WaitGroup
	done := make(chan bool)
	var churn sync.WaitGroup
	churn.Go(func() {
		for {
			p := must(NewProvider(b.t, b.disk.Address()))(t)
			check(t, p.AddResource(2, 2<<20, 0, nil))
			p.Publish(true)
			check(t, o.AddProvider(p))
			select {
			case <-done:
				p.Remove()
				return
			default:
			}
			for range 50 {
				if g, err := p.Alloc(4096); err == nil {
					check(t, g.Free())
				}
			}
			p.Remove()
		}
	})
	for w := range 4 {
		workers.Go(func() {
			r := rand.New(rand.NewPCG(uint64(w), 9))
			for range 200 {
				mark, n := byte(r.Uint32()), 1+r.Uint64N(20_000)
				var got byte
				_, _, err := o.Do(Transfer{
					From: clients[r.IntN(4)], To: clients[r.IntN(4)], Length: n,
					Produce: func(b [][]byte) error { b[0][n-1] = mark; return nil },
					Consume: func(b [][]byte) error { got = b[0][n-1]; return nil },
				})
				if err != nil || got != mark {
					t.Errorf("%d, want %d: %v", got, mark, err)
				}
			}
		})
	}
	workers.Wait()
	close(done)
	churn.Wait()
	s := o.Stats()
	t.Logf("%+v", s)
	if s.Transfers != 800 {
		t.Errorf("%d transfers", s.Transfers)
	}
}
