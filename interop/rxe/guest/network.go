package main

// The guest's network: the kernel's device is in the initial namespace, because older
// kernels support no other for it; ours is in a second one.

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const (
	oursNS   = "ours"
	kernelNS = "first" // a name for the initial namespace
	rxeDev   = "rxe0"

	kernelIf = "d0"
	oursIf   = "d1"
)

// families has the addresses of each address family, by its part of a case's name.
var families = map[string]struct{ kernel, ours, victim netip.Addr }{
	"v4": {netip.MustParseAddr("10.79.0.1"), netip.MustParseAddr("10.79.0.2"), netip.MustParseAddr("10.79.0.3")},
	"v6": {netip.MustParseAddr("fd79::1"), netip.MustParseAddr("fd79::2"), netip.MustParseAddr("fd79::3")},
}

// defaultFrame is the interfaces' MTU for cases that set no other.
const defaultFrame = 9000

// run runs a program whose output matters only if it fails.
func run(args ...string) error {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return nil
}

// passThrough runs a program with our own input and output.
func passThrough(args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	return cmd.Run()
}

// all runs commands until one fails. Words are separated by spaces.
func all(commands ...string) error {
	for _, c := range commands {
		if err := run(strings.Fields(c)...); err != nil {
			return err
		}
	}
	return nil
}

func makeNetwork() error {
	first := "/run/netns/" + kernelNS
	if err := os.WriteFile(first, nil, 0o444); err != nil {
		return err
	}
	// The kernel's device sends 64 packets and more in a row; they must fit into a socket's
	// buffer. The default has room for 25 of the largest.
	for _, name := range []string{"rmem_max", "wmem_max"} {
		if err := os.WriteFile("/proc/sys/net/core/"+name, []byte("4194304"), 0o644); err != nil {
			return err
		}
	}
	v4, v6 := families["v4"], families["v6"]
	return all(
		"mount -o bind /proc/1/ns/net "+first,
		"ip netns add "+oursNS,
		"ip link set lo up",
		"ip -n "+oursNS+" link set lo up",
		"ip link add "+kernelIf+" type veth peer name "+oursIf+" netns "+oursNS,
		fmt.Sprintf("ip addr add %v/24 dev %s", v4.kernel, kernelIf),
		fmt.Sprintf("ip addr add %v/64 dev %s nodad", v6.kernel, kernelIf),
		fmt.Sprintf("ip -n %s addr add %v/24 dev %s", oursNS, v4.ours, oursIf),
		fmt.Sprintf("ip -n %s addr add %v/64 dev %s nodad", oursNS, v6.ours, oursIf),
		fmt.Sprintf("ip -n %s addr add %v/24 dev %s", oursNS, v4.victim, oursIf),
		fmt.Sprintf("ip -n %s addr add %v/64 dev %s nodad", oursNS, v6.victim, oursIf),
		fmt.Sprintf("ip link set %s mtu %d up", kernelIf, defaultFrame),
		fmt.Sprintf("ip -n %s link set %s mtu %d up", oursNS, oursIf, defaultFrame),
		"rdma link add "+rxeDev+" type rxe netdev "+kernelIf,
	)
}

// inKernelNS returns a command that runs in the kernel's namespace.
func inKernelNS(args ...string) []string {
	return append([]string{"ip", "netns", "exec", kernelNS}, args...)
}

// setFrame changes the interfaces' MTU; the kernel's device follows.
func setFrame(mtu int) error {
	if err := run(inKernelNS("ip", "link", "set", kernelIf, "mtu", fmt.Sprint(mtu))...); err != nil {
		return err
	}
	return run("ip", "link", "set", oursIf, "mtu", fmt.Sprint(mtu))
}

// waitForPath waits until packets pass in both directions: the kernel takes up to a second to
// notice that both ends are up.
func waitForPath() error {
	for deadline := time.Now().Add(20 * time.Second); ; {
		err := run("ping", "-c", "1", "-W", "1", families["v4"].kernel.String())
		if err == nil {
			err = run("ping", "-c", "1", "-W", "1", families["v6"].kernel.String())
		}
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}

// impair makes both directions lose or reorder packets, by the arguments of tc's netem.
func impair(netem string) error {
	words := strings.Fields(netem)
	return firstError(
		run(append([]string{"tc", "qdisc", "add", "dev", oursIf, "root", "netem"}, words...)...),
		run(inKernelNS(append([]string{"tc", "qdisc", "add", "dev", kernelIf, "root", "netem"}, words...)...)...),
	)
}

func repair() error {
	return firstError(
		run("tc", "qdisc", "del", "dev", oursIf, "root"),
		run(inKernelNS("tc", "qdisc", "del", "dev", kernelIf, "root")...),
	)
}

// lost counts the packets that netem has dropped since impair, both ways.
func lost() (n int, err error) {
	for _, args := range [][]string{{"tc", "-s", "qdisc", "show", "dev", oursIf}, inKernelNS("tc", "-s", "qdisc", "show", "dev", kernelIf)} {
		out, err := exec.Command(args[0], args[1:]...).Output()
		if err != nil {
			return 0, err
		}
		m := droppedCount.FindSubmatch(out)
		if m == nil {
			return 0, fmt.Errorf("tc does not say what was dropped: %s", out)
		}
		one, err := strconv.Atoi(string(m[1]))
		if err != nil {
			return 0, err
		}
		n += one
	}
	return n, nil
}

var droppedCount = regexp.MustCompile(`dropped (\d+)`)

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
