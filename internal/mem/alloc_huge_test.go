package mem_test

import (
	"bufio"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// pageSizeAt returns the size of the pages that a mapping is made of, as the kernel
// writes it.
func pageSizeAt(t *testing.T, addr uint64) string {
	t.Helper()
	f, err := os.Open("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	inside := false
	for lines := bufio.NewScanner(f); lines.Scan(); {
		var start, end uint64
		if n, _ := fmt.Sscanf(lines.Text(), "%x-%x ", &start, &end); n == 2 {
			inside = start <= addr && addr < end
		}
		if size, ok := strings.CutPrefix(lines.Text(), "KernelPageSize:"); ok && inside {
			return strings.TrimSpace(size)
		}
	}
	t.Fatalf("nothing is mapped at %#x", addr)
	return ""
}

// Long memory lies on huge pages where some are reserved, and all of it can be used;
// short memory does not.
func TestAllocOnHugePages(t *testing.T) {
	allowHugePages(t)
	for _, c := range []struct {
		length uint64
		want   string
	}{{hugePage + 1, "2048 kB"}, {4096, "4 kB"}} {
		a, err := mem.NewAlloc(c.length, ib.AccessLocalWrite, ib.LockOff)
		if err != nil {
			t.Fatal(err)
		}
		b := a.Bytes()
		for i := range b {
			b[i] = byte(i)
		}
		if got := pageSizeAt(t, uint64(addrOf(b))); got != c.want {
			t.Errorf("%d bytes lie on pages of %s, should be %s", c.length, got, c.want)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
