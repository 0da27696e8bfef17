package modetest

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// machine is a file lock between test processes. Tests that change the machine for all
// its processes lock it exclusively; tests that such a change would disturb share it.
var machine struct {
	file   *os.File
	shared bool
}

// ShareMachine keeps tests of other processes from adding swap while this process runs.
// They only do so with VERBENA_FULL.
func ShareMachine() {
	if os.Getenv("VERBENA_FULL") != "" && Current() == "" {
		machine.shared = true
		lock(unix.LOCK_SH)
	}
}

func lock(how int) {
	if machine.file == nil {
		var err error
		if machine.file, err = os.OpenFile(filepath.Join(os.TempDir(), "verbena-tests.lock"), os.O_CREATE|os.O_RDWR, 0o666); err != nil {
			return // another user's file
		}
	}
	for unix.Flock(int(machine.file.Fd()), how) == unix.EINTR {
	}
}

// Swap makes a compressed device in memory and swaps on it until the test ends. It
// skips the test unless it runs as root and VERBENA_FULL is set.
func Swap(t *testing.T, size string) {
	t.Helper()
	if os.Getenv("VERBENA_FULL") == "" || os.Getuid() != 0 {
		t.Skip("full: needs root and VERBENA_FULL: it adds swap to the machine")
	}
	if Current() != "" { // the parent process shares the machine, and waits for this one
		t.Skip("full: in the mode ", Current())
	}
	lock(unix.LOCK_EX)
	t.Cleanup(func() {
		if machine.shared {
			lock(unix.LOCK_SH)
		} else {
			lock(unix.LOCK_UN)
		}
	})
	text, err := os.ReadFile("/sys/class/zram-control/hot_add")
	if err != nil {
		t.Skip("kernel: no zram:", err)
	}
	id := strings.TrimSpace(string(text))
	t.Cleanup(func() {
		if err := os.WriteFile("/sys/class/zram-control/hot_remove", []byte(id), 0); err != nil {
			t.Error(err)
		}
	})
	if err := os.WriteFile("/sys/block/zram"+id+"/disksize", []byte(size), 0); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"mkswap", "swapon"} {
		if out, err := exec.Command(command, "/dev/zram"+id).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", command, err, out)
		}
	}
	t.Cleanup(func() {
		if out, err := exec.Command("swapoff", "/dev/zram"+id).CombinedOutput(); err != nil {
			t.Errorf("swapoff: %v\n%s", err, out)
		}
	})
}
