package examples_test

// The documents for newcomers are held to the code:
//
//   - docs/first-hour.md, docs/gpu.md, docs/nvme.md, docs/rconn.md, docs/tutorial.md and docs/unified.md show the programs
//     of this directory, parts of them, and what they print. The programs are built and run, and all of it is compared.
//   - docs/verbs-in-go.md has a row for every verb of the drop-in library, and its Go
//     column names only what the package verbs has.
//   - docs/glossary.md stays at one screen.
//
// "go test ./examples -update" copies changed programs into the documents.

import (
	"bufio"
	"bytes"
	"context"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	firstHour = "../docs/first-hour.md"
	gpuDoc    = "../docs/gpu.md"
	nvmeDoc   = "../docs/nvme.md"
	oneDoc    = "../docs/unified.md"
	rconnDoc  = "../docs/rconn.md"
	tutorial  = "../docs/tutorial.md"
	verbsInGo = "../docs/verbs-in-go.md"
	glossary  = "../docs/glossary.md"
)

// documents show programs.
var documents = []string{firstHour, gpuDoc, nvmeDoc, oneDoc, rconnDoc, tutorial}

var update = flag.Bool("update", false, "copy the programs into the documents")

// block is a code block of a document that a comment marks:
//
//	<!-- program sendrecv -->          all of examples/sendrecv/main.go
//	<!-- excerpt mistakes overrun -->  one function, or a group of declarations, of the files below examples/mistakes
//	<!-- excerpt kv Client.Get -->     one method
//	<!-- excerpt rconn/grpc listen --> one function of a program in a directory below
//	<!-- output sendrecv -->           what the program prints
//	<!-- output twohosts server -->    what one of its two processes prints
//
// The output blocks of one program, in the order of the document, are its output.
type block struct {
	kind, program, part string
	text                string
}

var marked = regexp.MustCompile("(?s)<!-- (program|excerpt|output) ([\\w/]+) ?([\\w.]*) -->\n```\\w+\n(.*?)```\n")

func blocks(t *testing.T) []block {
	t.Helper()
	var all []block
	for _, doc := range documents {
		for _, m := range marked.FindAllStringSubmatch(read(t, doc), -1) {
			all = append(all, block{m[1], m[2], m[3], m[4]})
		}
	}
	if len(all) == 0 {
		t.Fatal("the documents have no marked blocks")
	}
	return all
}

