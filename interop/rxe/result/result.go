// Package result is what the guest and the host of the kernel tests say to each
// other: an order in one file, lines of results in another.
package result

import "time"

// OrderFile is where the host leaves the Order, in the shared directory.
const OrderFile = "order.json"

// CaptureDir is where the guest leaves the packets of failed cases, in the shared
// directory.
const CaptureDir = "pcap"

// Order is what the guest is to do.
type Order struct {
	Kernel string // the suite that it runs, for the record
	Run    string // a regular expression for the names of cases; empty: all
	Short  bool   // only the cases of the short form
	Soak   bool   // the long cases, and no others
	Keep   bool   // keep the captures of cases that passed too
	Record bool   // also record what is on the network between the two, frame by frame
	Bench  int    // rounds of the comparison of speeds, instead of cases
}

// Line is one line of results; exactly one field is set.
type Line struct {
	Plan  *Plan  `json:"plan,omitempty"`
	Case  *Case  `json:"case,omitempty"`
	Speed *Speed `json:"speed,omitempty"`
	Fatal string `json:"fatal,omitempty"` // the guest gives up
	Done  bool   `json:"done,omitempty"`  // the guest has nothing left to do
}

// Plan is the first line: what will be run, and by which kernel.
type Plan struct {
	Release string   // as uname -r has it
	Cases   []string // names
}

// Case is the result of a case.
type Case struct {
	Name    string        `json:"name"`
	Err     string        `json:"err,omitempty"`  // what went wrong; empty: passed
	Skip    string        `json:"skip,omitempty"` // what the kernel does not have
	Took    time.Duration `json:"took"`
	Capture string        `json:"capture,omitempty"` // a file in CaptureDir
}

// Speed compares the kernel's device with ours, in one guest, over the same pair
// of interfaces.
type Speed struct {
	Rounds      int
	Bandwidth   Comparison // 64 KiB WRITEs, MB/s
	Latency     Comparison // 8 byte WRITEs, both sides watch memory: half a round trip, µs
	UDP         []float64  // 52 bytes by plain UDP, both sides spin: half a round trip, µs
	SendLatency Comparison // 8 byte SENDs, both sides poll completion queues: half a round trip, µs
}

// Comparison has one figure a round for each side.
type Comparison struct {
	Kernel []float64
	Ours   []float64
	Ratio  float64 // of the medians, ours to the kernel's
}
