package programs

import (
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// pyTests returns the directory of rdma-core's own tests: that of the package
// python3-pyverbs, or, if its documentation is not installed, that of scripts/setup.sh.
func pyTests(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"/usr/share/doc/rdma-core/tests", root + "/.bin/rdma-core-tests"} {
		if _, err := os.Stat(dir + "/run_tests.py"); err == nil {
			return dir
		}
	}
	need(t, false, "rdma-core's tests are missing: make setup")
	return ""
}

// skips are the reasons for which a test of rdma-core may be skipped, and the rows
// of the table in docs/libibverbs.md that explain them. Any other reason fails.
var skips = []struct{ reason, row string }{
	{`Create Raw Packet QP|Create QP type 8`, "raw packet queue pairs"},
	{`non EFA device`, "EFA"},
	{`Create Extended CQ|PCI device of`, "mlx5: steering"},
	{`Extended CQ is not supported`, "tag matching"},
	{`cuda-python`, "CUDA"},
	{`All gid indices populated`, "empty GIDs"},
	{`no huge pages`, "huge pages"},
	{`Create Mkey|Create Mlx5DV QP`, "mlx5: signatures"},
	{`Crypto login details`, "mlx5: encryption"},
	{`Create Mlx5DV CQ|CQE 128B`, "mlx5: completion queues"},
	{`Create DC QP|DCI caps|doesn't have net interface`, "mlx5: dynamic connections"},
	{`DevX|UAR allocation|VAR allocation`, "mlx5: firmware"},
	{`LAG affinity|mlx5dv_query_port|schedule elements|UDP sport|reserved QP number`, "mlx5: ports and schedules"},
	{`Converting timestamp`, "mlx5: clock"},
	{`PCI device must be passed`, "mlx5: vfio"},
	{`CC_DMA_BOUNCE`, "confidential machines"},
}

// notRun has the modules that are not run, and their rows of that table.
var notRun = map[string]string{"test_mlx5_huge_page": "mlx5: queues on huge pages"}

// offered is how many tests of a module must pass. It is for modules in which tests that must
// pass, and others, could be skipped for the same reason.
var offered = map[string]int{"test_mlx5_mkey": 6, "test_mr": 27, "test_rdmacm": 10}

// wrapped has the modules that a program of ours runs, with its arguments. The program says why.
var wrapped = map[string][]string{"test_mr": {"dmabuf.py", "-v"}, "test_rdmacm": {"rdmacm.py", "-v", "Case"}}

// pyArgs returns the arguments of Python to run a module of the tests in a directory.
func pyArgs(dir, module string) []string {
	if w := wrapped[module]; w != nil {
		return append([]string{"testdata/" + w[0], dir}, w[1:]...)
	}
	return []string{dir + "/tests/run_tests.py", "-v", "tests." + module}
}

