package rxe

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestKernel is the short form of `make interop`: one kernel, Debian stable's or that of
// $VERBENA_KERNEL, and the short cases, each a subtest. With VERBENA_FULL it runs all cases.
func TestKernel(t *testing.T) {
	vmtest.Need(t, Check())
	suite := os.Getenv("VERBENA_KERNEL")
	if suite == "" {
		suite = Suites[0]
	}
	full := os.Getenv("VERBENA_FULL") != ""
	o := Options{Suite: suite, Order: result.Order{Short: !full}, Dir: t.TempDir(), Limit: 20 * time.Minute}
	if full {
		o.Limit = 6 * time.Hour // a busy host takes several times as long
	}
	// A kernel that is not in the cache has to be fetched, which takes a network.
	_, err := vm.FindKernel(t.Context(), suite, vm.Amd64)
	vmtest.Need(t, err)
	kept := filepath.Join("..", "..", ".logs", "interop", "test-"+suite)
	planned := false
	run := func() error {
		return Run(t.Context(), o, func(l result.Line) {
			switch {
			case l.Plan != nil:
				planned = true
				t.Logf("Linux %s, %d cases", l.Plan.Release, len(l.Plan.Cases))
			case l.Case != nil:
				t.Run(l.Case.Name, func(t *testing.T) { tell(t, l.Case, o.Dir, kept) })
			}
		})
	}
	if err = run(); err != nil && !planned { // the machine did not come up, for which ours is not to blame
		t.Logf("%v, before it announced the cases: once more", err)
		err = run()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestSoakGiants moves messages of 1 GiB, each operation both ways.
func TestSoakGiants(t *testing.T) {
	if os.Getenv("VERBENA_SOAK") == "" {
		t.Skip("full: messages of 1 GiB, only with VERBENA_SOAK, which make soak sets")
	}
	vmtest.Need(t, Check())
	o := Options{Suite: Suites[len(Suites)-1], Order: result.Order{Soak: true}, Dir: t.TempDir(), Limit: 2 * time.Hour, MemMB: GiantMemMB}
	err := Run(t.Context(), o, func(l result.Line) {
		if l.Case != nil {
			t.Run(l.Case.Name, func(t *testing.T) { tell(t, l.Case, o.Dir, o.Dir) })
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// tell turns the result of a case into that of a test.
func tell(t *testing.T, c *result.Case, dir, kept string) {
	switch {
	case c.Skip != "":
		t.Skip("kernel:", c.Skip)
	case c.Err != "":
		t.Error(c.Err)
		if c.Capture == "" {
			return
		}
		from, to := filepath.Join(dir, result.CaptureDir, c.Capture), filepath.Join(kept, c.Capture)
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.MkdirAll(kept, 0o755)
		}
		if err == nil {
			err = os.WriteFile(to, b, 0o644)
		}
		t.Logf("packets: %s (%v)", to, err)
	default:
		t.Logf("took %v in the machine", c.Took)
	}
}

// A guest that has no result for a case that it announced has failed.
func TestEnd(t *testing.T) {
	plan := result.Line{Plan: &result.Plan{Cases: []string{"a", "b"}}}
	a, b := result.Line{Case: &result.Case{Name: "a"}}, result.Line{Case: &result.Case{Name: "b", Err: "bad"}}
	done := result.Line{Done: true}
	for name, tt := range map[string]struct {
		lines []result.Line
		ok    bool
	}{
		"all":       {[]result.Line{plan, a, b, done}, true},
		"one less":  {[]result.Line{plan, a, done}, false},
		"not done":  {[]result.Line{plan, a, b}, false},
		"nothing":   {nil, false},
		"gave up":   {[]result.Line{plan, a, b, {Fatal: "help"}, done}, false},
		"only done": {[]result.Line{done}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var e end
			for _, l := range tt.lines {
				e.add(l)
			}
			if err := e.err(); (err == nil) != tt.ok {
				t.Errorf("err is %v", err)
			}
		})
	}
}
