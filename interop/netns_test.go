package interop

// Two network namespaces joined by a veth pair: between them packets pass through the
// kernel's network stack.

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// need skips a test if something is missing. In continuous integration the test fails.
func need(t testing.TB, ok bool, format string, args ...any) {
	t.Helper()
	if ok {
		return
	}
	if os.Getenv("CI") == "true" || os.Getenv("CI") == "1" {
		t.Fatalf(format, args...)
	}
	t.Skipf(format, args...)
}

// tool finds a program, also in directories that an ordinary user's PATH does not have.
func tool(name string) (string, bool) {
	if p, err := exec.LookPath(name); err == nil {
		return p, true
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		p := filepath.Join(dir, name)
		if _, err := os.Stat(p); err == nil {
			return p, true
		}
	}
	return "", false
}

func run(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// network is two namespaces and the addresses of their ends.
type network struct {
	ns     [2]string
	v4, v6 [2]string
}

// newNetwork makes two namespaces, joined by interfaces with an MTU.
func newNetwork(t testing.TB, mtu int) *network {
	t.Helper()
	need(t, os.Getuid() == 0, "network namespaces need root")
	ip, ok := tool("ip")
	need(t, ok, "network namespaces need iproute2's ip")
	tag := fmt.Sprintf("vb%d", os.Getpid())
	n := &network{
		ns: [2]string{tag + "a", tag + "b"},
		v4: [2]string{"10.78.0.1", "10.78.0.2"},
		v6: [2]string{"fd78::1", "fd78::2"},
	}
	if out, err := exec.Command(ip, "netns", "add", n.ns[0]).CombinedOutput(); err != nil {
		need(t, false, "network namespaces cannot be made here: %v\n%s", err, out)
	}
	t.Cleanup(func() { run(t, ip, "netns", "del", n.ns[0]) }) // the interfaces go with it
	run(t, ip, "netns", "add", n.ns[1])
	t.Cleanup(func() { run(t, ip, "netns", "del", n.ns[1]) })
	// Both ends are made in the namespaces, so that nothing shows outside.
	run(t, ip, "-n", n.ns[0], "link", "add", "d0", "type", "veth", "peer", "name", "d1", "netns", n.ns[1])
	for i, ns := range n.ns {
		dev := fmt.Sprintf("d%d", i)
		run(t, ip, "-n", ns, "link", "set", "lo", "up")
		run(t, ip, "-n", ns, "link", "set", dev, "mtu", fmt.Sprint(mtu), "up")
		run(t, ip, "-n", ns, "addr", "add", n.v4[i]+"/24", "dev", dev)
		run(t, ip, "-n", ns, "addr", "add", n.v6[i]+"/64", "dev", dev, "nodad")
	}
	for i, ns := range n.ns {
		waitForCarrier(t, ip, ns, fmt.Sprintf("d%d", i))
	}
	return n
}

// waitForCarrier waits until an interface carries packets. The kernel takes up to
// a second to notice that the other end is up too, and loses them until then.
func waitForCarrier(t testing.TB, ip, ns, dev string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		out, err := exec.Command(ip, "-n", ns, "-o", "link", "show", dev).CombinedOutput()
		if err == nil && strings.Contains(string(out), "state UP") {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s does not come up: %v\n%s", dev, err, out)
		}
	}
}

func (n *network) places(addrs [2]string) [2]place {
	return [2]place{{n.ns[0], addrs[0]}, {n.ns[1], addrs[1]}}
}

// All operations over a network, with both usual frame sizes and both versions of IP.
func TestNamespaces(t *testing.T) {
	for _, tt := range []struct{ frame, mtu int }{{1500, 1024}, {9000, 4096}} {
		t.Run(fmt.Sprint("frame", tt.frame), func(t *testing.T) {
			n := newNetwork(t, tt.frame)
			for name, addrs := range map[string][2]string{"IPv4": n.v4, "IPv6": n.v6} {
				t.Run(name, func(t *testing.T) {
					at := n.places(addrs)
					for _, r := range perform(t, script{Scenario: "operations"}, at[0], at[1], nil) {
						if r.MTU != tt.mtu {
							t.Errorf("the active MTU is %d, want %d", r.MTU, tt.mtu)
						}
						t.Logf("offloads %v, %d packets sent, %d again", r.Offloads, r.Counters["tx_packets"], r.Counters["retransmitted_packets"])
						wantSound(t, r)
					}
					perform(t, script{Scenario: "stream", Seconds: 1}, at[0], at[1], nil)
				})
			}
		})
	}
}

// The kernel drops three of a hundred datagrams on their way in, at both ends.
// A datagram may be a whole train of packets.
func TestNamespacesLossy(t *testing.T) {
	n := newNetwork(t, 9000)
	nft, ok := tool("nft")
	need(t, ok, "losing datagrams needs nft")
	ip, _ := tool("ip")
	for _, ns := range n.ns {
		in := func(args ...string) []string {
			return append([]string{ip, "netns", "exec", ns, nft}, args...)
		}
		run(t, in("add", "table", "inet", "loss")...)
		run(t, in("add", "chain", "inet", "loss", "in", "{ type filter hook input priority 0; }")...)
		if out, err := exec.Command(ip, in("add", "rule", "inet", "loss", "in", "udp", "dport", "4791",
			"numgen", "random", "mod", "100", "<", "3", "counter", "drop")[1:]...).CombinedOutput(); err != nil {
			need(t, false, "this kernel's nft cannot drop at random: %v\n%s", err, out)
		}
	}
	for name, addrs := range map[string][2]string{"IPv4": n.v4, "IPv6": n.v6} {
		t.Run(name, func(t *testing.T) {
			at := n.places(addrs)
			for _, s := range []script{{Scenario: "operations", Lossy: true}, {Scenario: "stream", Seconds: 2, Lossy: true}} {
				var again uint64
				for _, r := range perform(t, s, at[0], at[1], nil) {
					again += r.Counters["retransmitted_packets"]
					t.Logf("%s: %d packets sent, %d again, %d timeouts, %.0f MB", s.Scenario, r.Counters["tx_packets"],
						r.Counters["retransmitted_packets"], r.Counters["local_ack_timeouts"], float64(r.Bytes)/1e6)
					wantSound(t, r)
				}
				if again == 0 {
					t.Errorf("%s: nothing was sent again, so nothing was lost", s.Scenario)
				}
			}
		})
	}
}

// The peer's host goes away: its interface is taken down.
func TestNamespacesUnplugged(t *testing.T) {
	n := newNetwork(t, 1500)
	ip, _ := tool("ip")
	at := n.places(n.v4)
	pulled := false
	perform(t, script{Scenario: "doomed"}, at[0], at[1], func(other *actor, body string) {
		if body == `"kill"` && !pulled {
			pulled = true
			run(t, ip, "-n", n.ns[1], "link", "set", "d1", "down")
			other.kill(t)
		}
	})
	if !pulled {
		t.Error("the interface was not taken down")
	}
}
