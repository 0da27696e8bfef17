package section

import "testing"

func TestReplace(t *testing.T) {
	const doc = "a\n<!-- x one -->\nold\n<!-- end -->\nb\n<!-- x two -->\n<!-- end -->\n"
	for _, c := range []struct{ name, want string }{
		{"x one", "a\n<!-- x one -->\nnew\n<!-- end -->\nb\n<!-- x two -->\n<!-- end -->\n"},
		{"x two", "a\n<!-- x one -->\nold\n<!-- end -->\nb\n<!-- x two -->\nnew\n<!-- end -->\n"},
		{"x", ""},
	} {
		got, err := Replace(doc, c.name, "new\n")
		if got != c.want || (err != nil) != (c.want == "") {
			t.Errorf("%s: %q, %v", c.name, got, err)
		}
	}
	if _, err := Replace("<!-- x -->\n", "x", ""); err == nil {
		t.Error("a part without an end is accepted")
	}
}
