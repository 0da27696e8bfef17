package sys

import (
	"sync"

	"golang.org/x/sys/unix"
)

// PagingSupport is what this machine offers for paging on demand, for people.
type PagingSupport struct {
	Notifier string // how changes of mappings are reported: "userfaultfd", or why not
	Scan     string // how present pages are found: "PAGEMAP_SCAN", "pagemap", or why not
	Mappings string // how mappings are found: "PROCMAP_QUERY", "maps", or why not
	Fetch    string // how pages are brought in: "MADV_POPULATE", or "touch", one by one
}

// FindPagingSupport returns what this machine offers. It finds out at the first call.
func FindPagingSupport() PagingSupport { return findPagingSupport() }

var findPagingSupport = sync.OnceValue(func() PagingSupport {
	s := PagingSupport{Notifier: "userfaultfd", Scan: "pagemap", Mappings: "maps", Fetch: "touch"}
	if canPopulate() {
		s.Fetch = "MADV_POPULATE"
	}
	if err := probeNotifier(); err != nil {
		s.Notifier = err.Error()
	}
	if p, err := pagemapFile(); err != nil {
		s.Scan = err.Error()
	} else if p.scan {
		s.Scan = "PAGEMAP_SCAN"
	}
	if m, err := mapsFile(); err != nil {
		s.Mappings = err.Error()
	} else if m.query {
		s.Mappings = "PROCMAP_QUERY"
	}
	return s
})

// probeNotifier does what OpenNotifier does, without the thread.
func probeNotifier() error {
	if err := notifierPossible(); err != nil {
		return err
	}
	fd, err := openUserfault()
	if err != nil {
		return err
	}
	return unix.Close(fd)
}
