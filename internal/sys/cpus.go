package sys

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// PossibleCPUs returns a number that is higher than that of every processor which the machine can
// have.
var PossibleCPUs = sync.OnceValue(func() int {
	b, _ := os.ReadFile("/sys/devices/system/cpu/possible") // without it, parsePossible returns 0
	return max(parsePossible(string(b)), runtime.NumCPU())
})

// parsePossible returns one more than the highest number of a list such as 0-3,8-11; 0 if it is none.
func parsePossible(list string) int {
	list = strings.TrimSpace(list)
	n, err := strconv.ParseUint(list[strings.LastIndexAny(list, "-,")+1:], 10, 31)
	if err != nil {
		return 0
	}
	return int(n) + 1
}

// MayRunOn reports whether the calling thread may run on a processor.
func MayRunOn(cpu int) bool {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		// The machine has more processors than a set has room for. Nobody knows.
		return true
	}
	return set.IsSet(cpu)
}