// unpackTests copies rdma-core's tests and returns the directory above them.
func unpackTests(t *testing.T, from string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "tests"), 0o755); err != nil {
		t.Fatal(err)
	}
	files, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if err := unpack(filepath.Join(from, f.Name()), filepath.Join(dir, "tests", strings.TrimSuffix(f.Name(), ".gz"))); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func unpack(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	var r io.Reader = in
	if strings.HasSuffix(from, ".gz") {
		if r, err = gzip.NewReader(in); err != nil {
			return err
		}
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return os.WriteFile(to, b, 0o644)
}

var (
	// A result follows the test's name, or is alone in its line if the library has printed something.
	pyResult = regexp.MustCompile(`(?m)(?:\.\.\. |^)(ok|FAIL|ERROR|skipped '(.*)'|skipped "(.*)"|expected failure)$`)
	pyRan    = regexp.MustCompile(`Ran (\d+) tests?`)
)

// rdma-core's own tests: each passes, or is skipped for a reason that the documentation
// explains.
func TestPyverbs(t *testing.T) {
	dir, docs := unpackTests(t, pyTests(t)), docsOfSkips(t)
	alloc := compileWith(t, "dmabufalloc", "-shared", "-fPIC")
	awaitHugePages(t)
	modules, err := filepath.Glob(filepath.Join(dir, "tests", "test_*.py"))
	if err != nil || len(modules) < 20 {
		t.Fatalf("%d modules, %v", len(modules), err)
	}
	passed, skipped := 0, 0
	for _, file := range modules {
		name := strings.TrimSuffix(filepath.Base(file), ".py")
		if row := notRun[name]; row != "" {
			wantRow(t, row, name, docs)
			continue
		}
		env := []string{"VERBENA_ADDR=" + address(), "PYTHONPATH=" + dir}
		if strings.HasPrefix(name, "test_mlx5") {
			env = append(env, "VERBENA_IDENTITY=mlx5")
		}
		if name == "test_mr" {
			env = append(env, "LD_PRELOAD="+alloc)
		}
		t.Run(name, func(t *testing.T) {
			ok, not := pyResults(t, run(t, side{args: append([]string{"/usr/bin/python3"}, pyArgs(dir, name)...), env: env}), docs, offered[name])
			passed, skipped = passed+ok, skipped+not
		})
	}
	t.Logf("%d passed, %d skipped", passed, skipped)
	if passed < 100 {
		t.Errorf("only %d tests passed: most were skipped", passed)
	}
}

// Tests of regions, in a storm that moves and evicts the dma-bufs under them.
func TestPyverbsStorm(t *testing.T) {
	const module = "test_mr"
	dir, docs := unpackTests(t, pyTests(t)), docsOfSkips(t)
	seed := badArgs()[0]
	env := []string{"VERBENA_ADDR=" + address(), "PYTHONPATH=" + dir, "LD_PRELOAD=" + compileWith(t, "dmabufalloc", "-shared", "-fPIC"),
		"VERBENA_DMABUF_STORM=" + seed + ",20000"}
	pyResults(t, run(t, side{args: append([]string{"/usr/bin/python3"}, pyArgs(dir, module)...), env: env}), docs, offered[module])
	if t.Failed() {
		t.Logf("VERBENA_SEED=%s repeats it", seed)
	}
}

// pyResults returns how many tests of a module have passed, and how many were skipped. It checks the reasons
// of the latter, and that the former are at least as many as they should be.
func pyResults(t *testing.T, out, docs string, want int) (passed, skipped int) {
	t.Helper()
	ran, results := pyRan.FindStringSubmatch(out), pyResult.FindAllStringSubmatch(out, -1)
	if ran == nil || ran[1] != strconv.Itoa(len(results)) {
		t.Fatalf("%d results, %v:\n%s", len(results), ran, out)
	}
	for _, m := range results {
		switch {
		case m[1] == "ok":
			passed++
		case strings.HasPrefix(m[1], "skipped"):
			skipped++
			explained(t, m[2]+m[3], docs)
		default:
			t.Errorf("%s\n%s", m[0], out)
		}
	}
	if passed < want {
		t.Errorf("%d tests pass, %d should:\n%s", passed, want, out)
	}
	return passed, skipped
}

// Tests of newer releases, with the Python and the pyverbs of these: regions, dma-bufs, those of device
// memory, buffers and DMA handles.
func TestPyverbsReleases(t *testing.T) {
	// They ask rdma(8) for the network interface of a device, which asks the kernel. This is what it answers
	// in a kernel with RDMA and without devices.
	path := t.TempDir()
	if err := os.WriteFile(filepath.Join(path, "rdma"), []byte("#!/bin/sh\necho '[]'\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	for suite, modules := range map[string]map[string]int{
		"trixie": {"test_mr": 32},
		"sid":    {"test_mr": 38, "test_buf": 19, "test_dmah": 9},
	} {
		t.Run(suite, func(t *testing.T) {
			r, docs := newRelease(t, suite, false, "python3-pyverbs"), docsOfSkips(t)
			dir := unpackTests(t, r.tree+"/usr/share/doc/rdma-core/tests")
			python := append(append([]string{}, r.loader...), oneFile(t, r.tree+"/usr/bin/python3.[0-9]*"))
			for name, want := range modules {
				env := []string{"VERBENA_ADDR=" + address(), "PYTHONPATH=" + dir, "PATH=" + path + ":" + os.Getenv("PATH")}
				t.Run(name, func(t *testing.T) {
					passed, skipped := pyResults(t, run(t, side{args: append(python[:len(python):len(python)], pyArgs(dir, name)...), env: env}), docs, want)
					t.Logf("%d passed, %d skipped", passed, skipped)
				})
			}
		})
	}
}

// docsOfSkips returns the document that explains skips.
func docsOfSkips(t *testing.T) string {
	t.Helper()
	docs, err := os.ReadFile(root + "/docs/libibverbs.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(docs)
}

// awaitHugePages waits while other processes have all huge pages: if the machine has any, the
// tests use them.
func awaitHugePages(t *testing.T) {
	t.Helper()
	for range 60 {
		b, err := os.ReadFile("/proc/meminfo")
		if err != nil {
			t.Fatal(err)
		}
		n := map[string]int{}
		for _, m := range regexp.MustCompile(`HugePages_(\w+):\s+(\d+)`).FindAllStringSubmatch(string(b), -1) {
			n[m[1]], _ = strconv.Atoi(m[2]) // digits
		}
		if n["Total"] == 0 || n["Free"]-n["Rsvd"] >= 8 {
			return
		}
		time.Sleep(time.Second)
	}
	need(t, false, "other processes have all huge pages")
}

// explained checks that the documentation has a row for the reason of a skip.
func explained(t *testing.T, reason, docs string) {
	t.Helper()
	for _, s := range skips {
		if regexp.MustCompile(s.reason).MatchString(reason) {
			wantRow(t, s.row, reason, docs)
			return
		}
	}
	t.Errorf("a test is skipped for an unknown reason: %q", reason)
}

func wantRow(t *testing.T, row, what, docs string) {
	t.Helper()
	if !strings.Contains(docs, "| "+row+" |") {
		t.Errorf("docs/libibverbs.md has no row %q, to explain %q", row, what)
	}
}
