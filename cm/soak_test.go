package cm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/verbs"
)

// lossEnv makes a peer in another process lose messages, by a seed.
const lossEnv = "VERBENA_TEST_CM_LOSS"

// loss is the part of the connection manager's messages that a soak loses.
const loss = 0.05

// losing returns what makes a device lose messages of the connection manager.
func losing(seed uint64) func(provider.Device) provider.Device {
	var mu sync.Mutex // guards rng
	rng := rand.New(rand.NewPCG(seed, 5))
	lost := func() bool {
		mu.Lock()
		defer mu.Unlock()
		return rng.Float64() < loss
	}
	return func(d provider.Device) provider.Device { return losingDevice{d, lost} }
}

type losingDevice struct {
	provider.Device
	lost func() bool
}

func (d losingDevice) Management() provider.Management {
	return losingManagement{d.Device.Management(), d.lost}
}

type losingManagement struct {
	provider.Management
	lost func() bool
}

func (m losingManagement) Send(d *provider.MAD) error {
	if m.lost() {
		return nil
	}
	return m.Management.Send(d)
}

// soak is what the workers of a soak share.
type soak struct {
	t              *testing.T
	seed           uint64
	server, client *verbs.Device
	serves         *Listener // accepts all
	picks          *Listener // accepts some, late, and refuses others
	stop           chan struct{}
	wg             sync.WaitGroup // those that begin connections
	ends           sync.WaitGroup // those that serve them

	done, refused, aborted, killed, heard atomic.Int64
}

// Connections are made, refused, given up and closed for the duration in VERBENA_SOAK, and processes that
// make them are killed, while 5 % of the connection manager's messages are lost. All that should come
// about does, and nothing is left.
func TestSoakConnections(t *testing.T) {
	d, err := time.ParseDuration(os.Getenv("VERBENA_SOAK"))
	if err != nil {
		t.Skip("full: soaks run with make soak, which sets VERBENA_SOAK to a duration")
	}
	s := &soak{t: t, seed: rand.Uint64(), stop: make(chan struct{})}
	if v := os.Getenv("VERBENA_SEED"); v != "" {
		s.seed, err = strconv.ParseUint(v, 10, 64)
		check(t, err)
	}
	t.Logf("VERBENA_SEED=%d", s.seed)
	managed = losing(s.seed)
	defer func() { managed = func(d provider.Device) provider.Device { return d } }()
	before := runtime.NumGoroutine()
	s.server, s.client = device(t, verbs.LinkUDP), device(t, verbs.LinkUDP)
	s.serves = listenOn(t, anyPort(s.server), &Config{Device: s.server, Setup: func(c *Conn) error { return receives(make([]byte, 16))(c) }})
	s.picks = listenOn(t, anyPort(s.server), &Config{Device: s.server, Backlog: 8})
	serving, end := context.WithCancel(context.Background())
	for range 4 {
		s.ends.Go(func() { s.serve(serving) })
		s.ends.Go(func() { s.pick(serving) })
	}
	for i, work := range []func(*rand.Rand) error{s.talk, s.talk, s.talk, s.talk, s.talk, s.talk, s.ask, s.ask, s.ask, s.abort, s.abort, s.nobody, s.kill, s.kill} {
		s.wg.Go(func() {
			rng := rand.New(rand.NewPCG(s.seed, uint64(i)))
			for {
				select {
				case <-s.stop:
					return
				default:
				}
				if err := work(rng); err != nil {
					t.Errorf("worker %d: %v", i, err)
					return
				}
			}
		})
	}
	time.Sleep(d)
	close(s.stop)
	s.wg.Wait()
	end()
	s.ends.Wait()
	closeAll(t, s.serves, s.picks)
	inUse.mu.Lock()
	if len(inUse.list) > 0 {
		t.Errorf("%d devices are in use at the end", len(inUse.list))
	}
	inUse.mu.Unlock()
	t.Logf("%d connections, %d refused, %d given up, %d processes killed, the end of %d connections heard of", s.done.Load(), s.refused.Load(), s.aborted.Load(), s.killed.Load(), s.heard.Load())
	if s.done.Load() == 0 || s.refused.Load() == 0 || s.aborted.Load() == 0 || s.killed.Load() == 0 {
		t.Error("something was never done")
	}
	closeAll(t, s.server, s.client)
	for ctx := within(t); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

// hold closes a connection when its peer has, or when nothing has been heard for some time: the peer's
// last message may be lost.
func (s *soak) hold(c *Conn) {
	select {
	case <-c.Done():
		s.heard.Add(1)
	case <-time.After(10 * time.Second):
	}
	if err := c.Close(); err != nil {
		s.t.Error(err)
	}
}

// serve accepts connections.
func (s *soak) serve(ctx context.Context) {
	for {
		c, err := s.serves.Accept(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.t.Error(err)
			}
			return
		}
		s.ends.Go(func() { s.hold(c) })
	}
}

