package cuda_test

import (
	"fmt"
	"log"

	"github.com/verbena-rdma/verbena/gpu/cuda"
	"github.com/verbena-rdma/verbena/verbs"
)

// A peer may write into 64 MiB of the first GPU's memory. It is told the address and the key.
func Example() {
	dev, err := cuda.Open(0)
	if err != nil {
		log.Fatal(err) // such as "no CUDA here: libcuda.so.1: cannot open shared object file"
	}
	defer dev.Close()
	buf, err := dev.Alloc(64 << 20)
	if err != nil {
		log.Fatal(err)
	}
	nic, err := verbs.Open("", nil)
	if err != nil {
		log.Fatal(err)
	}
	defer nic.Close()
	pd, err := nic.AllocPD()
	if err != nil {
		log.Fatal(err)
	}
	mr, err := pd.RegGPU(buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("write to %#x with key %#x\n", mr.Addr(), mr.RKey())
}
