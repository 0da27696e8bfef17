package mem_test

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
)

var paging mem.Paging

// On-demand memory passes the suite: slices of the Go heap, mappings of every
// sort, and the whole address space under one key.
func TestConformanceOnDemand(t *testing.T) {
	for _, kind := range []memtest.Constructor{
		{Name: "on-demand heap", New: onDemandHeap},
		{Name: "on-demand mmap", New: onDemandMmap},
		{Name: "on-demand memfd", New: onDemandMemfd},
		{Name: "implicit", New: implicitMmap},
	} {
		kind.Access = ib.AccessOnDemand
		memtest.Run(t, kind)
	}
}

// part is a part of the address space, to test it as if it were all.
type part struct {
	*mem.OnDemand
	base, n uint64
}

func (p part) Len() uint64 { return p.n }

func (p part) Run(off, n uint64, acc ib.Access) ([]byte, mem.FaultKind) {
	return p.OnDemand.Run(p.base+off, n, acc)
}

func (p part) Gone(off, n uint64, acc ib.Access) mem.FaultKind {
	return p.OnDemand.Gone(p.base+off, n, acc)
}

func (p part) Await(off, n uint64, acc ib.Access) mem.FaultKind {
	return p.OnDemand.Await(p.base+off, n, acc)
}

func implicitMmap(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	b := mmap(tb, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	m, err := mem.NewImplicit(access, &paging)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: part{m, uint64(addrOf(b)), n}, Bytes: b, Free: func() { unix.Munmap(b) }}
}

func onDemandHeap(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	b := make([]byte, n)
	m, err := mem.NewOnDemandBytes(b, access, &paging)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: m, Bytes: b}
}

func onDemandMmap(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	b := mmap(tb, -1, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	m, err := mem.NewOnDemand(addrOf(b), n, access, &paging)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: m, Bytes: b, Free: func() { unix.Munmap(b) }}
}

func onDemandMemfd(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
	fd := memfd(tb, n)
	defer unix.Close(fd)
	registered := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	seen := mmap(tb, fd, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	m, err := mem.NewOnDemand(addrOf(registered), n, access, &paging)
	if err != nil {
		tb.Fatal(err)
	}
	return memtest.Memory{Backing: m, Bytes: seen, Free: func() {
		unix.Munmap(registered)
		unix.Munmap(seen)
	}}
}
