package main

import (
	"strings"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const module = "github.com/verbena-rdma/verbena/"

func TestSummary(t *testing.T) {
	tests := []struct {
		name   string
		strict bool
		in     []string
		good   bool
		want   []string // parts of the output
		not    []string // parts that must not be there
	}{
		{
			name: "pass",
			in: []string{
				`{"Action":"run","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"chatter\n"}`,
				`{"Action":"pass","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"pass","Package":"` + module + `a","Elapsed":1.5}`,
			},
			good: true,
			want: []string{"ok    a ", "1.50s", "1 packages, 1 tests passed, 0 failed, 0 skipped"},
			not:  []string{"chatter"},
		},
		{
			name: "failed test, with its output and the order's seed",
			in: []string{
				`{"Action":"output","Package":"` + module + `a","Output":"-test.shuffle 42\n"}`,
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"=== RUN   TestOne\n"}`,
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"    a_test.go:7: seed 9: wrong\n"}`,
				`{"Action":"fail","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"fail","Package":"` + module + `a"}`,
			},
			want: []string{"FAIL  a ", "seed 9: wrong", "-test.shuffle 42", "failed: a\n"},
			not:  []string{"=== RUN"},
		},
		{
			name: "a panic fails the test that was running",
			in: []string{
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"panic: boom\n"}`,
				`{"Action":"fail","Package":"` + module + `a"}`,
			},
			want: []string{"panic: boom", "failed: a\n"},
		},
		{
			name: "does not compile",
			in: []string{
				`{"ImportPath":"x [x.test]","Action":"build-output","Output":"a.go:1: undefined: y\n"}`,
				`{"ImportPath":"x [x.test]","Action":"build-fail"}`,
				`{"Action":"fail","Package":"` + module + `a","FailedBuild":"x [x.test]"}`,
			},
			want: []string{"undefined: y", "failed: a\n"},
		},
		{
			name: "skip",
			in: []string{
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"    a_test.go:7: tshark is missing\n"}`,
				`{"Action":"skip","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"pass","Package":"` + module + `a"}`,
			},
			good: true,
			want: []string{"skip  a TestOne: tshark is missing", "1 skipped"},
		},
		{
			name:   "skip where everything should be there",
			strict: true,
			in: []string{
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"    a_test.go:7: tshark is missing\n"}`,
				`{"Action":"skip","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"pass","Package":"` + module + `a"}`,
			},
			want: []string{"skip  a TestOne (a failure here): tshark is missing", "1 tests were skipped that"},
		},
		{
			name:   "excused skip",
			strict: true,
			in: []string{
				`{"Action":"output","Package":"` + module + `a","Test":"TestOne","Output":"    a_test.go:7: full: all sizes\n"}`,
				`{"Action":"skip","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"pass","Package":"` + module + `a"}`,
			},
			good: true,
			want: []string{"skip  a TestOne: full: all sizes"},
		},
		{
			name: "a package that never ended",
			in: []string{
				`{"Action":"pass","Package":"` + module + `a"}`,
				`{"Action":"run","Package":"` + module + `b","Test":"TestOne"}`,
			},
			want: []string{"failed: b (did not end)"},
		},
		{
			name: "nothing at all",
			want: []string{"nothing was tested"},
		},
		{
			name: "only packages without tests",
			in:   []string{`{"Action":"skip","Package":"` + module + `a"}`},
			want: []string{"nothing was tested", "1 packages without tests"},
		},
		{
			name: "-run picked nothing",
			in:   []string{`{"Action":"pass","Package":"` + module + `a"}`},
			want: []string{"nothing was tested"},
			not:  []string{"ok "},
		},
		{
			name: "plain text passes through",
			in: []string{
				"go: warning: something",
				`{"Action":"pass","Package":"` + module + `a","Test":"TestOne"}`,
				`{"Action":"pass","Package":"` + module + `a"}`,
			},
			good: true,
			want: []string{"go: warning: something\n"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var out strings.Builder
			s := newSummary(&out, tt.strict)
			if err := s.read(strings.NewReader(strings.Join(tt.in, "\n"))); err != nil {
				t.Fatal(err)
			}
			if good := s.finish(); good != tt.good {
				t.Errorf("good = %v, want %v", good, tt.good)
			}
			for _, w := range tt.want {
				if !strings.Contains(out.String(), w) {
					t.Errorf("output lacks %q:\n%s", w, out.String())
				}
			}
			for _, w := range tt.not {
				if strings.Contains(out.String(), w) {
					t.Errorf("output has %q:\n%s", w, out.String())
				}
			}
		})
	}
}
