package iser

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newSeed returns VERBENA_SEED, or a random seed. It is printed if the test fails.
func newSeed(t *testing.T) uint64 {
	t.Helper()
	seed := uint64(rand.Uint32())
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		seed = n
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("VERBENA_SEED=%d repeats the commands", seed)
		}
	})
	return seed
}

// compileDisk builds the initiator of testdata.
func compileDisk(t *testing.T) string {
	t.Helper()
	_, err := os.Stat("/usr/include/iscsi/iscsi.h")
	clibtest.Need(t, err == nil, "iscsi.h is missing: apt-get install libiscsi-dev")
	return clibtest.Compile(t, []string{"testdata/disk.c"}, "-liscsi")
}

// patient returns a variable for programs on libiscsi, which works around two of its faults (testdata/patient.c).
func patient(t *testing.T) string {
	t.Helper()
	return "LD_PRELOAD=" + clibtest.Compile(t, []string{"testdata/patient.c"}, "-shared", "-fPIC", "-fno-builtin")
}

// way is how an initiator reaches its target.
type way struct {
	name     string
	env      []string // variables of both processes
	spaces   bool     // two namespaces
	lose     int      // of a hundred datagrams, between namespaces
	commands int      // random ones
	full     bool
}

var ways = []way{
	{name: "memory", commands: 1000},
	{name: "packets", env: []string{"VERBENA_LINK=udp"}, commands: 5000, full: true},
	{name: "namespaces", spaces: true, commands: 5000, full: true},
	{name: "lossy", spaces: true, lose: 1, commands: 1000},
	{name: "lossy long", spaces: true, lose: 3, commands: 20000, full: true},
}

// places returns where the target and the initiator run.
func (w *way) places(t *testing.T) (of, from place) {
	t.Helper()
	if !w.spaces {
		return place{addr: clibtest.Address(), env: w.env}, place{addr: clibtest.Address(), env: append([]string{patient(t)}, w.env...)}
	}
	ns := clibtest.Network(t)
	if w.lose > 0 {
		clibtest.Lose(t, ns, w.lose)
	}
	in := func(i int) place {
		return place{addr: fmt.Sprintf("10.79.0.%d", i+1), env: w.env, wrap: []string{clibtest.Tool(t, "ip", "iproute2"), "netns", "exec", ns[i]}}
	}
	of, from = in(0), in(1)
	from.env = append([]string{patient(t)}, w.env...)
	return of, from
}

const diskMB = 32

// A disk is written, read and compared over iSER. The target's file has what was written.
func TestDisk(t *testing.T) {
	exe := compileDisk(t)
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			if w.full && !clibtest.Full {
				t.Skip("full: another way to the same disk")
			}
			seed := newSeed(t)
			of, from := w.places(t)
			d := startTarget(t, of, diskMB)
			out := clibtest.Start(t, from.program(exe, d.url(), initiatorName, fmt.Sprint(seed), fmt.Sprint(w.commands))).Finish(t)
			if !strings.HasSuffix(out, "ok\n") {
				t.Fatalf("it says\n%s", out)
			}
			checkFile(t, d.file, seed)
			c := d.quit(t)
			t.Logf("%s; the target's device: %d bytes received, %d sent, %d packets sent again", regexp.MustCompile(`\d+ blocks.*`).FindString(out),
				c["rx_bytes"], c["tx_bytes"], c["retransmitted_packets"])
			if c["rx_bytes"] < 2*diskMB<<20 || c["tx_bytes"] < 2*diskMB<<20 { // each block is written and read twice, at least
				t.Errorf("the target's device has received %d bytes and sent %d", c["rx_bytes"], c["tx_bytes"])
			}
			if w.lose > 0 && c["retransmitted_packets"] == 0 {
				t.Error("nothing was sent again, so nothing was lost")
			}
		})
	}
}

// checkFile compares a disk with what testdata/disk.c writes at last.
func checkFile(t *testing.T, file string, seed uint64) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil || len(b) != diskMB<<20 {
		t.Fatalf("%d bytes, %v", len(b), err)
	}
	for i := range len(b) / 8 {
		if got, want := binary.LittleEndian.Uint64(b[8*i:]), mix(seed+1<<63+uint64(i)); got != want {
			t.Fatalf("word %d of the disk is %#x, not %#x", i, got, want)
		}
	}
}

