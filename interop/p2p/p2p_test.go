package p2p

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/p2p/result"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
	"github.com/verbena-rdma/verbena/p2p"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var keep = flag.String("keep", "", "directory in which each machine leaves its dump with the kernel's verdicts")

// models are processors for which the kernel decides differently.
var models = []string{"max", "EPYC"}

// TestKnownMachine asks the kernel about one machine, with each processor.
func TestKnownMachine(t *testing.T) {
	program := prepare(t)
	for _, cpu := range models {
		t.Run(cpu, func(t *testing.T) {
			pairs := judge(t, program, known(t.TempDir(), cpu), 0, "q35-"+map[string]string{"max": "max", "EPYC": "epyc"}[cpu])
			if len(pairs) != 8 {
				t.Errorf("%d pairs, want 2 providers and 4 clients", len(pairs))
			}
			refused := 0
			for _, k := range pairs {
				if k.Direct != "" {
					refused++
				}
			}
			if want := map[string]int{"max": 5, "EPYC": 0}[cpu]; refused != want {
				t.Errorf("the kernel refuses %d pairs, want %d: %+v", refused, want, pairs)
			}
		})
	}
}

// TestMachinesByChance asks the kernel about generated machines.
func TestMachinesByChance(t *testing.T) {
	if os.Getenv("VERBENA_FULL") == "" {
		t.Skip("full: each machine takes about twenty seconds")
	}
	program := prepare(t)
	first, count := uint64(1), uint64(20)
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		seed, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		first, count = seed, 1
	}
	allowed, refused := 0, 0
	for seed := first; seed < first+count; seed++ {
		for _, cpu := range models {
			t.Run(fmt.Sprintf("%d/%s", seed, cpu), func(t *testing.T) {
				t.Logf("VERBENA_SEED=%d repeats this", seed)
				for _, k := range judge(t, program, byChance(t.TempDir(), cpu, seed), seed, fmt.Sprintf("seed%d-%s", seed, cpu)) {
					if k.Direct == "" {
						allowed++
					} else {
						refused++
					}
				}
			})
		}
	}
	t.Logf("%d pairs are allowed, %d refused", allowed, refused)
	if count > 1 && (allowed < 20 || refused < 20) {
		t.Error("the machines are too much alike")
	}
}

func prepare(t *testing.T) (program string) {
	t.Helper()
	vmtest.Need(t, Check())
	_, err := vm.FindKernel(t.Context(), suite, vm.Amd64)
	vmtest.Need(t, err)
	program, err = buildGuest(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return program
}

// judge boots a machine, and compares the kernel's verdicts with ours.
func judge(t *testing.T, program string, m *machine, seed uint64, name string) []result.Pair {
	t.Helper()
	share := t.TempDir()
	pairs, err := boot(t.Context(), program, share, m, seed)
	if err != nil {
		t.Fatal(err)
	}
	dump := filepath.Join(share, result.DumpDir)
	top, err := p2p.ReadSys(dump)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range compare(top, pairs) {
		t.Error(d)
	}
	if len(pairs) == 0 {
		t.Error("the kernel was asked about no pair")
	}
	t.Logf("%d functions, %d pairs", len(top.Functions()), len(pairs))
	if *keep != "" {
		store(t, filepath.Join(*keep, name), dump, pairs)
	}
	return pairs
}

// store keeps a dump with the kernel's verdicts, in the form of the dumps of package p2p.
func store(t *testing.T, dir, dump string, pairs []result.Pair) {
	t.Helper()
	type verdict struct {
		Provider  p2p.Address `json:"provider"`
		Client    p2p.Address `json:"client"`
		Supported bool        `json:"supported"`
	}
	var all []verdict
	for _, k := range pairs {
		all = append(all, verdict{k.Provider, k.Client, k.Direct == ""})
	}
	b, err := json.MarshalIndent(all, "", "  ")
	if err == nil {
		err = os.MkdirAll(filepath.Dir(dir), 0o755)
	}
	if err == nil {
		err = os.CopyFS(dir, os.DirFS(dump))
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "kernel.json"), append(b, '\n'), 0o644)
	}
	if err != nil {
		t.Error(err)
	}
}

// A verdict that differs from the kernel's is found.
func TestCompare(t *testing.T) {
	b := p2p.NewBuilder(p2p.CPU{Vendor: "GenuineIntel", Family: 6})
	h := b.HostBridge(p2p.ID{Vendor: 0x8086, Device: 0x29c0})
	one := h.RootPort(nil).Endpoint("", p2p.ID{}, p2p.ClassNVMe)
	two := h.RootPort(nil).Endpoint("", p2p.ID{}, p2p.ClassNVMe)
	top, err := b.Build()
	if err != nil {
		t.Fatal(err)
	}
	same, far := result.Pair{Provider: one.Address(), Client: one.Address()}, result.Pair{Provider: one.Address(), Client: two.Address()}
	far.Direct, far.NVMet = "EINVAL", "EINVAL"
	if d := compare(top, []result.Pair{same, far}); d != nil {
		t.Error(d)
	}
	same.NVMet, far.Direct = "EINVAL", ""
	if d := compare(top, []result.Pair{same, far}); len(d) != 2 {
		t.Error(d)
	}
}
