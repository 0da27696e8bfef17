package interop

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// TestMain runs the tests or, in a process that one of them has started, one
// side of a scenario.
func TestMain(m *testing.M) {
	if role := os.Getenv(roleVar); role != "" {
		os.Exit(play(role))
	}
	if what := os.Getenv(caseVar); what != "" {
		os.Exit(playAppear(what))
	}
	goleak.VerifyTestMain(m)
}
