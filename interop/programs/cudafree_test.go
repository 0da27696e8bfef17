package programs

// What the preloaded library makes of programs that free memory of CUDA (clib/files/cuda.c). libcuda.so.1 and
// libibverbs.so.1 are of our own here, and print what is called: so a test sees the order.

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// cudaFree is the directory of the programs and their libraries.
type cudaFree string

func buildCUDAFree(t *testing.T) cudaFree {
	t.Helper()
	if prebuilt != "" {
		return cudaFree(filepath.Join(prebuilt, "testdata", "cudafree"))
	}
	dir := t.TempDir()
	if out, err := exec.Command("sh", "testdata/cudafree.sh", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return cudaFree(dir)
}

func (c cudaFree) path(name string) string { return filepath.Join(string(c), name) }

// run runs a program with a kind of libcuda, and returns what is printed. Preloaded are "ours" and other libraries.
func (c cudaFree) run(t *testing.T, program, kind string, env, preload []string, ways ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, c.path(program), ways...)
	paths := make([]string, len(preload))
	for i, p := range preload {
		paths[i] = c.path(p)
		if p == "ours" {
			paths[i] = built(t) + "/lib/libverbena-files.so"
		}
	}
	cmd.Env = append(os.Environ(), "LD_LIBRARY_PATH="+c.path(kind)+":"+c.path("ears"), "LD_PRELOAD="+strings.Join(paths, ":"))
	cmd.Env = append(cmd.Env, env...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", strings.Join(ways, " "), err, out)
	}
	return string(out)
}

// Numbers of enum vb_cuda, in clib/files/files.h.
const (
	goneAllocation = iota + 1
	goneRange
	goneContext
	goneDevice
	goneHost
	goneRelease
)

// cudaCalls are the calls of each way in cudafree.c: the function, and what the listener is told before.
var cudaCalls = []struct {
	name string
	what int
}{
	{"cuMemFree", goneAllocation}, {"cuMemFree_v2", goneAllocation}, {"cuMemFreeAsync", goneAllocation}, {"cuMemFreeAsync_ptsz", goneAllocation},
	{"cuIpcCloseMemHandle", goneAllocation}, {"cuMemUnmap", goneRange}, {"cuCtxDestroy", goneContext}, {"cuCtxDestroy_v2", goneContext},
	{"cuDevicePrimaryCtxReset", goneDevice}, {"cuDevicePrimaryCtxReset_v2", goneDevice},
	{"cuDevicePrimaryCtxRelease", goneRelease}, {"cuDevicePrimaryCtxRelease_v2", goneRelease},
	{"cuMemFreeHost", goneHost}, {"cuMemHostUnregister", goneHost}, {"cuMemGetHandleForAddressRange", 0},
}

// called returns what is printed when a function is called: heard is whether there is a listener.
func called(real string, what int, heard bool) string {
	told := func(what int, args string) string {
		if !heard {
			return ""
		}
		return fmt.Sprintf("told %d %s\n", what, args)
	}
	const args = "7f0000010000 20000"
	switch what {
	case 0:
		s := "real " + real + " " + args + "\n"
		if heard {
			s += "exported 77 " + args + "\n"
		}
		return s
	case goneAllocation:
		return told(what, "7f0000010000 10000") + "real " + real + " " + args + "\n"
	case goneRange:
		return told(what, args) + "real " + real + " " + args + "\n"
	case goneDevice:
		return told(what, "1 0") + "real " + real + " dead00000001 0\n"
	case goneRelease:
		return told(what, "1 0") + "real " + real + " 1 0\n" + told(goneDevice, "1 0")
	default:
		return told(what, "7f0000010000 0") + "real " + real + " " + args + "\n"
	}
}

// eachCall returns what a way of cudafree.c prints. without are functions that the libcuda lacks.
func eachCall(way string, heard bool, without ...string) string {
	s := "# " + way + "\n"
	for _, c := range cudaCalls {
		if strings.Contains(" "+strings.Join(without, " ")+" ", " "+c.name+" ") {
			s += "none " + c.name + "\n"
			continue
		}
		s += called(c.name, c.what, heard) + "returned 0\n"
	}
	if heard {
		return s + "told 6 2 0\nreal cuDevicePrimaryCtxRelease_v2 2 0\nreturned 0\n" +
			"told 1 bad 0\nreal cuMemFree_v2 bad 0\nreturned 1\n" +
			"told 1 7f0000010040 0\nreal cuMemFree_v2 7f0000010040 0\nreturned 0\n" +
			"real cuMemFree_v2 0 0\nreturned 0\n"
	}
	return s + "real cuDevicePrimaryCtxRelease_v2 2 0\nreturned 0\nreal cuMemFree_v2 bad 0\nreturned 1\n" +
		"real cuMemFree_v2 7f0000010040 0\nreturned 0\nreal cuMemFree_v2 0 0\nreturned 0\n"
}

