package mem

import (
	"bufio"
	"fmt"
	"os"
	"strings"
)

// watchedBySmaps looks for the mark of userfaultfd in write-protect mode, "uw",
// among the flags of a mapping.
func watchedBySmaps(addr uintptr) (bool, error) {
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		return false, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	inside := false
	for lines.Scan() {
		var start, end uintptr
		if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &start, &end); n == 2 {
			inside = start <= addr && addr < end
		}
		if flags, ok := strings.CutPrefix(lines.Text(), "VmFlags:"); ok && inside {
			return strings.Contains(flags+" ", " uw "), nil
		}
	}
	return false, fmt.Errorf("nothing is mapped at %#x: %w", addr, os.ErrNotExist)
}