// output returns what the document says that a program prints.
func output(all []block, program, part string) string {
	var text strings.Builder
	for _, b := range all {
		if b.kind == "output" && b.program == program && b.part == part {
			text.WriteString(b.text)
		}
	}
	return text.String()
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// programs returns the names of the example programs.
func programs(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("*/main.go")
	if err != nil || len(files) == 0 {
		t.Fatalf("no programs: %v", err)
	}
	for i := range files {
		files[i] = filepath.Dir(files[i])
	}
	return files
}

// source returns the text that a program or excerpt block must have.
func source(t *testing.T, b block) string {
	t.Helper()
	if b.kind == "program" {
		return read(t, filepath.Join(b.program, "main.go"))
	}
	var found []string
	err := filepath.WalkDir(b.program, func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			found = append(found, declared(t, path, b.part)...)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != 1 {
		t.Fatalf("examples/%s has %d declarations of %q, want 1", b.program, len(found), b.part)
	}
	return found[0]
}

// declared returns the text of the declarations of a name in a file: a function, a method as Type.Method, or a type, constant
// or variable with what is declared in the same parentheses.
func declared(t *testing.T, path, name string) (found []string) {
	t.Helper()
	text := read(t, path)
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, text, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range file.Decls {
		begin, is := d.Pos(), false
		var doc *ast.CommentGroup
		switch d := d.(type) {
		case *ast.FuncDecl:
			doc = d.Doc
			is = d.Name.Name == name
			if d.Recv != nil {
				is = typeName(d.Recv.List[0].Type)+"."+d.Name.Name == name
			}
		case *ast.GenDecl:
			doc = d.Doc
			is = slices.ContainsFunc(d.Specs, func(s ast.Spec) bool {
				switch s := s.(type) {
				case *ast.TypeSpec:
					return s.Name.Name == name
				case *ast.ValueSpec:
					return slices.ContainsFunc(s.Names, func(n *ast.Ident) bool { return n.Name == name })
				}
				return false
			})
		}
		if doc != nil {
			begin = doc.Pos()
		}
		if is {
			found = append(found, text[fset.Position(begin).Offset:fset.Position(d.End()).Offset]+"\n")
		}
	}
	return found
}

func TestProgramsInDocument(t *testing.T) {
	shown := map[string]bool{}
	for _, b := range blocks(t) {
		shown[b.program+" "+b.kind] = true
	}
	for _, path := range documents {
		testDocument(t, path)
	}
	for _, p := range programs(t) {
		if !shown[p+" output"] || !shown[p+" program"] && !shown[p+" excerpt"] {
			t.Errorf("no document shows examples/%s/main.go and what it prints", p)
		}
	}
}

// testDocument compares the programs that a document shows with their files.
func testDocument(t *testing.T, path string) {
	t.Helper()
	doc := read(t, path)
	want := marked.ReplaceAllStringFunc(doc, func(s string) string {
		m := marked.FindStringSubmatch(s)
		if m[1] == "output" {
			return s
		}
		b := block{kind: m[1], program: m[2], part: m[3]}
		if now := source(t, b); now != m[4] {
			if !*update {
				t.Errorf("the %s of %s %s in %s is not what the file has: go test ./examples -update", b.kind, b.program, b.part, path)
			}
			return strings.TrimSuffix(s, m[4]+"```\n") + now + "```\n"
		}
		return s
	})
	if *update && want != doc {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	// A block that looks like a program and has no mark would never be checked.
	if n, m := strings.Count(doc, "```go\n"), len(regexp.MustCompile("<!-- (program|excerpt) .*-->\n```go\n").FindAllString(doc, -1)); n != m {
		t.Errorf("%d of %d blocks of Go in %s have no mark", n-m, n, path)
	}
}

// number is what differs from run to run: a number of a queue pair, a key, a port.
var number = regexp.MustCompile(`0x[0-9a-f]+|(127\.0\.0\.1):\d+`)

func masked(s string) string { return number.ReplaceAllString(s, "$1#") }

func TestPrograms(t *testing.T) {
	all, bin := blocks(t), t.TempDir()
	build := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-w", "-o", bin+string(filepath.Separator), "./...")
	if text, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for _, name := range programs(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			if name == "twohosts" {
				testTwoHosts(ctx, t, all, filepath.Join(bin, name))
				return
			}
			got, err := exec.CommandContext(ctx, filepath.Join(bin, name)).CombinedOutput()
			compare(t, string(got), output(all, name, ""), err)
		})
	}
}

// The target of examples/nvmet refuses flags that have no effect beside the others, before it does anything.
func TestIgnoredFlags(t *testing.T) {
	nvmet := filepath.Join(t.TempDir(), "nvmet")
	if text, err := exec.Command("go", "build", "-buildvcs=false", "-ldflags=-w", "-o", nvmet, "./nvmet").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	for args, want := range map[string]string{
		"-file disk.img":                  "-file has no effect without -listen",
		"-direct":                         "-direct has no effect without -listen",
		"-p2pmem 01:00.0":                 "-p2pmem has no effect without -listen",
		"-in-capsule 0":                   "-in-capsule has no effect without -listen",
		"-workers 2":                      "-workers has no effect without -listen",
		"-v":                              "-v has no effect without -listen",
		"-size 4096 -v=true":              "-v has no effect without -listen",
		"-listen 127.0.80.3:4420 -direct": "-direct has no effect without -file",
		"-listen 127.0.80.3:4420 -p2pmem 01:00.0":           "-p2pmem has no effect without -file",
		"-listen 127.0.80.3:4420 -size 4096 -file disk.img": "-size has no effect with -file",
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		c := exec.CommandContext(ctx, nvmet, strings.Fields(args)...)
		got, _ := c.CombinedOutput() // its exit status is looked at
		cancel()
		if code := c.ProcessState.ExitCode(); code != 2 || string(got) != "nvmet: "+want+"\n" {
			t.Errorf("%s: exit status %d, %q; want 2 and %q", args, code, got, want)
		}
	}
}

func compare(t *testing.T, got, want string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("the program fails: %v", err)
	}
	if masked(got) != masked(want) {
		t.Errorf("the program prints\n%s\nwant, by the document,\n%s", got, want)
	}
}

