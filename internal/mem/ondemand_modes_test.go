package mem_test

import (
	"os"
	"testing"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

// On-demand memory works on machines that can do less: tests that need the kernel's
// reports of changes are skipped, all the rest pass.
func TestOnDemandModes(t *testing.T) {
	tests, checks := "TestOnDemand(SeesWhatTheCPUSees|Sweep|Huge|BehindEnd|StormOfAll|Model)|TestPrefetch|TestMeans", "20"
	if os.Getenv("VERBENA_FULL") != "" {
		tests, checks = "TestOnDemand.*|TestPrefetch|TestStale.*|TestMeans|TestConformanceOnDemand.*", "100"
	}
	for _, mode := range []modetest.Mode{modetest.NoUserfault, modetest.OldKernel, modetest.Unprivileged} {
		t.Run(string(mode), func(t *testing.T) {
			modetest.Rerun(t, mode, "^("+tests+")$", "-rapid.checks="+checks)
		})
	}
}

// On-demand memory works where pages can be swapped out: then they are not
// populated, but touched.
func TestOnDemandWithSwap(t *testing.T) {
	modetest.Swap(t, "256M")
	modetest.Rerun(t, modetest.Swapping, "^(TestOnDemand(Counts|SeesWhatTheCPUSees|Sweep|Huge|BehindEnd|StormOfAll|Model|Undisturbed)|TestPrefetch)$",
		"-rapid.checks=300")
}

// What the machine can do is said.
func TestMeans(t *testing.T) {
	m := mem.PagingMeans()
	t.Logf("%+v", m)
	switch mode := modetest.Current(); mode {
	case modetest.NoUserfault:
		if m.Notifier == "userfaultfd" || m.Mappings != "PROCMAP_QUERY" && m.Mappings != "maps" {
			t.Errorf("%+v", m)
		}
	case modetest.OldKernel:
		if m.Notifier == "userfaultfd" || m.Scan != "pagemap" || m.Mappings != "maps" || m.Fetch != "touch" {
			t.Errorf("%+v", m)
		}
	}
}
