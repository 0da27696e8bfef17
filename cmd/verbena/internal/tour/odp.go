package tour

// What the counters of on-demand paging are good for, in four scenes. In each, a device
// really writes to another one's on-demand region, Linux pages, and the counters are
// compared with what must have happened.
//
// Top-down: RunODP goes through the scenes (odp_scenes.go); pagingLab makes the
// devices and the regions that the scenes use.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/guptarohit/asciigraph"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/verbs"
)

// scene is one use of the counters. run prints what it counted, and returns in a few words
// what that means, or an error if a counter is not as it must be.
type scene struct {
	name, about string
	run         func(l *pagingLab) (string, error)
}

var scenes = []scene{
	{"warm-up and steady state", "A peer writes to random pages of a working set. Pages fault once; then there is silence, until the working set moves.", warmUpScene},
	{"paging efficiency", "The same memory is written for the first time in messages of several sizes: a fault brings in all pages that an access needs.", efficiencyScene},
	{"thrashing", "Only so many pages may stay in memory, the oldest goes first. Two working sets are gone through again and again: one fits, one does not.", thrashingScene},
	{"the effect of prefetch", "The first pass over fresh memory, as it is and after advice that it is about to be written.", prefetchScene},
}

// RunODP shows what the counters of on-demand paging are good for. It goes on after
// a failure.
func RunODP(ctx context.Context, out *term.Printer) error {
	t := &tour{ctx: ctx, out: out, began: time.Now(), total: len(scenes)}
	out.Printf("%s\n", out.Paint(term.Bold, "On-demand paging: nothing is pinned; the device faults, and Linux brings the pages in."))
	l, err := newPagingLab(ctx, out)
	if err != nil {
		return err
	}
	out.Printf("devices at %v and %v; changes of mappings are reported by %s\n", l.a.dev.Addr(), l.b.dev.Addr(), l.notifier)
	for _, s := range scenes {
		t.at++
		l.at = fmt.Sprintf("[%d/%d] %s", t.at, t.total, s.name)
		out.Printf("\n%s\n%s\n\n", out.Paint(term.Bold, s.name), s.about)
		detail, err := s.run(l)
		switch cause := context.Cause(ctx); {
		case cause != nil:
			out.Clear()
			return errors.Join(cause, l.close())
		case err != nil:
			t.fail("", s.name, err)
		default:
			t.pass("", s.name, detail)
		}
	}
	if err := l.close(); err != nil {
		t.fail("", "close the devices", err)
	}
	return t.summary()
}

// pagingLab is two devices, of which the first writes to on-demand regions of the
// second.
type pagingLab struct {
	*lab
	out      *term.Printer
	at       string // the scene, for the progress line
	pair     *pair
	source   *verbs.MR
	bytes    []byte // what source names
	notifier string
}

// longest is the length of the longest message in the scenes.
const longest = 1 << 20

var pageSize = os.Getpagesize()

