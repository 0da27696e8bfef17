package main

// A path is two network namespaces joined by a veth pair. Everything that it makes belongs to the namespaces and goes
// with them.
//
// A veth carries a segmented send, of up to 64 KiB, as one packet from one stack to the other: a rule that drops a
// packet then drops the whole send, and a mark is on all of it. On a path of single packets the interfaces take no
// segmented sends (gso_max_segs 1), so the kernel cuts them before they leave, of TCP and UDP alike. Nothing joins them
// again before the rules: a veth has no GRO unless it is asked for.

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// segmentation is what the interfaces of a path carry.
type segmentation bool

const (
	segmented segmentation = true
	single    segmentation = false
)

// path is two namespaces and the addresses of their ends.
type path struct {
	ns   [2]string
	addr [2]string
}

// command runs a program, and returns what it prints.
func command(args ...string) (string, error) {
	out, err := exec.Command(args[0], args[1:]...).CombinedOutput() //nolint:gosec // G204: the programs are ours to choose
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// commands runs programs one after the other, up to the first that fails.
func commands(lines ...[]string) error {
	for _, l := range lines {
		if _, err := command(l...); err != nil {
			return err
		}
	}
	return nil
}

// newNamespaces makes two namespaces with nothing between them. TCP does not ask for ECN there.
func newNamespaces() (p *path, err error) {
	tag := fmt.Sprintf("vn%d", os.Getpid())
	p = &path{ns: [2]string{tag + "a", tag + "b"}, addr: [2]string{"10.80.0.1", "10.80.0.2"}}
	for i, ns := range p.ns {
		if _, err := command("ip", "netns", "add", ns); err != nil {
			if i > 0 {
				err = errors.Join(err, p.close())
			}
			return nil, err
		}
	}
	for _, ns := range p.ns {
		err = errors.Join(err, commands(
			[]string{"ip", "-n", ns, "link", "set", "lo", "up"},
			p.in(ns, "sysctl", "-qw", "net.ipv4.tcp_ecn=0")))
	}
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

// newPath makes a path over a veth pair.
func newPath(frame int, seg segmentation) (*path, error) {
	p, err := newNamespaces()
	if err != nil {
		return nil, err
	}
	if err := p.join(frame, seg); err != nil {
		return nil, errors.Join(err, p.close())
	}
	return p, nil
}

func (p *path) join(frame int, seg segmentation) error {
	if _, err := command("ip", "-n", p.ns[0], "link", "add", "d0", "type", "veth", "peer", "name", "d0", "netns", p.ns[1]); err != nil {
		return err
	}
	for i, ns := range p.ns {
		set := []string{"ip", "-n", ns, "link", "set", "d0", "mtu", strconv.Itoa(frame)}
		if seg == single {
			set = append(set, "gso_max_segs", "1")
		}
		if err := commands(append(set, "up"),
			[]string{"ip", "-n", ns, "addr", "add", p.addr[i] + "/24", "dev", "d0"},
			p.cubic(i, "d0"),
			p.in(ns, "nft", "add table netdev loss; add chain netdev loss in { type filter hook ingress device d0 priority 0; }")); err != nil {
			return err
		}
	}
	return p.waitUp()
}

// cubic has TCP use cubic on the way to the other end, whatever the host's default is. Only the host itself may allow a
// namespace another default.
func (p *path) cubic(end int, dev string) []string {
	return []string{"ip", "-n", p.ns[end], "route", "replace", "10.80.0.0/24", "dev", dev, "proto", "kernel", "scope", "link", "src", p.addr[end], "congctl", "cubic"}
}

// waitUp waits until the interfaces carry packets, which takes the kernel up to a second.
func (p *path) waitUp() error {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		up := 0
		for _, ns := range p.ns {
			if out, err := command("ip", "-n", ns, "-o", "link", "show", "d0"); err == nil && strings.Contains(out, "state UP") {
				up++
			}
		}
		if up == 2 {
			return nil
		}
		if time.Now().After(deadline) {
			return errors.New("the interfaces do not come up")
		}
	}
}

func (p *path) in(ns string, args ...string) []string {
	return append([]string{"ip", "netns", "exec", ns}, args...)
}

// lose has both ends drop so many of a thousand packets at random, on their way in.
func (p *path) lose(perMille int) error {
	rules := "flush chain netdev loss in"
	if perMille > 0 {
		rules += fmt.Sprintf("; add rule netdev loss in meta protocol ip counter numgen random mod 1000 < %d counter drop", perMille)
	}
	for _, ns := range p.ns {
		if _, err := command(p.in(ns, "nft", rules)...); err != nil {
			return fmt.Errorf("dropping at random: %w", err)
		}
	}
	return nil
}

var counted = regexp.MustCompile(`counter packets (\d+)`)

// lost returns how many packets came to the rules of both ends since lose, and how many of them were dropped.
func (p *path) lost() (seen, dropped int, err error) {
	for _, ns := range p.ns {
		out, err := command(p.in(ns, "nft", "list chain netdev loss in")...)
		if err != nil {
			return 0, 0, err
		}
		for i, m := range counted.FindAllStringSubmatch(out, -1) {
			n, _ := strconv.Atoi(m[1]) // these are digits
			if i == 0 {
				seen += n
			} else {
				dropped += n
			}
		}
	}
	return seen, dropped, nil
}

func (p *path) close() error {
	var errs []error
	for _, ns := range p.ns {
		_, err := command("ip", "netns", "del", ns)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// network returns the sums of the counters of both namespaces, as Udp.RcvbufErrors.
func (p *path) network() (map[string]uint64, error) {
	all := map[string]uint64{}
	for _, ns := range p.ns {
		out, err := command(p.in(ns, "cat", "/proc/net/snmp")...)
		if err != nil {
			return nil, err
		}
		lines := strings.Split(out, "\n")
		for k := 0; k+1 < len(lines); k += 2 { // of names, and of values
			names, values := strings.Fields(lines[k]), strings.Fields(lines[k+1])
			for i := 1; i < min(len(names), len(values)); i++ {
				if v, err := strconv.ParseUint(values[i], 10, 64); err == nil { // Tcp.MaxConn is -1
					all[strings.TrimSuffix(names[0], ":")+"."+names[i]] += v
				}
			}
		}
	}
	return all, nil
}