// pick accepts every second request, some of them late, and refuses the others.
func (s *soak) pick(ctx context.Context) {
	for {
		r, err := s.picks.Next(ctx)
		if err != nil {
			if ctx.Err() == nil {
				s.t.Error(err)
			}
			return
		}
		p := r.Private()
		time.Sleep(time.Duration(p[1]%8) * time.Millisecond)
		if p[0] == 0 {
			if err := r.Reject(0, []byte{p[1]}); err != nil {
				s.t.Error(err)
			}
			continue
		}
		s.ends.Go(func() {
			within, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			if c, err := r.Accept(within, nil); err == nil { // the peer may have given up
				s.hold(c)
			}
		})
	}
}

func (s *soak) dial(ctx context.Context, rng *rand.Rand, l *Listener, private []byte) (*Conn, error) {
	dev := s.client
	if rng.IntN(2) == 0 {
		dev = s.server
	}
	return Dial(ctx, l.Addr().String(), &Config{Device: dev, Private: private})
}

// patience is how long something may take that is sent again and again: three messages in a row may be
// lost, at 4.6 s each, and the machine may be slow.
const patience = 90 * time.Second

func upTo(rng *rand.Rand, d time.Duration) time.Duration { return time.Duration(rng.Int64N(int64(d))) }

// talk makes a connection and sends a message.
func (s *soak) talk(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, err := s.dial(ctx, rng, s.serves, nil)
	if err != nil {
		return err
	}
	_, err = c.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte("ping")}})
	for wcs := make([]verbs.WC, 1); err == nil; runtime.Gosched() {
		var n int
		if n, err = c.SendCQ().Poll(wcs); n == 1 {
			err = wcs[0].Err()
			break
		}
		if ctx.Err() != nil {
			err = ctx.Err()
		}
	}
	s.done.Add(1)
	return errors.Join(err, c.Close())
}

// ask wants to be refused, or not.
func (s *soak) ask(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	private := []byte{byte(rng.IntN(2)), byte(rng.IntN(256))}
	c, err := s.dial(ctx, rng, s.picks, private)
	if private[0] == 1 {
		if err != nil {
			return err
		}
		s.done.Add(1)
		return c.Close()
	}
	var r *RejectError
	if !errors.As(err, &r) || r.Reason != ReasonProgram || r.Private[0] != private[1] {
		return fmt.Errorf("refused with %v, %w", r, err)
	}
	s.refused.Add(1)
	return nil
}

// abort gives up, at any moment.
func (s *soak) abort(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), upTo(rng, 5*time.Millisecond))
	defer cancel()
	c, err := s.dial(ctx, rng, []*Listener{s.serves, s.picks}[rng.IntN(2)], []byte{1})
	if err == nil {
		return c.Close()
	}
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	s.aborted.Add(1)
	return nil
}

// nobody asks where nobody listens.
func (s *soak) nobody(rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	_, err := Dial(ctx, s.server.Addr().String()+":7", &Config{Device: s.client})
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("nobody listens: %w", err)
	}
	time.Sleep(upTo(rng, 20*time.Millisecond))
	return nil
}

// kill starts a process that makes a connection, and kills it: at any moment, or when it is connected.
func (s *soak) kill(rng *rand.Rand) error {
	from := []*verbs.Device{s.server, s.client}[rng.IntN(2)]
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), peerEnv+"="+from.Addr().String()+" "+s.serves.Addr().String(), fmt.Sprint(lossEnv, "=", rng.Uint64()))
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	if rng.IntN(2) == 0 {
		time.Sleep(upTo(rng, 500*time.Millisecond))
	} else if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "connected\n" {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // the line says more
		return fmt.Errorf("a process says %q, %w: %s", line, err, &stderr)
	}
	if err := cmd.Process.Kill(); err != nil {
		return err
	}
	_ = cmd.Wait() // it was killed
	_ = in.Close()
	s.killed.Add(1)
	return nil
}
