package arm64

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var full = os.Getenv("VERBENA_FULL") != ""

// result is the line that the end of a test prints.
var result = regexp.MustCompile(`^\s*--- (PASS|FAIL|SKIP): (\S+) \(`)

// reason is what stands before the reason of a skipped test, on the line before its result.
var reason = regexp.MustCompile(`^\s*\S+\.go:\d+: `)

// TestArm64 runs Debian's programs on the drop-in library: in the short form each once, in the full form as
// the tests of interop/programs do on the host in their short form: emulation is slow. fio, qperf, UCX and libfabric are not among the guest's
// packages, and programs that tests compile are left out, but for the library that cannot be patched, and those
// for which the preloaded library has assembler (TestCUDAFrees).
func TestArm64(t *testing.T) {
	run := `^(TestDevinfo|TestPingpong|TestRDMACM|TestRDMACMOneAddress|TestCUDAFrees)$/^(rc|rping|ucmatose|udaddy|rdma_server|rstream|rping_fd79::1|linked|loaded|another_library_behind)$`
	if full {
		run = `^(TestDevinfo|TestPingpong|TestPerftest|TestKilled|TestOrdinaryUser|TestCUDAFrees(Race)?|TestRDMACM(OneAddress|Namespaces|Persistent|Refused|Killed|Unpatchable)?)$/^[^f]`
	}
	if some := os.Getenv("VERBENA_ARM64"); some != "" {
		run = some
	}
	inGuest(t, Tests{Package: "interop/programs", Run: run})
}

// TestArm64Packages runs the tests of packages whose code depends on the processor, or whose memory several
// threads or processes share, in their short form: emulation is slow.
func TestArm64Packages(t *testing.T) {
	if !full {
		t.Skip("full: tests of packages on arm64")
	}
	dirs := []string{"ib", "internal/wire", "internal/queue", "internal/shm", "internal/sys", "internal/mem"}
	if some := os.Getenv("VERBENA_ARM64"); some != "" {
		dirs = strings.Fields(some)
	}
	var all []Tests
	for _, dir := range dirs {
		all = append(all, Tests{Package: dir, Run: ".", Cgo: true})
	}
	inGuest(t, all...)
}

// inGuest runs tests in a machine with arm64; each of theirs is a subtest.
func inGuest(t *testing.T, all ...Tests) {
	vmtest.Need(t, Check())
	g, err := Fetch(t.Context())
	vmtest.Need(t, err)
	limit := 20 * time.Minute
	if full {
		limit = 3 * time.Hour // a busy host takes several times as long
	}
	dir := t.TempDir()
	var (
		pkg     string
		printed []string
		passed  = map[string]int{} // by package
		status  = map[string]string{}
	)
	err = g.Run(t.Context(), dir, limit, func(line string) {
		if name, ok := strings.CutPrefix(line, "package "); ok {
			pkg, printed = name, nil
			return
		}
		if f := strings.Fields(line); len(f) == 3 && f[0] == "status" {
			status[f[1]] = f[2]
			if f[2] != "0" {
				t.Errorf("%s ends with status %s\n%s", f[1], f[2], strings.Join(printed, "\n"))
			}
			return
		}
		printed = append(printed, line)
		m := result.FindStringSubmatch(line)
		if m == nil {
			return
		}
		t.Run(pkg+"/"+m[2], func(t *testing.T) {
			switch m[1] {
			case "FAIL":
				t.Error("see below, where the package ends")
			case "SKIP":
				t.Skip(reason.ReplaceAllString(printed[max(0, len(printed)-2)], ""))
			default:
				passed[pkg]++
			}
		})
	}, all...)
	if err != nil || t.Failed() {
		kept := filepath.Join(modulePath, ".logs", "interop", "arm64")
		for _, name := range []string{vm.ConsoleLog, vm.Results} {
			b, e := os.ReadFile(filepath.Join(dir, name))
			if e == nil {
				e = os.MkdirAll(kept, 0o755)
			}
			if e == nil {
				e = os.WriteFile(filepath.Join(kept, name), b, 0o644)
			}
			t.Logf("%s: %v", filepath.Join(kept, name), e)
		}
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range all {
		if status[p.Package] == "" {
			t.Errorf("%s has not ended", p.Package)
		}
		if passed[p.Package] == 0 {
			t.Errorf("of %s no test has passed", p.Package)
		}
	}
}
