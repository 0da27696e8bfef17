package verbs_test

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/verbs"
)

// A region is registered before its memory is in use, and its memory is replaced
// while it is registered: nothing is locked, and nothing is registered again.
func ExamplePD_RegMR_onDemand() {
	alice, bob := newSide(verbs.RC), newSide(verbs.RC)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	caps, err := bob.dev.QueryODPCaps()
	check(err)
	fmt.Println("a peer's WRITE may use on-demand memory:", caps.RC&verbs.ODPWrite != 0)

	page := os.Getpagesize()
	memory, err := unix.MmapPtr(-1, 0, nil, uintptr(8*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	check(err)
	region, err := bob.pd.RegMRAddr(uintptr(memory), uint64(8*page),
		verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessOnDemand)
	check(err)

	greeting := alice.register([]byte("hello"))
	write := func() {
		_, err := alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled,
			SGL: []verbs.SGE{greeting.SGE(0, 5)}, RemoteAddr: region.Addr(), RKey: region.RKey()}})
		check(err)
		check(alice.wait().Err())
	}
	report := func(when string) {
		s := region.PagingStats()
		fmt.Printf("%s: %d page faults for %d pages, %d prefetches for %d pages\n", when, s.PageFaults, s.PageFaultPages, s.Prefetches, s.PrefetchPages)
	}
	write()
	report("first access")
	write()
	report("second access")

	// Another mapping at the same address. The next access is to what is there now.
	_, err = unix.MmapPtr(-1, 0, memory, uintptr(8*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	check(err)
	write()

	// All of it is about to be used.
	check(bob.pd.AdviseMR(verbs.AdvisePrefetchWrite, verbs.AdviseFlush, region.SGE(0, 8*page)))
	s := region.PagingStats()
	fmt.Printf("prefetches: %d; failed resolutions: %d\n", s.Prefetches, s.FailedResolutions)

	bob.close(region)
	check(unix.MunmapPtr(memory, uintptr(8*page)))
	alice.close(greeting)
	// Output:
	// a peer's WRITE may use on-demand memory: true
	// first access: 1 page faults for 1 pages, 0 prefetches for 0 pages
	// second access: 1 page faults for 1 pages, 0 prefetches for 0 pages
	// prefetches: 1; failed resolutions: 0
}

// One key for all of the address space: new mappings just work.
func ExamplePD_RegImplicitMR() {
	alice, bob := newSide(verbs.RC), newSide(verbs.RC)
	check(alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(bob.qp.Connect(alice.qp.Endpoint(), nil))
	everything, err := bob.pd.RegImplicitMR(verbs.AccessLocalWrite | verbs.AccessRemoteWrite | verbs.AccessOnDemand)
	check(err)

	greeting := alice.register([]byte("hello"))
	for range 2 {
		memory, err := unix.MmapPtr(-1, 0, nil, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
		check(err)
		_, err = alice.qp.PostSend([]verbs.SendWR{{Op: verbs.OpRDMAWrite, Flags: verbs.SendSignaled,
			SGL: []verbs.SGE{greeting.SGE(0, 5)}, RemoteAddr: uint64(uintptr(memory)), RKey: everything.RKey()}})
		check(err)
		check(alice.wait().Err())
		fmt.Printf("%s\n", (*[5]byte)(memory)[:])
		check(unix.MunmapPtr(memory, 4096))
	}

	alice.close(greeting)
	bob.close(everything)
	// Output:
	// hello
	// hello
}