// noCall returns what a way prints if it finds no function.
func noCall(way string) string {
	s := "# " + way + "\n"
	for _, c := range cudaCalls {
		s += "none " + c.name + "\n"
	}
	return s + "none cuDevicePrimaryCtxRelease_v2\n" + strings.Repeat("none cuMemFree_v2\n", 3)
}

// askedCalls returns what a way prints that calls what cuGetProcAddress returns, of a libcuda that may lack functions.
func askedCalls(way string, lacking bool) string {
	s := "# " + way + "\n"
	for _, a := range []struct {
		name, real string
		what       int
		args       string
	}{
		{"cuMemFree", "cuMemFree", goneAllocation, "2000 0"}, {"cuMemFree", "cuMemFree_v2", goneAllocation, "12000 0"},
		{"cuMemFreeAsync", "cuMemFreeAsync", goneAllocation, "12000 0"}, {"cuMemFreeAsync", "cuMemFreeAsync_ptsz", goneAllocation, "12000 2"},
		{"cuMemFreeAsync", "unnamed_free_async", goneAllocation, "13000 2"}, {"cuMemFreeAsync", "", goneAllocation, "10000 0"},
		{"cuMemUnmap", "cuMemUnmap", goneRange, "12000 0"}, {"cuCtxDestroy", "cuCtxDestroy_v2", goneContext, "12000 0"},
		{"cuMemGetHandleForAddressRange", "cuMemGetHandleForAddressRange", 0, "12000 0"},
	} {
		if lacking && a.real == "cuMemFreeAsync_ptsz" {
			a.real = "cuMemFreeAsync"
		}
		s += "asked " + a.name + " " + a.args
		if a.real == "" || lacking && a.real == "cuMemUnmap" {
			s += ": 500, 0 1\nnone " + a.name + "\n"
			continue
		}
		s += ": 0, 0 0\n" + called(a.real, a.what, true) + "returned 0\n"
	}
	return s + "asked cuInit 12000 0: 0, 0 0\nreal cuInit 0 0\nreturned 0\n"
}

// Every function that frees is called by its real name with its own arguments and result, after the listener was told;
// what libcuda does not have is not there.
func TestCUDAFrees(t *testing.T) {
	c := buildCUDAFree(t)
	ours, next := []string{"ours"}, "next/cudanext.so"
	lacks := []string{"cuMemUnmap", "cuMemFreeAsync_ptsz"}
	for _, test := range []struct {
		name, program, kind string
		env, preload, ways  []string
		want                string
	}{
		{"linked", "linked", "whole", nil, ours, []string{"ears", "linked", "linked ask"}, "# ears\n" + eachCall("linked", true) + askedCalls("linked ask", false)},
		{"linked, default", "linked", "whole", nil, ours, []string{"ears", "default", "program", "next", "default version"},
			"# ears\n" + eachCall("default", true) + eachCall("program", true) + eachCall("next", true) + eachCall("default version", true)},
		{"linked, lacking", "linked", "lacking", nil, ours, []string{"ears", "default", "program", "linked ask"},
			"# ears\n" + eachCall("default", true, lacks...) + eachCall("program", true, lacks...) + askedCalls("linked ask", true)},
		{"loaded", "unlinked", "whole", nil, ours, []string{"ears", "load", "handle", "version", "ask", "ask more"},
			"# ears\n# load\n" + eachCall("handle", true) + eachCall("version", true) + askedCalls("ask", false) + askedCalls("ask more", false)},
		{"loaded, open", "unlinked", "open", nil, ours, []string{"ears", "load", "handle", "version", "ask", "ask more"},
			"# ears\n# load\n" + eachCall("handle", true) + eachCall("version", true) + askedCalls("ask", false) + askedCalls("ask more", false)},
		{"one address", "linked", "whole", nil, ours, []string{"load", "address"}, "# load\n# address\n1 1\n"},
		{"one address, open", "linked", "open", nil, ours, []string{"load", "address"}, "# load\n# address\n1 1\n"},
		{"no error", "unlinked", "lacking", nil, ours, []string{"load", "error"}, "# load\n# error\nfound without a text\n"},
		{"loaded, lacking", "unlinked", "lacking", nil, ours, []string{"ears", "load", "handle", "version", "ask"},
			"# ears\n# load\n" + eachCall("handle", true, lacks...) + eachCall("version", true, lacks...) + askedCalls("ask", true)},
		{"no libcuda", "unlinked", "whole", nil, ours, []string{"ears", "default", "program", "next", "default version", "error"},
			"# ears\n" + noCall("default") + noCall("program") + noCall("next") + noCall("default version") + "# error\nnone with a text\n"},
		{"libcuda for its own handle", "unlinked", "whole", nil, ours, []string{"ears", "load", "program", "default version", "next"},
			"# ears\n# load\n" + noCall("program") + noCall("default version") + eachCall("next", true)},
		{"no listener, then one", "unlinked", "whole", nil, ours, []string{"load", "handle", "ears", "handle"},
			"# load\n" + eachCall("handle", false) + "# ears\n" + eachCall("handle", true)},
		{"software GPUs", "linked", "shim", nil, ours, []string{"ears", "linked"}, "# ears\n" + eachCall("linked", false)},
		{"software GPUs as a driver", "linked", "shim", []string{"VERBENA_CUDA=peermem, driver"}, ours, []string{"ears", "linked"}, "# ears\n" + eachCall("linked", true)},
		{"child", "linked", "whole", nil, ours, []string{"ears", "one", "fork", "linked", "linked ask"},
			"# ears\n# one\ntold 1 7f0000010000 10000\nreal cuMemFree_v2 7f0000010000 0\nreturned 0\n# fork\n" + eachCall("linked", true) + askedCalls("linked ask", false)},
		{"another library behind", "linked", "whole", nil, []string{"ours", next}, []string{"ears", "getppid", "one"},
			"# ears\n# getppid\nnext getppid\nok\n# one\ntold 1 7f0000010000 10000\nnext cuMemFree_v2 goes on\nreal cuMemFree_v2 7f0000010000 0\nreturned 0\n"},
		{"another library in front", "linked", "whole", nil, []string{next, "ours"}, []string{"ears", "getppid", "one"},
			"# ears\n# getppid\nnext getppid\nok\n# one\nnext cuMemFree_v2 goes on\ntold 1 7f0000010000 10000\nreal cuMemFree_v2 7f0000010000 0\nreturned 0\n"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if got := c.run(t, test.program, test.kind, test.env, test.preload, test.ways...); got != test.want {
				t.Errorf("it prints\n%s\nand should\n%s", got, test.want)
			}
		})
	}
}

