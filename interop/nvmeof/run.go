package nvmeof

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/verbena-rdma/verbena/interop/vm"
)

// contents lists what the guest gets.
var contents = vm.Contents{
	Programs: []vm.Program{
		{Name: "ip", Package: "iproute2"}, {Name: "rdma", Package: "iproute2"},
		{Name: "mkfs.ext4", Package: "e2fsprogs"}, {Name: "e2fsck", Package: "e2fsprogs"},
		{Name: "fio", Package: "fio"},
	},
	Files: []vm.Program{{Name: "/etc/mke2fs.conf", Package: "e2fsprogs"}},
	// The modules of the checksum come first: rxe looks the checksum up by name, so no dependency names them.
	Modules: []string{"crc32_generic", "crc32_pclmul", "crc32c_generic", "veth", "rdma_rxe", "ext4", "brd", "nvme", "nvme_rdma", "nvmet_rdma"},
}

// Line is what the guest says of a case.
type Line struct {
	Case   string
	Error  string // why it failed; empty: it passed
	Skip   string // why it was not run
	Figure string // what it measured
	End    bool   // there are no more cases
}

// Options say what Run runs.
type Options struct {
	Suite string // the Debian suite of the kernel
	Full  bool   // the long cases, too
	Cases string // a regular expression: the cases whose names it matches, long ones among them. Empty: all of the form
	Dir   string // where results and the console are left
	Limit time.Duration

	Counted bool // vm.Machine's, with one processor
}

// Floor is the ratio of our target's speed to that of the kernel's below which the case speed fails. The goal is 1;
// docs/performance.md has with which kernels it is reached.
const Floor = 0.75

// Files in the shared directory that tell the guest what to run.
const (
	FullFile  = "full"  // if it is there, the long form
	CasesFile = "cases" // Options.Cases
)

// Check returns an error that names what the host lacks.
func Check() error {
	return vm.Check(vm.Amd64, append(append([]vm.Program{{Name: "busybox", Package: "busybox-static"}, {Name: "go", Package: "golang"}}, contents.Programs...), contents.Files...)...)
}

// Run runs the cases on a kernel, and calls sink with each line of the guest as it comes.
func Run(ctx context.Context, o Options, sink func(Line)) error {
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return err
	}
	for name, pkg := range map[string]string{vm.GuestProgram: "./interop/nvmeof/guest", "nvmet": "./examples/nvmet"} {
		out, err := filepath.Abs(filepath.Join(o.Dir, name))
		if err != nil {
			return err
		}
		build := exec.CommandContext(ctx, "go", "build", "-o", out, pkg)
		build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=0")
		if msg, err := build.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", pkg, err, msg)
		}
	}
	if o.Full {
		if err := os.WriteFile(filepath.Join(o.Dir, FullFile), nil, 0o644); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(o.Dir, CasesFile), []byte(o.Cases), 0o644); err != nil {
		return err
	}
	kernel, err := vm.FindKernel(ctx, o.Suite, vm.Amd64)
	if err != nil {
		return err
	}
	image, err := vm.Image(ctx, kernel, contents)
	if err != nil {
		return err
	}
	ended := false
	m := vm.Machine{Kernel: kernel, Image: image, Share: o.Dir, Limit: o.Limit}
	if m.Args, err = vm.Peers(o.Dir); err != nil {
		return err
	}
	if o.Counted {
		m.Counted, m.CPUs = true, 1
	}
	err = m.Run(ctx, func(b []byte) {
		var l Line
		if json.Unmarshal(b, &l) != nil {
			l = Line{Case: "results", Error: fmt.Sprintf("not a result: %q", b)}
		}
		ended = ended || l.End
		if !l.End {
			sink(l)
		}
	})
	if err == nil && !ended {
		err = fmt.Errorf("the guest has ended before its last case")
	}
	return err
}
