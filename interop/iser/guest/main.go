// Command guest runs the cases of interop/iser with the kernel, in a virtual machine. Package iser boots it.
//
// The kernel's iSER knows only the first network namespace. So its device, rxe, is there, and ours in another one.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/iser"
	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/interop/vm"
)

const (
	namespace  = "us"
	kernelAddr = "10.80.0.1"
	ourAddr    = "10.80.0.2"
	share      = "/share/"
	lib        = "/tmp/lib"
	verbena    = "/tmp/verbena"
	diskTool   = "/tmp/" + iser.DiskProgram
)

// cases, in their order.
var cases = []struct {
	name string
	run  func() (figure string, err error)
}{
	{"initiator/data", initiatorData},
	{"initiator/ext4", initiatorExt4},
	{"initiator/fio", initiatorFio},
	{"initiator/loss", initiatorLoss},
	{"target/data", targetData},
}

func main() {
	f, err := os.OpenFile(share+vm.Results, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	say := json.NewEncoder(f)
	if err := prepare(); err != nil {
		_ = say.Encode(iser.Line{Case: "preparation", Error: err.Error()}) // the run fails without it, too
		return
	}
	wanted, err := os.ReadFile(share + iser.CasesFile)
	if err != nil {
		_ = say.Encode(iser.Line{Case: "choice", Error: err.Error()}) // the run fails without it, too
		return
	}
	chosen := regexp.MustCompile(string(wanted))
	for _, c := range cases {
		if !chosen.MatchString(c.name) {
			continue
		}
		start := time.Now()
		l := iser.Line{Case: c.name}
		figure, err := c.run()
		if err != nil {
			l.Error = err.Error() + "\n" + dmesg()
		}
		l.Figure = strings.TrimSpace(fmt.Sprintf("%s (%v)", figure, time.Since(start).Round(time.Millisecond)))
		if err := say.Encode(l); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	_ = say.Encode(iser.Line{End: true}) // the run fails without it
}

// prepare copies the programs, and makes the two sides of the network. From the shared directory each page of a program
// would be fetched from the host when it is first needed.
func prepare() error {
	if err := os.MkdirAll(lib, 0o755); err != nil {
		return err
	}
	copies := []string{"cp " + share + "verbena " + verbena, "cp " + share + iser.DiskProgram + " " + diskTool}
	for _, name := range result.Library {
		copies = append(copies, "cp "+share+name+" "+lib+"/"+name)
	}
	if err := os.WriteFile("/etc/iscsi/initiatorname.iscsi", []byte("InitiatorName="+initiatorName+"\n"), 0o600); err != nil {
		return err
	}
	return doAll(append(copies, "ip link set lo up",
		"ip netns add "+namespace,
		"ip link add k0 type veth peer name u0 netns "+namespace,
		"ip addr add "+kernelAddr+"/24 dev k0", "ip link set k0 mtu 4200 up",
		"ip -n "+namespace+" addr add "+ourAddr+"/24 dev u0", "ip -n "+namespace+" link set u0 mtu 4200 up", "ip -n "+namespace+" link set lo up",
		"rdma link add rxe0 type rxe netdev k0", "mount -t configfs none /sys/kernel/config",
		"mkdir -p /run/lock /var/lib/iscsi", "ln -sfn /run/lock /var/lock", "iscsid")...)
}

// ours returns a program on our library, in our namespace.
func ours(env []string, args ...string) *exec.Cmd {
	cmd := exec.Command("ip", append([]string{"netns", "exec", namespace, verbena, "exec", "--log", "--"}, args...)...)
	cmd.Env = append(append(os.Environ(), "VERBENA_ADDR="+ourAddr, "VERBENA_LIB="+lib), env...)
	return cmd
}

// do runs a program, whose output it returns with an error.
func do(args ...string) error { return doWith(nil, args...) }

func doWith(env []string, args ...string) error {
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
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

// dmesg returns the end of what the kernel has said.
func dmesg() string {
	out, _ := exec.Command("dmesg").Output() // without it the error says less
	return string(out[max(0, len(out)-3000):])
}

// eventually waits for a condition.
func eventually(what string, is func() bool) error {
	for end := time.Now().Add(2 * time.Minute); !is(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			return errors.New("not: " + what)
		}
	}
	return nil
}

// ok runs a program that prints ok at its end.
func ok(cmd *exec.Cmd) (string, error) {
	out, err := cmd.CombinedOutput()
	if err == nil && !bytes.HasSuffix(out, []byte("ok\n")) {
		err = errors.New("it does not say ok")
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, out)
	}
	return strings.ReplaceAll(strings.TrimSuffix(string(out), "\nok\n"), "\n", ", "), nil
}
