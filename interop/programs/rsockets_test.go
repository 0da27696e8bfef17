package programs

// Ordinary programs of TCP on rsockets: rdma-core's librspreload.so replaces the functions of the
// C library for sockets. The programs know nothing of RDMA.

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// rspreload returns the path of the distribution's librspreload.so.
func rspreload(t testing.TB) string {
	t.Helper()
	all, err := filepath.Glob("/usr/lib/*/rsocket/librspreload.so")
	need(t, err == nil && len(all) > 0, "librspreload.so is missing: apt-get install librdmacm1")
	return all[0]
}

// A client and a server exchange 13 MB in each direction, by blocking calls in turns, by poll, and
// with a server that sends back what it gets. Both check every byte. That the server listens on a port of
// RDMA, and not of TCP, is what the prober finds out.
func TestRsockets(t *testing.T) {
	preload := rspreload(t)
	seed := os.Getenv("VERBENA_SEED")
	if seed == "" {
		seed = strconv.FormatUint(uint64(rand.Uint32()), 10)
	}
	exe := compileWith(t, "tcp")
	for _, how := range []string{"turns", "poll", "echo"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("VERBENA_SEED=%s repeats the lengths", seed)
				}
			})
			args := strings.Join([]string{exe, how, seed}, " ")
			m := meeting{server: args + " server IP 5999", client: args + " client IP 5999", port: 5999, says: `(?m)^ok$`, env: "LD_PRELOAD=" + preload}
			meet(t, &m, address())
		})
	}
}
