package p2p

// A run, top-down: the guest's program is built, the kernel and its image come from package vm, the
// machine is booted, and each of the kernel's verdicts is compared with ours on the dump.

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/p2p/result"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/p2p"
)

// suite has the first of Debian's kernels that is built with P2PDMA.
const suite = "sid"

var contents = vm.Contents{Modules: []string{"nvme", "nvmet"}}

// Check returns an error that names what the host lacks.
func Check() error {
	return vm.Check(vm.Amd64, vm.Program{Name: "busybox", Package: "busybox-static"})
}

// buildGuest makes the guest's program, without libraries.
func buildGuest(ctx context.Context, dir string) (string, error) {
	file := filepath.Join(dir, vm.GuestProgram)
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", file, "github.com/verbena-rdma/verbena/interop/p2p/guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("building the guest's program: %w\n%s", err, out)
	}
	return file, nil
}

// boot runs a machine, and returns what the kernel says. The dump is in share.
func boot(ctx context.Context, program, share string, m *machine, seed uint64) ([]result.Pair, error) {
	if m.err != nil {
		return nil, m.err
	}
	b, err := os.ReadFile(filepath.Clean(program))
	if err == nil {
		err = os.WriteFile(filepath.Join(share, vm.GuestProgram), b, 0o755)
	}
	if err != nil {
		return nil, err
	}
	order, err := json.Marshal(result.Order{Seed: seed})
	if err == nil {
		err = os.WriteFile(filepath.Join(share, result.OrderFile), order, 0o644)
	}
	if err != nil {
		return nil, err
	}
	kernel, err := vm.FindKernel(ctx, suite, vm.Amd64)
	if err != nil {
		return nil, err
	}
	image, err := vm.Image(ctx, kernel, contents)
	if err != nil {
		return nil, err
	}
	var pairs []result.Pair
	var fatal []string
	done := false
	guest := vm.Machine{Kernel: kernel, Image: image, Share: share, MemMB: 1024, CPUs: 1, Limit: 5 * time.Minute}
	if m.second { // whose bus the emulator would choose for the shared directory, and refuse
		guest.Late = m.args
	} else {
		guest.Args = m.args
	}
	err = guest.Run(ctx, func(b []byte) {
		var l result.Line
		if err := json.Unmarshal(b, &l); err != nil {
			fatal = append(fatal, fmt.Sprintf("not a result: %q", b))
		}
		if l.Pair != nil {
			pairs = append(pairs, *l.Pair)
		}
		if l.Fatal != "" {
			fatal = append(fatal, l.Fatal)
		}
		done = done || l.Done
	})
	switch {
	case err != nil:
		return nil, err
	case len(fatal) > 0:
		return nil, errors.New(strings.Join(fatal, "; "))
	case !done:
		return nil, errors.New("the guest has ended too early")
	}
	return pairs, nil
}

// compare returns what the kernel and we see differently.
func compare(t *p2p.Topology, pairs []result.Pair) (different []string) {
	for _, k := range pairs {
		v := t.Verdict(k.Provider, k.Client)
		if ours := v.Map != p2p.NotSupported; ours != (k.Direct == "") || ours != (k.NVMet == "") {
			different = append(different, fmt.Sprintf("%v → %v: we say %v (%s); the kernel's O_DIRECT %q, nvmet %q", k.Provider, k.Client, v.Map, v.Reason, k.Direct, k.NVMet))
		}
	}
	return different
}
