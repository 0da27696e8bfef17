package hmmtests

import (
	"fmt"
	"slices"
	"strings"
)

// A row of the table is a test, with a verdict for each kind of device.
type row struct {
	test    string // fixture.test
	verdict [2]Verdict
	reason  string
}

// kinds are the kinds of devices, as variants end.
var kinds = [2]string{"private", "coherent"}

// Table is the table of docs/hmm-tests.md.
type Table struct{ rows []row }

// split returns a case's row, and its kind of device.
func split(name string) (test string, kind int, err error) {
	part := strings.Split(name, ".")
	if len(part) == 3 {
		for kind, k := range kinds {
			if strings.HasSuffix(part[1], "_"+k) {
				return part[0] + "." + part[2], kind, nil
			}
		}
	}
	return "", 0, fmt.Errorf("%q is no case of hmm-tests", name)
}

const head = "| test | private | coherent | why not |\n|---|---|---|---|\n"

// ParseTable reads the table from a document.
func ParseTable(doc string) (*Table, error) {
	_, lines, found := strings.Cut(doc, head)
	if !found {
		return nil, fmt.Errorf("the document has no table with the head %q", head)
	}
	var t Table
	for line := range strings.Lines(lines) {
		cell := strings.Split(strings.TrimSpace(line), "|")
		if len(cell) != 6 {
			break
		}
		for i := range cell {
			cell[i] = strings.TrimSpace(cell[i])
		}
		t.rows = append(t.rows, row{test: cell[1], verdict: [2]Verdict{Verdict(cell[2]), Verdict(cell[3])}, reason: cell[4]})
	}
	return &t, nil
}

// Add adds a result. What a case says is the reason, unless the old table has another one for the same verdict.
func (t *Table) Add(r Result, old *Table) error {
	test, kind, err := split(r.Case)
	if err != nil {
		return err
	}
	same := func(r row) bool { return r.test == test }
	i := slices.IndexFunc(t.rows, same)
	if i < 0 {
		t.rows, i = append(t.rows, row{test: test}), len(t.rows)
	}
	t.rows[i].verdict[kind] = r.Verdict
	if r.Verdict == Pass {
		return nil
	}
	if k := slices.IndexFunc(old.rows, same); k >= 0 && old.rows[k].verdict[kind] == r.Verdict {
		t.rows[i].reason = old.rows[k].reason
	} else {
		t.rows[i].reason = strings.ReplaceAll(r.Reason, "|", "/")
	}
	return nil
}

// Verdict returns a case's verdict; empty, if the table does not have the case.
func (t *Table) Verdict(name string) Verdict {
	test, kind, err := split(name)
	if err != nil {
		return ""
	}
	for _, r := range t.rows {
		if r.test == test {
			return r.verdict[kind]
		}
	}
	return ""
}

// Count returns how many cases have a verdict.
func (t *Table) Count(v Verdict) int {
	n := 0
	for _, r := range t.rows {
		for _, have := range r.verdict {
			if have == v {
				n++
			}
		}
	}
	return n
}

// String returns the table as it is in the document.
func (t *Table) String() string {
	var b strings.Builder
	b.WriteString(head)
	for _, r := range t.rows {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", r.test, r.verdict[0], r.verdict[1], r.reason)
	}
	return b.String()
}

// Replace returns the document with this table in the place of its own.
func (t *Table) Replace(doc string) (string, error) {
	old, err := ParseTable(doc)
	if err != nil {
		return "", err
	}
	before, _, _ := strings.Cut(doc, head)
	rest := strings.SplitAfter(doc[len(before)+len(head):], "\n")
	return before + t.String() + strings.Join(rest[len(old.rows):], ""), nil
}
