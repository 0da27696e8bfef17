// Package modetest runs tests again as on a machine that can do less: it starts the
// test's own program as a child in which system calls are forbidden, or as another
// user. The child sees its mode in the environment, in this package's init.
package modetest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

const variable = "VERBENA_TEST_MODE"

// Mode is a machine that can do less.
type Mode string

// The modes.
const (
	// NoUserfault: seccomp forbids userfaultfd, as profiles of containers do.
	NoUserfault Mode = "no-userfaultfd"
	// OldKernel: the kernel has neither PROCMAP_QUERY, PAGEMAP_SCAN nor
	// MADV_POPULATE_READ and _WRITE, and its userfaultfd is too old.
	OldKernel Mode = "old-kernel"
	// Unprivileged: a user without privileges, who may lock 64 KiB. Only root can run
	// the tests as another user; otherwise they run as the same user.
	Unprivileged Mode = "unprivileged"
	// Swapping: pages can be swapped out, by Swap.
	Swapping Mode = "swapping"
)

// From the kernel's linux/fs.h and linux/userfaultfd.h.
const (
	procmapQuery = 0xc0686611
	pagemapScan  = 0xc0606610
	uffdioAPI    = 0xc018aa3f
)

// MemlockLimit is what the unprivileged may lock.
const MemlockLimit = 64 << 10

func init() {
	var err error
	switch mode := Current(); mode {
	case "", Swapping:
	case NoUserfault:
		err = Forbid(Rule{Number: unix.SYS_USERFAULTFD, Arg: -1, Value: 0, Errno: unix.EPERM})
	case OldKernel:
		err = Forbid(
			Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: procmapQuery, Errno: unix.ENOTTY},
			Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: pagemapScan, Errno: unix.ENOTTY},
			Rule{Number: unix.SYS_IOCTL, Arg: 1, Value: uffdioAPI, Errno: unix.EINVAL},
			Rule{Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_POPULATE_READ, Errno: unix.EINVAL},
			Rule{Number: unix.SYS_MADVISE, Arg: 2, Value: unix.MADV_POPULATE_WRITE, Errno: unix.EINVAL},
		)
	case Unprivileged:
		err = unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: MemlockLimit, Max: MemlockLimit})
	default:
		err = fmt.Errorf("no such mode: %q", mode)
	}
	if err != nil {
		fmt.Println("modetest:", err)
		os.Exit(1)
	}
}

// Current returns the mode of this process, "" if it can do what the machine can.
func Current() Mode { return Mode(os.Getenv(variable)) }

// Rerun runs tests of this program again in a mode: those whose names match a
// pattern, with more flags if given. It fails the test if one of them fails, or if none runs.
func Rerun(t *testing.T, mode Mode, pattern string, flags ...string) {
	t.Helper()
	if Current() != "" {
		t.Skip("full: in the mode", Current())
	}
	cmd := exec.Command("/proc/self/exe", append([]string{"-test.run=" + pattern, "-test.v", "-test.timeout=9m"}, flags...)...)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), variable+"="+string(mode), "CI=", "VERBENA_FULL=") // tests of what the mode lacks may skip; the long tests are not for modes
	if mode == Unprivileged && os.Getuid() == 0 {
		const nobody = 65534
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	}
	out, err := cmd.CombinedOutput()
	ran := strings.Count(string(out), "\n--- PASS")
	if err != nil || ran == 0 {
		t.Errorf("%s: %v, %d tests passed\n%s", mode, err, ran, failures(string(out)))
		return
	}
	t.Logf("%s: %d tests passed, %d skipped", mode, ran, strings.Count(string(out), "\n--- SKIP"))
}

// failures returns the output without the lines of tests that passed.
func failures(out string) string {
	var b strings.Builder
	for line := range strings.Lines(out) {
		if !strings.HasPrefix(line, "=== ") && !strings.Contains(line, "--- PASS") && !strings.Contains(line, "VERBENA_SEED") {
			b.WriteString(line)
		}
	}
	return b.String()
}
