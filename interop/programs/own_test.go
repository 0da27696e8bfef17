package programs

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// compile builds a program of testdata against the library.
func compile(t testing.TB, name string) string {
	t.Helper()
	return compileWith(t, name, "-L", built(t)+"/lib", "-libverbs")
}

// badArgs returns the arguments of "bad": a seed, and how many random calls it makes. "bad"
// prints the seed if it fails; VERBENA_SEED repeats the run.
func badArgs() []string {
	seed, rounds := os.Getenv("VERBENA_SEED"), "3000"
	if seed == "" {
		seed = strconv.FormatUint(rand.Uint64(), 10)
	}
	if full {
		rounds = "60000"
	}
	return []string{seed, rounds}
}

// cancelArgs returns the arguments of "cancel", which cancels threads after random times.
func cancelArgs(how string) []string { return append([]string{how}, badArgs()[0], "300") }

// Programs of our own, for what no tool does. Each prints "ok" at its end if nothing failed.
func TestOwn(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
	}{
		{"idle", nil}, {"bad", badArgs()}, {"fork", nil}, {"odp", nil}, {"rereg", nil}, {"query", nil}, {"newer", nil}, {"events", nil}, {"xrc", nil}, {"import", nil}, {"files", nil}, {"signals", nil}, {"ucma", badArgs()}, {"fence", nil}, {"gpu", nil},
		{"dmabuf", []string{"dynamic"}}, {"dmabuf", []string{"pinned"}}, {"dmabuf", []string{"hidden"}}, {"dmabuf", []string{"storm"}},
		{"drm", []string{"amdgpu"}}, {"drm", []string{"i915"}}, {"drm", []string{"off"}}, {"drm", []string{"storm"}},
		{"seeds", []string{"alloc"}}, {"seeds", []string{"shared"}}, {"seeds", []string{"exporter"}}, {"seeds", []string{"reg only"}},
		{"threads", []string{"polling"}}, {"threads", []string{"events"}}, {"threads", []string{"armed-after"}},
		{"limits", []string{"same"}}, {"limits", []string{"full"}}, {"limits", []string{"later"}}, {"limits", []string{"space"}},
		{"closed", []string{"list", "1024"}}, {"closed", []string{"open", "1024"}}, {"closed", []string{"open", "0"}},
		{"leave", []string{"nobody"}}, {"leave", []string{"worker"}}, {"leave", []string{"term"}}, {"leave", []string{"sigwait"}}, {"leave", []string{"blocked"}},
		{"cancel", cancelArgs("async")}, {"cancel", cancelArgs("deferred")}, {"cancel", []string{"late", "0", "100000"}},
		{"stopped", []string{"killed"}}, {"stopped", []string{"left"}},
		{"fault", []string{"never"}}, {"fault", []string{"early"}}, {"fault", []string{"late"}},
	} {
		name := c.name
		switch c.name { // seeds are not part of a name
		case "bad", "ucma":
		case "cancel":
			name += " " + c.args[0]
		default:
			name = strings.Join(append([]string{name}, c.args...), " ")
		}
		t.Run(name, func(t *testing.T) {
			out := run(t, side{args: append([]string{compile(t, c.name)}, c.args...), env: append([]string{"VERBENA_ADDR=" + address()}, settingsFor(c.name, c.args)...)})
			if !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// The programs in docs/dmabuf.md print what stands below them.
func TestDMABufDocument(t *testing.T) {
	doc, err := os.ReadFile(filepath.Join(root, "docs", "dmabuf.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(doc), "```c\n")
	n := 0
	for found {
		n++
		program, after, ended := strings.Cut(rest, "```\n")
		_, after, shown := strings.Cut(after, "```\n")
		want, after, _ := strings.Cut(after, "```")
		if !ended || !shown {
			t.Fatal("a program in C does not end, or nothing that it prints follows")
		}
		source := filepath.Join(t.TempDir(), "document.c")
		if err := os.WriteFile(source, []byte(program), 0o600); err != nil {
			t.Fatal(err)
		}
		out := run(t, side{args: []string{compileFile(t, source, "-L", built(t)+"/lib", "-libverbs")}, env: []string{"VERBENA_ADDR=" + address()}})
		if out != want {
			t.Errorf("program %d prints\n%swant\n%s", n, out, want)
		}
		_, rest, found = strings.Cut(after, "```c\n")
	}
	if n != 2 {
		t.Errorf("there are %d programs in C", n)
	}
}

// settingsFor returns the variables that a program's argument stands for.
func settingsFor(name string, args []string) []string {
	switch {
	case name == "gpu":
		return []string{"VERBENA_GPU=count=2,vram=64M"}
	case name == "drm" && args[0] != "storm":
		return []string{"VERBENA_DRM=" + args[0]}
	case name == "seeds" && args[0] == "reg only":
		return []string{"VERBENA_HIDE=rereg_dmabuf"}
	case name != "dmabuf" && name != "drm":
		return nil
	case args[0] == "hidden":
		return []string{"VERBENA_HIDE=dmabuf"}
	case args[0] == "storm":
		return []string{"VERBENA_DMABUF_STORM=1,20000"}
	}
	return []string{"VERBENA_DMABUF=" + args[0]}
}

// A program that writes over its environment before the first verb: the settings are those with which
// it was started.
func TestTitle(t *testing.T) {
	out := run(t, side{args: []string{compile(t, "title")}, env: []string{"VERBENA_ADDR=" + address(), "VERBENA_LIMITS=qp=5"}})
	if !strings.HasSuffix(out, "ok\n") {
		t.Errorf("it says\n%s", out)
	}
}

// Four threads that spin on two processors all make progress, by packets.
func TestSpin(t *testing.T) {
	rounds := "5000"
	if full {
		rounds = "100000"
	}
	bin := compile(t, "spin")
	for _, how := range []string{"pairs", "each"} {
		t.Run(how, func(t *testing.T) {
			out := run(t, side{args: []string{bin, how, rounds}, wrap: twoProcessors(t),
				env: []string{"VERBENA_ADDR=" + address() + ";" + address(), "VERBENA_LINK=udp"}})
			if !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
			t.Log(strings.TrimSpace(out))
		})
	}
}

// twoProcessors returns a command that runs a program on two of the processors that this process
// may use.
func twoProcessors(t testing.TB) []string {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	var usable []string
	for line := range strings.Lines(string(status)) {
		list, ok := strings.CutPrefix(line, "Cpus_allowed_list:")
		if !ok {
			continue
		}
		for part := range strings.SplitSeq(strings.TrimSpace(list), ",") { // as 0-3,7
			var first, last int
			if n, _ := fmt.Sscanf(part, "%d-%d", &first, &last); n < 2 {
				last = first
			}
			for cpu := first; cpu <= last && len(usable) < 2; cpu++ {
				usable = append(usable, strconv.Itoa(cpu))
			}
		}
	}
	return []string{program(t, "taskset", "util-linux"), "-c", strings.Join(usable, ",")}
}

// Programs that were built with sanitizers, which restrict how libraries are loaded.
func TestSanitizers(t *testing.T) {
	for _, kind := range []string{"address", "thread", "undefined"} {
		t.Run(kind, func(t *testing.T) {
			bin := compileWith(t, "threads", "-fsanitize="+kind, "-L", built(t)+"/lib", "-libverbs")
			out := run(t, side{args: []string{bin, "events"}, env: []string{"VERBENA_ADDR=" + address()}})
			if !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// Regions of one process that another one imports and uses, on both links between
// processes, as root and as an ordinary user.
func TestImports(t *testing.T) {
	lib := installed(t)
	bin := lib + "/imports" // every user can read it there
	if out, err := exec.Command("cp", compile(t, "imports"), bin).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	for _, what := range []string{"traffic", "dereg", "destroy", "owner killed", "user killed", "refused"} {
		for _, link := range []string{"local", "udp"} {
			for _, user := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/%s/%v", what, link, user), func(t *testing.T) {
					s := side{args: []string{bin, what}, env: []string{"VERBENA_ADDR=" + address(), "VERBENA_LINK=" + link, "VERBENA_LIB=" + lib}}
					if user {
						s.wrap = noRights(t)
					}
					if out := run(t, s); !strings.HasSuffix(out, "ok\n") {
						t.Errorf("it says\n%s", out)
					}
				})
			}
		}
	}
}

// Programs that were built for rdma-core's libmlx5: what works, and how the rest is refused.
func TestMlx5(t *testing.T) {
	libs := []string{"-lmlx5", "-libverbs"}
	const identity = "VERBENA_IDENTITY=mlx5"
	for _, c := range []struct {
		args []string
		env  []string
	}{
		{[]string{"mkey"}, []string{identity, "VERBENA_LIMITS=mr=8"}},
		{[]string{"mkey"}, []string{identity, "VERBENA_LIMITS=mr=8", "VERBENA_LINK=udp"}},
		{[]string{"mkey", "on demand"}, []string{identity, "VERBENA_LIMITS=mr=8"}},
		{[]string{"mkeys"}, []string{identity}},
		{[]string{"mkeys"}, []string{identity, "VERBENA_LINK=udp"}},
		{[]string{"mlx5"}, []string{identity}},
		{[]string{"mlx5", "other"}, nil},
	} {
		t.Run(strings.Join(append(c.args, c.env...), " "), func(t *testing.T) {
			args := append([]string{compileWith(t, c.args[0], libs...)}, c.args[1:]...)
			out := run(t, side{args: args, env: append(c.env, "VERBENA_ADDR="+address())})
			if !strings.Contains(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// Names and rates are those of rdma-core's library. Those that it does not have are not
// compared: an earlier release has fewer.
func TestNames(t *testing.T) {
	bin := compile(t, "names")
	cmd := exec.Command(bin)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "LD_") })
	theirs, err := cmd.Output()
	need(t, err == nil, "rdma-core's library is missing: apt-get install libibverbs1")
	ours := strings.Split(run(t, side{args: []string{bin}}), "\n")
	same := 0
	for i, line := range strings.Split(string(theirs), "\n") {
		if strings.HasSuffix(line, " unknown") {
			continue
		}
		if i >= len(ours) || ours[i] != line {
			t.Fatalf("theirs: %s\nours: %s", line, ours[min(i, len(ours)-1)])
		}
		same++
	}
	if same < 1000 {
		t.Errorf("only %d lines", same)
	}
}

// threads is a Python program whose threads all use one device.
const threads = `
import threading, sys
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.cq import CQ, CompChannel
from pyverbs.mr import MR
import pyverbs.enums as e
ctx, wrong = Context(name='verbena0'), []
def work(n):
    try:
        for i in range(40):
            with PD(ctx) as pd, CompChannel(ctx) as ch, CQ(ctx, 10 + i, None, ch) as cq, MR(pd, 4096 * (1 + n), e.IBV_ACCESS_LOCAL_WRITE) as mr:
                mr.write('x' * 100, 100)
                cq.req_notify()
                n, wcs = cq.poll()
                assert n == 0 and mr.read(100, 0) == b'x' * 100
    except Exception as x:
        wrong.append(x)
all = [threading.Thread(target=work, args=(n,)) for n in range(8)]
[t.start() for t in all]
[t.join() for t in all]
ctx.close()
print(wrong or 'ok')
`

func TestPythonThreads(t *testing.T) {
	_, err := os.Stat("/usr/lib/python3/dist-packages/pyverbs")
	need(t, err == nil, "pyverbs is missing: apt-get install python3-pyverbs")
	out := run(t, side{args: []string{"/usr/bin/python3", "-c", threads}, env: []string{"VERBENA_ADDR=" + address()}})
	if !strings.HasSuffix(out, "ok\n") {
		t.Errorf("it says\n%s", out)
	}
}

// noRights returns a command that runs a program as an ordinary user who may lock 64 KiB.
func noRights(t testing.TB) []string {
	t.Helper()
	need(t, os.Getuid() == 0, "only root can become an ordinary user")
	return []string{program(t, "prlimit", "util-linux"), "--memlock=65536:65536", "--",
		program(t, "setpriv", "util-linux"), "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs", "--"}
}

// An ordinary user with a memlock limit of 64 KiB registers and moves megabytes.
func TestOrdinaryUser(t *testing.T) {
	program(t, "ib_write_bw", "perftest")
	wrap := noRights(t)
	dir := installed(t)
	tcp := port()
	env := []string{"VERBENA_ADDR=" + address(), "VERBENA_LIB=" + dir}
	for _, args := range [][]string{
		{"ib_write_bw", "-F", "-n", "100", "-s", "1048576"}, {"ibv_rc_pingpong", "-g", "0", "-o", "-s", "1000000", "-n", "20"},
	} {
		args = append(args, "-p", tcp)
		pair(t, side{args: args, env: env, wrap: wrap}, side{args: append(args, "localhost"), env: env, wrap: wrap}, tcp)
	}
}

// installed copies the library to a directory that every user can read.
func installed(t testing.TB) string {
	t.Helper()
	bin := built(t)
	dir, err := os.MkdirTemp("", "verbena-lib")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if out, err := exec.Command("cp", "-a", bin+"/lib/.", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
