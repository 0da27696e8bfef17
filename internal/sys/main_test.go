package sys

import (
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(childVariable); name != "" {
		if err := children[name](); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// children are what tests run in a process of its own: things that cannot be undone,
// and things that are found out once in a process.
var children = map[string]func() error{
	"unprivileged":   unprivilegedChild,
	"unprivileged-2": unprivilegedFileChild,
	"seccomp-EPERM":  func() error { return seccompChild(syscall.EPERM) },
	"seccomp-ENOSYS": func() error { return seccompChild(syscall.ENOSYS) },
	"old-kernel":     oldKernelChild,
	"no-proc":        noProcChild,
	"ring-writer":    ringWriterChild,
	"handle-holder":  handleHolderChild,
	"handle-limit":   handleLimitChild,
	"handle-user":    handleUserChild,
	"handle-blind":   func() error { return handleBlindChild(unix.SYS_INOTIFY_INIT1, unix.EMFILE) },
	"handle-blind-2": func() error { return handleBlindChild(unix.SYS_INOTIFY_ADD_WATCH, unix.ENOSPC) },
}

const childVariable = "VERBENA_SYS_TEST_CHILD"

// runChild runs one of children, as another user if uid is not 0.
func runChild(t *testing.T, name string, uid uint32, env ...string) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), append(env, childVariable+"="+name)...)
	if uid != 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", name, err, out)
	}
}

// problems collects what a child finds wrong.
type problems struct {
	mu    sync.Mutex // guards found
	found []string
}

func (p *problems) addf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.found = append(p.found, fmt.Sprintf(format, args...))
}

func (p *problems) err() error {
	if len(p.found) == 0 {
		return nil
	}
	return fmt.Errorf("%d problems: %q", len(p.found), p.found)
}
