package main

import (
	"os"
	"regexp"
	"strconv"
	"testing"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/verbs"
)

// stat and ps show dma-bufs: the counters of a device, those of each region, and the kind.
func TestStatDMABuf(t *testing.T) {
	const addr, pages = "127.77.0.208", 5
	size := uint64(pages * os.Getpagesize())
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: size})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	p := newPaged(t, addr)
	p.odp, err = p.pd.RegDMABufMR(verbs.DMABuf{Buffer: m.Buffer(), Length: size, IOVA: 1 << 32}, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
	if err != nil {
		t.Fatal(err)
	}
	mr := p.odp
	t.Cleanup(func() {
		if err := mr.Close(); err != nil {
			t.Error(err)
		}
	})
	pid := strconv.Itoa(os.Getpid())
	// line checks the region's line: how many pages are mapped, page faults, faults,
	// invalidated pages, invalidations.
	line := func(counts string) {
		t.Helper()
		out := succeed(t, "stat", "--mr", addr).stdout
		want := `(?m)^ *127\.77\.0\.208 +` + pid + ` +\d+ +dmabuf +20\.0 KiB +` + counts + ` `
		if os.Getpagesize() == 4096 && !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line like %s:\n%s", want, out)
		}
	}
	counters := func(wants ...string) {
		t.Helper()
		out := succeed(t, "stat", "--all", addr).stdout
		for _, want := range wants {
			if !regexp.MustCompile(`(?m)^ +` + want + `$`).MatchString(out) {
				t.Errorf("no line like %s in\n%s", want, out)
			}
		}
	}
	p.write(0, 1000)
	counters(`dmabuf_regions +1`, `dmabuf_mappings +1`, `copied_bytes_pinned_to_dmabuf +1,000`)
	line(`5 +0 +0 +0 +0`)
	if err := m.Move(t.Context()); err != nil {
		t.Fatal(err)
	}
	line(`0 +0 +0 +5 +1`)
	p.write(1000, 2000)
	line(`5 +5 +1 +5 +1`)

	counters(`dmabuf_regions +1`, `dmabuf_mappings +2`, `dmabuf_faults +1`, `dmabuf_invalidations +1`)
	out := succeed(t, "ps", "--mrs").stdout
	if want := `MR 0x100000000 +dmabuf `; !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("no line like %s in\n%s", want, out)
	}
}
