package migrate

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newSeed returns the seed of a guest: VERBENA_SEED, or a random one. It is printed if the test fails.
func newSeed(t *testing.T) uint32 {
	t.Helper()
	seed := rand.Uint32()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = uint32(n) //nolint:gosec // the lower half will do
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("VERBENA_SEED=%d repeats the guest's values", seed)
		}
	})
	return seed | 1
}

// kernelFile writes the guest's program to a file.
func kernelFile(t *testing.T, seed uint32) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "guest")
	if err := os.WriteFile(file, image(seed), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// migration is a case: how a guest gets from one place to another one.
type migration struct {
	name   string
	pin    bool     // all memory is registered in the beginning
	env    []string // variables of both processes
	spaces bool     // two namespaces
	lose   int      // of a hundred datagrams, between namespaces
	full   bool
}

var migrations = []migration{
	{name: "chunks"},
	{name: "pinned", pin: true},
	{name: "packets", env: []string{"VERBENA_LINK=udp"}, full: true},
	{name: "packets pinned", env: []string{"VERBENA_LINK=udp"}, pin: true, full: true},
	{name: "namespaces", spaces: true, full: true},
	{name: "lossy", spaces: true, lose: 1, full: true},
	{name: "lossy pinned", spaces: true, lose: 1, pin: true, full: true},
}

// places returns where source and destination run, and what stands in front of the destination's port.
func (m *migration) places(t *testing.T) (from, to place) {
	t.Helper()
	if !m.spaces {
		return place{addr: clibtest.Address(), env: m.env}, place{addr: clibtest.Address(), env: m.env}
	}
	ns := clibtest.Network(t)
	if m.lose > 0 {
		clibtest.Lose(t, ns, m.lose)
	}
	in := func(i int) place {
		return place{addr: fmt.Sprintf("10.79.0.%d", i+1), env: m.env, wrap: []string{clibtest.Tool(t, "ip", "iproute2"), "netns", "exec", ns[i]}}
	}
	return in(0), in(1)
}

const migrationPort = ":4444"

// begin starts two processes, and the migration between them when the guest has written all of its memory several times.
func (m *migration) begin(t *testing.T, seed uint32) (source, dest *qemu) {
	t.Helper()
	from, to := m.places(t)
	kernel := kernelFile(t, seed)
	dest = startQEMU(t, to, kernel, "-incoming", "defer")
	source = startQEMU(t, from, kernel)
	caps := map[string]any{"capabilities": []any{map[string]any{"capability": "rdma-pin-all", "state": m.pin}}}
	uri := map[string]any{"uri": "rdma:" + to.addr + migrationPort}
	for _, q := range []*qemu{source, dest} {
		q.do(t, "migrate-set-capabilities", caps)
	}
	set(t, source, "downtime-limit", 1)
	set(t, source, "max-bandwidth", 1<<20) // the guest shall write all pages while the first round is sent
	dest.do(t, "migrate-incoming", uri)
	source.awaitPasses(t, 4)
	source.do(t, "migrate", uri)
	return source, dest
}

// set sets a parameter of QEMU's migrations: downtime-limit, in ms, is how long the guest may be stopped while the last
// pages are sent. As long as they would take longer, QEMU sends what the guest has written meanwhile again and again, in
// rounds.
func set(t *testing.T, q *qemu, name string, value int) {
	t.Helper()
	q.do(t, "migrate-set-parameters", map[string]any{name: value})
}

// await waits for the end of a migration.
func await(t *testing.T, source, dest *qemu) (s status) {
	t.Helper()
	until := func(what string, is func() bool) {
		clibtest.Until(t, what, func() bool {
			s = source.migration(t)
			return is() || s.Status == "completed" || s.Status == "failed"
		}, source.Process, dest.Process)
	}
	source.awaitPasses(t, 2)
	set(t, source, "max-bandwidth", 1<<40)
	until("the guest's memory was sent several times", func() bool { return s.RAM.Rounds >= 5 })
	set(t, source, "downtime-limit", 60_000) // the guest may write faster than a busy machine sends
	until("the migration ends", func() bool { return false })
	return s
}

// The guest is migrated while it runs. Its memory is right at the destination, where it goes on.
func TestMigrate(t *testing.T) {
	for _, m := range migrations {
		t.Run(m.name, func(t *testing.T) {
			if m.full && !clibtest.Full {
				t.Skip("full: another way of the same migration")
			}
			seed := newSeed(t)
			source, dest := m.begin(t, seed)
			s := await(t, source, dest)
			if s.Status != "completed" || source.running(t) {
				t.Fatalf("migration: %+v", s)
			}
			before := source.passes(t)
			dest.awaitPasses(t, 3)
			dest.do(t, "stop", nil)
			checkMemory(t, dest, seed)
			dest.do(t, "cont", nil)
			dest.awaitPasses(t, 2)
			checkPrinted(t, source.printed(t)+dest.printed(t))

			sent, got := source.quit(t), dest.quit(t)
			t.Logf("%d ms, of which the guest was stopped for %d ms; %d rounds, %d pages; the guest made %d passes before and %d after; %d bytes and %d packets sent, %d again",
				s.TotalTime, s.Downtime, s.RAM.Rounds, s.RAM.Normal, before, dest.passes(t), sent["tx_bytes"], sent["tx_packets"], sent["retransmitted_packets"])
			// A page of the areas has no byte that repeats in all of it, so each has to be sent once at least.
			least := hot.bytes() + cold.bytes()
			if sent["tx_bytes"] < least || got["rx_bytes"] < least {
				t.Errorf("the device of the source has sent %d bytes, that of the destination received %d; the guest has %d", sent["tx_bytes"], got["rx_bytes"], least)
			}
			if again := hot.bytes(); s.RAM.Rounds < 2 || s.RAM.Normal*4096 < least+again {
				t.Errorf("%d pages in %d rounds: not all that the guest wrote meanwhile were sent again", s.RAM.Normal, s.RAM.Rounds)
			}
			if m.lose > 0 && sent["retransmitted_packets"] == 0 {
				t.Error("nothing was sent again, so nothing was lost")
			}
			for _, q := range []*qemu{source, dest} {
				if !strings.Contains(q.Output(), "RDMA Device opened: kernel name verbena0") {
					t.Errorf("QEMU says\n%s", q.Output())
				}
			}
		})
	}
}

// checkMemory checks the guest's memory from outside.
func checkMemory(t *testing.T, q *qemu, seed uint32) {
	t.Helper()
	filled := func(a area, i int) uint32 { return (a.start + 4*uint32(i)) * seed } //nolint:gosec // i is that of a word
	b := q.memory(t, cold)
	for i := range int(cold.words) {
		if got := binary.LittleEndian.Uint32(b[4*i:]); got != filled(cold, i) {
			t.Fatalf("cold word %d is %#x, not %#x", i, got, filled(cold, i))
		}
	}
	// In front of the word that the guest has come to, words are one pass further.
	b = q.memory(t, hot)
	pass := func(i int) uint32 { return binary.LittleEndian.Uint32(b[4*i:]) - filled(hot, i) }
	first, last := pass(0), pass(int(hot.words)-1)
	if first != last && first != last+1 || first == 0 {
		t.Fatalf("hot words are of the passes %d to %d", first, last)
	}
	turned := false
	for i := range int(hot.words) {
		turned = turned || pass(i) != first
		if turned && pass(i) != last || !turned && pass(i) != first {
			t.Fatalf("hot word %d is of pass %d, the first is of %d and the last of %d", i, pass(i), first, last)
		}
	}
}

// checkPrinted checks that the guest has printed the number of each pass, at the source and then at the destination. The
// last line may not be whole.
func checkPrinted(t *testing.T, s string) {
	t.Helper()
	lines := strings.Split(s, "\n")
	for i, l := range lines[:len(lines)-1] {
		if l != fmt.Sprintf("%08x", i) {
			t.Fatalf("line %d is %q", i, l)
		}
	}
}

// The destination is killed in the middle of a migration. The source finds out, and its guest goes on.
func TestKilled(t *testing.T) {
	if !clibtest.Full {
		t.Skip("full: the end of a destination")
	}
	for _, m := range []migration{{name: "memory"}, {name: "packets", spaces: true}} {
		t.Run(m.name, func(t *testing.T) {
			seed := newSeed(t)
			source, dest := m.begin(t, seed)
			clibtest.Until(t, "the migration is under way", func() bool {
				return source.migration(t).RAM.Normal > 100
			}, source.Process, dest.Process)
			dest.Signal(syscall.SIGKILL)
			clibtest.Until(t, "the migration fails", func() bool { return source.migration(t).Status == "failed" }, source.Process)
			source.awaitPasses(t, 3)
			source.do(t, "stop", nil)
			checkMemory(t, source, seed)
			checkPrinted(t, source.printed(t))
		})
	}
}

// The guest finds out if a word of its memory changes: of either area.
func TestGuestFinds(t *testing.T) {
	for name, a := range map[string]area{"hot": hot, "cold": cold} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "memory")
			q := startQEMU(t, place{addr: clibtest.Address()}, kernelFile(t, newSeed(t)), "-machine", "memory-backend=m",
				"-object", fmt.Sprintf("memory-backend-file,id=m,size=%dM,mem-path=%s,share=on", memoryMB, file))
			q.awaitPasses(t, 2)
			q.do(t, "stop", nil)
			f, err := os.OpenFile(file, os.O_RDWR, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }() // a failure shows in the guest
			at := int64(a.start) + int64(a.bytes())/2 + 4000
			if _, err := f.WriteAt([]byte{1, 2, 3, 4}, at); err != nil {
				t.Fatal(err)
			}
			q.do(t, "cont", nil)
			clibtest.Until(t, "the guest finds a wrong word", func() bool {
				return strings.Contains(q.printed(t), fmt.Sprintf("B%08x\n04030201\n", at))
			}, q.Process)
		})
	}
}
