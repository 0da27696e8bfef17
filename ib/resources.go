package ib

import "net/netip"

// DeviceResources is a device and what each process that shares it has on it.
type DeviceResources struct {
	Addr      netip.Addr         `json:"addr"` // the device's first address
	Processes []ProcessResources `json:"processes"`
}

// ProcessResources is what one process has on a device.
type ProcessResources struct {
	Slot     int    `json:"slot"` // its place among the processes that share the device
	PID      int    `json:"pid"`
	Program  string `json:"program"`
	Device   string `json:"device"`
	Answered bool   `json:"answered"` // false: the process did not answer, because it is stopped or has just ended

	CQs      int            `json:"cqs"`
	PDs      int            `json:"pds"`
	SRQs     int            `json:"srqs"`
	AHs      int            `json:"ahs"`
	Channels int            `json:"channels"` // completion channels
	QPs      []QPResource   `json:"qps"`
	MRs      []MRResource   `json:"mrs"`
	MWs      []MWResource   `json:"mws"`
	DMs      []DMResource   `json:"dms"`
	XRCDs    []XRCDResource `json:"xrcds"`

	// Paging is what on-demand paging has done for this process.
	Paging PagingStats `json:"paging"`

	// Counters are the device's counters in this process that are not 0.
	Counters map[string]uint64 `json:"counters"`
}

// QPResource is a queue pair and its traffic.
type QPResource struct {
	Number      uint32 `json:"qpn"`
	Type        string `json:"type"`
	State       string `json:"state"`
	DestQPN     uint32 `json:"dest_qpn,omitempty"`
	DestGID     GID    `json:"dest_gid"`
	Shard       int    `json:"shard"` // the shard of the device that it is in, from 0
	TxBytes     uint64 `json:"tx_bytes"`
	RxBytes     uint64 `json:"rx_bytes"`
	TxPackets   uint64 `json:"tx_packets"`
	RxPackets   uint64 `json:"rx_packets"`
	Retransmits uint64 `json:"retransmitted_packets"`

	// Counters are the queue pair's counters that are not 0.
	Counters map[string]uint64 `json:"counters"`
}

// MRResource is a memory region. It has no keys, since a key gives access. Number
// identifies a region among those of its process; after the region is closed, another
// one may get the number.
type MRResource struct {
	Number uint32 `json:"mrn"`
	Kind   string `json:"kind"`
	Addr   uint64 `json:"addr"`
	Length uint64 `json:"length"`
	Access string `json:"access"`

	// Of on-demand regions and of dma-bufs only: what paging has done, and how many pages the
	// device's page table has as present.
	Paging  *PagingStats `json:"paging,omitempty"`
	Present uint64       `json:"present_pages,omitempty"`
}

// MWResource is a memory window and, if it is bound, what it is bound to. Windows and
// regions of a process are numbered together.
type MWResource struct {
	Number uint32 `json:"mwn"`
	Type   string `json:"type"`
	Bound  bool   `json:"bound"`

	MR     uint32 `json:"mrn,omitempty"` // the region
	QPN    uint32 `json:"qpn,omitempty"` // type 2: the queue pair that it is bound on
	Addr   uint64 `json:"addr,omitempty"`
	Length uint64 `json:"length,omitempty"`
	Access string `json:"access,omitempty"`
}

// DMResource is a buffer of device memory.
type DMResource struct {
	Number uint32 `json:"dmn"`
	Class  string `json:"class"`
	Length uint64 `json:"length"`
	MRs    int    `json:"mrs"` // regions on it
}

// XRCDResource is an XRC domain that a process has open.
type XRCDResource struct {
	Number uint32 `json:"xrcdn"`          // in the process
	File   string `json:"file,omitempty"` // device and inode of the file that names it: the same in every process
	Opens  int    `json:"opens"`
	QPs    int    `json:"qps"` // targets in it
	SRQs   int    `json:"srqs"`
}
