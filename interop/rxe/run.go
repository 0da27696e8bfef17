package rxe

// A run, top-down:
//
//  1. Check names what the host lacks, before anything is done.
//  2. build makes the guest's programs, in the directory that host and guest share.
//  3. The kernel and its image come from package vm.
//  4. Run reads the guest's lines as it writes them, and fails if it ends too early.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/interop/vm"
)

// Suites are the Debian suites whose kernels the full list runs on.
var Suites = []string{"stable", "sid"}

// contents lists the host's programs and files that the guest gets.
var contents = vm.Contents{
	Programs: []vm.Program{
		{Name: "ip", Package: "iproute2"}, {Name: "tc", Package: "iproute2"}, {Name: "rdma", Package: "iproute2"},
		{Name: "dumpcap", Package: "tshark"},
		{Name: "ibv_devinfo", Package: "ibverbs-utils"},
		{Name: "ibv_rc_pingpong", Package: "ibverbs-utils"}, {Name: "ibv_uc_pingpong", Package: "ibverbs-utils"},
		{Name: "ibv_ud_pingpong", Package: "ibverbs-utils"}, {Name: "ibv_srq_pingpong", Package: "ibverbs-utils"},
		{Name: "ib_write_bw", Package: "perftest"}, {Name: "ib_write_lat", Package: "perftest"},
		{Name: "ib_read_bw", Package: "perftest"}, {Name: "ib_read_lat", Package: "perftest"},
		{Name: "ib_send_bw", Package: "perftest"}, {Name: "ib_send_lat", Package: "perftest"},
		{Name: "ib_atomic_bw", Package: "perftest"}, {Name: "ib_atomic_lat", Package: "perftest"},
		{Name: "rping", Package: "rdmacm-utils"}, {Name: "ucmatose", Package: "rdmacm-utils"}, {Name: "udaddy", Package: "rdmacm-utils"},
		{Name: "rdma_server", Package: "rdmacm-utils"}, {Name: "rdma_client", Package: "rdmacm-utils"}, {Name: "cmtime", Package: "rdmacm-utils"},
		{Name: "rstream", Package: "rdmacm-utils"}, {Name: "riostream", Package: "rdmacm-utils"},
		{Name: "mckey", Package: "rdmacm-utils"}, {Name: "rcopy", Package: "rdmacm-utils"},
		{Name: "stdbuf", Package: "coreutils"}, {Name: "iperf3", Package: "iperf3"},
	},
	Files: []vm.Program{
		{Name: "/usr/libexec/coreutils/libstdbuf.so", Package: "coreutils"},
		{Name: "/etc/libibverbs.d/rxe.driver", Package: "ibverbs-providers"},
		{Name: "/usr/lib/*/libibverbs/librxe-rdmav*.so", Package: "ibverbs-providers"},
	},
	// The modules of the checksum come first: rxe looks the checksum up by name, so no
	// dependency names them.
	Modules: []string{"crc32_generic", "crc32_pclmul", "veth", "sch_netem", "sch_tbf", "sch_fq_codel", "rdma_rxe", "ib_uverbs", "rdma_ucm", "vgem", "vfio_iommu_type1", "vfio_pci"},
}

// pciDevice are the emulator's arguments for a PCI device with memory, behind an IOMMU: for dma-bufs of
// vfio. The short form does without.
var pciDevice = []string{"-device", "intel-iommu", "-blockdev", "driver=null-co,node-name=nothing,size=67108864",
	"-device", "nvme,drive=nothing,serial=1,cmb_size_mb=16"}

// buildPrograms are what build needs besides Go.
var buildPrograms = []vm.Program{
	{Name: "gcc", Package: "gcc"},
	{Name: "/usr/include/infiniband/verbs.h", Package: "libibverbs-dev"},
	{Name: "/usr/include/rdma/rdma_cma.h", Package: "librdmacm-dev"},
}

// GiantMemMB is the memory of a guest for the long cases, which have two buffers of 1 GiB.
const GiantMemMB = 5120

