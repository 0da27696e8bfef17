// Command guest runs the cases of interop/nvmeof, in a virtual machine. Package nvmeof boots it.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/nvmeof"
	"github.com/verbena-rdma/verbena/interop/vm"
)

// Where the two sides are: the kernel's in the first namespace, ours in another one.
const (
	namespace  = "us"
	kernelAddr = "10.80.0.1"
	ourAddr    = "10.80.0.2"
	share      = "/share/"
	program    = "/tmp/nvmet" // our target
)

// full is set for the long form.
var full bool

func main() {
	if len(os.Args) > 1 {
		if err := role(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	f, err := os.OpenFile(share+vm.Results, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	say := json.NewEncoder(f)
	// From the shared directory each page of the program would be fetched from the host when it is first needed, which may
	// take seconds of the guest's time.
	if err := do("cp", share+"nvmet", program); err != nil {
		_ = say.Encode(nvmeof.Line{Case: "program", Error: err.Error()}) // the run fails without it, too
		return
	}
	if err := network(); err != nil {
		_ = say.Encode(nvmeof.Line{Case: "network", Error: err.Error()}) // the run fails without it, too
		return
	}
	_, err = os.Stat(share + nvmeof.FullFile)
	full = err == nil
	wanted, err := choice()
	if err != nil {
		_ = say.Encode(nvmeof.Line{Case: "choice", Error: err.Error()}) // the run fails without it, too
		return
	}
	for _, c := range cases {
		run := c.form == always || c.form == long && full
		if wanted != nil {
			run = wanted.MatchString(c.name)
		}
		if !run {
			continue
		}
		start := time.Now()
		l := nvmeof.Line{Case: c.name}
		figure, err := c.run()
		if errors.Is(err, errNoPeers) {
			l.Skip = err.Error()
		} else if err != nil {
			l.Error = err.Error()
		}
		l.Figure = strings.TrimSpace(fmt.Sprintf("%s (%v)", figure, time.Since(start).Round(time.Millisecond)))
		if err := say.Encode(l); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	_ = say.Encode(nvmeof.Line{End: true}) // the run fails without it
}

// choice returns which cases are wanted; nil: those of the form.
func choice() (*regexp.Regexp, error) {
	b, err := os.ReadFile(share + nvmeof.CasesFile)
	if err != nil || len(b) == 0 {
		return nil, err
	}
	return regexp.Compile(string(b))
}

// do runs a program, whose output it returns with an error.
func do(args ...string) error {
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return nil
}

func doAll(lines ...string) error {
	for _, l := range lines {
		if err := do(strings.Fields(l)...); err != nil {
			return err
		}
	}
	return nil
}

// network makes the two sides.
func network() error {
	return doAll("ip link set lo up",
		"ip netns add "+namespace,
		"ip link add k0 type veth peer name u0 netns "+namespace,
		"ip addr add "+kernelAddr+"/24 dev k0", "ip link set k0 mtu 4200 up",
		"ip -n "+namespace+" addr add "+ourAddr+"/24 dev u0", "ip -n "+namespace+" link set u0 mtu 4200 up", "ip -n "+namespace+" link set lo up",
		"rdma link add rxe0 type rxe netdev k0", "mount -t configfs none /sys/kernel/config")
}

// eventually waits for a condition.
func eventually(what string, limit time.Duration, is func() bool) error {
	for end := time.Now().Add(limit); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return errors.New("not: " + what)
		}
	}
	return nil
}
