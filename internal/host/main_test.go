package host

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// childEnv makes the test binary a process of a device at the address that it
// holds.
const childEnv = "VERBENA_HOST_TEST_CHILD"

// squatEnv makes the test binary take the name that it holds, as soon as the name is free.
const squatEnv = "VERBENA_HOST_TEST_SQUAT"

// modeEnv makes such a process do something besides.
const modeEnv = "VERBENA_HOST_TEST_MODE"

func squat(name string) int {
	fmt.Println("trying")
	for _, err := listen(name); err != nil; _, err = listen(name) {
		time.Sleep(50 * time.Microsecond)
	}
	fmt.Println("squatting")
	_, _ = os.Stdin.Read(make([]byte, 1))
	return 0
}

func TestMain(m *testing.M) {
	if name := os.Getenv(squatEnv); name != "" {
		os.Exit(squat(name))
	}
	if addr := os.Getenv(childEnv); addr != "" {
		os.Exit(child(netip.MustParseAddr(addr)))
	}
	goleak.VerifyTestMain(m)
}

// child joins, gets two ranges, and prints so. It prints what packets its sockets receive. It
// leaves when its input ends.
func child(a netip.Addr) int {
	var u udp
	m, err := Join(Config{Addrs: []netip.Addr{a}, Limits: manyObjects(), Listen: u.listen, Status: func(bool) any { return os.Getpid() }})
	if err != nil {
		fmt.Println("refused:", err)
		return 1
	}
	go u.print()
	for range 2 {
		r, err := m.Places().Lease()
		if err != nil {
			fmt.Println("no range:", err)
			return 1
		}
		fmt.Println("range", r)
	}
	fmt.Println("slot", m.Slot())
	if os.Getenv(modeEnv) == "closes" { // and has another file at the number, where no byte is locked
		fd, err := sys.NewMemfd("another", layoutSize)
		if err == nil {
			err = unix.Dup3(fd, m.dir.fd, unix.O_CLOEXEC)
		}
		m.dir.sweep(m.self)
		fmt.Println("closed", err)
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() { // a line asks for one more range
		r, err := m.Places().Lease()
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

// udp has the sockets of a process.
type udp struct {
	addrs []netip.Addr // default: that of the process
	socks []*sys.UDPSocket
	bound int // calls that have bound new sockets
}

func (u *udp) listen(w *Sockets) (place int, err error) {
	if len(u.addrs) == 0 {
		u.addrs = []netip.Addr{netip.MustParseAddr(os.Getenv(childEnv))}
	}
	for i, a := range u.addrs {
		at := netip.AddrPortFrom(a, 4791)
		var s *sys.UDPSocket
		if w.Adopt != nil {
			s, err = sys.AdoptUDP(w.Adopt[i], at)
		} else {
			s, err = sys.OpenUDP(at, sys.UDPOptions{RcvBuf: 1 << 16, SndBuf: 1 << 16, Held: func(fd int) error { return w.Hold(i, fd) }})
		}
		if err != nil {
			return 0, err
		}
		u.socks = append(u.socks, s)
	}
	if w.Adopt != nil {
		return w.Place, nil
	}
	u.bound++
	at, err := u.socks[len(u.socks)-len(u.addrs)].FindPlace(random())
	return int(at), err
}

// print prints the packets that the first socket receives.
func (u *udp) print() {
	b := sys.NewRecvBatch(1, 1<<16)
	for ; ; time.Sleep(time.Millisecond) {
		for n := 1; n > 0; {
			if n, _ = u.socks[0].Recv(b, 1); n == 1 {
				var d sys.Datagram
				if b.Get(0, &d); !sys.IsProbe(d.Bytes) {
					fmt.Printf("packet %x\n", d.Bytes)
				}
			}
		}
	}
}

func (u *udp) close() {
	for _, s := range u.socks {
		_ = s.Close()
	}
	u.socks = nil
}

func manyObjects() (l [NumObjects]uint64) {
	for i := range l {
		l[i] = 1000
	}
	return l
}
