package programs

// Programs that were built for GPUs, on software GPUs: our libraries of HSA and HIP.

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// withGPUs returns a command that runs a program with software GPUs.
func withGPUs(t testing.TB, args ...string) []string {
	t.Helper()
	return append([]string{built(t) + "/verbena", "exec", "--gpu=soft", "--"}, args...)
}

// Every function of the libraries, used and misused.
func TestHSA(t *testing.T) {
	bin := compileWith(t, "hsa", "-L", built(t)+"/lib/gpu", "-lhsa-runtime64", "-lamdhip64", "-L", built(t)+"/lib", "-libverbs")
	out := run(t, side{args: withGPUs(t, bin), env: []string{"VERBENA_ADDR=" + address(), "VERBENA_GPU=count=2,vram=64M"}})
	if !strings.HasSuffix(out, "ok\n") {
		t.Errorf("it says\n%s", out)
	}
}

// ranks is Debian trixie with UCX and Open MPI, as the root directory of two processes that mpirun starts.
type ranks struct {
	tree string
	dirs string // that are in that root directory, too
}

func newRanks(t *testing.T) *ranks {
	t.Helper()
	r := newRelease(t, "trixie", false, "ucx-utils", "openmpi-bin", "libopenmpi-dev", "librdmacm1")
	need(t, os.Geteuid() == 0, "only root makes a root directory")
	program(t, "unshare", "util-linux")
	return &ranks{tree: r.tree, dirs: built(t)}
}

// run runs a program in two processes, with UCX's transport rc_verbs and the GPU's, and returns what they print.
func (r *ranks) run(t *testing.T, env []string, args ...string) string {
	t.Helper()
	script, err := filepath.Abs("testdata/inroot.sh")
	if err != nil {
		t.Fatal(err)
	}
	mpi := withGPUs(t, "/usr/bin/mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "2")
	return run(t, side{args: append(mpi, args...), wrap: []string{"unshare", "--mount", "--propagation", "private", "sh", script, r.tree, r.dirs},
		env: append([]string{"VERBENA_ADDR=" + address(), "VERBENA_STATS=stderr", "VERBENA_LOG=0", "UCX_TLS=rc,rocm_copy",
			// Weak: for the others, rc_verbs would need a key that only mlx5 makes.
			"UCX_FENCE_MODE=weak"}, env...)})
}

// counters returns the sum of the counters of all processes whose names match.
func counters(t *testing.T, out, name string) (sum uint64) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^(?:`+name+`) +(\d+)$`).FindAllStringSubmatch(out, -1) {
		n, err := strconv.ParseUint(m[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

const byDMABuf = "UCX_ROCM_COPY_DMABUF=yes"

// All tests of trixie's ucx_perftest with memory of GPUs, which is registered by dma-buf. Those of 100000 bytes are without
// copies: the device accesses the GPU's memory.
func TestPerftestROCm(t *testing.T) {
	r := newRanks(t)
	// Open MPI starts the processes, and exchanges addresses. The messages are UCX's.
	perftest := []string{"--mca", "pml", "ob1", "--mca", "btl", "self,sm", "/usr/bin/ucx_perftest", "-m", "rocm", "-n", "100", "-w", "10"}
	check := func(t *testing.T, moves int, env []string, args ...string) {
		t.Helper()
		out := r.run(t, env, append(perftest[:len(perftest):len(perftest)], args...)...)
		if !regexp.MustCompile(`(?m)^Final: +100 `).MatchString(out) || strings.Contains(out, "UCX  ERROR") {
			t.Errorf("%s: it says\n%s", args, out)
		}
		if env != nil && counters(t, out, "dmabuf_regions") == 0 {
			t.Errorf("%s: nothing was registered by dma-buf\n%s", args, out)
		}
		if got := counters(t, out, "copied_bytes_raw_to_dmabuf|copied_bytes_dmabuf_to_raw|copied_bytes_dmabuf_to_dmabuf"); got < uint64(moves) {
			t.Errorf("%s: the device has moved %d bytes of the GPUs' memory, not %d\n%s", args, got, moves, out)
		}
	}
	const size, n = 100000, 100
	for _, test := range strings.Fields("tag_lat tag_bw tag_sync_lat tag_sync_bw ucp_put_lat ucp_put_bw ucp_get stream_lat stream_bw ucp_am_lat ucp_am_bw") {
		t.Run(test, func(t *testing.T) {
			for _, s := range []int{1, 4000, size} {
				moves := 0
				if s == size && !strings.HasPrefix(test, "stream") && !strings.HasPrefix(test, "ucp_am") { // these may be received in host memory
					moves = size * n
				}
				check(t, moves, []string{byDMABuf, "UCX_RNDV_THRESH=16384"}, "-t", test, "-s", strconv.Itoa(s))
			}
		})
	}
	for _, test := range strings.Fields("ucp_add ucp_fadd ucp_swap ucp_cswap") {
		t.Run(test, func(t *testing.T) { check(t, 0, []string{byDMABuf}, "-t", test, "-s", "8") })
	}
	// Registered by address, as with PeerDirect: /dev/kfd is there.
	for _, test := range strings.Fields("ucp_put_bw ucp_get") {
		t.Run("address "+test, func(t *testing.T) { check(t, size*n, nil, "-t", test, "-s", strconv.Itoa(size)) })
	}
	for test, how := range map[string]string{"am_lat": "short", "am_bw": "short", "put_lat": "short", "put_bw": "short", "get_bw": "zcopy", "add_lat": "short", "add_mr": "short"} {
		t.Run("uct "+test, func(t *testing.T) {
			s := map[string]string{"zcopy": "4096", "short": "8"}[how]
			check(t, 0, nil, "-x", "rc_verbs", "-d", "verbena0:1", "-D", how, "-t", test, "-s", s)
		})
	}
}

// Open MPI of trixie, on UCX, with memory of GPUs. The program compares all data.
func TestOpenMPIROCm(t *testing.T) {
	r := newRanks(t)
	lib := filepath.Dir(oneFile(t, r.tree+"/usr/lib/*/libmpi.so.40"))
	bin := compileWith(t, "mpigpu", "-I", lib+"/openmpi/include", "-L", built(t)+"/lib/gpu", "-lamdhip64", "-L", lib, "-l:libmpi.so.40", "-Wl,--allow-shlib-undefined")
	r.dirs += " " + filepath.Dir(bin)
	seed := os.Getenv("VERBENA_SEED")
	if seed == "" {
		seed = strconv.FormatUint(rand.Uint64(), 10)
	}
	for _, tls := range []string{"rc,rocm_copy", "rc,rocm_copy,rocm_ipc"} {
		t.Run(tls, func(t *testing.T) {
			out := r.run(t, []string{byDMABuf, "UCX_TLS=" + tls}, "--mca", "pml", "ucx", bin, seed)
			for rank := range 2 {
				if !strings.Contains(out, fmt.Sprintf("rank %d: ok\n", rank)) {
					t.Errorf("seed %s: it says\n%s", seed, out)
				}
			}
			if counters(t, out, "copied_bytes_raw_to_dmabuf|copied_bytes_dmabuf_to_raw") == 0 && !strings.Contains(tls, "ipc") {
				t.Errorf("seed %s: the device has moved nothing of the GPUs' memory\n%s", seed, out)
			}
		})
	}
}
