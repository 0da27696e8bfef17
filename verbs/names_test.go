package verbs

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"strings"
	"testing"
)

// exported lists the exported names of a package's source, each with the
// comment on its own line, if it has one.
func exported(t *testing.T, dir string) map[string]string {
	t.Helper()
	notTest := func(fi fs.FileInfo) bool { return !strings.HasSuffix(fi.Name(), "_test.go") }
	pkgs, err := parser.ParseDir(token.NewFileSet(), dir, notTest, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]string{}
	for _, pkg := range pkgs {
		for _, file := range pkg.Files {
			for _, decl := range file.Decls {
				switch d := decl.(type) {
				case *ast.FuncDecl:
					if d.Recv == nil && d.Name.IsExported() {
						names[d.Name.Name] = ""
					}
				case *ast.GenDecl:
					for _, spec := range d.Specs {
						switch s := spec.(type) {
						case *ast.TypeSpec:
							if s.Name.IsExported() {
								names[s.Name.Name] = ""
							}
						case *ast.ValueSpec:
							for _, n := range s.Names {
								if n.IsExported() {
									names[n.Name] = strings.TrimSpace(s.Comment.Text())
								}
							}
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
