package host

import (
	"bufio"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// childEnv makes the test binary a process of a device at the addresses that it holds, with
// commas between them.
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
		os.Exit(child(addrsOf(addr)))
	}
	goleak.VerifyTestMain(m)
}

// child joins, gets two ranges, and prints so. It prints what packets its sockets receive. It
// leaves when its input ends.
func child(addrs []netip.Addr) int {
	var soft, hard uint64
	if _, err := fmt.Sscanf(os.Getenv(modeEnv), "limits %d %d", &soft, &hard); err == nil {
		if err := limit(soft, hard); err != nil {
			fmt.Println("refused:", err)
			return 1
		}
	}
	u := udp{addrs: addrs}
	m, err := Join(Config{Addrs: addrs, Limits: manyObjects(), Listen: u.listen, Status: func(bool) any { return os.Getpid() },
		Watcher: os.Getenv(watcherEnv)})
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
	var now unix.Rlimit
	if _ = unix.Getrlimit(unix.RLIMIT_NOFILE, &now); soft != 0 && now.Cur != soft {
		fmt.Println("refused: the limit is", now.Cur)
		return 1
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
	var connected []*Record
	if os.Getenv(modeEnv) == "connected" { // has a port and two connections that its peers are to hear of
		p, err := m.BindPort(PortsTCP, 7174, []int{0}, false)
		if err == nil {
			err = p.Listen()
		}
		for i := range uint32(2) {
			r := m.NewRecord()
			connected = append(connected, r)
			r.Set(&LastWords{State: 1, Peer: netip.MustParseAddr("192.0.2.7"), Local: 100 + i, Remote: 200 + i, QPN: 300 + i})
		}
		m.NewRecord().Free()
		fmt.Println("connected", err)
		for called := false; m.cfg.Watcher != "" && !called; time.Sleep(time.Millisecond) {
			m.watch.mu.Lock()
			called = m.watch.watcher != nil
			m.watch.mu.Unlock()
		}
		fmt.Println("watched", err)
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
	for _, r := range connected {
		r.Free()
	}
	if err := m.Close(); err != nil {
		fmt.Println("close:", err)
		return 1
	}
	return 0
}

// limit has many descriptors under way, and then sets the limits on them.
func limit(soft, hard uint64) error {
	s, err := sys.NewShelf(fmt.Sprintf("@verbena/shelf/test-%x", random()))
	if err != nil {
		return err
	}
	in, _ := s.FDs()
	for range 150 {
		if err := s.Put(in); err != nil {
			return err
		}
	}
	return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: soft, Max: hard})
}

func addrsOf(list string) (all []netip.Addr) {
	for _, a := range strings.Split(list, ",") {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}

// dies ends the process if its mode is that it dies at this moment, as one that is killed.
func dies(when string, addr int) {
	if os.Getenv(modeEnv) == fmt.Sprint(when, addr) {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
}

// udp has the sockets of a process.
type udp struct {
	addrs []netip.Addr
	socks []*sys.UDPSocket
	bound int // new sockets
	found int // sockets that a dead process has left
}

func (u *udp) listen(w *Sockets) (place int, err error) {
	var own []*sys.UDPSocket
	for i, a := range u.addrs {
		at := netip.AddrPortFrom(a, 4791)
		var s *sys.UDPSocket
		switch {
		case w.Adopt != nil:
			s, err = sys.AdoptUDP(w.Adopt[i], at)
		case w.Orphans[i] >= 0:
			u.found++
			s, err = sys.AdoptUDP(w.Orphans[i], at)
		default:
			u.bound++
			s, err = sys.OpenUDP(at, sys.UDPOptions{RcvBuf: 1 << 16, SndBuf: 1 << 16, Held: func(fd int) error {
				dies("early", i)
				err := w.Hold(i, fd)
				dies("held", i)
				return err
			}})
			dies("bound", i)
		}
		if err != nil {
			return 0, err
		}
		own = append(own, s)
	}
	u.socks = append(u.socks, own...)
	if w.Adopt != nil {
		return w.Place, nil
	}
	for i, s := range own {
		at, err := s.FindPlace(0, random())
		if err != nil || i > 0 && int(at) != place {
			return 0, fmt.Errorf("address %d has place %d, others %d: %w", i, at, place, err)
		}
		place = int(at)
	}
	return place, nil
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