// Threads that find functions and free at the same time: each call goes to the real function once, and the listener was
// told before.
func TestCUDAFreesRace(t *testing.T) {
	c := buildCUDAFree(t)
	want := map[string]string{"0": "cuMemFree_v2", "1": "cuMemFreeAsync_ptsz", "2": "cuMemFreeAsync", "3": "unnamed_free_async"}
	for range 10 {
		told, done := map[string]bool{}, 0
		for _, line := range strings.Split(c.run(t, "unlinked", "whole", nil, []string{"ours"}, "ears", "load", "race"), "\n") {
			f := strings.Fields(line)
			if len(f) == 4 && f[0] == "told" && f[1] == "1" && f[3] == "10000" {
				told[f[2]] = true
			}
			if len(f) == 4 && f[0] == "real" {
				var thread int
				if _, err := fmt.Sscanf(f[3], "%x", &thread); err != nil || !told[f[2]] || f[1] != want[fmt.Sprint(thread%4)] {
					t.Errorf("%s: told %v, %v", line, told[f[2]], err)
				}
				delete(told, f[2])
				done++
			}
		}
		if done != 8*50 || len(told) != 0 {
			t.Errorf("%d calls, and %d were announced in vain", done, len(told))
		}
	}
}

// The file that shows that CUDA's addresses can be registered is there with Verbena's libcuda, and with another one if
// VERBENA_CUDA asks for it.
func TestCUDAPeermemFile(t *testing.T) {
	c := buildCUDAFree(t)
	lib := built(t) + "/lib"
	const file = "/sys/module/nvidia_peermem/version"
	if _, err := os.Stat(file); err == nil {
		t.Skip("kernel: it has nvidia_peermem itself")
	}
	for _, test := range []struct {
		kind, setting string
		want          bool
	}{
		{"whole", "", false}, {"whole", "peermem", true}, {"whole", "driver, peermem", true}, {"whole", "peermem,off", false}, {"whole", "driver", false},
		{"shim", "", true}, {"shim", "off", true}, {"shim", "driver", false}, {"shim", "driver,peermem", true},
	} {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		cmd := exec.CommandContext(ctx, "cat", file)
		cmd.Env = append(os.Environ(), "VERBENA_CUDA="+test.setting, "LD_LIBRARY_PATH="+c.path(test.kind)+":"+lib,
			"LD_PRELOAD="+lib+"/libverbena-files.so:libibverbs.so.1:libcuda.so.1")
		out, err := cmd.CombinedOutput()
		cancel()
		if shown := err == nil && string(out) == "1\n"; shown != test.want {
			t.Errorf("%s, VERBENA_CUDA=%s: %v, %s", test.kind, test.setting, err, out)
		}
	}
}

// A program runs on software GPUs as it does otherwise if their libcuda is taken for a driver.
func TestCUDADriver(t *testing.T) {
	env := []string{"VERBENA_ADDR=" + address(), "VERBENA_GPU=count=2,vram=64M", "VERBENA_CUDA=driver"}
	if out := run(t, side{args: onGPU(t, append([]string{compileCUDA(t, "cuda")}, badArgs()...)...), env: env}); !strings.HasSuffix(out, "ok\n") {
		t.Errorf("it says\n%s", out)
	}
}