// Options say what Run runs.
type Options struct {
	Suite string        // the Debian suite of the kernel
	Order result.Order  // which cases
	Dir   string        // where results, console and captures are left
	Limit time.Duration // for the whole machine. Zero: 10 minutes
	MemMB int           // zero: enough for all but the long cases
}

// Check returns an error that names what the host lacks.
func Check() error {
	return vm.Check(vm.Amd64, append(append(append([]vm.Program{{Name: "busybox", Package: "busybox-static"}}, contents.Programs...), contents.Files...), buildPrograms...)...)
}

// Run runs the cases on a kernel. It calls sink with each line of the guest as it comes. It
// returns an error if a case has no result; a case that failed is none.
func Run(ctx context.Context, o Options, sink func(result.Line)) error {
	if err := Check(); err != nil {
		return err
	}
	dir, err := filepath.Abs(o.Dir)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(filepath.Join(dir, result.CaptureDir)); err != nil {
		return err
	}
	if err := build(ctx, dir); err != nil {
		return err
	}
	whole := !o.Order.Short && !o.Order.Soak && !o.Order.Peers && o.Order.Bench == 0
	if whole {
		if err := buildWhole(ctx, filepath.Join(dir, result.WholeDir)); err != nil {
			return err
		}
	}
	o.Order.Kernel = o.Suite
	order, err := json.Marshal(o.Order)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(dir, result.OrderFile), order, 0o644); err != nil {
		return err
	}
	kernel, err := vm.FindKernel(ctx, o.Suite, vm.Amd64)
	if err != nil {
		return err
	}
	has := contents
	if o.Order.Peers {
		has.Modules = slices.Concat(has.Modules, []string{"nvme"}) // the others leave controllers to vfio
	}
	image, err := vm.Image(ctx, kernel, has)
	if err != nil {
		return err
	}
	var ended end
	m := vm.Machine{Kernel: kernel, Image: image, Share: dir, Limit: o.Limit, MemMB: o.MemMB}
	switch {
	case o.Order.Peers:
		if m.Args, err = vm.Peers(dir); err != nil {
			return err
		}
		m.Boot = "swiotlb=force" // the kernel counts what does not go from device to device
	case !o.Order.Short && o.Order.Bench == 0:
		m.Args, m.Boot = pciDevice, "intel_iommu=on"
	}
	err = m.Run(ctx, func(b []byte) {
		var l result.Line
		if json.Unmarshal(b, &l) != nil {
			l = result.Line{Fatal: fmt.Sprintf("not a result: %q", b)}
		}
		ended.add(l)
		sink(l)
	})
	for _, name := range programs {
		err = errors.Join(err, os.Remove(filepath.Join(dir, name)))
	}
	err = errors.Join(err, os.RemoveAll(filepath.Join(dir, result.WholeDir)))
	return errors.Join(err, ended.err())
}

// end keeps account of whether the guest has done all that it announced.
type end struct {
	missing map[string]bool
	fatal   []string
	done    bool
}

func (e *end) add(l result.Line) {
	switch {
	case l.Plan != nil:
		e.missing = map[string]bool{}
		for _, name := range l.Plan.Cases {
			e.missing[name] = true
		}
	case l.Case != nil:
		delete(e.missing, l.Case.Name)
	case l.Fatal != "":
		e.fatal = append(e.fatal, l.Fatal)
	case l.Done:
		e.done = true
	}
}

func (e *end) err() error {
	switch {
	case len(e.fatal) > 0:
		return fmt.Errorf("the guest: %s", strings.Join(e.fatal, "\n"))
	case len(e.missing) > 0:
		return fmt.Errorf("the guest ended before %d of its cases were run", len(e.missing))
	case !e.done || e.missing == nil:
		return errors.New("the guest ended too early")
	}
	return nil
}

// programs are the files that build leaves in the shared directory.
var programs = append([]string{vm.GuestProgram, "verbena", "kverbs", "cmpeer", "udpfloor", "regfd"}, result.Library...)

