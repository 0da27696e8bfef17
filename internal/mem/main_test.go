package mem

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/internal/sys/modetest"
)

func TestMain(m *testing.M) {
	modetest.ShareMachine()
	goleak.VerifyTestMain(m)
}
