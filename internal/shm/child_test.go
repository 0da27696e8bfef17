package shm

// What the child process does in each mode.

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/internal/sys"
)

// Types of records in tests.
const (
	recData byte = iota + 1
	recAddr
	recDone
)

// testRing is the size of the rings in tests with two processes: small, so that
// they are often full.
const testRing = 32 << 10

func childMain(mode, addr, arg string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := runChild(ctx, mode, addr, arg); err != nil {
		fmt.Fprintf(os.Stderr, "child, mode %s: %v\n", mode, err)
		os.Exit(1)
	}
}

func runChild(ctx context.Context, mode, addr, arg string) error {
	cfg := &Config{RingBytes: testRing}
	switch mode {
	case "echo", "drain":
		cfg = nil
	case "private":
		if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
			return err
		}
	}
	in, err := NewInbox(cfg)
	if err != nil {
		return err
	}
	defer in.Close()
	conn, err := dial(addr)
	if err != nil {
		return err
	}
	c, err := in.Dial(ctx, conn, nil)
	if err != nil {
		return err
	}
	switch mode {
	case "exchange":
		x := newExchange(arg, 2, 1)
		return x.run(in, c)
	case "flood":
		return childFlood(in, c, arg)
	case "echo":
		return childEcho(in)
	case "drain":
		return childDrain(in)
	case "memory", "private":
		return childMemory(in, c)
	case "grant":
		return childGrant(in)
	case "close":
		c.Send(recDone)
		c.Close()
		return nil
	}
	return errors.New("no such mode")
}

// exchange sends a number of records with random sizes and checks as many from
// the peer, which does the same with the other seed.
type exchange struct {
	send, check   *rand.Rand
	count         uint64
	sent, checked uint64
	next          int // size of the record that is sent next
	bad           error
	finished      bool // the peer has received everything
}

// newExchange reads "seed,count".
func newExchange(arg string, sends, checks uint64) *exchange {
	x := new(exchange)
	var seed uint64
	if _, err := fmt.Sscanf(arg, "%d,%d", &seed, &x.count); err != nil {
		panic(err)
	}
	x.send, x.check = rand.New(rand.NewPCG(seed, sends)), rand.New(rand.NewPCG(seed, checks))
	x.next = exchangeSize(x.send)
	return x
}

func exchangeSize(rng *rand.Rand) int {
	switch rng.IntN(100) {
	case 0:
		return rng.IntN(maxRecord(testRing) + 1)
	case 1, 2, 3, 4, 5:
		return rng.IntN(2000)
	}
	return rng.IntN(100)
}

// push sends what there is room for, in batches.
func (x *exchange) push(c *Channel) bool {
	if x.sent == x.count || !c.Begin() {
		return false
	}
	defer c.End()
	for batch := 0; batch < 8 && x.sent < x.count; batch++ {
		p, ok := c.Reserve(recData+byte(x.sent%100), x.next)
		if !ok {
			c.Commit()
			return batch > 0
		}
		fill(p, x.sent)
		x.sent++
		x.next = exchangeSize(x.send)
	}
	c.Commit()
	return true
}

func (x *exchange) Record(_ *Channel, typ byte, p []byte) {
	if typ == 255 {
		x.finished = true
		return
	}
	n := exchangeSize(x.check)
	if x.bad == nil && (typ != recData+byte(x.checked%100) || len(p) != n || !filled(p, x.checked)) {
		x.bad = fmt.Errorf("record %d: type %d, %d bytes, should be %d", x.checked, typ, len(p), n)
	}
	x.checked++
}

func (x *exchange) Full(*Channel) bool { return false }
func (x *exchange) Room(*Channel)      {}

func (x *exchange) Gone(_ *Channel, err error) {
	if x.bad == nil && !x.finished {
		x.bad = err
	}
	x.finished = true
}

func (x *exchange) run(in *Inbox, c *Channel) error {
	told := false
	for x.bad == nil && (!x.finished || !told) {
		busy := x.push(c)
		busy = in.Poll(x, 64) > 0 || busy
		if x.checked == x.count && !told {
			told = c.Send(255) == nil
		}
		if !busy && (told || x.checked < x.count) {
			wait(in, time.Second)
		}
	}
	return x.bad
}

