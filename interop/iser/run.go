package iser

// The virtual machine, from the host's side: Check names what the host lacks, Run builds the guest's programs, boots the
// machine and reads what the guest says of its cases.

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/interop/vm"
)

// contents lists what the guest gets.
var contents = vm.Contents{
	Programs: []vm.Program{
		{Name: "ip", Package: "iproute2"}, {Name: "rdma", Package: "iproute2"}, {Name: "tc", Package: "iproute2"},
		{Name: "tgtd", Package: "tgt"}, {Name: "tgtadm", Package: "tgt"}, {Name: "iscsid", Package: "open-iscsi"}, {Name: "iscsiadm", Package: "open-iscsi"},
		{Name: "iscsi-inq", Package: "libiscsi-bin"}, {Name: "mkfs.ext4", Package: "e2fsprogs"}, {Name: "e2fsck", Package: "e2fsprogs"},
		{Name: "fio", Package: "fio"},
	},
	Files: []vm.Program{{Name: "/etc/mke2fs.conf", Package: "e2fsprogs"}, {Name: "/etc/iscsi/iscsid.conf", Package: "open-iscsi"}},
	// The modules of the checksum come first: rxe looks the checksum up by name, so no dependency names them.
	Modules: []string{"crc32_generic", "crc32_pclmul", "crc32c_generic", "veth", "sch_netem", "rdma_rxe", "ext4", "sd_mod", "ib_iser",
		"target_core_mod", "iscsi_target_mod", "ib_isert"},
}

// Line is what the guest says of a case.
type Line struct {
	Case   string
	Error  string // why it failed; empty: it passed
	Figure string // what it measured
	End    bool   // there are no more cases
}

// Options say what Run runs.
type Options struct {
	Suite string // the Debian suite of the kernel
	Dir   string // where results and the console are left
	Disk  string // the compiled testdata/disk.c
	Cases string // a regular expression: the cases whose names it matches. Empty: all
	Limit time.Duration
}

// Files in the shared directory: Options.Disk, and Options.Cases.
const (
	DiskProgram = "disk"
	CasesFile   = "cases"
)

// Check returns an error that names what the host lacks.
func Check() error {
	return vm.Check(vm.Amd64, slices.Concat([]vm.Program{{Name: "busybox", Package: "busybox-static"}, {Name: "go", Package: "golang"}}, contents.Programs, contents.Files)...)
}

// Run runs the cases on a kernel, and calls sink with each line of the guest as it comes. lib is the directory of the
// drop-in library.
func Run(ctx context.Context, o Options, lib string, sink func(Line)) error {
	for name, pkg := range map[string]string{vm.GuestProgram: "./interop/iser/guest", "verbena": "./cmd/verbena"} {
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
	files := map[string]string{DiskProgram: o.Disk}
	for _, name := range result.Library {
		files[name] = filepath.Join(lib, name)
	}
	for name, from := range files {
		b, err := os.ReadFile(from) //nolint:gosec // what was just built
		if err == nil {
			err = os.WriteFile(filepath.Join(o.Dir, name), b, 0o755) //nolint:gosec // a program, or a library
		}
		if err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(o.Dir, CasesFile), []byte(o.Cases), 0o644); err != nil { //nolint:gosec // for the guest
		return err
	}
	kernel, err := vm.FindKernel(ctx, o.Suite, vm.Amd64)
	if err != nil {
		return err
	}
	// The initiator of testdata is not in the image, but its library is that of iscsi-inq.
	image, err := vm.Image(ctx, kernel, contents)
	if err != nil {
		return err
	}
	ended := false
	m := vm.Machine{Kernel: kernel, Image: image, Share: o.Dir, Limit: o.Limit}
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
