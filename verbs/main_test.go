package verbs

import (
	"testing"

	"go.uber.org/goleak"
)

// The examples run here too: a device that was closed must leave no goroutine.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }
