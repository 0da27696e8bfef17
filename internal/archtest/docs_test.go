package archtest

// Documents that name things in the code are held to it: links lead somewhere,
// and docs/errors.md knows every status and every vendor error.

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
)

func readDoc(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

var mdLink = regexp.MustCompile(`\]\(([^)#\s]+)(#[^)\s]*)?\)`)

func TestLinksInDocuments(t *testing.T) {
	var docs []string
	for _, pattern := range []string{"*.md", "docs/*.md"} {
		found, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		docs = append(docs, found...)
	}
	links := 0
	for _, doc := range docs {
		b, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range mdLink.FindAllStringSubmatch(string(b), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			links++
			if _, err := os.Stat(filepath.Join(filepath.Dir(doc), m[1])); err != nil {
				t.Errorf("%s: link to %s leads nowhere", doc, m[1])
			}
		}
	}
	if links == 0 {
		t.Error("no links were found at all")
	}
}

var (
	vendorCode = regexp.MustCompile(`(?m)^\s*(vendor\w+)\s+uint16 = (0x2[0-9a-f]{2})\b`)
	faultKind  = regexp.MustCompile(`(?m)^\s*(Fault[A-Z]\w*)\b`)
	statusName = regexp.MustCompile(`(?m)^\s*(WC\w+)\s+WCStatus = (\d+)\b`)
)

func TestErrorsDocument(t *testing.T) {
	doc := readDoc(t, "docs/errors.md")

	codes := vendorCode.FindAllStringSubmatch(readDoc(t, "internal/qp/faults.go"), -1)
	if len(codes) < 5 {
		t.Fatalf("only %d vendor errors found in the code", len(codes))
	}
	for _, c := range codes {
		if !strings.Contains(doc, "| `"+c[2]+"` |") {
			t.Errorf("docs/errors.md does not explain %s, %s", c[1], c[2])
		}
	}

	// Faults of memory are 0x100 and their number in the list of kinds.
	src := readDoc(t, "internal/mem/mem.go")
	_, list, _ := strings.Cut(src, "FaultKind = iota")
	list, _, _ = strings.Cut(list, "numFaultKinds")
	kinds := faultKind.FindAllStringSubmatch(list, -1)
	if len(kinds) < 5 {
		t.Fatalf("only %d kinds of fault found in the code", len(kinds))
	}
	for i, k := range kinds {
		if code := fmt.Sprintf("| `0x%03x` |", 0x101+i); !strings.Contains(doc, code) {
			t.Errorf("docs/errors.md does not explain %s, %s", k[1], code)
		}
	}

	statuses := statusName.FindAllStringSubmatch(readDoc(t, "ib/wc.go"), -1)
	if len(statuses) != int(ib.WCGeneralErr)+1 {
		t.Fatalf("%d statuses found in the code", len(statuses))
	}
	for _, s := range statuses {
		if !strings.Contains(doc, "`"+s[1]+"`") {
			t.Errorf("docs/errors.md does not mention %s", s[1])
		}
	}
}

// The lines of Go in docs/dmabuf.md are part of an example whose output is tested.
func TestDMABufExample(t *testing.T) {
	_, rest, found := strings.Cut(readDoc(t, "docs/dmabuf.md"), "```go\n")
	part, _, ended := strings.Cut(rest, "```\n")
	if !found || !ended {
		t.Fatal("docs/dmabuf.md has no Go example")
	}
	example := strings.ReplaceAll(readDoc(t, "verbs/example_dmabuf_test.go"), "\n\t", "\n")
	if !strings.Contains(example, part) {
		t.Errorf("verbs/example_dmabuf_test.go does not have\n%s", part)
	}
}
