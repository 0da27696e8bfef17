package verbs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strings"
	"testing"
)

// exported lists the exported names of a package's source, each with the
// comment on its own line, if it has one.
func exported(t *testing.T, dir string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{}
	add := func(name *ast.Ident, comment string) {
		if name.IsExported() {
			names[name.Name] = comment
		}
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			switch d := decl.(type) {
			case *ast.FuncDecl:
				if d.Recv == nil {
					add(d.Name, "")
				}
			case *ast.GenDecl:
				for _, spec := range d.Specs {
					switch s := spec.(type) {
					case *ast.TypeSpec:
						add(s.Name, "")
					case *ast.ValueSpec:
						for _, n := range s.Names {
							add(n, strings.TrimSpace(s.Comment.Text()))
						}
					}
				}
			}
		}
	}
	return names
}

// Programs import package verbs alone: every name of package ib is there, and
// what ib says about a value is said here too.
func TestNamesOfIB(t *testing.T) {
	forProviders := map[string]bool{"NewAH": true, "Errorf": true}
	in, out := exported(t, "../ib"), exported(t, ".")
	if len(in) < 100 {
		t.Fatalf("found only %d names in package ib", len(in))
	}
	for name, comment := range in {
		if forProviders[name] {
			if _, ok := out[name]; ok {
				t.Errorf("%s is for providers and should not be here", name)
			}
			continue
		}
		got, ok := out[name]
		if !ok {
			t.Errorf("ib.%s is missing", name)
		} else if comment != "" && got != comment {
			t.Errorf("%s is commented %q, in package ib %q", name, got, comment)
		}
	}
}