// mix is that of testdata/disk.c.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// The tools of libiscsi.
func TestTools(t *testing.T) {
	clibtest.Tool(t, "iscsi-ls", "libiscsi-bin")
	d := startTarget(t, place{addr: clibtest.Address()}, diskMB)
	from := place{addr: clibtest.Address(), env: []string{patient(t)}}
	for _, c := range []struct {
		args, says string
		crashes    bool // the program ends by a signal when it is done
	}{
		// libiscsi 1.19 polls a completion queue that it has destroyed. stdbuf: what was printed is not lost.
		{"stdbuf -oL iscsi-ls -i INITIATOR iscsi://PORTAL?iser", `Target:` + targetName + ` Portal:[0-9.]+:3260`, true},
		{"iscsi-inq -i INITIATOR URL", `Vendor:IET\s+Product:VIRTUAL-DISK`, false},
		{"iscsi-readcapacity16 -i INITIATOR URL", `Total size:33554432\n`, false},
		{"iscsi-perf -i INITIATOR -m 16 -b 64 -t 1 URL", `iops average [1-9]\d* .*\n*\s*finished`, false},
		{"iscsi-perf -i INITIATOR -m 16 -b 64 -t 1 -r URL", `iops average [1-9]\d* .*\n*\s*finished`, false},
	} {
		t.Run(c.args, func(t *testing.T) {
			args := strings.Fields(strings.NewReplacer("INITIATOR", initiatorName, "URL", d.url(), "PORTAL", fmt.Sprintf("%s:%d", d.addr, port)).Replace(c.args))
			p := clibtest.Start(t, from.program(args...))
			err := p.Wait(t)
			if err != nil && !c.crashes {
				t.Error(err)
			}
			if out := p.Output(); !regexp.MustCompile(c.says).MatchString(out) {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// suites are those of iscsi-test-cu that read and write data. Read10.Async and Write10.Async are left out: they start more
// commands than libiscsi 1.19 has descriptors for over iSER, and it crashes.
var suites = []struct {
	name string
	full bool
}{
	{"Read6", true}, {"Read12", true}, {"Read16", true}, {"Write12", true}, {"Write16", false},
	{"Read10.Simple", false}, {"Read10.BeyondEol", true}, {"Read10.ZeroBlocks", true}, {"Read10.ReadProtect", true}, {"Read10.DpoFua", true},
	{"Write10.Simple", true}, {"Write10.BeyondEol", true}, {"Write10.ZeroBlocks", true}, {"Write10.WriteProtect", true}, {"Write10.DpoFua", true},
	{"OrWrite", true}, {"WriteSame10", true}, {"WriteSame16", true},
	{"WriteVerify10", true}, {"WriteVerify12", true}, {"WriteVerify16", true},
	{"Verify10", true}, {"Verify12", true}, {"Verify16", false},
	{"Prefetch10", true}, {"Prefetch16", true}, {"ReadCapacity10", true}, {"ReadCapacity16", true}, {"Mandatory", true},
}

var summary = regexp.MustCompile(`tests +(\d+) +(\d+) +(\d+) +0 +0\s+asserts +(\d+) +(\d+) +(\d+) +0 `)

// The tests of libiscsi's authors.
func TestSuites(t *testing.T) {
	tool := clibtest.Tool(t, "iscsi-test-cu", "libiscsi-bin")
	d := startTarget(t, place{addr: clibtest.Address()}, diskMB)
	from := place{addr: clibtest.Address(), env: []string{patient(t)}}
	for _, s := range suites {
		t.Run(s.name, func(t *testing.T) {
			if s.full && !clibtest.Full {
				t.Skip("full: one of many suites")
			}
			out := clibtest.Start(t, from.program(tool, "-i", initiatorName, "-d", "-n", "-t", "ALL."+s.name, d.url())).Finish(t)
			m := summary.FindStringSubmatch(out)
			if m == nil || m[1] == "0" || m[1] != m[2] || m[1] != m[3] || m[4] == "0" || m[4] != m[6] {
				t.Fatalf("it says\n%s", out)
			}
			t.Logf("%s tests, %s assertions, %d skips within them", m[1], m[4], strings.Count(out, "SKIPPED"))
		})
	}
}

// An initiator is killed while its commands are under way. The target serves the next one.
func TestKilled(t *testing.T) {
	if !clibtest.Full {
		t.Skip("full: the end of an initiator")
	}
	exe := compileDisk(t)
	seed := newSeed(t)
	d, from := startTarget(t, place{addr: clibtest.Address()}, diskMB), place{addr: clibtest.Address(), env: []string{patient(t)}}
	p := clibtest.Start(t, from.program(exe, d.url(), initiatorName, fmt.Sprint(seed), "100000000"))
	clibtest.Until(t, "commands are under way", func() bool { return strings.Contains(p.Output(), "begun") }, d.Process, p)
	p.Kill()
	if out := clibtest.Start(t, from.program(exe, d.url(), initiatorName, fmt.Sprint(seed), "500")).Finish(t); !strings.HasSuffix(out, "ok\n") {
		t.Errorf("the next one says\n%s", out)
	}
	checkFile(t, d.file, seed)
	d.quit(t)
}
