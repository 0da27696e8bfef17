package programs

// The same programs in other places: in two network namespaces, under seccomp, and after one
// was killed.

import (
	"context"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

func do(t testing.TB, args ...string) {
	t.Helper()
	clibtest.Do(t, args...)
}

// newNetwork makes two namespaces joined by a veth pair: 10.79.0.1 and .2.
func newNetwork(t testing.TB) [2]string {
	t.Helper()
	return clibtest.Network(t)
}

// Across two namespaces, as root and as an ordinary user: only packets reach the other side.
// The programs use the first device, which is not that of the loopback interface; UCX uses
// all devices that it sees.
func TestNamespaces(t *testing.T) {
	program(t, "ib_write_bw", "perftest")
	program(t, "ucx_perftest", "ucx-utils")
	ns := newNetwork(t)
	lib := installed(t)
	for _, c := range []struct {
		args string
		user bool
	}{
		{"ibv_rc_pingpong -g 0 -n 100 -e", false}, {"ib_write_bw -F -n 100", true}, {"ib_send_lat -F -n 100 -c UD", false},
		{"ib_read_bw -F -n 100", true}, {"ib_atomic_lat -F -n 100", false},
		{"ucx_perftest -t tag_bw -s 1000000 -n 100 -w 10", false},
	} {
		t.Run(c.args, func(t *testing.T) {
			tcp := port()
			args := append(strings.Fields(c.args), "-p", tcp)
			in := func(i int, args []string) side {
				wrap := []string{"ip", "netns", "exec", ns[i]}
				if c.user {
					wrap = append(wrap, noRights(t)...)
				}
				return side{args: args, wrap: wrap, env: []string{"VERBENA_LIB=" + lib, "UCX_TLS=rc_verbs,ud_verbs:aux"}}
			}
			pair(t, in(0, args), in(1, append(args, "10.79.0.1")), tcp)
		})
	}
}

// Under a profile that refuses userfaultfd, io_uring and unshare.
func TestSeccomp(t *testing.T) {
	program(t, "ib_write_bw", "perftest")
	wrap := []string{compile(t, "seccomp")}
	for _, c := range []string{"ibv_rc_pingpong -g 0 -o -n 100", "ib_write_bw -F -n 100", "ib_read_lat --odp -F -n 100"} {
		t.Run(c, func(t *testing.T) {
			tcp := port()
			args, env := append(strings.Fields(c), "-p", tcp), []string{"VERBENA_ADDR=" + address()}
			pair(t, side{args: args, env: env, wrap: wrap}, side{args: append(args, "localhost"), env: env, wrap: wrap}, tcp)
		})
	}
	for _, name := range []string{"fork", "fault", "odp"} {
		t.Run(name, func(t *testing.T) {
			out := run(t, side{args: []string{compile(t, name)}, env: []string{"VERBENA_ADDR=" + address()}, wrap: wrap})
			if !strings.HasSuffix(out, "ok\n") {
				t.Errorf("it says\n%s", out)
			}
		})
	}
}

// While a program runs, "verbena ps" shows it. When it is killed, nothing is left that
// disturbs the next one.
func TestKilled(t *testing.T) {
	program(t, "ibv_rc_pingpong", "ibverbs-utils")
	addr := address()
	env := []string{"VERBENA_ADDR=" + addr}
	tcp := port()
	args := []string{"ibv_rc_pingpong", "-g", "0", "-p", tcp}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	s := start(ctx, t, side{args: args, env: env})
	waitListening(t, s, tcp)
	out, err := exec.Command(built(t)+"/verbena", "ps", "--json").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []struct {
		Addr      string
		Processes []struct {
			PID     int
			Program string
			QPs     []any
		}
	}
	if err := json.Unmarshal(out, &all); err != nil {
		t.Fatal(err)
	}
	seen := false
	for _, d := range all {
		for _, p := range d.Processes {
			seen = seen || d.Addr == addr && p.PID == s.cmd.Process.Pid && p.Program == "ibv_rc_pingpong" && len(p.QPs) == 1
		}
	}
	if !seen {
		t.Errorf("verbena ps does not show process %d at %s:\n%s", s.cmd.Process.Pid, addr, out)
	}
	if err := s.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-s.done
	between(t, []string{"ibv_rc_pingpong", "-g", "0", "-n", "100"}, env...)
}