func newPagingLab(ctx context.Context, out *term.Printer) (_ *pagingLab, err error) {
	l := &pagingLab{out: out, bytes: make([]byte, longest)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	if l.lab, err = newLab(ctx, verbs.Config{Link: verbs.LinkLoop}); err != nil {
		return nil, err
	}
	if l.pair, err = l.lab.pair(verbs.RC); err != nil {
		return nil, err
	}
	caps, err := l.b.dev.QueryODPCaps()
	if err != nil {
		return nil, err
	}
	if l.notifier = caps.Notifier; caps.RC&verbs.ODPWrite == 0 {
		return nil, errors.New("the device has no on-demand paging")
	}
	l.source, err = l.a.pd.RegMR(l.bytes, 0)
	return l, err
}

func (l *pagingLab) close() error {
	var errs []error
	if l.pair != nil {
		errs = append(errs, l.pair.close())
	}
	if l.source != nil {
		errs = append(errs, l.source.Close())
	}
	return errors.Join(append(errs, l.lab.close())...)
}

// told reports whether the kernel reports changes at once. If not, they are counted when
// a sweep finds them, at some later time.
func (l *pagingLab) told() bool { return l.notifier == "userfaultfd" }

// onDemand is an on-demand region of the second device, on fresh memory.
type onDemand struct {
	l       *pagingLab
	memory  []byte
	mr      *verbs.MR
	written []uint64 // the stamp of each page; 0: never
	stamp   uint64
}

func (l *pagingLab) newRegion(pages int) (r *onDemand, err error) {
	r = &onDemand{l: l, written: make([]uint64, pages)}
	if r.memory, err = sys.MapShared(pages * pageSize); err != nil {
		return nil, fmt.Errorf("mmap: %w", err)
	}
	if r.mr, err = l.b.pd.RegMR(r.memory, verbs.AccessLocalWrite|verbs.AccessRemoteWrite|verbs.AccessOnDemand); err != nil {
		return nil, errors.Join(err, sys.Unmap(r.memory))
	}
	return r, nil
}

// withRegion calls f with a region, and compares the region's data at the end.
func (l *pagingLab) withRegion(pages int, f func(r *onDemand) error) error {
	r, err := l.newRegion(pages)
	if err != nil {
		return err
	}
	if err = f(r); err == nil {
		err = r.compare()
	}
	return errors.Join(err, r.mr.Close(), sys.Unmap(r.memory))
}

// discard takes a page away, as reclaim would.
func (r *onDemand) discard(page int) error { return sys.Discard(r.page(page)) }

// page returns the bytes of a page.
func (r *onDemand) page(i int) []byte { return r.memory[i*pageSize : (i+1)*pageSize] }

// write has the peer write pages, with data that it has not written before.
func (r *onDemand) write(first, pages int) error {
	r.prepare(first, pages)
	return r.send(first, pages)
}

// prepare makes the data for pages.
func (r *onDemand) prepare(first, pages int) {
	r.stamp++
	for i := range pages {
		fillPage(r.l.bytes[i*pageSize:(i+1)*pageSize], first+i, r.stamp)
		r.written[first+i] = r.stamp
	}
}

// send has the peer write what was prepared, and waits for it.
func (r *onDemand) send(first, pages int) error {
	wr := verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{r.l.source.SGE(0, pages*pageSize)},
		RemoteAddr: r.mr.Addr() + uint64(first*pageSize), RKey: r.mr.RKey()}
	if err := post(r.l.pair.a, wr); err != nil {
		return err
	}
	_, err := r.l.expect(r.l.a.cq, verbs.WCRDMAWrite)
	return err
}

// compare compares what the CPU sees with what must be there: the last data of each page,
// and zeros in pages that were never written.
func (r *onDemand) compare() error {
	want := make([]byte, pageSize)
	for i, stamp := range r.written {
		clear(want)
		if stamp != 0 {
			fillPage(want, i, stamp)
		}
		if err := same(r.page(i), want); err != nil {
			return fmt.Errorf("page %d: %w", i, err)
		}
	}
	return nil
}

// fillPage makes data that no other page has, nor the same one at another time.
func fillPage(b []byte, page int, stamp uint64) {
	x := uint64(page)<<32 ^ stamp ^ 0x9e3779b97f4a7c15
	for i := 0; i+8 <= len(b); i += 8 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint64(b[i:], x)
	}
}

// since returns the region's counters, and how much they have grown since before.
func (r *onDemand) since(before verbs.PagingStats) (now, grown verbs.PagingStats) {
	now = r.mr.PagingStats()
	return now, verbs.PagingStats{
		PageFaults: now.PageFaults - before.PageFaults, PageFaultPages: now.PageFaultPages - before.PageFaultPages,
		Invalidations: now.Invalidations - before.Invalidations, InvalidationPages: now.InvalidationPages - before.InvalidationPages,
		Prefetches: now.Prefetches - before.Prefetches, PrefetchPages: now.PrefetchPages - before.PrefetchPages,
		LocalFaults: now.LocalFaults - before.LocalFaults, RemoteFaults: now.RemoteFaults - before.RemoteFaults,
	}
}

// progress shows what a scene is doing.
func (l *pagingLab) progress(format string, args ...any) {
	l.out.Progress("%s: %s …", l.at, fmt.Sprintf(format, args...))
}

// plot draws one or two series, the second with stars.
func (l *pagingLab) plot(caption string, series ...[]float64) {
	text := asciigraph.PlotMany(series, asciigraph.Height(8), asciigraph.Width(60), asciigraph.LowerBound(0), asciigraph.Precision(0),
		asciigraph.Caption(caption), asciigraph.SeriesChars(asciigraph.DefaultCharSet, asciigraph.CreateCharSet("*")))
	l.out.Printf("%s\n\n", indent(text))
}

// table shows rows in columns.
func (l *pagingLab) table(rows [][]string) {
	l.out.Printf("%s\n\n", indent(strings.Join(term.Table(rows), "\n")))
}

func indent(text string) string { return "      " + strings.ReplaceAll(text, "\n", "\n      ") }