// childFlood sends and receives until it is killed.
func childFlood(in *Inbox, c *Channel, arg string) error {
	f := flood{}
	seed, err := strconv.ParseUint(arg, 10, 64)
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, 7))
	for f.gone == nil && f.bad == nil {
		f.push(c, rng)
		if in.Poll(&f, 64) == 0 {
			wait(in, time.Millisecond)
		}
	}
	return f.bad
}

// flood sends records from whose own bytes the receiver can check them.
type flood struct {
	sent, got uint64
	gone, bad error
}

func (f *flood) push(c *Channel, rng *rand.Rand) {
	if !c.Begin() {
		return
	}
	defer c.End()
	for range 1 + rng.IntN(6) {
		n := 8 + rng.IntN(2000)
		p, ok := c.Reserve(recData, n)
		if !ok {
			break
		}
		binary.NativeEndian.PutUint64(p, f.sent)
		fill(p[8:], f.sent)
		f.sent++
	}
	c.Commit()
}

func (f *flood) Record(_ *Channel, typ byte, p []byte) {
	if typ != recData || len(p) < 8 || binary.NativeEndian.Uint64(p) != f.got || !filled(p[8:], f.got) {
		f.bad = fmt.Errorf("record %d: type %d, %d bytes", f.got, typ, len(p))
	}
	f.got++
}
func (f *flood) Full(*Channel) bool         { return false }
func (f *flood) Room(*Channel)              {}
func (f *flood) Gone(_ *Channel, err error) { f.gone = err }

// childEcho sends back what it gets, polling all the time.
func childEcho(in *Inbox) error {
	gone := false
	s := &recorder{
		record: func(c *Channel, typ byte, p []byte) {
			if c.Begin() {
				if q, ok := c.Reserve(typ, len(p)); ok {
					copy(q, p)
				}
				c.Commit()
				c.End()
			}
		},
		gone: func(*Channel, error) { gone = true },
	}
	for !gone {
		in.Poll(s, 64)
	}
	return nil
}

// childDrain copies what it gets to memory of its own, and answers recDone.
func childDrain(in *Inbox) error {
	gone := false
	buf := make([]byte, 1<<20)
	s := &recorder{
		record: func(c *Channel, typ byte, p []byte) {
			if typ == recDone {
				c.Send(recDone)
				return
			}
			copy(buf, p)
		},
		gone: func(*Channel, error) { gone = true },
	}
	for !gone {
		in.Poll(s, 64)
	}
	return nil
}

// childMemory sends the address of memory with known contents and a hole behind.
func childMemory(in *Inbox, c *Channel) error {
	const n = 1 << 20
	b, err := unix.Mmap(-1, 0, 2*n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	fill(b[:n], 42)
	if err := unix.Mprotect(b[n:], unix.PROT_NONE); err != nil {
		return err
	}
	if err := c.Send(recAddr, binary.NativeEndian.AppendUint64(nil, sys.AddrOf(b))); err != nil {
		return err
	}
	for gone := false; !gone; {
		s := &recorder{gone: func(*Channel, error) { gone = true }}
		if in.Poll(s, 1) == 0 {
			wait(in, time.Second)
		}
	}
	return nil
}

// childGrant enters the grant whose number it receives, and stays inside until SIGUSR1.
func childGrant(in *Inbox) error {
	leave := make(chan os.Signal, 1)
	signal.Notify(leave, unix.SIGUSR1)
	var p *PeerGrant
	s := &recorder{record: func(c *Channel, _ byte, b []byte) {
		c.Hold()
		p = c.PeerGrant(int(binary.NativeEndian.Uint64(b)), binary.NativeEndian.Uint64(b[8:]))
	}}
	for in.Poll(s, 1) == 0 || p == nil {
		wait(in, time.Second)
	}
	if !p.Enter() {
		return errors.New("it cannot enter")
	}
	select {
	case <-leave:
		p.Count(GrantWrites, 1, 8)
		p.Leave()
		return nil
	case <-time.After(patience):
		return errors.New("it was left alone")
	}
}
