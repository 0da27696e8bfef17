package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// fakeLib makes a directory that looks like the library's.
func fakeLib(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libibverbs.so.1"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestEnv(t *testing.T) {
	dir := fakeLib(t)
	t.Setenv("VERBENA_LIB", dir)
	for name := range forCUDA {
		t.Setenv(name, "")
	}
	t.Setenv("LD_LIBRARY_PATH", "/it's/there")
	if got, want := succeed(t, "env").stdout, "export CUDA_DEVICE_MAX_CONNECTIONS='16'\nexport CUDA_MODULE_LOADING='EAGER'\n"+`export LD_LIBRARY_PATH='`+dir+`:/it'\''s/there'`+"\n"; got != want {
		t.Errorf("%q is not %q", got, want)
	}
	// What is preloaded comes first, and once.
	file := filepath.Join(dir, "libverbena-files.so")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	t.Setenv("LD_LIBRARY_PATH", dir)
	for before, after := range map[string]string{"": file, "/other.so": file + ":/other.so", file: file, file + ":/other.so": file + ":/other.so"} {
		t.Setenv("LD_PRELOAD", before)
		if got, want := succeed(t, "env").stdout, "export ASAN_OPTIONS='verify_asan_link_order=0'\nexport CUDA_DEVICE_MAX_CONNECTIONS='16'\nexport CUDA_MODULE_LOADING='EAGER'\nexport LD_LIBRARY_PATH='"+dir+"'\nexport LD_PRELOAD='"+after+"'\n"; got != want {
			t.Errorf("%q is not %q", got, want)
		}
	}
	t.Setenv("LD_PRELOAD", "")
	for _, name := range []string{"VERBENA_ADDR", "VERBENA_PCAP", "VERBENA_LIB"} {
		if !strings.Contains(succeed(t, "env", "--help").stdout, name) {
			t.Errorf("the help does not mention %s", name)
		}
	}
}

// Programs find what CUDA is to be told, unless they have told it something else.
func TestExecCUDA(t *testing.T) {
	t.Setenv("VERBENA_LIB", fakeLib(t))
	for _, c := range []struct{ connections, loading, want string }{
		{"", "", "16 EAGER"},
		{"8", "", "8 EAGER"},
		{"", "LAZY", "16 LAZY"},
		{"32", "LAZY", "32 LAZY"},
	} {
		t.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", c.connections)
		t.Setenv("CUDA_MODULE_LOADING", c.loading)
		got := succeed(t, "exec", "-e", "VERBENA_WATCHER=off", "--", "sh", "-c", "echo $CUDA_DEVICE_MAX_CONNECTIONS $CUDA_MODULE_LOADING").stdout
		if got != c.want+"\n" {
			t.Errorf("with %q and %q the program has %q, want %q", c.connections, c.loading, got, c.want)
		}
		want := "export LD_LIBRARY_PATH="
		if c.connections == "" {
			want = "export CUDA_DEVICE_MAX_CONNECTIONS='16'\n"
		} else if c.loading == "" {
			want = "export CUDA_MODULE_LOADING='EAGER'\n"
		}
		if got := succeed(t, "env").stdout; !strings.HasPrefix(got, want) {
			t.Errorf("with %q and %q, verbena env prints %q", c.connections, c.loading, got)
		}
	}
}

// An exec within an exec has the watcher of the outer one, but one that has ended is not believed.
func TestExecWatcher(t *testing.T) {
	dir := fakeLib(t)
	if out, err := exec.Command("go", "build", "-o", filepath.Join(dir, "verbena-watcher"), "../../clib/watcher").CombinedOutput(); err != nil {
		t.Fatalf("building the watcher: %v\n%s", err, out)
	}
	t.Setenv("VERBENA_LIB", dir)
	run := func(watcher, script string) []string {
		t.Helper()
		t.Setenv(watcherVar, watcher)
		return strings.Fields(succeed(t, "exec", "--", "sh", "-c", script).stdout)
	}
	const say = "echo $VERBENA_WATCHER"
	inner := program + " exec -- sh -c '" + say + "'"
	first := run("", say+"; "+inner)
	if len(first) != 2 || first[0] != first[1] || !strings.HasPrefix(first[0], "@") {
		t.Fatalf("the watchers of an exec and of one within it: %q", first)
	}
	for end := time.Now().Add(time.Minute); hasWatcher(first[0]); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the watcher does not end with its program")
		}
	}
	for _, gone := range []string{first[0], "@nobody", "nothing"} {
		next := run(gone, say+"; "+inner)
		if len(next) != 2 || next[0] != next[1] || next[0] == gone || !strings.HasPrefix(next[0], "@") {
			t.Errorf("after %q, which has ended: %q", gone, next)
		}
	}
	if off := run("off", say); len(off) != 1 || off[0] != "off" {
		t.Errorf("switched off: %q", off)
	}
}

// The libraries of GPUs come first, and only where no real GPU is hidden unless that is asked for.
func TestExecGPU(t *testing.T) {
	dir := fakeLib(t)
	t.Setenv("VERBENA_LIB", dir)
	t.Setenv("LD_LIBRARY_PATH", "/other")
	t.Setenv(watcherVar, "off")
	const say = "echo $LD_LIBRARY_PATH $VERBENA_GPU"
	fail := func(code int, args ...string) {
		t.Helper()
		if o := verbena(t, args...); o.code != code {
			t.Errorf("%q: exit status %d, not %d\n%s", args, o.code, code, o.stderr)
		}
	}
	fail(1, "exec", "--gpu=soft", "--", "sh", "-c", say) // the directory is missing
	if err := os.Mkdir(filepath.Join(dir, "gpu"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{nil, dir + ":/other\n"},
		{[]string{"--gpu=soft"}, dir + "/gpu:" + dir + ":/other\n"},
		{[]string{"--gpu=soft", "--gpu-set", "count=2"}, dir + "/gpu:" + dir + ":/other count=2\n"},
	} {
		if got := succeed(t, slices.Concat([]string{"exec"}, c.args, []string{"--", "sh", "-c", say})...).stdout; got != c.want {
			t.Errorf("%q: %q is not %q", c.args, got, c.want)
		}
	}
	fail(2, "exec", "--gpu=hard", "--", "true")
	fail(2, "exec", "--gpu=soft", "--gpu-set", "vram=much", "--", "true")

	defer func(old []string) { drivers = old }(drivers)
	drivers = []string{filepath.Join(dir, "libibverbs.so.1")} // it is there
	if _, err := (&gpuFlag{on: true}).gpuDir(dir); err == nil {
		t.Error("a real GPU is hidden")
	}
	drivers = []string{filepath.Join(dir, "no driver")}
	if got, err := (&gpuFlag{on: true}).gpuDir(dir); err != nil || got != filepath.Join(dir, "gpu") {
		t.Errorf("%s, %v", got, err)
	}
}
