package modetest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Swap makes a compressed device in memory and swaps on it until the test ends. It
// skips the test unless everything is to be tested, by root.
func Swap(t *testing.T, size string) {
	t.Helper()
	if os.Getenv("VERBENA_FULL") == "" || os.Getuid() != 0 {
		t.Skip("full: needs root and VERBENA_FULL: it adds swap to the machine")
	}
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
