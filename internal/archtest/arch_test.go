package archtest

// Stages: every Go file of the module is found and parsed (parseTree), then each
// rule walks all of them and names what breaks it. The rules are functions from a
// file to complaints, so that TestRulesBite can show each of them a file that
// breaks it.

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// file is a parsed source file; path is slash-separated from the module's root.
type file struct {
	path string
	fset *token.FileSet
	ast  *ast.File
}

func (f *file) isTest() bool { return strings.HasSuffix(f.path, "_test.go") }

func (f *file) under(dirs ...string) bool {
	for _, d := range dirs {
		if strings.HasPrefix(f.path, d+"/") {
			return true
		}
	}
	return false
}

// mayBeUnsafe reports whether the file's name announces unsafe code.
func (f *file) mayBeUnsafe() bool {
	return strings.HasSuffix(f.path, "_unsafe.go") || strings.HasSuffix(f.path, "_unsafe_test.go")
}

// complain formats a position in the file and what is wrong there.
func (f *file) complain(pos token.Pos, format string, args ...any) string {
	return fmt.Sprintf("%s:%d: %s", f.path, f.fset.Position(pos).Line, fmt.Sprintf(format, args...))
}

// imports calls fn for each import with its path and the name that the file knows
// it by.
func (f *file) imports(fn func(spec *ast.ImportSpec, path, name string)) {
	for _, spec := range f.ast.Imports {
		path, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue // the parser has refused it already
		}
		name := path[strings.LastIndexByte(path, '/')+1:]
		if spec.Name != nil {
			name = spec.Name.Name
		}
		fn(spec, path, name)
	}
}

const root = "../.."

func parseTree(t *testing.T) []*file {
	t.Helper()
	var files []*file
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != root && (strings.HasPrefix(name, ".") || name == "testdata" || name == "vendor") {
				return filepath.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		fset := token.NewFileSet()
		f, err := parser.ParseFile(fset, path, nil, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		files = append(files, &file{path: filepath.ToSlash(rel), fset: fset, ast: f})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < 20 {
		t.Fatalf("only %d Go files found under %s", len(files), root)
	}
	return files
}

type rule struct {
	name  string
	check func(f *file) []string
}

var rules = []rule{
	{"unsafe only in files named *_unsafe.go", checkUnsafe},
	{"unsafe code says why it is sound", checkUnsafeReason},
	{"cgo only in internal/sys, hmm and clib", checkCgo},
	{"system calls only in packages internal/sys", checkSyscalls},
	{"a mutex says what it guards", checkMutexComment},
}

func TestRules(t *testing.T) {
	files := parseTree(t)
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			for _, f := range files {
				for _, c := range r.check(f) {
					t.Error(c)
				}
			}
		})
	}
}

// checkUnsafe: unsafe.Pointer and go:linkname are both ways around the type
// system; a reader must be able to list the files that take them.
func checkUnsafe(f *file) (bad []string) {
	if f.mayBeUnsafe() {
		return nil
	}
	f.imports(func(spec *ast.ImportSpec, path, _ string) {
		if path == "unsafe" {
			bad = append(bad, f.complain(spec.Pos(), "imports unsafe: move that code to a file named *_unsafe.go"))
		}
	})
	for _, g := range f.ast.Comments {
		for _, c := range g.List {
			if strings.HasPrefix(c.Text, "//go:linkname") {
				bad = append(bad, f.complain(c.Pos(), "uses go:linkname outside a file named *_unsafe.go"))
			}
		}
	}
	return bad
}

var soundness = regexp.MustCompile(`(?i)\b(un)?(sound|safe)`)

// checkUnsafeReason wants the reason in words. It cannot judge it.
func checkUnsafeReason(f *file) []string {
	usesUnsafe := false
	f.imports(func(_ *ast.ImportSpec, path, _ string) { usesUnsafe = usesUnsafe || path == "unsafe" })
	if !usesUnsafe || f.isTest() {
		return nil
	}
	for _, g := range f.ast.Comments {
		if soundness.MatchString(g.Text()) {
			return nil
		}
	}
	return []string{f.complain(f.ast.Package, "no comment says why the unsafe code is sound")}
}

func checkCgo(f *file) (bad []string) {
	if f.under("internal/sys", "hmm", "clib") {
		return nil
	}
	f.imports(func(spec *ast.ImportSpec, path, _ string) {
		if path == "C" || path == "runtime/cgo" {
			bad = append(bad, f.complain(spec.Pos(), "imports %q: cgo belongs in internal/sys, hmm or clib", path))
		}
	})
	return bad
}

// What package syscall offers that is no system call: error and signal numbers,
// and the types that other packages' interfaces are made of.
var harmless = regexp.MustCompile(`^(E[A-Z0-9]+|SIG[A-Z0-9]+|Errno|Signal|RawConn|Conn|WaitStatus|SysProcAttr)$`)

// checkSyscalls: the device's system calls are in internal/sys. The command and
// the benchmarks are programs like anybody's; each has an internal/sys of its own
// for its few.
func checkSyscalls(f *file) (bad []string) {
	if f.isTest() || f.under("internal/sys", "cmd/verbena/internal/sys", "internal/benchsuite/internal/sys", "clib") {
		return nil
	}
	local := "" // what the file calls package syscall
	f.imports(func(spec *ast.ImportSpec, path, name string) {
		switch {
		case strings.HasPrefix(path, "golang.org/x/sys/"):
			bad = append(bad, f.complain(spec.Pos(), "imports %s: only internal/sys may", path))
		case path == "syscall" && name == ".":
			bad = append(bad, f.complain(spec.Pos(), "dot-imports syscall"))
		case path == "syscall":
			local = name
		}
	})
	if local == "" {
		return bad
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		sel, ok := n.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); ok && x.Name == local && !harmless.MatchString(sel.Sel.Name) {
			bad = append(bad, f.complain(sel.Pos(), "uses syscall.%s: system calls belong in internal/sys", sel.Sel.Name))
		}
		return true
	})
	return bad
}

