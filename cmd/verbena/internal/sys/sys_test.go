package sys

import (
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// CPU time grows with work, and not much with waiting.
func TestCPUSeconds(t *testing.T) {
	before := CPUSeconds()
	n := 0
	for deadline := time.Now().Add(10 * time.Second); CPUSeconds()-before < 0.05; n++ {
		if time.Now().After(deadline) {
			t.Fatalf("10 s of work are %v s of CPU time", CPUSeconds()-before)
		}
	}
	before = CPUSeconds()
	time.Sleep(100 * time.Millisecond)
	if used := CPUSeconds() - before; used < 0 || used > 0.09 {
		t.Errorf("sleeping for 0.1 s takes %v s of CPU time", used)
	}
	Yield()
}
