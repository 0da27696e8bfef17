package hmmtests

import (
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/interop/vm/vmtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if dir != "" {
			_ = os.RemoveAll(dir) // of temporary files
		}
		os.Exit(code)
	}))
}

var full = os.Getenv("VERBENA_FULL") != ""

const root = "../.."

var dir string

// built makes the tests, once.
var built = sync.OnceValues(func() (*Built, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	source, err := FindSource(ctx)
	if err != nil {
		return nil, err
	}
	if dir, err = os.MkdirTemp("", "hmm-tests."); err != nil {
		return nil, err
	}
	return source.Build(ctx, root, dir)
})

// setUp returns the tests, or skips where there is no source, no root or no kernel for them.
func setUp(t *testing.T) *Built {
	t.Helper()
	if why := Kernel(); why != "" {
		t.Skip("kernel: " + why)
	}
	vmtest.Need(t, Check())
	b, err := built()
	vmtest.Need(t, err)
	return b
}

func committed(t *testing.T) (string, *Table) {
	t.Helper()
	doc, err := os.ReadFile(root + "/docs/hmm-tests.md")
	if err != nil {
		t.Fatal(err)
	}
	table, err := ParseTable(string(doc))
	if err != nil {
		t.Fatal(err)
	}
	return string(doc), table
}

// TestLinux runs all cases, which must end as docs/hmm-tests.md says; in the short form without the benchmark, which moves gigabytes.
func TestLinux(t *testing.T) {
	b := setUp(t)
	doc, table := committed(t)
	if !full && !strings.Contains(doc, b.Source+".") {
		t.Skipf("kernel: the archive has %s by now, and docs/hmm-tests.md is of another: make hmm-tests WRITE=1", b.Source)
	}
	cases, err := b.Cases(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(cases) < 76 {
		t.Errorf("%d cases, should be 76", len(cases))
	}
	for _, name := range cases {
		t.Run(name, func(t *testing.T) {
			if !full && strings.Contains(name, "benchmark") {
				t.Skip("full: it moves gigabytes")
			}
			want := table.Verdict(name)
			if want == "" {
				t.Fatal("docs/hmm-tests.md does not have the case: make hmm-tests WRITE=1")
			}
			r := b.Run(t.Context(), name)
			switch {
			case r.Verdict == Skip && strings.Contains(strings.ToLower(r.Reason), "huge page"):
				t.Skip("kernel: " + r.Reason)
			case r.Verdict != want:
				t.Errorf("%s after %v, should be %s: %s", r.Verdict, r.Took, want, r.Reason)
			case want != Pass:
				t.Skip("kernel: docs/hmm-tests.md says why it does not pass: " + r.Reason)
			}
		})
	}
}

// TestDriver looks at what hmm-tests do not look at.
func TestDriver(t *testing.T) {
	b := setUp(t)
	if err := b.RunCheck(t.Context()); err != nil {
		t.Error(err)
	}
}

// What the document promises: 76 cases, of which sixty pass, and a reason for each other one.
func TestDocument(t *testing.T) {
	doc, table := committed(t)
	if pass, all := table.Count(Pass), 2*len(table.rows); all != 76 || pass < 60 || table.Count(Fail)+table.Count(Skip) != all-pass {
		t.Errorf("%d of %d cases pass, %d fail, %d are skipped", pass, all, table.Count(Fail), table.Count(Skip))
	}
	for _, r := range table.rows {
		if passes := r.verdict == [2]Verdict{Pass, Pass}; passes != (r.reason == "") {
			t.Errorf("%s: %v, for the reason %q", r.test, r.verdict, r.reason)
		}
	}
	if again, err := table.Replace(doc); err != nil || again != doc {
		t.Errorf("the table, written again, is another one: %v", err)
	}
}

func TestTable(t *testing.T) {
	old, err := ParseTable("before\n" + head + "| hmm.a | pass | fail | known |\n| hmm.b | pass | pass |  |\n\nafter\n")
	if err != nil {
		t.Fatal(err)
	}
	var table Table
	for _, r := range []Result{
		{Case: "hmm.hmm_device_private.a", Verdict: Pass},
		{Case: "hmm.hmm_device_coherent.a", Verdict: Fail, Reason: "not this one"},
		{Case: "hmm.hmm_device_private.b", Verdict: Skip, Reason: "a|b"},
	} {
		if err := table.Add(r, old); err != nil {
			t.Fatal(err)
		}
	}
	const want = head + "| hmm.a | pass | fail | known |\n| hmm.b | skip |  | a/b |\n"
	if got := table.String(); got != want {
		t.Errorf("it is\n%sshould be\n%s", got, want)
	}
	doc, err := table.Replace("before\n" + old.String() + "\nafter\n")
	if want := "before\n" + want + "\nafter\n"; err != nil || doc != want {
		t.Errorf("the document is %q, %v, should be %q", doc, err, want)
	}
	if v := table.Verdict("hmm.hmm_device_coherent.a"); v != Fail {
		t.Errorf("the verdict is %q", v)
	}
	for _, name := range []string{"hmm.a", "hmm.hmm_device_other.a", "a.b.c.d"} {
		if err := table.Add(Result{Case: name}, old); err == nil {
			t.Errorf("%s is a case", name)
		}
	}
}

func TestParseList(t *testing.T) {
	const text = "# FIXTURE            VARIANT                   TEST\n" +
		"global                                         \n" +
		"--------------------------------------------------------------------------------\n" +
		"hmm                  hmm_device_private        open_close\n" +
		"                     hmm_device_coherent       migrate\n" +
		"                                               exclusive\n" +
		"--------------------------------------------------------------------------------\n" +
		"hmm2                 hmm2_device_private       double_map\n" +
		"# [INFO] detected hugetlb page size: 2048 KiB\n"
	got, err := parseList(text)
	const want = "hmm.hmm_device_private.open_close hmm.hmm_device_private.migrate hmm.hmm_device_private.exclusive " +
		"hmm.hmm_device_coherent.open_close hmm.hmm_device_coherent.migrate hmm.hmm_device_coherent.exclusive " +
		"hmm2.hmm2_device_private.double_map"
	if err != nil || strings.Join(got, " ") != want {
		t.Errorf("%v, %v, should be %s", got, err, want)
	}
	if got, err := parseList("nothing\n"); err == nil {
		t.Errorf("a list of %v", got)
	}
}

func TestJudge(t *testing.T) {
	const name = "hmm.hmm_device_private.migrate"
	failed := errors.New("exit status 1")
	for _, c := range []struct {
		out     string
		err     error
		verdict Verdict
		reason  string
	}{
		{"ok 1 " + name + "\n", nil, Pass, "^$"},
		{"ok 1 " + name + "\n", failed, Fail, "exit status 1"},
		{"ok 1 " + name + " # SKIP no huge pages\n", nil, Skip, "^no huge pages$"},
		{"ok 1 hmm.hmm_device_private.migrate_fault\n", nil, Fail, "not said how"},
		{"1..1\n", failed, Fail, "not said how it ended: exit status 1"},
		{"not ok 1 " + name + "\n", failed, Fail, "not said why"},
		{"# src/hmm-tests.c:12:migrate:Expected 1 (1) == 2 (2)\n# migrate: Test terminated by assertion\nnot ok 1 " + name + "\n", failed, Fail, "^Expected 1"},
		{"# migrate: Test terminated by timeout\nnot ok 1 " + name + "\n", failed, Fail, "^Test terminated by timeout$"},
		{"hmm_dmirror: no\n# src/hmm-tests.c:12:migrate:Expected\nnot ok 1 " + name + "\n", failed, Fail, "^hmm_dmirror: no$"},
	} {
		r := judge(name, c.out, c.err, 0)
		if r.Verdict != c.verdict || !regexp.MustCompile(c.reason).MatchString(r.Reason) {
			t.Errorf("%q: %s, %q; should be %s, %q", c.out, r.Verdict, r.Reason, c.verdict, c.reason)
		}
	}
	var e ends
	for range 1000 {
		_, _ = e.Write([]byte(strings.Repeat("x", 1000)))
	}
	_, _ = e.Write([]byte("\nok 1 " + name + "\n"))
	if out := e.String(); len(out) > 200<<10 || judge(name, out, nil, 0).Verdict != Pass {
		t.Errorf("of much output %d bytes are left", len(out))
	}
}
