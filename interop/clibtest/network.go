package clibtest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Do runs a command that must succeed.
func Do(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(args, " "), err, out)
	}
}

// NewNetwork makes two network namespaces joined by a veth pair, and returns their names. Their addresses are 10.79.0.1
// and 10.79.0.2. They end with the test.
func NewNetwork(t testing.TB) [2]string {
	t.Helper()
	Need(t, os.Getuid() == 0, "network namespaces need root")
	ip, err := exec.LookPath("ip")
	if err != nil {
		ip = "/usr/sbin/ip"
	}
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
		Do(t, ip, "-n", ns[i], "link", "set", "lo", "up")
		Do(t, ip, "-n", ns[i], "link", "set", fmt.Sprintf("d%d", i), "mtu", "9000", "up")
		Do(t, ip, "-n", ns[i], "addr", "add", fmt.Sprintf("10.79.0.%d/24", i+1), "dev", fmt.Sprintf("d%d", i))
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
