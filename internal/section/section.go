// Package section renews the parts of documents that programs write: tables of measurements.
package section

import (
	"fmt"
	"strings"
)

// Replace returns a document whose part between the lines "<!-- NAME -->" and "<!-- end -->" is body.
func Replace(doc, name, body string) (string, error) {
	begin, end := "<!-- "+name+" -->\n", "<!-- end -->"
	before, rest, ok := strings.Cut(doc, begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return "", fmt.Errorf("the document has no lines %q and %q", strings.TrimSpace(begin), end)
	}
	return before + begin + body + end + after, nil
}
