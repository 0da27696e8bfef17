package drivertest

import (
	_ "embed" // the record
	"fmt"
	"strconv"
	"strings"

	"github.com/verbena-rdma/verbena/nvme"
)

// recorded is how the probes ended at QEMU's controller: a status in hexadecimal and a name in each line.
//
//go:embed recorded.txt
var recorded string

// Recorded returns how the probes ended at a controller that others have made: QEMU's, of the version that interop/nvme
// was last recorded with.
func Recorded() (list []Outcome) {
	for line := range strings.Lines(recorded) {
		status, name, _ := strings.Cut(strings.TrimSpace(line), " ")
		v, err := strconv.ParseUint(status, 16, 16)
		if err != nil {
			panic(fmt.Sprintf("recorded.txt: %q", line))
		}
		list = append(list, Outcome{name, nvme.Status(v)})
	}
	return list
}

// Format writes outcomes as recorded.txt has them.
func Format(list []Outcome) []byte {
	var b []byte
	for _, o := range list {
		b = fmt.Appendf(b, "%04x %s\n", uint16(o.Status), o.Name)
	}
	return b
}
