package sys

import (
	"runtime"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPossibleCPUs(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8-11": 12, "0,2": 3, "": 0, "all": 0, "0-": 0} {
		if got := parsePossible(list); got != want {
			t.Errorf("%q: %d, want %d", list, got, want)
		}
	}
	if n := PossibleCPUs(); n < runtime.NumCPU() {
		t.Errorf("%d processors are possible, %d are there", n, runtime.NumCPU())
	}
}

func TestMayRunOn(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &before); err != nil {
		t.Fatal(err)
	}
	first := 0
	for !before.IsSet(first) {
		first++
	}
	one.Set(first)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.SchedSetaffinity(0, &before); err != nil {
			t.Error(err)
		}
	}()
	if !MayRunOn(first) || MayRunOn(first+1) || MayRunOn(PossibleCPUs()) {
		t.Errorf("the thread may run on %d alone", first)
	}
}
