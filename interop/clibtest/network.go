package clibtest

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Do runs a program, which must succeed.
func Do(t testing.TB, args ...string) string {
	t.Helper()
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Tool returns the path of a program, also from directories that an ordinary user's PATH does not have. It skips the
// test if the program is missing.
func Tool(t testing.TB, name, pkg string) string {
	t.Helper()
	if p, err := exec.LookPath(name); err == nil {
		return p
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		p := filepath.Join(dir, name)
		if _, err := os.Stat(p); err == nil {
			return p
		}
	}
	Need(t, false, "%s is missing: apt-get install %s", name, pkg)
	return ""
}

// Network makes two namespaces joined by a veth pair, with the addresses 10.79.0.1 and 10.79.0.2. A test has one at a
// time.
func Network(t testing.TB) [2]string {
	t.Helper()
	Need(t, os.Getuid() == 0, "network namespaces need root")
	ip := Tool(t, "ip", "iproute2")
	tag := fmt.Sprintf("vp%d", os.Getpid())
	ns := [2]string{tag + "a", tag + "b"}
	if out, err := exec.Command(ip, "netns", "add", ns[0]).CombinedOutput(); err != nil {
		Need(t, false, "network namespaces cannot be made here: %v\n%s", err, out)
	}
	t.Cleanup(func() { Do(t, ip, "netns", "del", ns[0]) })
	Do(t, ip, "netns", "add", ns[1])
	t.Cleanup(func() { Do(t, ip, "netns", "del", ns[1]) })
	Do(t, ip, "-n", ns[0], "link", "add", "d0", "type", "veth", "peer", "name", "d1", "netns", ns[1])
	for i := range ns {
		dev := fmt.Sprintf("d%d", i)
		Do(t, ip, "-n", ns[i], "link", "set", "lo", "up")
		Do(t, ip, "-n", ns[i], "link", "set", dev, "mtu", "9000", "up")
		Do(t, ip, "-n", ns[i], "addr", "add", fmt.Sprintf("10.79.0.%d/24", i+1), "dev", dev)
	}
	for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		out, _ := exec.Command(ip, "-n", ns[1], "-o", "link", "show", "d1").CombinedOutput() // if it fails, it is tried again
		if strings.Contains(string(out), "state UP") {
			return ns
		}
		if time.Now().After(deadline) {
			t.Fatalf("the interfaces do not come up: %s", out)
		}
	}
}

// Lose makes both namespaces drop so many of a hundred datagrams of RoCE on their way in, at random. A datagram may be
// a whole train of packets.
func Lose(t testing.TB, ns [2]string, percent int) {
	t.Helper()
	ip, nft := Tool(t, "ip", "iproute2"), Tool(t, "nft", "nftables")
	for _, n := range ns {
		in := []string{ip, "netns", "exec", n, nft}
		Do(t, append(in, "add", "table", "inet", "loss")...)
		Do(t, append(in, "add", "chain", "inet", "loss", "in", "{ type filter hook input priority 0; }")...)
		rule := append(in[1:len(in):len(in)], "add", "rule", "inet", "loss", "in", "udp", "dport", "4791",
			"numgen", "random", "mod", "100", "<", strconv.Itoa(percent), "counter", "drop")
		if out, err := exec.Command(ip, rule...).CombinedOutput(); err != nil {
			Need(t, false, "this kernel's nft cannot drop at random: %v\n%s", err, out)
		}
	}
}

// Counters reads a file that VERBENA_STATS named, and adds up the counters of all processes in it.
func Counters(t testing.TB, file string) map[string]uint64 {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }() // it was only read
	sum := map[string]uint64{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		w := strings.Fields(lines.Text())
		if len(w) != 2 || w[0] == "#" {
			continue
		}
		n, err := strconv.ParseUint(w[1], 10, 64)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		sum[w[0]] += n
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return sum
}