// testTwoHosts runs the server on a free port, and the client when the server listens.
func testTwoHosts(ctx context.Context, t *testing.T, all []block, path string) {
	server := exec.CommandContext(ctx, path, "-listen", "127.0.0.1:0")
	var complaints bytes.Buffer
	server.Stderr = &complaints
	pipe, err := server.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(pipe)
	var printed strings.Builder
	for lines.Scan() {
		fmt.Fprintln(&printed, lines.Text())
		if address, ok := strings.CutPrefix(lines.Text(), "listening on "); ok {
			got, err := exec.CommandContext(ctx, path, "-connect", address).CombinedOutput()
			compare(t, string(got), output(all, "twohosts", "client"), err)
		}
	}
	err = server.Wait()
	compare(t, printed.String()+complaints.String(), output(all, "twohosts", "server"), err)
}

func TestGlossary(t *testing.T) {
	rows := tableRows(read(t, glossary))
	if len(rows) < 20 || len(rows) > 48 {
		t.Errorf("the glossary has %d words, it is to have at most 48", len(rows))
	}
	var words []string
	for _, r := range rows {
		if len(r) != 2 || r[1] == "" {
			t.Errorf("row %q has not two columns", r)
			continue
		}
		words = append(words, strings.ToLower(r[0]))
	}
	if !slices.IsSorted(words) {
		t.Error("the words are not in alphabetical order")
	}
}

// tableRows returns the cells of all rows of all tables, without their heads.
func tableRows(doc string) [][]string {
	var rows [][]string
	body := false
	for line := range strings.Lines(doc) {
		line = strings.TrimSpace(line)
		switch {
		case !strings.HasPrefix(line, "|"):
			body = false
		case strings.HasPrefix(line, "|---"):
			body = true
		case body:
			cells := strings.Split(strings.Trim(line, "|"), " | ")
			for i := range cells {
				cells[i] = strings.TrimSpace(cells[i])
			}
			rows = append(rows, cells)
		}
	}
	return rows
}

var codeSpan = regexp.MustCompile("`([^`]+)`")

func codeSpans(cell string) []string {
	var spans []string
	for _, m := range codeSpan.FindAllStringSubmatch(cell, -1) {
		spans = append(spans, m[1])
	}
	return spans
}

// verbRows returns the rows of docs/verbs-in-go.md: C names, Go, a remark.
func verbRows(t *testing.T) [][]string {
	t.Helper()
	rows := tableRows(read(t, verbsInGo))
	if len(rows) < 50 {
		t.Fatalf("%s has %d rows only", verbsInGo, len(rows))
	}
	return rows
}

// TestVerbsOfLibrary: every verb that the drop-in library has is in the table.
func TestVerbsOfLibrary(t *testing.T) {
	named := map[string]bool{}
	for _, row := range verbRows(t) {
		for _, name := range codeSpans(row[0]) {
			if named[name] {
				t.Errorf("%s has two rows", name)
			}
			named[name] = true
		}
	}
	verbs := libraryVerbs(t)
	if len(verbs) < 150 {
		t.Fatalf("only %d verbs were found in the library", len(verbs))
	}
	for _, v := range verbs {
		if !named[v] {
			t.Errorf("%s has no row for %s", verbsInGo, v)
		}
	}
}

