package arm64

// A run, top-down:
//
//  1. Check names what the host lacks.
//  2. Fetch finds Debian's kernel and packages.
//  3. build makes the library, the command and the tests, in a directory that the guest sees.
//  4. Run boots the machine. Its first program, a script, runs the tests and writes what they print to
//     the file that Machine.Run follows.

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/vm"
)

// Suite is the one whose kernel the guest has.
const Suite = "stable"

// packages are what the guest has of the host's own release, whose C library is the one that the host's
// compiler for arm64 links against.
var packages = []string{"busybox-static", "ibverbs-utils", "iproute2", "perftest", "rdmacm-utils", "util-linux"}

// programs are what the host needs besides what package vm does.
var programs = []vm.Program{
	{Name: "go", Package: "golang"},
	{Name: "busybox", Package: "busybox-static"},
	{Name: "aarch64-linux-gnu-gcc", Package: "gcc-aarch64-linux-gnu"},
	{Name: "/usr/aarch64-linux-gnu/include/stdio.h", Package: "libc6-dev-arm64-cross"},
	{Name: "/usr/include/infiniband/verbs.h", Package: "libibverbs-dev"},
	{Name: "/usr/include/rdma/rdma_cma.h", Package: "librdmacm-dev"},
}

// Check returns an error that names what the host lacks.
func Check() error { return vm.Check(vm.Arm64, programs...) }

// Guest is Debian's part of a machine.
type Guest struct {
	Kernel *vm.Kernel
	tree   string
}

// Fetch finds the kernel and the packages, in the cache or in the archive.
func Fetch(ctx context.Context) (*Guest, error) {
	release, err := hostRelease()
	if err != nil {
		return nil, err
	}
	g := new(Guest)
	if g.tree, err = vm.FindPackages(ctx, release, vm.Arm64, packages...); err != nil {
		return nil, err
	}
	g.Kernel, err = vm.FindKernel(ctx, Suite, vm.Arm64)
	return g, err
}

// hostRelease returns the name of the host's Debian release.
func hostRelease() (string, error) {
	b, err := os.ReadFile("/etc/os-release")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "VERSION_CODENAME="); ok {
			return strings.Trim(name, `"`), nil
		}
	}
	return "", errors.New("/etc/os-release does not name the release")
}

// modulePath is the root of the module, seen from this package.
const modulePath = "../.."

// Tests is a package of tests, with what to run of it.
type Tests struct {
	Package string // its directory, from the root of the module
	Run     string // as -test.run
	Cgo     bool
}

// file returns the name of the compiled tests.
func (t Tests) file() string { return strings.ReplaceAll(t.Package, "/", "-") + ".test" }

// script is the guest's first program. Programs are copied into memory, and everything that the tests
// print goes to the file of results. "status" and the status of a package end what it prints.
const script = `#!/bin/sh
export PATH=/usr/sbin:/sbin:/usr/bin:/bin HOME=/tmp TMPDIR=/tmp CI=true VERBENA_BUILT=/tmp/bin
/usr/sbin/ip link set lo up || /bin/ip link set lo up
chmod 1777 /tmp /dev/shm
ln -s /proc/self/fd /dev/fd
mkdir /tmp/bin && cp -r /share/built/. /tmp/bin && chmod -R a+rX /tmp/bin && rm -f /tmp/bin/*.test
while read -r dir file run; do
  mkdir -p "/tmp/src/$dir" && cp "/share/built/$file" /tmp/tests && cd "/tmp/src/$dir" || exit
  [ -d "/share/src/$dir/testdata" ] && cp -r "/share/src/$dir/testdata" .
  echo "package $dir"
  /tmp/tests -test.v -test.timeout 60m -test.run "$run" 2>&1
  echo "status $dir $?"
done </share/tests >>/share/` + vm.Results + `
`

// Run builds everything, boots the machine and runs the tests in it. It calls line with each line that
// they print. dir is a directory for all files of the run.
func (g *Guest) Run(ctx context.Context, dir string, limit time.Duration, line func(string), tests ...Tests) error {
	if err := build(ctx, dir, tests); err != nil {
		return err
	}
	image, err := vm.Image(ctx, g.Kernel, vm.Contents{Tree: g.tree, Modules: []string{"veth"}})
	if err != nil {
		return err
	}
	var list strings.Builder
	for _, t := range tests {
		fmt.Fprintln(&list, t.Package, t.file(), t.Run)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "tests"), []byte(list.String()), 0o644),
		os.WriteFile(filepath.Join(dir, vm.GuestProgram), []byte(script), 0o755)); err != nil {
		return err
	}
	m := vm.Machine{Kernel: g.Kernel, Image: image, Share: dir, Limit: limit, MemMB: 2048}
	return m.Run(ctx, func(b []byte) { line(string(b)) })
}

// build leaves in dir/built what the guest copies: the command, the library in lib, compiled tests, and in
// testdata what tests would compile.
func build(ctx context.Context, dir string, tests []Tests) error {
	built := filepath.Join(dir, "built")
	if err := os.MkdirAll(filepath.Join(built, "testdata"), 0o755); err != nil {
		return err
	}
	type command struct {
		cgo  string
		args []string
	}
	commands := []command{
		{"1", []string{"scripts/clib.sh"}},
		{"1", []string{"cp", "-a", "bin/arm64/lib", built}},
		{"0", []string{"go", "build", "-buildvcs=false", "-pgo=off", "-o", filepath.Join(built, "verbena"), "./cmd/verbena"}},
		{"1", []string{"aarch64-linux-gnu-gcc", "-std=gnu11", "-Wall", "-Werror", "-idirafter", "/usr/include", "-O1", "-shared", "-fPIC", "-Wl,-soname,librdmacm.so.1",
			"-o", filepath.Join(built, "testdata", "unpatchable"), "interop/programs/testdata/unpatchable.c", "-L", "bin/arm64/lib", "-libverbs"}},
		{"1", []string{"sh", "interop/programs/testdata/cudafree.sh", filepath.Join(built, "testdata", "cudafree")}},
	}
	for _, t := range tests {
		cgo := "0"
		if t.Cgo {
			cgo = "1"
		}
		commands = append(commands, command{cgo, []string{"go", "test", "-c", "-vet=off", "-o", filepath.Join(built, t.file()), "./" + t.Package}})
		data := filepath.Join(t.Package, "testdata")
		if _, err := os.Stat(filepath.Join(modulePath, data)); err == nil {
			commands = append(commands, command{cgo, []string{"mkdir", "-p", filepath.Join(dir, "src", t.Package)}},
				command{cgo, []string{"cp", "-r", data, filepath.Join(dir, "src", t.Package)}})
		}
	}
	for _, c := range commands {
		cmd := exec.CommandContext(ctx, c.args[0], c.args[1:]...)
		cmd.Dir = modulePath
		cmd.Env = append(os.Environ(), "GOARCH=arm64", "CC=aarch64-linux-gnu-gcc", "PGO=off", "CGO_ENABLED="+c.cgo)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(c.args, " "), err, out)
		}
	}
	return nil
}
