package host

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// childEnv makes the test binary a process of a device at the address that it
// holds.
const childEnv = "VERBENA_HOST_TEST_CHILD"

func TestMain(m *testing.M) {
	if addr := os.Getenv(childEnv); addr != "" {
		os.Exit(child(netip.MustParseAddr(addr)))
	}
	goleak.VerifyTestMain(m)
}

// child joins, gets two ranges, and prints so; it prints when it becomes the owner.
// It leaves when its input ends.
func child(a netip.Addr) int {
	m, err := Join(Config{Addrs: []netip.Addr{a}, Limits: manyObjects(), Become: func() error {
		fmt.Println("owner")
		return nil
	}, Status: func(bool) any { return os.Getpid() }})
	if err != nil {
		fmt.Println("refused:", err)
		return 1
	}
	for range 2 {
		r, err := m.Lease()
		if err != nil {
			fmt.Println("no range:", err)
			return 1
		}
		fmt.Println("range", r)
	}
	fmt.Println("slot", m.Slot())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() { // a line asks for one more range
		r, err := m.Lease()
		if err != nil {
			fmt.Println("no range:", err)
			return 1
		}
		fmt.Println("range", r)
	}
	if err := m.Close(); err != nil {
		fmt.Println("close:", err)
		return 1
	}
	return 0
}

func manyObjects() (l [NumObjects]uint64) {
	for i := range l {
		l[i] = 1000
	}
	return l
}