// Symbols of the version script, and what the library puts into the tables that the
// inline functions of infiniband/verbs.h and mlx5dv.h call.
var (
	exported    = regexp.MustCompile(`\b_?((?:ibv|mlx5dv)_\w+|m\w+_to_ibv_rate);`)
	refused     = regexp.MustCompile(`(?m)^REFUSE_\w+\((\w+)\)`)
	inQP        = regexp.MustCompile(`(?m)^static \w+ (wr_\w+)\(struct ibv_qp_ex `)
	inCQ        = regexp.MustCompile(`->(read_\w+|\w+_poll)\s*=`)
	inDM        = regexp.MustCompile(`\.(memcpy_\w+) = `)
	inMlx5QP    = regexp.MustCompile(`\.(wr_\w+) = `)
	inContext   = regexp.MustCompile(`->([a-z]\w+) = \w+;`)
	otherwise   = map[string]string{"ibv_query_rt_values": "ibv_query_rt_values_ex"}
	notVerbs    = regexp.MustCompile(`^ibv_(sz|abi_compat)$`)
	frontSource = "../clib/front/"
)

func libraryVerbs(t *testing.T) []string {
	t.Helper()
	var verbs []string
	add := func(file, prefix string, re *regexp.Regexp, text string) {
		found := re.FindAllStringSubmatch(text, -1)
		if len(found) == 0 {
			t.Errorf("no verbs were found in %s", file)
		}
		for _, m := range found {
			verbs = append(verbs, prefix+m[1])
		}
	}
	front := func(file string) string { return read(t, frontSource+file) }

	add("libibverbs.map", "", exported, front("libibverbs.map"))
	// Of the vendor's verbs only those that the library does not refuse.
	no := map[string]bool{}
	for _, m := range refused.FindAllStringSubmatch(front("vendors.c"), -1) {
		no[strings.TrimPrefix(m[1], "_")] = true
	}
	verbs = slices.DeleteFunc(verbs, func(v string) bool { return no[v] })

	add("wr.c", "ibv_", inQP, front("wr.c"))
	add("cq.c", "ibv_", inCQ, front("cq.c"))
	for i, v := range verbs {
		verbs[i] = strings.Replace(v, "ibv_read_", "ibv_wc_read_", 1)
		if slices.Contains([]string{"ibv_wc_read_sysfs_file", "ibv_wc_read_comp_cntr", "ibv_wc_read_err_comp_cntr"}, verbs[i]) {
			verbs[i] = v // a symbol, not a reader of completions
		}
	}
	add("dm.c", "ibv_", inDM, front("dm.c"))
	add("mkey.c", "mlx5dv_", inMlx5QP, front("mkey.c"))

	// The table of a context is filled in one function: the one with post_send.
	for _, f := range strings.Split(front("device.c"), "\n}\n") {
		if strings.Contains(f, "->post_send = ") {
			add("device.c", "ibv_", inContext, f)
		}
	}
	for i, v := range verbs {
		if other := otherwise[v]; other != "" {
			verbs[i] = other
		}
	}
	verbs = slices.DeleteFunc(verbs, notVerbs.MatchString)
	slices.Sort(verbs)
	return slices.Compact(verbs)
}

// TestNamesInTable: what the Go column names exists, with so many arguments and with
// these fields. A verb without a counterpart says why.
func TestNamesInTable(t *testing.T) {
	apis := make(map[string]*packageAPI)
	for _, p := range packages {
		apis[p.name] = parseAPI(t, p)
	}
	seen := 0
	for _, row := range verbRows(t) {
		if len(row) != 3 {
			t.Errorf("row %q has %d columns, it is to have 3", row, len(row))
			continue
		}
		spans := codeSpans(row[1])
		if len(spans) == 0 && (row[1] != "none" || row[2] == "") {
			t.Errorf("%s: the Go column has neither code nor \"none\" with a reason", row[0])
		}
		for _, span := range append(spans, goNames(row[2])...) {
			e, err := parser.ParseExpr(span)
			if err != nil {
				t.Errorf("%s: %q is not an expression of Go: %v", row[0], span, err)
				continue
			}
			if err := apis[packageOf(e)].check(e); err != nil {
				t.Errorf("%s: %q: %v", row[0], span, err)
			}
			seen++
		}
	}
	if seen < 100 {
		t.Errorf("only %d names of Go were checked", seen)
	}
}

