// Package result is what the guest tells the host.
package result

import "github.com/verbena-rdma/verbena/p2p"

// OrderFile is the file in the shared directory with the Order; DumpDir the directory with the dump.
const (
	OrderFile = "order.json"
	DumpDir   = "dump"
)

// Order is what the guest is to do.
type Order struct {
	// Seed chooses the ports at which the guest sets ACS redirect; 0: at none.
	Seed uint64 `json:"seed"`
}

// Line is a line of the guest's results.
type Line struct {
	Pair  *Pair  `json:"pair,omitempty"`
	Fatal string `json:"fatal,omitempty"`
	Done  bool   `json:"done,omitempty"`
}

// Pair is what the kernel says of a provider and a client.
type Pair struct {
	Provider p2p.Address `json:"provider"`
	Client   p2p.Address `json:"client"`
	// Direct is how the client's disk has written and read the provider's memory by O_DIRECT, NVMet
	// whether the kernel's NVMe target takes the provider for that disk; "" is yes, else it is the
	// error.
	Direct string `json:"direct"`
	NVMet  string `json:"nvmet"`
}