// build makes the guest's programs. Their libraries are in the image. The one with the cases
// has cgo, so that the kernel notifies it of changes of its mappings.
func build(ctx context.Context, dir string) error {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	for _, b := range []struct {
		env  string
		args []string
	}{
		{"", []string{"scripts/clib.sh"}},
		{"CGO_ENABLED=1", []string{"go", "build", "-buildvcs=false", "-o", filepath.Join(dir, vm.GuestProgram), "./interop/rxe/guest"}},
		{"CGO_ENABLED=0", []string{"go", "build", "-buildvcs=false", "-o", filepath.Join(dir, "verbena"), "./cmd/verbena"}},
		{"", []string{"gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, "kverbs"), "interop/rxe/kverbs/kverbs.c", "interop/rxe/kverbs/queues.c", "-libverbs"}},
		{"", []string{"gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, "cmpeer"), "interop/rxe/cmpeer/cmpeer.c", "-lrdmacm", "-libverbs"}},
		{"", []string{"gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, "udpfloor"), "interop/rxe/udpfloor/udpfloor.c"}},
		{"", []string{"gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, "regfd"), "interop/rxe/regfd/regfd.c", "-libverbs"}},
	} {
		cmd := exec.CommandContext(ctx, b.args[0], b.args[1:]...)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), b.env)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(b.args, " "), err, out)
		}
	}
	for _, name := range result.Library {
		b, err := os.ReadFile(filepath.Join(root, "bin", "lib", name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, name), b, 0o755)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// buildWhole makes what the short form does without, in a directory of its own.
func buildWhole(ctx context.Context, dir string) error {
	root, err := moduleRoot(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, pkg := range result.Tests {
		if _, err := output(ctx, root, "go", "test", "-c", "-o", filepath.Join(dir, name), pkg); err != nil {
			return err
		}
	}
	return buildOFI(ctx, root, dir)
}

// buildOFI makes a program on Debian trixie's libfabric, with the libraries and the loader of that release: the
// image has those of the host.
func buildOFI(ctx context.Context, root, dir string) error {
	tree, err := vm.FindPackages(ctx, "trixie", vm.Amd64, "libfabric-dev", "libfabric-bin")
	if err != nil {
		return err
	}
	lib, exe := filepath.Join(tree, "usr", "lib", "x86_64-linux-gnu"), filepath.Join(dir, "ofi")
	if _, err := output(ctx, root, "gcc", "-std=gnu11", "-O1", "-Wall", "-Werror", "-I", "clib/include", "-I", tree+"/usr/include", "-o", exe, "interop/programs/testdata/ofi.c",
		"-Lbin/lib", "-libverbs", "-L"+lib, "-lfabric", "-lpthread", "-Wl,--allow-shlib-undefined"); err != nil {
		return err
	}
	list, err := output(ctx, root, filepath.Join(lib, result.Loader), "--library-path", lib, "--list", exe)
	if err != nil {
		return err
	}
	files := []string{filepath.Join(lib, result.Loader)}
	for line := range strings.Lines(list) { // name => path (address)
		_, rest, _ := strings.Cut(line, " => ")
		if path, _, _ := strings.Cut(rest, " "); filepath.Dir(path) == lib && filepath.Base(path) != result.Loader {
			files = append(files, path)
		}
	}
	providers, err := filepath.Glob(filepath.Join(lib, "libibverbs", "librxe-rdmav*.so"))
	if err != nil || len(files) < 5 || len(providers) != 1 {
		return fmt.Errorf("libfabric: libraries %v, providers %v, %w", files, providers, err)
	}
	for _, from := range append(files, providers...) {
		b, err := os.ReadFile(from)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, filepath.Base(from)), b, 0o755)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// output runs a program in a directory, and returns what it prints.
func output(ctx context.Context, dir string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// moduleRoot returns the directory of the module.
func moduleRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("go list -m: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}
