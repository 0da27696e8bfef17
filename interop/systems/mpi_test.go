package systems

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

// transports are those of UCX that use our device.
const transports = "UCX_TLS=rc_verbs,ud_verbs:aux"

// patient is how long a connection of UCX waits for each answer, of eight: many threads that poll all the time may keep
// a process from running.
const patient = "UCX_RC_TIMEOUT=20s"

// implementation is one of MPI.
type implementation struct {
	compiler, starter, pkg string
	args                   []string // of the starter
	hosts                  func(agent, a, b string) []string
	env                    []string
}

// Ranks that poll all the time are slow where there are more of them than processors, so Open MPI's yield. btl names
// what one-sided communication would use besides UCX; self is no way between ranks.
var openMPI = implementation{
	compiler: "mpicc.openmpi", starter: "mpirun.openmpi", pkg: "openmpi-bin libopenmpi-dev",
	args: []string{"--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ucx", "--mca", "osc", "ucx", "--mca", "btl", "self", "--mca", "mpi_yield_when_idle", "1"},
	hosts: func(agent, a, b string) []string {
		return []string{"--mca", "plm_rsh_agent", agent, "--mca", "oob_tcp_if_include", "10.79.0.0/24", "--host", a + ":8," + b + ":8", "--map-by", "node"}
	},
}

var mpich = implementation{
	compiler: "mpicc.mpich", starter: "mpiexec.mpich", pkg: "mpich libmpich-dev",
	hosts: func(agent, a, b string) []string {
		return []string{"-launcher", "ssh", "-launcher-exec", agent, "-hosts", a + "," + b}
	},
}

// job returns the job of so many ranks on one host.
func (m *implementation) job(ranks int, env []string, args ...string) job {
	return job{
		env:  append(append([]string{transports}, m.env...), env...),
		args: append(append(append([]string{m.starter}, m.args...), "-n", strconv.Itoa(ranks)), args...),
	}
}

// here returns the address of one host.
func here() string { return "VERBENA_ADDR=" + clibtest.Address() }

func (m *implementation) needed(t testing.TB) {
	t.Helper()
	program(t, m.starter, m.pkg)
	program(t, m.compiler, m.pkg)
}

var messages = []string{"messages", "collectives", "windows", "threads"}

// How much each rank sends at least: the large messages to its neighbours.
const leastBytes = 2_000_000

// Ranks on one host: Open MPI with four in the short form; all that the program can do, in one run.
func TestMPI(t *testing.T) {
	for name, m := range map[string]*implementation{"Open MPI": &openMPI, "MPICH": &mpich} {
		for _, ranks := range []int{4, 8} {
			t.Run(fmt.Sprintf("%s/%d", name, ranks), func(t *testing.T) {
				m.needed(t)
				rounds, env := "1", []string{here()}
				if ranks > 4 {
					long(t)
					rounds, env = "3", append(env, patient)
				}
				exe := built(t, m.compiler, "mpi")
				p := run(t, m.job(ranks, env, append([]string{exe, seed(t), rounds}, messages...)...))
				p.onOurDevice(t, ranks, leastBytes)
			})
		}
	}
}

// agent returns a program that is called like ssh, and runs a command in the namespace of an address. Each has a host
// name of its own, or both would count as one host.
func agent(t testing.TB, ns [2]string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "agent")
	text := fmt.Sprintf(`#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in 10.79.0.1) ns=%s ;; *) ns=%s ;; esac
shift
exec ip netns exec $ns unshare --uts sh -c "hostname $ns; $*"
`, ns[0], ns[1])
	if err := os.WriteFile(file, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return file
}

// Ranks in two network namespaces.
func TestMPIBetweenNamespaces(t *testing.T) {
	long(t)
	ns := clibtest.Network(t)
	for name, m := range map[string]*implementation{"Open MPI": &openMPI, "MPICH": &mpich} {
		for _, ranks := range []int{4, 8} {
			t.Run(fmt.Sprintf("%s/%d", name, ranks), func(t *testing.T) {
				m.needed(t)
				exe := built(t, m.compiler, "mpi")
				j := m.job(ranks, []string{patient}, append([]string{exe, seed(t), "1"}, messages...)...)
				j.args = append(append(j.args[:1:1], m.hosts(agent(t, ns), "10.79.0.1", "10.79.0.2")...), j.args[1:]...)
				j.wrap = []string{"ip", "netns", "exec", ns[0], "unshare", "--uts", "sh", "-c", `hostname ` + ns[0] + `; exec "$@"`, "sh"}
				p := run(t, j)
				p.onOurDevice(t, ranks, leastBytes)
			})
		}
	}
}