// checkMutexComment wants words at every mutex that is a field of a struct, beside
// it or above it.
func checkMutexComment(f *file) (bad []string) {
	if f.isTest() {
		return nil
	}
	ast.Inspect(f.ast, func(n ast.Node) bool {
		st, ok := n.(*ast.StructType)
		if !ok {
			return true
		}
		for _, field := range st.Fields.List {
			sel, ok := field.Type.(*ast.SelectorExpr)
			if !ok || (sel.Sel.Name != "Mutex" && sel.Sel.Name != "RWMutex") {
				continue
			}
			if x, ok := sel.X.(*ast.Ident); ok && x.Name == "sync" && field.Doc == nil && field.Comment == nil {
				bad = append(bad, f.complain(field.Pos(), "no comment says what this mutex guards"))
			}
		}
		return true
	})
	return bad
}

// TestRulesBite shows each rule one file that breaks it and one that does not: a
// rule that finds nothing in the tree must still be able to find something.
func TestRulesBite(t *testing.T) {
	tests := []struct {
		path, src string
		check     func(*file) []string
		want      int
	}{
		{"internal/mem/a.go", "package a\nimport \"unsafe\"\nvar _ unsafe.Pointer", checkUnsafe, 1},
		{"internal/mem/a_test.go", "package a\nimport \"unsafe\"\nvar _ unsafe.Pointer", checkUnsafe, 1},
		{"internal/mem/a.go", "package a\n//go:linkname x runtime.x\nfunc x()", checkUnsafe, 1},
		{"internal/mem/a_unsafe.go", "package a\nimport \"unsafe\"\nvar _ unsafe.Pointer", checkUnsafe, 0},
		{"internal/mem/a_unsafe_test.go", "package a\nimport \"unsafe\"\nvar _ unsafe.Pointer", checkUnsafe, 0},

		{"internal/mem/a_unsafe.go", "package a\nimport \"unsafe\"\n// x is a pointer.\nvar x unsafe.Pointer", checkUnsafeReason, 1},
		{"internal/mem/a_unsafe.go", "package a\nimport \"unsafe\"\n// Sound: x outlives y.\nvar x unsafe.Pointer", checkUnsafeReason, 0},
		{"internal/mem/a_unsafe.go", "package a", checkUnsafeReason, 0},

		{"verbs/a.go", "package a\nimport \"C\"", checkCgo, 1},
		{"verbs/a_test.go", "package a\nimport \"C\"", checkCgo, 1},
		{"internal/sys/a.go", "package a\nimport \"C\"", checkCgo, 0},
		{"internal/system/a.go", "package a\nimport \"C\"", checkCgo, 1},

		{"verbs/a.go", "package a\nimport \"golang.org/x/sys/unix\"\nvar _ = unix.Getpid()", checkSyscalls, 1},
		{"verbs/a.go", "package a\nimport \"syscall\"\nvar _ = syscall.Getpid()", checkSyscalls, 1},
		{"verbs/a.go", "package a\nimport s \"syscall\"\nvar _ = s.Getpid()", checkSyscalls, 1},
		{"verbs/a.go", "package a\nimport . \"syscall\"\nvar _ = Getpid()", checkSyscalls, 1},
		{"verbs/a.go", "package a\nimport \"syscall\"\nvar _ syscall.Errno = syscall.EINVAL", checkSyscalls, 0},
		{"verbs/a_test.go", "package a\nimport \"syscall\"\nvar _ = syscall.Getpid()", checkSyscalls, 0},
		{"internal/sys/a.go", "package a\nimport \"syscall\"\nvar _ = syscall.Getpid()", checkSyscalls, 0},
		{"cmd/verbena/internal/sys/a.go", "package a\nimport \"syscall\"\nvar _ = syscall.Getpid()", checkSyscalls, 0},
		{"cmd/verbena/a.go", "package a\nimport \"syscall\"\nvar _ = syscall.Getpid()", checkSyscalls, 1},

		{"verbs/a.go", "package a\nimport \"sync\"\ntype t struct { mu sync.Mutex }", checkMutexComment, 1},
		{"verbs/a.go", "package a\nimport \"sync\"\ntype t struct { sync.RWMutex }", checkMutexComment, 1},
		{"verbs/a.go", "package a\nimport \"sync\"\ntype t struct {\n mu sync.Mutex // guards n\n}", checkMutexComment, 0},
		{"verbs/a.go", "package a\nimport \"sync\"\ntype t struct {\n// mu guards n.\n mu sync.Mutex\n}", checkMutexComment, 0},
	}
	for i, tt := range tests {
		fset := token.NewFileSet()
		parsed, err := parser.ParseFile(fset, tt.path, tt.src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		got := tt.check(&file{path: tt.path, fset: fset, ast: parsed})
		if len(got) != tt.want {
			t.Errorf("case %d, %s %q: %d complaints %q, want %d", i, tt.path, tt.src, len(got), got, tt.want)
		}
	}
}
