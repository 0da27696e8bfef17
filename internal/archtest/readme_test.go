package archtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestReadmeExample builds and runs the program in README.md and compares what it
// prints with what stands below it.
func TestReadmeExample(t *testing.T) {
	doc := readDoc(t, "README.md")
	_, rest, ok := strings.Cut(doc, "```go\n")
	if !ok {
		t.Fatal("README.md has no Go example")
	}
	program, rest, _ := strings.Cut(rest, "```\n")
	_, rest, ok = strings.Cut(rest, "```\n")
	if !ok {
		t.Fatal("README.md does not say what its example prints")
	}
	want, _, _ := strings.Cut(rest, "```")

	file := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "run", file)
	cmd.Dir = root
	got, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the example fails: %v\n%s", err, got)
	}
	if string(got) != want {
		t.Errorf("the example prints\n%swant\n%s", got, want)
	}
}
