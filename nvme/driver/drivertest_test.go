package driver_test

import (
	"context"
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
	"github.com/verbena-rdma/verbena/nvme/driver/drivertest"
	"github.com/verbena-rdma/verbena/nvme/pci"
)

// The model, through what real controllers are put through, too.
func TestModelAsReal(t *testing.T) {
	seed := rand.Uint64()
	if v, err := strconv.ParseUint(os.Getenv("VERBENA_SEED"), 10, 64); err == nil {
		seed = v
	}
	t.Logf("VERBENA_SEED=%d", seed)
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	r, disk := modelRig(ctx, t)
	r.Seed = seed
	parts := 0
	drivertest.Data(ctx, r, func(part string, err error) {
		parts++
		if err != nil {
			t.Errorf("%s: %v", part, err)
		}
	})
	if parts != 8 {
		t.Errorf("%d parts were run", parts)
	}
	want := drivertest.Pattern(seed)
	got := make([]byte, len(want))
	if _, err := disk.ReadAt(got, 0); err != nil || string(got) != string(want) {
		t.Errorf("the namespace has not what was written: %v", err)
	}
	list, err := drivertest.Outcomes(ctx, r)
	if err != nil {
		t.Fatal(err)
	}
	recorded := drivertest.Recorded()
	if len(list) != len(recorded) || len(list) < 90 {
		t.Fatalf("%d outcomes, %d are recorded", len(list), len(recorded))
	}
	seen := 0
	for i, o := range list {
		want := recorded[i]
		if d, found := deviations[o.Name]; found {
			seen++
			if want.Status != d.theirs {
				t.Errorf("%s: %v is recorded, so %q is no reason", o.Name, want.Status, d.why)
			}
			want.Status = d.ours
		}
		if o != want {
			t.Errorf("%s: %v, should be %v", o.Name, o.Status, want.Status)
		}
	}
	if seen != len(deviations) {
		t.Errorf("%d of %d deviations were met", seen, len(deviations))
	}
}

// deviations are where the model does not end as the recorded controller does, and why.
var deviations = map[string]struct {
	theirs, ours nvme.Status
	why          string
}{
	"deallocate behind the end":      {ok, nvme.StatusLBAOutOfRange | dnr, "a range out of bounds is skipped there"},
	"PRP not at 4 bytes":             {ok, nvme.StatusPRPOffset | dnr, "controllers are allowed to look, and not obliged to"},
	"PRP list not at 8 bytes":        {ok, nvme.StatusPRPOffset | dnr, "likewise"},
	"PRP nowhere":                    {ok, nvme.StatusDataTransferError | dnr, "faults of data are not noticed there"},
	"second PRP nowhere":             {ok, nvme.StatusDataTransferError | dnr, "likewise"},
	"SGL nowhere":                    {ok, nvme.StatusDataTransferError | dnr, "likewise"},
	"SGL too long":                   {ok, nvme.StatusDataSGLLength | dnr, "that takes bit 18 of SGLS, which neither has"},
	"SGL of another type":            {nvme.StatusInvalidSGLSegment | dnr, nvme.StatusSGLType | dnr, "1.4, 4.6.1 has a status for it"},
	"SGL segment that leads nowhere": {ok, nvme.StatusInvalidSGLSegment | dnr, "only last segments end with data (1.4, 4.4)"},
	"no such log":                    {nvme.StatusInvalidField | dnr, nvme.StatusInvalidLogPage | dnr, "1.4, 5.14 has a status for it"},
	"create submission queue for completion queue 0": {nvme.StatusInvalidCQ | dnr, nvme.StatusInvalidQueueID | dnr, "1.4, 5.4: the status for CQID 0"},
	"delete completion queue again":                  {nvme.StatusInvalidCQ | dnr, nvme.StatusInvalidQueueID | dnr, "1.4, 5.5 has no other status for it"},
	"delete completion queue 0":                      {nvme.StatusInvalidCQ | dnr, nvme.StatusInvalidQueueID | dnr, "likewise"},
}

const (
	ok  = nvme.StatusSuccess
	dnr = nvme.StatusDNR
)

func modelRig(ctx context.Context, t *testing.T) (*drivertest.Rig, nvme.Namespace) {
	t.Helper()
	disk, err := nvme.NewMemory(8<<20, 512)
	if err != nil {
		t.Fatal(err)
	}
	sub, err := nvme.NewSubsystem(nvme.SubsystemConfig{NQN: "nqn.2026-01.org.verbena:real"})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.AddNamespace(1, disk); err != nil {
		t.Fatal(err)
	}
	bus, cmb := new(pci.Space), make([]byte, 1<<20)
	host := driver.NewHostMemory(bus)
	model, err := pci.New(pci.Config{Subsystem: sub, Bus: bus, MDTS: 7, CMB: &pci.CMB{Memory: cmb}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	c, err := driver.Open(model, host, &driver.Config{MapBAR: func(int, uint64, uint64) (driver.Memory, error) {
		return driver.Memory{Bytes: cmb, Addr: 1 << 46}, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	list, err := c.Namespaces(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return &drivertest.Rig{C: c, DMA: host, NS: list[0]}, disk
}