// goNames returns the code of a remark that is ours: names of the package, and calls of
// the methods of its types.
func goNames(remark string) []string {
	return slices.DeleteFunc(codeSpans(remark), func(s string) bool {
		name, _, ok := strings.Cut(s, ".")
		return !ok || !slices.ContainsFunc(packages, func(p tablePackage) bool { return p.name == name || p.variables[name] != "" })
	})
}

// tablePackage is a package that the table names.
type tablePackage struct {
	name      string
	dirs      []string          // the last one is its own; what the others export is not its
	variables map[string]string // names that the table uses, with their types
}

var packages = []tablePackage{
	{"verbs", []string{"../ib", "../verbs"}, map[string]string{
		"dev": "Device", "pd": "PD", "mr": "MR", "mw": "MW", "mkey": "MKey", "dm": "DM", "dmah": "DMAH",
		"cq": "CQ", "ch": "Channel", "ev": "Event", "qp": "QP", "srq": "SRQ", "xrcd": "XRCD",
		"ah": "AH", "wr": "SendWR", "wc": "WC", "event": "AsyncEvent", "state": "PortState",
	}},
	{"dmabuf", []string{"../dmabuf"}, map[string]string{"memory": "Memory", "buffer": "Buffer", "fence": "Fence"}},
	{"peermem", []string{"../peermem"}, map[string]string{"registered": "Registered"}},
}

// packageOf returns the package that an expression is about, by its first name.
func packageOf(e ast.Expr) string {
	first := ""
	ast.Inspect(e, func(n ast.Node) bool {
		if id, ok := n.(*ast.Ident); ok && first == "" {
			first = id.Name
		}
		return first == ""
	})
	for _, p := range packages {
		if p.name == first || p.variables[first] != "" {
			return p.name
		}
	}
	return "verbs"
}

// packageAPI is what a package exports: functions, constants, types, and of each type its fields
// and methods. Types of package ib, which verbs re-exports, count as its own.
type packageAPI struct {
	tablePackage
	names   map[string]bool                     // everything that is exported
	members map[string]map[string]*ast.FuncType // type, then field (nil) or method
	fields  map[string]map[string]string        // type, then field: its type
	funcs   map[string]*ast.FuncType
}

func parseAPI(t *testing.T, p tablePackage) *packageAPI {
	t.Helper()
	api := &packageAPI{tablePackage: p, names: map[string]bool{}, members: map[string]map[string]*ast.FuncType{},
		fields: map[string]map[string]string{}, funcs: map[string]*ast.FuncType{}}
	for i, dir := range p.dirs {
		exports := i == len(p.dirs)-1
		files, err := filepath.Glob(dir + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatalf("no files in %s: %v", dir, err)
		}
		for _, path := range files {
			if strings.HasSuffix(path, "_test.go") {
				continue
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range file.Decls {
				api.add(d, exports)
			}
		}
	}
	return api
}

// add notes a declaration. exports reports whether it is one of the package itself.
func (api *packageAPI) add(d ast.Decl, exports bool) {
	switch d := d.(type) {
	case *ast.FuncDecl:
		switch {
		case !d.Name.IsExported():
		case d.Recv != nil:
			api.member(typeName(d.Recv.List[0].Type), d.Name.Name, d.Type)
		case exports:
			api.names[d.Name.Name] = true
			api.funcs[d.Name.Name] = d.Type
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.ValueSpec:
				for _, n := range s.Names {
					api.names[n.Name] = api.names[n.Name] || exports
				}
			case *ast.TypeSpec:
				api.names[s.Name.Name] = api.names[s.Name.Name] || exports
				if st, ok := s.Type.(*ast.StructType); ok {
					api.structFields(s.Name.Name, st)
				}
			}
		}
	}
}

func (api *packageAPI) member(typ, name string, f *ast.FuncType) {
	if api.members[typ] == nil {
		api.members[typ] = map[string]*ast.FuncType{}
	}
	api.members[typ][name] = f
}

