package p2p_test

import (
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/p2p"
)

func Example() {
	b := p2p.NewBuilder(p2p.CPU{Vendor: "GenuineIntel", Family: 6, Model: 106})
	host := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x09a2})
	ports := host.RootPort(nil).Switch(2, nil)
	disk := ports[0].Endpoint("nvme0", p2p.ID{Vendor: 0x1b36, Device: 0x0010}, p2p.ClassNVMe,
		p2p.BAR{Index: 2, Size: 64 << 20, Is64: true, Prefetchable: true}).P2PMem(2, 0, 64<<20)
	card := ports[1].Endpoint("card0", p2p.ID{Vendor: 0x10de, Device: 0x2335}, p2p.ClassGPU)
	t, err := b.Build()
	if err != nil {
		log.Fatal(err)
	}
	v := t.Verdict(disk.Address(), card.Address())
	fmt.Printf("%v, distance %d: %s\n", v.Map, v.Distance, v.Reason)
	// Output: bus address, distance 4: below the common upstream port 0000:01:00.0, and no ACS redirect is on the way
}
