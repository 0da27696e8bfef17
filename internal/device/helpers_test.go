package device

// What the tests of this package share: seeds, addresses, devices, simulated
// networks, counters, events and descriptors.

import (
	"context"
	"errors"
	"math/rand/v2"
	"net/netip"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// fullMatrix asks for the long matrices.
func fullMatrix() bool { return os.Getenv("VERBENA_FULL") != "" }

// lasting is how long a test of endurance runs.
func lasting(short, long time.Duration) time.Duration {
	if fullMatrix() {
		return long
	}
	return short
}

// lastingOps is how many operations a test of endurance does.
func lastingOps(short, long int) int {
	if fullMatrix() {
		return long
	}
	return short
}

// testSeed returns the seed of a test's random choices: a new one each time,
// printed when the test fails, or the one in VERBENA_SEED.
func testSeed(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		v, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("VERBENA_SEED: %v", err)
		}
		seed = v
	}
	t.Logf("VERBENA_SEED=%d repeats this", seed)
	return seed
}

var addrs atomic.Uint32

// nextAddr returns a loopback address that no other test uses, nor a test of
// this package in another process: part of it is the process's number.
func nextAddr() netip.Addr {
	n := addrs.Add(1)
	pid := uint32(os.Getpid()) * 2654435761 >> 16
	return netip.AddrFrom4([4]byte{127, byte(100 + pid>>8%100), byte(pid + n/250), byte(n%250) + 1})
}

// openDevice opens a device, at an address of its own unless cfg names one, and
// closes it after the test, when nothing may be left in it.
func openDevice(t testing.TB, cfg provider.Config) *Device {
	t.Helper()
	if len(cfg.Addrs) == 0 {
		cfg.Addrs = []netip.Addr{nextAddr()}
	}
	d, err := Open("", &cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeAll(t, d) })
	return d
}

// closer is any object of the provider interface.
type closer interface{ Close() error }

// closeAll closes objects, in the given order.
func closeAll(t testing.TB, objects ...closer) {
	t.Helper()
	for _, o := range objects {
		if err := o.Close(); err != nil {
			t.Errorf("closing %T: %v", o, err)
		}
	}
}

// wantErrno fails the test unless err is that errno, as an *ib.OpError.
func wantErrno(t testing.TB, what string, err error, want syscall.Errno) {
	t.Helper()
	var op *ib.OpError
	if !errors.Is(err, want) || !errors.As(err, &op) {
		t.Errorf("%s: %v, want errno %d (%v)", what, err, int(want), want)
	}
}

// simulated opens n devices on a network in memory, at 10.77.0.1 and so on.
func simulated(t testing.TB, n int, net link.FaultyConfig, cfg *provider.Config) (*link.Fabric, []*Device) {
	t.Helper()
	f := link.NewFabric(net)
	devs := make([]*Device, n)
	for i := range devs {
		devs[i] = openOn("test", f.Attach(netip.AddrFrom4([4]byte{10, 77, 0, byte(1 + i)})), cfg)
		t.Cleanup(func() { closeAll(t, devs[i]) })
	}
	return f, devs
}

// virtualPause lets virtual time go on between two polls: in a bubble nothing
// happens while a goroutine spins.
func virtualPause() { time.Sleep(100 * time.Microsecond) }

// stillWaits wants a call not to return, which closes done when it does.
func stillWaits(t testing.TB, done <-chan struct{}) {
	t.Helper()
	for range looks {
		select {
		case <-done:
			t.Fatal("the call has not waited")
		default:
			runtime.Gosched()
		}
	}
}

// bubble runs a subtest in virtual time.
func bubble(t *testing.T, name string, run func(t *testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
}

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(100 * time.Microsecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// counts are a device's counters by name.
type counts map[string]uint64

func countsOf(d *Device) counts {
	c := counts{}
	for _, v := range d.Counters() {
		c[v.Name] = v.Value
	}
	return c
}

// since returns by how much the counters have grown, without those that have
// not.
func (c counts) since(before counts) counts {
	grown := counts{}
	for name, v := range c {
		if d := v - before[name]; d != 0 {
			grown[name] = d
		}
	}
	return grown
}

// wantEvent waits for an asynchronous event of a type, past others.
func wantEvent(t testing.TB, d *Device, want ib.AsyncEvent) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	var seen []ib.AsyncEvent
	for {
		ev, err := d.NextEvent(ctx)
		if err != nil {
			t.Fatalf("no event %+v but %+v: %v", want, seen, err)
		}
		if ev == want {
			return
		}
		seen = append(seen, ev)
	}
}

// noEvent checks that no event waits.
func noEvent(t testing.TB, d *Device) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if ev, err := d.NextEvent(ctx); err == nil {
		t.Errorf("unexpected event: %+v (%v)", ev, ev.Type)
	}
}

// descriptors counts the open file descriptors of this process.
func descriptors(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list) - 1 // the one that reads the directory
}

func isErrno(err error, want syscall.Errno) bool { return errors.Is(err, want) }

// openOn opens a device on a link, for a simulated network: it reaches its peers by that
// link alone.
func openOn(name string, l link.Link, cfg *provider.Config) *Device {
	if cfg == nil {
		cfg = &provider.Config{}
	}
	d := newDevice(name, l, nil, cfg)
	d.first.run()
	return d
}
