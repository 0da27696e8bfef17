// Package vmtest has what tests in virtual machines share.
package vmtest

import (
	"os"
	"testing"
)

// Need skips a test if something is missing. In continuous integration the test fails.
func Need(t testing.TB, err error) {
	t.Helper()
	if err == nil {
		return
	}
	if os.Getenv("CI") == "true" || os.Getenv("CI") == "1" {
		t.Fatal(err)
	}
	t.Skip(err)
}