// hookless are the variables by which UCX installs no memory hooks.
var hookless = []string{"UCX_MEM_EVENTS=n", "UCX_MEM_MMAP_HOOK_MODE=none", "UCX_MEM_MALLOC_HOOKS=n"}

// Without memory hooks, on the implicit on-demand region: memory is unmapped and mapped again at the same address, and
// the data are right. Nothing is locked.
func TestWithoutHooks(t *testing.T) {
	for name, m := range map[string]*implementation{"Open MPI": &openMPI, "MPICH": &mpich} {
		t.Run(name, func(t *testing.T) {
			m.needed(t)
			const ranks = 4
			rounds := "1"
			if m == &mpich {
				long(t)
				rounds = "5"
			}
			exe := built(t, m.compiler, "mpi")
			p := run(t, m.job(ranks, append(hookless, here(), "UCX_IB_REG_METHODS=odp"), exe, seed(t), rounds, "messages", "remap"))
			all := p.onOurDevice(t, ranks, leastBytes)
			for _, c := range all {
				if c["num_page_faults"] == 0 || c["num_invalidations"] == 0 || c["copied_bytes_raw_to_implicit"]+c["copied_bytes_implicit_to_raw"] < leastBytes {
					t.Errorf("a process has not used the implicit region: %v", c)
				}
			}
			if locked := strings.Count(p.out.String(), " 0 KiB locked"); locked != ranks {
				t.Errorf("%d of %d ranks have nothing locked:\n%s", locked, ranks, p.out.String())
			}
		})
	}
}

// The same with UCX's cache of pinned regions, which is told that somebody else reports what is unmapped, and nobody
// does. The cache then offers regions whose memory is gone. The device refuses these, and says why; no data are wrong.
func TestPinnedWithoutHooks(t *testing.T) {
	m := &openMPI
	m.needed(t)
	exe := built(t, m.compiler, "mpi")
	j := m.job(2, append(hookless[1:], here(), "VERBENA_LOG=1", "UCX_IB_REG_METHODS=rcache"), exe, seed(t), "1", "unhooked", "remap")
	j.args = append(append(j.args[:1:1], "--mca", "opal_common_ucx_opal_mem_hooks", "0"), j.args[1:]...)
	p := start(t, j)
	<-p.done
	said := p.out.String() + p.err.String()
	if logs, err := filepath.Glob(p.dir + "/ucx.*"); err == nil {
		for _, name := range logs {
			b, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			said += string(b)
		}
	}
	if p.failed == nil {
		t.Fatalf("a program whose registrations are stale succeeds:\n%s", said)
	}
	for _, want := range []string{`registered memory is gone`, `local protection error|remote access error|local access violation`} {
		if !regexp.MustCompile(want).MatchString(said) {
			t.Errorf("nobody says %q:\n%s", want, said)
		}
	}
	if strings.Contains(said, "not so") {
		t.Errorf("data are wrong:\n%s", said)
	}
}

// UCX's hooks see what free() unmaps: in the preloaded library they must find the C library's functions.
func TestHooks(t *testing.T) {
	_, err := os.Stat("/usr/include/ucm/api/ucm.h")
	clibtest.Need(t, err == nil, "ucm/api/ucm.h is missing: apt-get install libucx-dev")
	// libucm comes behind the C library, as in a program of MPICH: it then looks functions up by RTLD_DEFAULT.
	exe := clibtest.Compile(t, []string{"testdata/hooks.c"}, "-L", clibtest.Built(t)+"/lib", "-libverbs", "-Wl,--no-as-needed", "-lc", "-lucs", "-lucm")
	for _, what := range []string{"dlsym", "ucx"} {
		t.Run(what, func(t *testing.T) {
			run(t, job{env: []string{here(), "UCX_LOG_LEVEL=warn"}, args: []string{exe, what}})
		})
	}
}

// Times of Open MPI by our device, by its own TCP and by its own shared memory. They are only printed.
func TestTimes(t *testing.T) {
	long(t)
	openMPI.needed(t)
	exe := built(t, openMPI.compiler, "mpi")
	for _, c := range []struct {
		name string
		mca  []string
	}{
		{"verbena", openMPI.args},
		{"tcp", []string{"--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,tcp", "--mca", "btl_tcp_if_include", "lo"}},
		{"vader", []string{"--allow-run-as-root", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,vader"}},
	} {
		m := openMPI
		m.args = c.mca
		p := run(t, m.job(2, []string{here()}, exe, seed(t), "2", "times"))
		t.Logf("%s:\n%s", c.name, p.out.String())
	}
}
