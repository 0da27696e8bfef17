package hmmtests

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/verbena-rdma/verbena/interop/vm"
)

// programs are what the host must have.
var programs = []vm.Program{
	{Name: "apt-get", Package: "apt"}, {Name: "dpkg-deb", Package: "dpkg"},
	{Name: "tar", Package: "tar"}, {Name: "xz", Package: "xz-utils"}, {Name: "cc", Package: "gcc"},
}

// Check returns what the host lacks.
func Check() error {
	if runtime.GOOS != "linux" || runtime.GOARCH != vm.Amd64 {
		return &vm.MissingError{What: []string{"an amd64 Linux host"}}
	}
	var e vm.MissingError
	for _, p := range programs {
		if _, err := exec.LookPath(p.Name); err != nil {
			e.What, e.Packages = append(e.What, p.Name), append(e.Packages, p.Package)
		}
	}
	if os.Geteuid() != 0 {
		e.What = append(e.What, "root: system calls touch pages that are away, and tests set up huge pages")
	}
	if len(e.What) == 0 {
		return nil
	}
	return &e
}

// Kernel returns why the running kernel cannot have the tests: the engine takes Linux 6.8, the library 6.11.
func Kernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err.Error()
	}
	var major, minor int
	if n, err := fmt.Sscanf(string(release), "%d.%d", &major, &minor); err != nil || n != 2 || major > 6 || (major == 6 && minor >= 11) {
		return ""
	}
	return "Linux " + strings.TrimSpace(string(release)) + " has no PROCMAP_QUERY; 6.11 has it"
}

// members are the files of the kernel's source that the tests are built from.
var members = []string{
	"*/tools/testing/selftests/mm/*.[ch]", "*/tools/testing/selftests/*.h", "*/lib/test_hmm_uapi.h", "*/mm/gup_test.h",
}

// Source is the kernel's source and its headers for programs.
type Source struct {
	Name     string // of Debian's package
	dir      string // with the members
	packages string
}

// FindSource returns the source of the newest kernel that Debian has, from the cache or from the archive.
func FindSource(ctx context.Context) (*Source, error) {
	packages, err := vm.FindPackages(ctx, "sid", vm.Amd64, "linux-source", "linux-libc-dev")
	if err != nil {
		return nil, err
	}
	found, err := filepath.Glob(filepath.Join(packages, "usr/src/linux-source-*.tar.xz"))
	if err != nil || len(found) != 1 {
		return nil, fmt.Errorf("%d kernel sources in %s: %w", len(found), packages, err)
	}
	st, err := os.Stat(found[0])
	if err != nil {
		return nil, err
	}
	cache, err := vm.CacheDir()
	if err != nil {
		return nil, err
	}
	s := &Source{Name: strings.TrimSuffix(filepath.Base(found[0]), ".tar.xz"), packages: packages}
	// The file has the time of its package.
	s.dir = filepath.Join(cache, "hmm", fmt.Sprintf("%s-%d", s.Name, st.ModTime().Unix()))
	if _, err := os.Stat(s.dir); err == nil {
		return s, nil
	}
	return s, s.unpack(ctx, found[0])
}

// unpack unpacks the members, and puts them where they are kept when they are complete.
func (s *Source) unpack(ctx context.Context, archive string) error {
	if err := os.MkdirAll(filepath.Dir(s.dir), 0o755); err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(filepath.Dir(s.dir), "tmp.")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // it has gone if all went well
	if err := run(ctx, "tar", append([]string{"-xf", archive, "-C", tmp, "--strip-components=1", "--no-same-owner", "--wildcards"}, members...)...); err != nil {
		return err
	}
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	if err := os.Rename(tmp, s.dir); err != nil && !errors.Is(err, fs.ErrExist) { // another run may have been faster
		return err
	}
	return nil
}

// Built is the tests, and what they are run with.
type Built struct {
	Tests   string // hmm-tests
	Library string // to preload
	Check   string // a program that looks at what hmm-tests do not look at
	Source  string // the name of the source's package
}

// limit matches the time that the tests' harness gives a case, in seconds. The longest case says 120; a machine that is busy
// needs as much for others.
var limit = regexp.MustCompile(`(?m)^(#define TEST_TIMEOUT_DEFAULT )30$`)

// Build builds the tests in a directory. root is the repository's.
func (s *Source) Build(ctx context.Context, root, dir string) (*Built, error) {
	const selftests = "tools/testing/selftests"
	in := func(name string) string { return filepath.Join(s.dir, selftests, name) }
	harness, err := os.ReadFile(in("kselftest_harness.h"))
	if err != nil {
		return nil, err
	}
	if !limit.Match(harness) {
		return nil, errors.New("the harness of the kernel's tests has another limit of time than 30 s")
	}
	if err := os.WriteFile(filepath.Join(dir, "kselftest_harness.h"), limit.ReplaceAll(harness, []byte("${1}120")), 0o644); err != nil {
		return nil, err
	}
	b := &Built{Source: s.Name, Tests: filepath.Join(dir, "hmm-tests"), Library: filepath.Join(dir, "dmirror.so"), Check: filepath.Join(dir, "check")}
	headers := filepath.Join(s.packages, "usr/include")
	// The kernel's headers and the C library's define some names twice: no warnings.
	if err := run(ctx, "cc", "-O2", "-w", "-D_GNU_SOURCE=", "-I", dir, "-I", s.dir, "-I", in(""), "-I", headers, "-I", headers+"/x86_64-linux-gnu",
		"-o", b.Tests, in("mm/hmm-tests.c"), in("mm/vm_util.c"), in("mm/hugepage_settings.c"), "-lpthread"); err != nil {
		return nil, err
	}
	engine, err := filepath.Glob(filepath.Join(root, "hmm/*.c"))
	if err != nil {
		return nil, err
	}
	ours := filepath.Join(root, "interop/hmmtests/testdata")
	flags := []string{"-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-I", ours, "-I", filepath.Join(root, "hmm"), "-I", s.dir}
	library := append([]string{"-shared", "-fPIC", "-include", filepath.Join(ours, "own.h"), "-o", b.Library}, flags...)
	for _, name := range []string{"calls", "dmirror", "table", "memory", "own"} {
		library = append(library, filepath.Join(ours, name+".c"))
	}
	if err := run(ctx, "cc", append(append(library, engine...), "-lpthread")...); err != nil {
		return nil, err
	}
	return b, run(ctx, "cc", append(flags, "-o", b.Check, filepath.Join(ours, "check.c"))...)
}

func run(ctx context.Context, name string, args ...string) error {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out.String())
	}
	return nil
}
