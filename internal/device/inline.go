package device

import (
	"github.com/verbena-rdma/verbena/internal/mem"
)

// scatterWanted reports whether short messages wait beside their completions (inline data).
// They do, unless VERBENA_SCATTER_TO_CQE is 0 or, if that is not set, MLX5_SCATTER_TO_CQE.
func scatterWanted() bool {
	own := Getenv("VERBENA_SCATTER_TO_CQE")
	return own != "0" && (own != "" || Getenv("MLX5_SCATTER_TO_CQE") != "0")
}

// scatterFailed fails the queue pair because inline data could not be written back, and
// returns the vendor error of the completion. The poll that calls it holds no lock.
func (q *QP) scatterFailed(f mem.Fault) (vendor uint16) {
	q.mu.Lock()
	vendor = q.core.ScatterBroke(f)
	q.rearmLocked()
	q.mu.Unlock()
	return vendor
}
