// Package result defines what host and guest of the kernel tests tell each other: the host's
// order in one file, the guest's lines of results in another.
package result

import "time"

// OrderFile is the file of the Order in the shared directory.
const OrderFile = "order.json"

// CaptureDir is the directory for packets of failed cases in the shared directory.
const CaptureDir = "pcap"

// Library are the files of the drop-in libibverbs, in the shared directory.
var Library = []string{"libibverbs.so.1", "libmlx5.so.1", "libefa.so.1", "libverbena-backend.so", "libverbena-files.so", "verbena-watcher"}

// WholeDir is a directory in the shared one with what the short form does without: Tests, a program "ofi" on
// libfabric, and its libraries, of which Loader loads them.
const (
	WholeDir = "whole"
	Loader   = "ld-linux-x86-64.so.2"
)

// Tests are compiled tests of packages, by the name of the file.
var Tests = map[string]string{
	"dmabuftest.test": "./internal/sys/dmabuftest", "dmabuf.test": "./dmabuf", "gpu.test": "./gpu", "mem.test": "./internal/mem",
}

// Order says what the guest runs.
type Order struct {
	Kernel string // the Debian suite of its kernel, for the record
	Run    string // a regular expression for the names of cases, or of what Bench compares; empty: all
	Short  bool   // only the cases of the short form
	Soak   bool   // the long cases, and no others
	Keep   bool   // keep the captures of cases that passed too
	Record bool   // also record the frames between the two devices
	Peers  bool   // the cases with memory of a PCI device, and no others
	Bench  int    // instead of cases: how many rounds to compare speeds for
}

// Line is one line of results; exactly one field is set.
type Line struct {
	Plan  *Plan  `json:"plan,omitempty"`
	Case  *Case  `json:"case,omitempty"`
	Speed *Speed `json:"speed,omitempty"`
	Fatal string `json:"fatal,omitempty"` // the guest gives up
	Done  bool   `json:"done,omitempty"`  // the guest has nothing left to do
}

// Plan is the first line: the cases that will be run, and the kernel.
type Plan struct {
	Release string   // as uname -r has it
	Cases   []string // names
}

// Case is the result of a case.
type Case struct {
	Name    string        `json:"name"`
	Err     string        `json:"err,omitempty"`  // why it failed; empty: passed
	Skip    string        `json:"skip,omitempty"` // why it was skipped: what the kernel lacks
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
	Lossy       []Figures  // 64 KiB WRITEs where packets are lost, MB/s
	Bottlenecks []Figures  // 64 KiB WRITEs and TCP behind 100 Mb/s, MB/s
	Connect     Comparison // cmtime, 100 connections at once: the sum of its steps for one connection, µs
}

// Figures have one figure a round.
type Figures struct {
	Name   string
	Values []float64
}

// Comparison has one figure a round for each side.
type Comparison struct {
	Kernel []float64
	Ours   []float64
	Ratio  float64 // the median of the rounds' ratios, ours to the kernel's
}
