package tour

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/verbs"
)

func runODP(t *testing.T, ctx context.Context) (string, error) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = RunODP(ctx, term.New(f))
	b, readErr := os.ReadFile(f.Name())
	if readErr != nil {
		t.Fatal(readErr)
	}
	return string(b), err
}

// The scenes hold the counters against what must have happened; here it is that
// they do, and are shown.
func TestODP(t *testing.T) {
	out, err := runODP(t, t.Context())
	if err != nil || strings.Contains(out, "FAIL") || strings.Count(out, "\nok  ") != len(scenes) || strings.ContainsAny(out, "\x1b\r") {
		t.Errorf("error %v:\n%s", err, out)
	}
	for _, want := range []string{
		`(?m)^ +0 ┤.*╰─`, `num_page_faults in each of 32 intervals`, `num_page_fault_pages in each of 12 passes`,
		`(?m)^ +64 KiB +64 +1024 +16\.0$`, `(?m)^ +num_page_faults +256 +0$`, `(?m)^ +num_prefetches_handled +0 +1$`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("nothing like %s in\n%s", want, out)
		}
	}
}

func TestODPCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := runODP(t, ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// A scene whose counters are wrong, or whose data is, fails.
func TestODPFails(t *testing.T) {
	saved := scenes
	defer func() { scenes = saved }()
	scenes = []scene{
		{"broken data", "", func(l *pagingLab) (string, error) {
			return "", l.withRegion(4, func(r *onDemand) error {
				if err := r.write(1, 2); err != nil {
					return err
				}
				r.memory[2*pageSize+5] ^= 1
				return nil
			})
		}},
		saved[1],
	}
	out, err := runODP(t, t.Context())
	if !errors.Is(err, ErrFailed) || !strings.Contains(out, "page 2: the data differs from byte 5 of") || !strings.Contains(out, "1 failed of 2") {
		t.Errorf("error %v:\n%s", err, out)
	}
}

// count makes counters of a part of a scene, where a peer had all faults.
func count(faults, pages, invalidated uint64) verbs.PagingStats {
	return verbs.PagingStats{PageFaults: faults, PageFaultPages: pages, RemoteFaults: faults, InvalidationPages: invalidated}
}

func TestFaultsAddUp(t *testing.T) {
	good := interval{accesses: 10, fresh: 4, counted: count(4, 4, 0)}
	local := good
	local.counted.LocalFaults, local.counted.RemoteFaults = 1, 3
	for name, tt := range map[string]struct {
		list []interval
		err  string
	}{
		"as booked":                  {[]interval{good, {accesses: 10}}, ""},
		"too few":                    {[]interval{good, {accesses: 10, fresh: 2, counted: count(1, 1, 0)}}, "interval 1: 2 pages were absent, and faults brought in 1"},
		"too many":                   {[]interval{good, {accesses: 10, counted: count(1, 1, 0)}}, "interval 1: 0 pages were absent, and faults brought in 1"},
		"again after reclaim":        {[]interval{{accesses: 10, fresh: 4, counted: count(4, 4, 2)}, {accesses: 10, counted: count(2, 2, 0)}}, ""},
		"more than were reclaimed":   {[]interval{{accesses: 10, fresh: 4, counted: count(4, 4, 2)}, {accesses: 10, counted: count(3, 3, 0)}}, "interval 1"},
		"taken away and not counted": {[]interval{{accesses: 10, fresh: 4, dropped: 3, counted: count(4, 4, 2)}}, "3 pages were taken away"},
		"taken away, and back":       {[]interval{{accesses: 10, fresh: 4, dropped: 4, counted: count(4, 4, 4)}}, ""},
		"several pages a fault":      {[]interval{{accesses: 10, fresh: 4, counted: count(2, 4, 0)}}, "2 faults of one page each"},
		"whose faults":               {[]interval{local}, "a peer had 3 and this side 1"},
	} {
		if err := faultsAddUp(tt.list); !matches(err, tt.err) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
	}
}

func matches(err error, text string) bool {
	if text == "" {
		return err == nil
	}
	return err != nil && strings.Contains(err.Error(), text)
}

func TestEfficiencyAddsUp(t *testing.T) {
	for name, tt := range map[string]struct {
		list []efficiency
		err  string
	}{
		"grows":     {[]efficiency{{1, count(64, 64, 0)}, {16, count(4, 64, 0)}, {64, count(2, 64, 0)}}, ""},
		"stays":     {[]efficiency{{64, count(2, 64, 0)}, {256, count(2, 64, 0)}}, ""},
		"falls":     {[]efficiency{{64, count(2, 64, 0)}, {256, count(4, 64, 0)}}, "a fault brings in 16, shorter ones 32"},
		"missing":   {[]efficiency{{16, count(4, 63, 0)}}, "brought in 63 pages of 64"},
		"too often": {[]efficiency{{16, count(5, 64, 0)}}, "a fault brings in 12.8"},
	} {
		if err := efficiencyAddsUp(tt.list, 64); !matches(err, tt.err) {
			t.Errorf("%s: %v, want %q", name, err, tt.err)
		}
	}
}

func TestThrashes(t *testing.T) {
	steady := interval{accesses: 100}
	busy := interval{accesses: 100, counted: count(100, 100, 100)}
	for name, tt := range map[string]struct {
		v    interval
		want bool
	}{
		"steady state":     {steady, false},
		"thrashing":        {busy, true},
		"warm-up":          {interval{accesses: 100, counted: count(100, 100, 0)}, false},
		"a few come back":  {interval{accesses: 100, counted: count(20, 20, 20)}, false},
		"memory was freed": {interval{accesses: 100, counted: count(0, 0, 100)}, false},
	} {
		if got := thrashes(&tt.v); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
	if err := thrashingSeen([]interval{busy, steady}, []interval{busy, busy}); err != nil {
		t.Error(err)
	}
	if thrashingSeen([]interval{busy, steady}, []interval{busy, steady}) == nil || thrashingSeen([]interval{busy, busy}, []interval{busy, busy}) == nil {
		t.Error("what the counters do not tell is taken for seen")
	}
}

func TestPrefetchHelped(t *testing.T) {
	plain := pass{counted: count(4, 64, 0)}
	advised := pass{counted: verbs.PagingStats{Prefetches: 1, PrefetchPages: 64}}
	if err := prefetchHelped(&plain, &advised, 64); err != nil {
		t.Error(err)
	}
	again := pass{counted: verbs.PagingStats{Prefetches: 1, PrefetchPages: 64, PageFaults: 1, PageFaultPages: 2}}
	short := pass{counted: verbs.PagingStats{Prefetches: 1, PrefetchPages: 63}}
	for name, bad := range map[string]error{
		"faults after all": prefetchHelped(&plain, &again, 64), "not all": prefetchHelped(&plain, &short, 64),
		"none": prefetchHelped(&plain, &plain, 64), "advised twice": prefetchHelped(&advised, &advised, 64),
	} {
		if bad == nil {
			t.Errorf("%s: passes", name)
		}
	}
	reclaimed := again
	reclaimed.counted.InvalidationPages = 2
	if err := prefetchHelped(&plain, &reclaimed, 64); err != nil {
		t.Error(err)
	}
}
