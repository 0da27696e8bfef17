package nvme

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/driver/drivertest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// line is a line of the guest's results.
type line struct {
	Controller string
	Info       *driver.Info
	Part       string
	Err        string
	Outcomes   []drivertest.Outcome
	Done       bool
}

const (
	seed     = 7 // the guest's
	diskSize = 16 << 20
)

// The controllers that the guest has: with a buffer as NVMe 1.4 has it, with one as it was before, and with none.
var controllers = map[string]string{"modern": ",cmb_size_mb=16", "legacy": ",cmb_size_mb=16,legacy-cmb=on", "plain": ""}

// TestRealController: the driver drives the emulator's controllers, and how their commands end is as recorded, which
// the model is held to by a test of its own.
func TestRealController(t *testing.T) {
	vmtest.Need(t, vm.Check(vm.Amd64, vm.Program{Name: "busybox", Package: "busybox-static"}))
	kernel, err := vm.FindKernel(t.Context(), "stable", vm.Amd64)
	vmtest.Need(t, err)
	image, err := vm.Image(t.Context(), kernel, vm.Contents{Modules: []string{"vfio_iommu_type1", "vfio_pci"}})
	if err != nil {
		t.Fatal(err)
	}
	dir, disks := t.TempDir(), t.TempDir()
	build(t.Context(), t, filepath.Join(dir, vm.GuestProgram))
	m := vm.Machine{Kernel: kernel, Image: image, Share: dir, Limit: 10 * time.Minute,
		Args: []string{"-device", "intel-iommu"}, Boot: "intel_iommu=on"}
	for name, options := range controllers {
		path := filepath.Join(disks, name)
		if err := os.WriteFile(path, bytes.Repeat([]byte{0xa5}, diskSize), 0o600); err != nil {
			t.Fatal(err)
		}
		m.Args = append(m.Args, "-blockdev", "driver=raw,node-name="+name+",discard=unmap,file.driver=file,file.filename="+path,
			"-device", "nvme,drive="+name+",serial="+name+options)
	}
	var lines []line
	err = m.Run(t.Context(), func(b []byte) {
		var l line
		if err := json.Unmarshal(b, &l); err != nil {
			t.Errorf("not a result: %q", b)
		}
		lines = append(lines, l)
	})
	if err != nil {
		t.Fatal(err)
	}
	judge(t, lines)
	for name := range controllers {
		if got := begin(t, filepath.Join(disks, name), 1<<20); !bytes.Equal(got, drivertest.Pattern(seed)) {
			t.Errorf("%s: the disk has not what was written", name)
		}
	}
}

// judge looks at the guest's results.
func judge(t *testing.T, lines []line) {
	t.Helper()
	recorded := drivertest.Recorded()
	parts, outcomes, done := map[string]int{}, map[string]bool{}, false
	for _, l := range lines {
		switch {
		case l.Err != "":
			t.Errorf("%s: %s: %s", l.Controller, l.Part, l.Err)
		case l.Info != nil:
			t.Logf("%s: %+v", l.Controller, *l.Info)
		case l.Part != "":
			parts[l.Controller]++
		case l.Outcomes != nil:
			outcomes[l.Controller] = true
			compare(t, l.Controller, l.Outcomes, recorded)
		case l.Done:
			done = true
		}
	}
	want := map[string]int{"modern": 7, "legacy": 7, "plain": 5} // its completion queues cannot lie in the buffer
	if !maps.Equal(parts, want) || len(outcomes) != len(controllers) || !done {
		t.Errorf("parts %v, should be %v; outcomes of %v; done: %v", parts, want, slices.Sorted(maps.Keys(outcomes)), done)
	}
}

func compare(t *testing.T, controller string, got, recorded []drivertest.Outcome) {
	t.Helper()
	if os.Getenv("VERBENA_RECORD") != "" && controller == "modern" {
		if err := os.WriteFile(os.Getenv("VERBENA_RECORD"), drivertest.Format(got), 0o600); err != nil {
			t.Error(err)
		}
		return
	}
	if len(got) != len(recorded) {
		t.Errorf("%s: %d outcomes, %d are recorded", controller, len(got), len(recorded))
		return
	}
	for i := range got {
		if got[i] != recorded[i] {
			t.Errorf("%s: %s: %v, recorded is %v", controller, got[i].Name, got[i].Status, recorded[i].Status)
		}
	}
}

// begin returns the first bytes of a file.
func begin(t *testing.T, path string, n int) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, n)
	if _, err := io.ReadFull(f, b); err != nil {
		t.Fatal(err)
	}
	return b
}

func build(ctx context.Context, t *testing.T, to string) {
	t.Helper()
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", to, "./guest")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
