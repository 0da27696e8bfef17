package systems

import (
	"fmt"
	"testing"
)

// OpenSHMEM of Open MPI: a position-independent program, and one at a fixed address.
func TestOpenSHMEM(t *testing.T) {
	program(t, "oshrun", "openmpi-bin")
	program(t, "oshcc", "libopenmpi-dev")
	for _, c := range []struct {
		name  string
		flags []string
		n     int
		full  bool
	}{
		{"position-independent", []string{"-fPIE", "-pie"}, 2, false},
		{"position-independent", []string{"-fPIE", "-pie"}, 8, true},
		{"fixed", []string{"-fno-PIE", "-no-pie"}, 4, true},
	} {
		t.Run(fmt.Sprintf("%s/%d", c.name, c.n), func(t *testing.T) {
			if c.full {
				long(t)
			}
			exe := built(t, "oshcc", "shmem", c.flags...)
			m := openMPI
			m.starter = "oshrun"
			p := run(t, m.job(c.n, []string{here()}, exe, seed(t), "1"))
			p.onOurDevice(t, c.n, 1_000_000)
		})
	}
}
