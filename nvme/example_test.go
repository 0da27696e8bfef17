package nvme_test

import (
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/nvme"
)

// A disk of 1 MiB in memory, a controller, and two commands as a transport brings them.
func Example() {
	disk, err := nvme.NewMemory(1<<20, 4096)
	if err != nil {
		log.Fatal(err)
	}
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.org.example:disk"})
	if err != nil {
		log.Fatal(err)
	}
	if err := sub.AddNamespace(1, disk); err != nil {
		log.Fatal(err)
	}
	ctrl, err := sub.NewController(nvme.ControllerConfig{Transport: nvme.TransportRDMA, HostNQN: "nqn.2026-01.org.example:host"})
	if err != nil {
		log.Fatal(err)
	}
	defer ctrl.Close()

	read := nvme.Command{Opcode: nvme.IORead, CID: 1, NSID: 1}
	read.SetLBA(255, 1)
	n, dir, _ := ctrl.Transfer(false, &read)
	fmt.Println(n, "bytes", dir)
	done, _ := ctrl.Execute(false, &read, [][]byte{make([]byte, n)})
	fmt.Println(done.Status)

	read.SetLBA(256, 1)
	_, _, st := ctrl.Transfer(false, &read)
	fmt.Println(st)
	// Output:
	// 4096 bytes to the host
	// success
	// LBA out of range, do not retry
}
