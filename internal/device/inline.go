package device

import (
	"os"

	"github.com/verbena-rdma/verbena/internal/mem"
)

// scatterWanted tells whether short messages wait beside their completions, as the
// environment has it: they do, unless it says 0, by our name or, where that says
// nothing, by that of another driver.
func scatterWanted() bool {
	own := os.Getenv("VERBENA_SCATTER_TO_CQE")
	return own != "0" && (own != "" || os.Getenv("MLX5_SCATTER_TO_CQE") != "0")
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
