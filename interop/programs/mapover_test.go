package programs

// Memory that is registered and then mapped over while a peer accesses it
// (testdata/mapover.c): the peer must never reach the new mapping.

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
)

// mapOverLinks are the links of the attack: in one process or two, and VERBENA_LINK.
var mapOverLinks = []struct{ name, processes, link string }{
	{"loop", "one", "local"}, {"local", "two", "local"}, {"udp", "two", "udp"},
}

// mapOverLine is what the program prints about one way to replace memory.
type mapOverLine struct {
	way                                                                      string
	rounds, writeRounds, writeBytes, readRounds, readBytes, refused, slowest uint64
}

func mapOverSeed(t *testing.T) string {
	t.Helper()
	seed := os.Getenv("VERBENA_SEED")
	if seed == "" {
		seed = strconv.FormatUint(rand.Uint64(), 10)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("VERBENA_SEED=%s", seed)
		}
	})
	return seed
}

func parseMapOver(t *testing.T, out string, ways []string) (lines []mapOverLine) {
	t.Helper()
	for _, text := range strings.Split(out, "\n") {
		var l mapOverLine
		n, _ := fmt.Sscan(text, &l.way, &l.rounds, &l.writeRounds, &l.writeBytes, &l.readRounds, &l.readBytes, &l.refused, &l.slowest)
		if n == 8 { // other lines are about requests that failed
			lines = append(lines, l)
		}
	}
	if len(lines) != len(ways) || !strings.HasSuffix(out, "ok\n") {
		t.Fatalf("not ok, or without a line for each of %d ways:\n%s", len(ways), out)
	}
	return lines
}

// never checks that no access has reached the new memory, and that the peer was refused in
// every round. Memory of System V is an exception: the region keeps the segment until it is
// closed, as an adapter does, so the peer is never refused.
func never(t *testing.T, lines []mapOverLine) {
	t.Helper()
	for _, l := range lines {
		t.Logf("%+v", l)
		if l.rounds == 0 || l.writeRounds != 0 || l.readRounds != 0 {
			t.Errorf("%s: of %d rounds, %d with %d bytes written to the new memory, %d with %d bytes read from it",
				l.way, l.rounds, l.writeRounds, l.writeBytes, l.readRounds, l.readBytes)
		}
		want := l.rounds
		if strings.HasPrefix(l.way, "shm") {
			want = 0
		}
		if l.refused != want {
			t.Errorf("%s: the peer was refused in %d of %d rounds, should be in %d", l.way, l.refused, l.rounds, want)
		}
	}
}

// With "verbena exec", whose preloaded library intercepts the calls, never holds for all ways.
func TestMapOver(t *testing.T) {
	seconds := "4"
	if full {
		seconds = "60"
	}
	ways := []string{"fixed", "mremap", "shm", "shm-remap", "dontneed", "munmap", "brk"}
	bin, seed := compile(t, "mapover"), mapOverSeed(t)
	for _, l := range mapOverLinks {
		t.Run(l.name, func(t *testing.T) {
			out := run(t, side{args: append([]string{bin, l.processes, seconds, seed}, ways...),
				env: []string{"VERBENA_ADDR=" + address(), "VERBENA_LINK=" + l.link}})
			never(t, parseMapOver(t, out, ways))
		})
	}
}

// The intercepted calls: what they return, what becomes stale and what does not.
func TestMaps(t *testing.T) {
	libs := []string{"-L", built(t) + "/lib", "-libverbs"}
	for _, c := range []struct{ name, flag string }{{"plain", "-g"}, {"address sanitizer", "-fsanitize=address"}} {
		t.Run(c.name, func(t *testing.T) {
			bin := compileWith(t, "maps", append([]string{c.flag}, libs...)...)
			if out := run(t, side{args: []string{bin}, env: []string{"VERBENA_ADDR=" + address()}}); !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// Without the preloaded library, never holds for the calls that wait until the kernel's event
// is read, and for memory of System V. VERBENA_FULL also measures how often accesses reach
// the new memory of the other calls.
func TestMapOverNotPreloaded(t *testing.T) {
	seconds := "1"
	if full {
		seconds = "20"
	}
	bin, seed := compile(t, "mapover"), mapOverSeed(t)
	for _, l := range mapOverLinks {
		attack := func(t *testing.T, ways ...string) []mapOverLine {
			t.Helper()
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			cmd := exec.CommandContext(ctx, bin, append([]string{l.processes, seconds, seed}, ways...)...)
			cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+built(t)+"/lib", "LD_PRELOAD=", "VERBENA_ADDR="+address(), "VERBENA_LINK="+l.link)
			out, err := cmd.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			return parseMapOver(t, string(out), ways)
		}
		t.Run(l.name, func(t *testing.T) { never(t, attack(t, "dontneed", "munmap", "brk", "shm", "shm-remap")) })
		t.Run(l.name+", what remains", func(t *testing.T) {
			if !full {
				t.Skip("full: a measurement, only with VERBENA_FULL")
			}
			for _, line := range attack(t, "fixed", "mremap") {
				t.Logf("%+v", line)
			}
		})
	}
}
