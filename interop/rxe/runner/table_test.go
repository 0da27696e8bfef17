package main

import (
	"bytes"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTable(t *testing.T) {
	tab := newTable()
	tab.begin("stable")
	tab.add(result.Line{Plan: &result.Plan{Release: "6.1", Cases: []string{"a", "b", "c"}}})
	tab.add(result.Line{Case: &result.Case{Name: "a"}})
	tab.add(result.Line{Case: &result.Case{Name: "b", Err: "bad"}})
	tab.add(result.Line{Case: &result.Case{Name: "c", Skip: "not there"}})
	tab.begin("sid")
	tab.add(result.Line{Plan: &result.Plan{Release: "7.2", Cases: []string{"a", "b"}}})
	tab.add(result.Line{Case: &result.Case{Name: "a"}})
	tab.broken("sid") // the guest ended before b
	if tab.passed != 2 || tab.failed != 2 || tab.skipped != 1 {
		t.Errorf("%d passed, %d failed, %d skipped", tab.passed, tab.failed, tab.skipped)
	}
	var out bytes.Buffer
	tab.print(&out)
	var rows [][]string
	for line := range strings.Lines(out.String()) {
		if f := strings.Fields(line); len(f) > 2 && len(f[0]) == 1 && f[0] != "1" {
			rows = append(rows, f)
		}
	}
	want := [][]string{{"a", "ok", "0s", "ok", "0s"}, {"b", "FAILED", "FAILED", "(not", "run)"}, {"c", "not", "in", "this", "kernel", "-"}}
	for i := range want {
		if i >= len(rows) || strings.Join(rows[i], " ") != strings.Join(want[i], " ") {
			t.Errorf("row %d of %q, want %q", i, rows, want[i])
		}
	}
}
