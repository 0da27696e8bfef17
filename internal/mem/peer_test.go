package mem_test

import (
	"context"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem/memtest"
	"github.com/verbena-rdma/verbena/peermem/peertest"
)

// Regions of PeerDirect clients pass the suite, also below indirect keys: from the beginning of a page
// and from its middle, with pages that lie in order and in another one.
func TestConformanceOfPeers(t *testing.T) {
	dmabuf.CheckLocks(true)
	defer dmabuf.CheckLocks(false)
	memtest.Run(t, memtest.Constructor{Name: "offset", New: peerMemory(peertest.Config{PageSize: 8192}, 4096+24)})
}

// The other shapes of it.
func TestConformanceOfMorePeers(t *testing.T) {
	if os.Getenv("VERBENA_FULL") == "" {
		t.Skip("full: the other shapes of peer memory")
	}
	memtest.Run(t, memtest.Constructor{Name: "in order", New: peerMemory(peertest.Config{Flat: true}, 0)})
	memtest.Run(t, memtest.Constructor{Name: "scattered", New: peerMemory(peertest.Config{PageSize: 4096}, 0)})
	memtest.Run(t, memtest.Constructor{Name: "below a key", New: peerMemory(peertest.Config{PageSize: 4096}, 0), Shape: memtest.List})
}

var peers atomic.Uint64 // devices that were made: each has a name of its own

func peerMemory(cfg peertest.Config, off uint64) func(testing.TB, uint64, ib.Access) memtest.Memory {
	return func(tb testing.TB, n uint64, access ib.Access) memtest.Memory {
		cfg := cfg
		cfg.Name = fmt.Sprintf("peer%d", peers.Add(1))
		page := uint64(cfg.PageSize)
		if page == 0 {
			page = 64 << 10
		}
		cfg.Pages = int((max(n, 1)+off)/page) + 1
		d, err := peertest.New(cfg)
		if err != nil {
			tb.Fatal(err)
		}
		b, err := importer.ImportPeer(d.Addr()+uintptr(off), max(n, 1), access, nil)
		if err != nil || b == nil {
			tb.Fatal(b, err)
		}
		return memtest.Memory{Backing: b,
			Read:  func(at uint64, b []byte) { d.ReadAt(b, off+at) },
			Write: func(at uint64, b []byte) { d.WriteAt(b, off+at) },
			Free: func() {
				if err := d.Close(context.Background()); err != nil {
					tb.Error(err)
				}
				if wrong := d.Wrong(); len(wrong) > 0 {
					tb.Error(wrong)
				}
			}}
	}
}
