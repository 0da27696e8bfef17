package ib

// PagingStats counts what on-demand paging does, for a region or for a device
// over its whole life. The names in JSON are those that the counters have in the
// kernel's sysfs and debugfs, and similar ones for what the kernel does not count.
type PagingStats struct {
	PageFaults        uint64 `json:"num_page_faults"`                  // how often an access met pages that were not present
	PageFaultPages    uint64 `json:"num_page_fault_pages"`             // pages that these faults brought in
	Invalidations     uint64 `json:"num_invalidations"`                // how often mappings of present pages changed
	InvalidationPages uint64 `json:"num_invalidation_pages"`           // present pages that these changes took away
	Contentions       uint64 `json:"invalidations_faults_contentions"` // faults and prefetches begun again, because of an invalidation meanwhile
	Prefetches        uint64 `json:"num_prefetches_handled"`           // calls that prefetched all that they were asked to; for a region, those that named it
	PrefetchPages     uint64 `json:"num_prefetch_pages"`               // pages that prefetches brought in

	LocalFaults  uint64 `json:"num_local_page_faults"`  // the page faults that local requests met
	RemoteFaults uint64 `json:"num_remote_page_faults"` // the page faults that a peer's requests met

	FailedResolutions uint64 `json:"num_failed_resolutions"` // faults on memory that is not mapped, or whose mapping does not allow the access

	// Of a device only.
	MRsNotFound uint64 `json:"num_mrs_not_found"` // faults whose region was closed before they were resolved
	MRs         uint64 `json:"num_odp_mrs"`       // on-demand regions that exist
	MRPages     uint64 `json:"num_odp_mr_pages"`  // pages of these regions; implicit ones do not count
}

// Plus returns the sum of s and t, counter by counter.
func (s PagingStats) Plus(t PagingStats) PagingStats {
	s.PageFaults += t.PageFaults
	s.PageFaultPages += t.PageFaultPages
	s.Invalidations += t.Invalidations
	s.InvalidationPages += t.InvalidationPages
	s.Contentions += t.Contentions
	s.Prefetches += t.Prefetches
	s.PrefetchPages += t.PrefetchPages
	s.LocalFaults += t.LocalFaults
	s.RemoteFaults += t.RemoteFaults
	s.FailedResolutions += t.FailedResolutions
	s.MRsNotFound += t.MRsNotFound
	s.MRs += t.MRs
	s.MRPages += t.MRPages
	return s
}

// TriggerCounters returns the counters that the kernel does not have: page faults of
// local and of remote requests, and pages that prefetches brought in.
func (s *PagingStats) TriggerCounters() []PagingCounter {
	return []PagingCounter{
		{"num_local_page_faults", s.LocalFaults},
		{"num_remote_page_faults", s.RemoteFaults},
		{"num_prefetch_pages", s.PrefetchPages},
	}
}

// PagingCounter is one counter of PagingStats with its name.
type PagingCounter struct {
	Name  string
	Value uint64
}

// Counters returns the counters that the kernel's core has for a device, by their
// names there.
func (s *PagingStats) Counters() []PagingCounter {
	return []PagingCounter{
		{"invalidations_faults_contentions", s.Contentions},
		{"num_invalidation_pages", s.InvalidationPages},
		{"num_invalidations", s.Invalidations},
		{"num_page_fault_pages", s.PageFaultPages},
		{"num_page_faults", s.PageFaults},
		{"num_prefetches_handled", s.Prefetches},
	}
}

// DebugCounters returns the counters that a driver has in debugfs, by their names
// there.
func (s *PagingStats) DebugCounters() []PagingCounter {
	return []PagingCounter{
		{"num_failed_resolutions", s.FailedResolutions},
		{"num_mrs_not_found", s.MRsNotFound},
		{"num_odp_mr_pages", s.MRPages},
		{"num_odp_mrs", s.MRs},
	}
}

// RegionCounters returns the counters of a region, by the names that "rdma
// statistic" has for them. Those without "handled" count pages.
func (s *PagingStats) RegionCounters() []PagingCounter {
	return []PagingCounter{
		{"page_faults", s.PageFaultPages},
		{"page_faults_handled", s.PageFaults},
		{"page_invalidations", s.InvalidationPages},
		{"page_invalidations_handled", s.Invalidations},
		{"page_prefetch", s.PrefetchPages},
	}
}

// ODPTransportCaps are the operations of one transport that may use on-demand
// memory, with the bits of IBV_ODP_SUPPORT_*.
type ODPTransportCaps uint32

const (
	ODPSend        ODPTransportCaps = 1 << 0
	ODPRecv        ODPTransportCaps = 1 << 1
	ODPWrite       ODPTransportCaps = 1 << 2
	ODPRead        ODPTransportCaps = 1 << 3
	ODPAtomic      ODPTransportCaps = 1 << 4
	ODPSRQRecv     ODPTransportCaps = 1 << 5
	ODPFlush       ODPTransportCaps = 1 << 6
	ODPAtomicWrite ODPTransportCaps = 1 << 7
)

var odpNames = [...]string{"send", "recv", "write", "read", "atomic", "srq-recv", "flush", "atomic-write"}

// Names returns the names of the operations.
func (c ODPTransportCaps) Names() []string {
	var names []string
	for i, name := range odpNames {
		if c&(1<<i) != 0 {
			names = append(names, name)
		}
	}
	return names
}

// ODPCaps is what on-demand paging the device does.
type ODPCaps struct {
	Supported bool // IBV_ODP_SUPPORT: regions may be on demand
	Implicit  bool // IBV_ODP_SUPPORT_IMPLICIT: one region may be the whole address space

	RC, UC, UD, XRC ODPTransportCaps

	// The means of the kernel that the device uses here, for people: how changes of
	// mappings are reported (Notifier); how pages are found that went away without a
	// report (Scan); how mappings are looked up (Mappings); and how pages are brought
	// in that cannot be swapped out (Fetch; others are touched one by one).
	Notifier, Scan, Mappings, Fetch string
}

// Advice is what to do with memory that is about to be used, with the values of
// IBV_ADVISE_MR_ADVICE_*.
type Advice uint32

const (
	AdvisePrefetch        Advice = 0 // bring pages in, to be read
	AdvisePrefetchWrite   Advice = 1 // bring pages in, to be written
	AdvisePrefetchNoFault Advice = 2 // take what is in memory already
)
