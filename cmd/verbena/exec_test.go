package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
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
