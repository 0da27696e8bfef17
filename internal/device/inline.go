package device

import (
	"os"

	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// scatterMode is when short messages wait beside their completions, as the
// environment has it: 0, by our name or by that of another driver, is never, 2 by our
// name always.
func scatterMode() qp.Scatter {
	const own = "VERBENA_SCATTER_TO_CQE"
	switch {
	case os.Getenv(own) == "0", os.Getenv("MLX5_SCATTER_TO_CQE") == "0" && os.Getenv(own) == "":
		return qp.ScatterOff
	case os.Getenv(own) == "2":
		return qp.ScatterAlways
	}
	return qp.ScatterAbsent
}

// scatterFailed is told by a poll, which holds nothing, that bytes could not be
// written.
func (q *QP) scatterFailed(f mem.Fault) (vendor uint16) {
	q.mu.Lock()
	vendor = q.core.ScatterBroke(f)
	q.dev.rearmLocked(q)
	q.mu.Unlock()
	return vendor
}
