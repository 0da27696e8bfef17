package programs

// The librdmacm of other releases, older and newer than the host's, from packages that are unpacked
// and not installed. Their programs find the libraries by the loader's option --library-path.

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/interop/vm"
)

// release is a Debian release, unpacked.
type release struct {
	tree   string
	loader []string // the loader, with the path of the libraries
}

// oneFile returns the file that a pattern names.
func oneFile(t testing.TB, pattern string) string {
	t.Helper()
	all, err := filepath.Glob(pattern)
	if err != nil || len(all) == 0 {
		t.Fatalf("no file %s: %v", pattern, err)
	}
	return all[0]
}

// newRelease returns packages of a release. The drop-in libibverbs does not run with a C library that
// is older than the one it was built with: with an old release, only librdmacm is the release's.
func newRelease(t *testing.T, suite string, old bool, packages ...string) *release {
	t.Helper()
	if !full {
		t.Skip("full: packages of other releases")
	}
	need(t, runtime.GOARCH == "amd64", "the packages are of amd64")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	tree, err := vm.FindPackages(ctx, suite, vm.Amd64, packages...)
	need(t, err == nil, "%v", err)
	lib := filepath.Dir(oneFile(t, tree+"/usr/lib/*/librdmacm.so.1"))
	path := []string{built(t) + "/lib"}
	loader := oneFile(t, "/lib*/ld-linux-*.so.?")
	if old {
		dir := t.TempDir()
		if err := os.Symlink(filepath.Join(lib, "librdmacm.so.1"), filepath.Join(dir, "librdmacm.so.1")); err != nil {
			t.Fatal(err)
		}
		path = append(path, dir)
	} else {
		loader = oneFile(t, lib+"/ld-linux-*.so.?")
		path = append(path, lib, lib+"/systemd")
	}
	return &release{tree: tree, loader: []string{loader, "--library-path", strings.Join(path, ":")}}
}

// program returns a command that runs a program of the release, with its arguments. preload is a
// library, or "".
func (r *release) program(preload, args string) string {
	all := r.loader
	if preload != "" {
		all = append(all[:len(all):len(all)], "--preload", preload)
	}
	return strings.Join(all, " ") + " " + r.tree + "/usr/bin/" + args
}

// The oldest librdmacm and the newest one that were tried. Older ones may work as well.
func TestVersions(t *testing.T) {
	for _, c := range []struct {
		suite, version string
		old            bool
	}{{"bullseye", `^librdmacm\.so\.1\.\d+\.33\.`, true}, {"sid", `^librdmacm\.so\.1\.\d+\.(6[5-9]|[7-9]\d|\d{3,})\.`, false}} {
		t.Run(c.suite, func(t *testing.T) {
			r := newRelease(t, c.suite, c.old, "rdmacm-utils", "librdmacm1")
			lib, err := filepath.EvalSymlinks(oneFile(t, r.tree+"/usr/lib/*/librdmacm.so.1"))
			if err != nil || !regexp.MustCompile(c.version).MatchString(filepath.Base(lib)) {
				t.Fatalf("the library is %s, %v; want %s", lib, err, c.version)
			}
			t.Log(filepath.Base(lib))
			out := run(t, side{args: append(append([]string{}, r.loader...), "--list", r.tree+"/usr/bin/rping")})
			ours, theirs := built(t)+"/lib/libibverbs.so.1", "librdmacm.so.1 => "+r.tree
			if c.old {
				theirs = "librdmacm.so.1 => " + os.TempDir()
			}
			if !strings.Contains(out, ours) || !strings.Contains(out, theirs) {
				t.Fatalf("rping's libraries are\n%s\nwant %s and %s", out, ours, theirs)
			}
			for _, m := range meetings() {
				switch strings.Fields(m.server)[0] {
				case "rping", "ucmatose", "rstream", "rdma_server", "udaddy":
				default:
					continue
				}
				// Before rdma-core 40 it posts a receive to a queue pair that is in state RESET, which no
				// device takes.
				if c.old && strings.Contains(m.server, "rping -s -q") {
					continue
				}
				t.Run(strings.TrimSpace(strings.Fields(m.server)[0]+" "+m.name), func(t *testing.T) {
					m.server, m.client = r.program("", m.server), r.program("", m.client)
					meet(t, &m, address())
				})
			}
		})
	}
}

// Servers that wait for sockets by epoll, on rsockets: rdma-core has that from version 65 on. The clients
// connect by calls that block. With others, version 65 may wait for ever when the socket is closed: two of
// its threads get and acknowledge the events of one connection, without a lock.
func TestRsocketsEpoll(t *testing.T) {
	r := newRelease(t, "sid", false, "librdmacm1", "iperf3", "valkey-server", "valkey-tools")
	preload := oneFile(t, r.tree+"/usr/lib/*/rsocket/librspreload.so")
	t.Run("iperf3", func(t *testing.T) {
		m := meeting{server: r.program(preload, "iperf3 -s -1 -B IP -p 5301"), client: r.program(preload, "iperf3 -c IP -p 5301 -n 20M"), port: 5301,
			says: `(?s)20\.0 MBytes.*receiver.*iperf Done`}
		meet(t, &m, address())
	})
	// It writes over its environment, to change its title.
	t.Run("valkey", func(t *testing.T) {
		addr := address()
		env := []string{"VERBENA_ADDR=" + addr}
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		args := "valkey-server --port 6379 --bind " + addr + " --appendonly no --protected-mode no --dir " + t.TempDir()
		s := start(ctx, t, side{args: strings.Fields(r.program(preload, args)), env: env})
		newProber(t, netip.MustParseAddr(address())).await(t, s, cma.PSTCP, netip.MustParseAddrPort(addr+":6379"))
		client := func(args, want string) {
			c := start(ctx, t, side{args: strings.Fields(r.program(preload, fmt.Sprintf("valkey-cli -h %s -p 6379 %s", addr, args))), env: env})
			if out := c.finish(t); !regexp.MustCompile(want).MatchString(out) {
				t.Errorf("%s: the client says\n%.1000s\nwant %q", args, out, want)
			}
		}
		client("set key value", `^OK\n$`)
		client("get key", `^value\n$`)
		client("-r 500 incr number", `^1\n(.*\n){498}500\n$`)
		client("setrange large 1000000 x", `^1000001\n$`)
		client("get large", `^\x00{1000}`)
		if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if out := s.finish(t); !strings.Contains(out, "ready to exit") {
			t.Errorf("the server says\n%s", out)
		}
	})
}