func (api *packageAPI) structFields(typ string, st *ast.StructType) {
	if api.fields[typ] == nil {
		api.fields[typ] = map[string]string{}
	}
	for _, f := range st.Fields.List {
		for _, n := range f.Names {
			if n.IsExported() {
				api.member(typ, n.Name, nil)
				api.fields[typ][n.Name] = typeName(f.Type)
			}
		}
	}
}

// typeName returns the name of a type without its package and without a pointer.
func typeName(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.StarExpr:
		return typeName(e.X)
	case *ast.SelectorExpr:
		return e.Sel.Name
	case *ast.Ident:
		return e.Name
	}
	return ""
}

// check reports the first name in an expression that does not exist.
func (api *packageAPI) check(e ast.Expr) error {
	var bad error
	ast.Inspect(e, func(n ast.Node) bool {
		if bad != nil {
			return false
		}
		switch n := n.(type) {
		case *ast.CallExpr:
			bad = api.checkCall(n)
		case *ast.SelectorExpr:
			_, bad = api.selected(n)
		case *ast.CompositeLit:
			bad = api.checkLiteral(n)
		case *ast.Ident:
			if n.IsExported() && !api.names[n.Name] && !api.isMember(n.Name) {
				bad = fmt.Errorf("there is no %s", n.Name)
			}
		}
		return true
	})
	return bad
}

func (api *packageAPI) isMember(name string) bool {
	for _, m := range api.members {
		if _, ok := m[name]; ok {
			return true
		}
	}
	return false
}

// selected returns the type of what a selector names, "" if that does not matter.
func (api *packageAPI) selected(s *ast.SelectorExpr) (string, error) {
	if x, ok := s.X.(*ast.Ident); ok && x.Name == api.name {
		if !api.names[s.Sel.Name] {
			return "", fmt.Errorf("package %s has no %s", api.name, s.Sel.Name)
		}
		return s.Sel.Name, nil
	}
	typ := api.typeOf(s.X)
	if typ == "" {
		return "", fmt.Errorf("the type of what is before .%s is not known", s.Sel.Name)
	}
	if _, ok := api.members[typ][s.Sel.Name]; !ok {
		return "", fmt.Errorf("%s has no %s", typ, s.Sel.Name)
	}
	return api.fields[typ][s.Sel.Name], nil
}

// typeOf returns the name of an expression's type: of a variable of the table, of a
// field, or of the first result of a call.
func (api *packageAPI) typeOf(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return api.variables[e.Name]
	case *ast.SelectorExpr:
		typ, _ := api.selected(e)
		return typ
	case *ast.CallExpr:
		if f := api.function(e); f != nil && f.Results != nil {
			return typeName(f.Results.List[0].Type)
		}
	}
	return ""
}

// function returns the function or method that a call calls, nil if it is none.
func (api *packageAPI) function(c *ast.CallExpr) *ast.FuncType {
	s, ok := c.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	if x, ok := s.X.(*ast.Ident); ok && x.Name == api.name {
		return api.funcs[s.Sel.Name]
	}
	return api.members[api.typeOf(s.X)][s.Sel.Name]
}

func (api *packageAPI) checkCall(c *ast.CallExpr) error {
	f := api.function(c)
	if f == nil {
		return fmt.Errorf("it calls what is no function")
	}
	want, variadic := 0, false
	for _, p := range f.Params.List {
		want += max(1, len(p.Names))
		_, variadic = p.Type.(*ast.Ellipsis)
	}
	if got := len(c.Args); got != want && (!variadic || got < want-1) {
		return fmt.Errorf("%d arguments, the function has %d", got, want)
	}
	return nil
}

func (api *packageAPI) checkLiteral(c *ast.CompositeLit) error {
	for _, e := range c.Elts {
		pair, ok := e.(*ast.KeyValueExpr)
		if !ok {
			return fmt.Errorf("a field has no name")
		}
		typ, name := typeName(c.Type), typeName(pair.Key)
		if _, ok := api.members[typ][name]; !ok {
			return fmt.Errorf("%s has no field %s", typ, name)
		}
	}
	return nil
}
