package driver_test

import (
	"context"
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/pci"
)

// A controller in software with a disk of 1 MiB, and a driver that writes to it.
func Example() {
	ctx := context.Background()
	disk, err := nvme.NewMemory(1<<20, 4096)
	if err != nil {
		log.Fatal(err)
	}
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.org.example:disk", Model: "Example"})
	if err != nil {
		log.Fatal(err)
	}
	if err := sub.AddNamespace(1, disk); err != nil {
		log.Fatal(err)
	}
	bus := new(pci.Space)
	host := driver.NewHostMemory(bus)
	model, err := pci.New(pci.Config{Subsystem: sub, Bus: bus})
	if err != nil {
		log.Fatal(err)
	}
	defer model.Close()

	c, err := driver.Open(model, host, nil)
	if err != nil {
		log.Fatal(err)
	}
	defer c.Close()
	list, err := c.Namespaces(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(c.Info().Model, list[0].Blocks, "blocks of", list[0].BlockSize)
	q, err := c.NewQueue(ctx, driver.QueueConfig{})
	if err != nil {
		log.Fatal(err)
	}
	data, err := host.Alloc(4096)
	if err != nil {
		log.Fatal(err)
	}
	copy(data.Bytes, "hello, disk")
	if err := q.Write(ctx, list[0], 7, data); err != nil {
		log.Fatal(err)
	}
	clear(data.Bytes)
	if err := q.Read(ctx, list[0], 7, data); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s\n", data.Bytes[:11])
	fmt.Println(q.Read(ctx, list[0], 256, data))
	// Output:
	// Example 256 blocks of 4096
	// hello, disk
	// read: LBA out of range, do not retry
}
