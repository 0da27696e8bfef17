package main

import (
	"os"
	"os/exec"
	"path/filepath"
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
	t.Setenv("LD_LIBRARY_PATH", "/it's/there")
	if got, want := succeed(t, "env").stdout, `export LD_LIBRARY_PATH='`+dir+`:/it'\''s/there'`+"\n"; got != want {
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
		if got, want := succeed(t, "env").stdout, "export ASAN_OPTIONS='verify_asan_link_order=0'\nexport LD_LIBRARY_PATH='"+dir+"'\nexport LD_PRELOAD='"+after+"'\n"; got != want {
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
