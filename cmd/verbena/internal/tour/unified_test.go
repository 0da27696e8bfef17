package tour

import (
	"context"
	"errors"
	"maps"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/verbena-rdma/verbena/cmd/verbena/internal/term"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/nvme/direct"
	"github.com/verbena-rdma/verbena/p2p"
)

func runUnified(t *testing.T, ctx context.Context) (string, error) {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "out")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	err = RunUnified(ctx, term.New(f))
	b, readErr := os.ReadFile(f.Name())
	if readErr != nil {
		t.Fatal(readErr)
	}
	return string(b), err
}

func TestUnified(t *testing.T) {
	out, err := runUnified(t, t.Context())
	if err != nil || strings.Contains(out, "FAIL") || strings.Count(out, "\nok  ") != len(legs) {
		t.Fatalf("error %v:\n%s", err, out)
	}
	for _, line := range strings.Split(out, "\n") {
		if utf8.RuneCountInString(line) > 80 {
			t.Errorf("more than 80 columns: %q", line)
		}
	}
	for _, want := range []string{
		`READ by the remote host +\S+ MiB +16\.0 MiB +16\.0 MiB\n`,
		`disk to GPU memory, peer to peer +\S+ [KM]iB +16\.0 MiB +0\n`,
		`disk to the buffer while it is evicted +\S+ [KM]iB +0 +0\n`,
		`disk to system memory, copied to the GPU +0 +0 +16\.0 MiB\n`,
		`  evictions +\d+ +0 +0\n`,
		`system memory ─+ +\S+ [KM]iB +0 +64\.0 MiB\n`,
		`switch \S+ ─+ +\S+ [KM]iB +0 +32\.0 MiB\n`,
		`gpu0 \S+ ─+ +\S+ MiB +32\.0 MiB +32\.0 MiB\n`,
		`nvme0 \S+ ─+ +\S+ MiB +16\.0 MiB +0\n`,
		`verbena1 \S+ ─+ +0 +0 +16\.0 MiB\n`,
	} {
		if !regexp.MustCompile(want).MatchString(out) {
			t.Errorf("no line like %q in\n%s", want, out)
		}
	}
}

func TestUnifiedCancelled(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	reason := errors.New("enough")
	cancel(reason)
	if _, err := runUnified(t, ctx); !errors.Is(err, reason) && !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
}

// Counters that do not fit each other fail a leg.
func TestUnifiedChecks(t *testing.T) {
	const n = 2 * roundSize
	good := map[string]result{
		"may move": {rounds: 2, sums: 2, time: time.Second, disk: direct.Stats{Bus: n / 2, System: n / 2, Faults: 1}, card: gpu.Stats{Moves: 2},
			fetched: n, fromVRAM: n / 2, evicted: n / 4, moving: n / 4, faults: 1},
		"pinned": {rounds: 2, sums: 2, disk: direct.Stats{Bus: n}, fetched: n, fromVRAM: n},
		"system": {rounds: 2, sums: 2, disk: direct.Stats{Copied: n}, fetched: n, copied: n},
	}
	for _, g := range legs {
		r := good[g.name]
		if err := r.check(g); err != nil {
			t.Errorf("%s: %v", g.name, err)
		}
		for what, change := range map[string]func(r *result){
			"a checksum": func(r *result) { r.sums-- }, "READs": func(r *result) { r.fetched-- },
			"bytes of the disk": func(r *result) { r.disk.Bus++ }, "bytes that were copied": func(r *result) { r.disk.Copied++ },
		} {
			bad := r
			if change(&bad); bad.check(g) == nil {
				t.Errorf("%s: nobody notices that %s is wrong", g.name, what)
			}
		}
	}
}

// Bytes between two devices below a switch do not pass the link above it.
func TestUnifiedLoad(t *testing.T) {
	m := &unified{}
	if err := m.build(); err != nil {
		t.Fatal(err)
	}
	l := load{link: map[p2p.Address]uint64{}}
	m.between(&l, m.at.nvme0, m.at.gpu, 10)
	m.toMemory(&l, m.at.nic0, 5)
	m.between(&l, m.at.nvme1, m.at.gpu, 100)
	port := func(a p2p.Address) p2p.Address { p, _ := m.t.Parent(a); return p }
	upstream := port(port(m.at.gpu))
	want := map[p2p.Address]uint64{
		m.at.nvme0: 10, port(m.at.nvme0): 10, m.at.gpu: 110, port(m.at.gpu): 110, m.at.nic0: 5, port(m.at.nic0): 5,
		upstream: 105, port(upstream): 105, m.at.nvme1: 100, port(m.at.nvme1): 100,
	}
	if !maps.Equal(l.link, want) || l.memory != 5 {
		t.Errorf("%v, memory %d; want %v", l.link, l.memory, want)
	}
}
