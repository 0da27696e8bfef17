package mem

import "sync/atomic"

// DMABufCounts is what the dma-bufs of a device's regions have counted, also of regions that are
// closed. The importer counts, when it happens. The zero value is good.
type DMABufCounts struct {
	Regions       atomic.Uint64 // registrations and re-registrations with a dma-buf
	Mappings      atomic.Uint64 // how often a buffer was mapped, at registration or after a move
	Faults        atomic.Uint64 // of the mappings, those that an access has waited for
	Invalidations atomic.Uint64 // mappings that an exporter has taken away
	Pins          atomic.Uint64 // how often a buffer was held in place
}
