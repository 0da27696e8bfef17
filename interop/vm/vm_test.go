package vm

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// readArchive reads an archive back, strictly.
func readArchive(t *testing.T, b []byte) (names []string, contents map[string]string) {
	t.Helper()
	contents = map[string]string{}
	for {
		if len(b) < 110 || string(b[:6]) != "070701" {
			t.Fatalf("no header after %v", names)
		}
		field := func(n int) int {
			v, err := strconv.ParseUint(string(b[6+8*n:][:8]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return int(v)
		}
		mode, size, nameSize := field(1), field(6), field(11)
		name := string(b[110:][:nameSize-1])
		at := (110 + nameSize + 3) / 4 * 4
		content := string(b[at:][:size])
		b = b[at+(size+3)/4*4:]
		if name == "TRAILER!!!" {
			if len(b) != 0 {
				t.Errorf("%d bytes behind the end", len(b))
			}
			return names, contents
		}
		names = append(names, name)
		contents[name] = fmt.Sprintf("%o %s", mode, content)
	}
}

func TestArchive(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tool")
	if err := os.WriteFile(file, []byte("12345"), 0o755); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	a := newArchiver(&buf)
	for _, err := range []error{
		a.link("lib", "usr/lib"), a.text("/lib/x/a.so", "abc", modeFile), a.text("usr/lib/x/a.so", "other", modeFile),
		a.file("/bin/tool", file), a.dir("proc"), a.text("empty", "", modeFile), a.close(),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	names, contents := readArchive(t, buf.Bytes())
	want := []string{"lib", "usr", "usr/lib", "usr/lib/x", "usr/lib/x/a.so", "usr/bin", "usr/bin/tool", "proc", "empty"}
	if !slices.Equal(names, want) {
		t.Errorf("the archive has %v, want %v: parents first, nothing twice, one /usr", names, want)
	}
	for name, want := range map[string]string{"lib": "120777 usr/lib", "usr/lib/x/a.so": "100644 abc", "usr/bin/tool": "100755 12345", "empty": "100644 "} {
		if contents[name] != want {
			t.Errorf("%s is %q, want %q", name, contents[name], want)
		}
	}
	if err := newArchiver(io.Discard).file("dir", t.TempDir()); err == nil {
		t.Error("a directory was packed as a file")
	}
}

func TestMissing(t *testing.T) {
	err := Check(Amd64, Program{"no-such-program-here", "some-package"}, Program{"/no/such/*.so", "other-package"}, Program{"sh", "dash"})
	var missing *MissingError
	if !errors.As(err, &missing) {
		t.Fatalf("Check says %v", err)
	}
	for _, want := range []string{"no-such-program-here", "/no/such/*.so", "apt-get install --no-install-recommends", "some-package", "other-package"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not say %q", err, want)
		}
	}
	if slices.Contains(missing.Packages, "dash") {
		t.Errorf("sh is called missing: %v", err)
	}
}

// A file appears in the cache with all its content, or not at all.
func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "sub", "file")
	broken := errors.New("broken")
	err := writeFileBy(name, func(w io.Writer) error {
		if _, err := io.WriteString(w, "half"); err != nil {
			return err
		}
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("err is %v", err)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "sub")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if err := writeFile(name, strings.NewReader("whole")); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(name); err != nil || string(b) != "whole" {
		t.Errorf("%q, %v", b, err)
	}
}

// The cache may be moved, and a record without its kernel is ignored.
func TestRecord(t *testing.T) {
	dir := t.TempDir()
	record := filepath.Join(dir, "sid.json")
	if err := writeFile(record, strings.NewReader(`{"Suite":"sid","Release":"7.2-x","Version":"7.2-1"}`)); err != nil {
		t.Fatal(err)
	}
	if k, _ := readRecord(record, Amd64); k != nil {
		t.Errorf("there is no kernel, but %+v", k)
	}
	image := filepath.Join(dir, "7.2-1", "boot", "vmlinuz-7.2-x")
	if err := writeFile(image, strings.NewReader("kernel")); err != nil {
		t.Fatal(err)
	}
	k, age := readRecord(record, Amd64)
	if k == nil || k.Image != image || k.Release != "7.2-x" || age < 0 || age > time.Minute {
		t.Errorf("%+v, %v", k, age)
	}
}

// follow passes on complete lines, however they are written, and also those that are written
// just before the end.
func TestFollow(t *testing.T) {
	name := filepath.Join(t.TempDir(), "results")
	w, err := os.Create(name)
	if err != nil {
		t.Fatal(err)
	}
	r, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ended := make(chan error, 1)
	next := make(chan string, 10)
	go func() {
		defer w.Close()
		for i, part := range []string{"one\ntw", "o\n", "three\nfour\n"} {
			w.WriteString(part)
			if i < 2 {
				<-next // until the line was seen
			}
		}
		ended <- nil
	}()
	var lines []string
	if err := follow(r, ended, func(b []byte) { lines = append(lines, string(b)); next <- string(b) }); err != nil {
		t.Fatal(err)
	}
	if want := []string{"one", "two", "three", "four"}; !slices.Equal(lines, want) {
		t.Errorf("%q, want %q", lines, want)
	}
}

// What the cache has for another processor has other names, and no name of one kernel's images begins
// as another's do.
func TestProcessors(t *testing.T) {
	dir := t.TempDir()
	record := filepath.Join(dir, "sid-arm64.json")
	image := filepath.Join(dir, "7.2-1-arm64", "boot", "vmlinuz-7.2-x")
	for name, text := range map[string]string{record: `{"Suite":"sid","Release":"7.2-x","Version":"7.2-1"}`, image: "kernel"} {
		if err := writeFile(name, strings.NewReader(text)); err != nil {
			t.Fatal(err)
		}
	}
	k, _ := readRecord(record, Arm64)
	if k == nil || k.Image != image || k.Arch != Arm64 {
		t.Fatalf("%+v", k)
	}
	if k, _ := readRecord(record, Amd64); k != nil {
		t.Errorf("a kernel for arm64 is taken for %+v", k)
	}
	other := &Kernel{Version: k.Version, Arch: Amd64}
	if a, b := k.imageName(), other.imageName(); strings.HasPrefix(a, b) || strings.HasPrefix(b, a) {
		t.Errorf("images are called %s and %s", a, b)
	}
	for _, err := range []error{
		Check("mips"),
		func() error { _, err := FindKernel(t.Context(), "sid", "mips"); return err }(),
		func() error { _, err := FindPackages(t.Context(), "sid", "mips", "bash"); return err }(),
		(&Machine{Kernel: &Kernel{Arch: "mips"}, Share: dir}).boot(t.Context()),
	} {
		if err == nil || !strings.Contains(err.Error(), `"mips"`) {
			t.Errorf("a processor of an unknown kind: %v", err)
		}
	}
	// A guest with another processor cannot run the host's programs, nor the host's one those of a tree.
	for _, c := range []struct {
		k *Kernel
		c Contents
	}{{k, Contents{}}, {k, Contents{Tree: dir, Programs: []Program{{"sh", "dash"}}}}, {other, Contents{Tree: dir}}} {
		if _, err := collect(t.Context(), c.k, c.c); err == nil || !strings.Contains(err.Error(), "programs of the host or of a tree") {
			t.Errorf("%+v: %v", c.c, err)
		}
	}
}

// A tree is packed without what programs do not read, with its links as they are.
func TestPackTree(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"usr/bin/tool", "lib/x/a.so.1", "usr/share/doc/tool/README", "usr/include/a.h", "usr/lib/x/a.a", "var/lib/x"} {
		if err := writeFile(filepath.Join(dir, name), strings.NewReader("12345")); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(os.Chmod(filepath.Join(dir, "usr/bin/tool"), 0o755), os.Symlink("a.so.1", filepath.Join(dir, "lib/x/a.so"))); err != nil {
		t.Fatal(err)
	}
	var buf bytes.Buffer
	a := newArchiver(&buf)
	if err := errors.Join(packTree(a, dir), a.close()); err != nil {
		t.Fatal(err)
	}
	names, contents := readArchive(t, buf.Bytes())
	want := []string{"usr", "usr/lib", "usr/lib/x", "usr/lib/x/a.so", "usr/lib/x/a.so.1", "usr/bin", "usr/bin/tool"}
	if !slices.Equal(names, want) {
		t.Errorf("the archive has %v, want %v", names, want)
	}
	for name, want := range map[string]string{"usr/bin/tool": "100755 12345", "usr/lib/x/a.so": "120777 a.so.1", "usr/lib/x/a.so.1": "100644 12345"} {
		if contents[name] != want {
			t.Errorf("%s is %q, want %q", name, contents[name], want)
		}
	}
	if err := packTree(newArchiver(io.Discard), filepath.Join(dir, "none")); err == nil {
		t.Error("a tree that is not there was packed")
	}
}
