package cm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/internal/cma"
	"github.com/verbena-rdma/verbena/verbs"
)

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// device opens a device at a free address, and closes it when the test ends: nothing may be left in it.
func device(t testing.TB, link verbs.LinkMode) *verbs.Device {
	t.Helper()
	d, err := verbs.Open("", &verbs.Config{Link: link})
	check(t, err)
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// anyPort is an address to listen at.
func anyPort(d *verbs.Device) string { return d.Addr().String() + ":0" }

// within returns a context that is long enough for everything but a hang.
func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func listenOn(t testing.TB, at string, cfg *Config) *Listener {
	t.Helper()
	l, err := Listen(within(t), at, cfg)
	check(t, err)
	t.Cleanup(func() { closeAll(t, l) })
	return l
}

func closeAll(t testing.TB, all ...interface{ Close() error }) {
	t.Helper()
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// pair dials and accepts.
func pair(t testing.TB, l *Listener, to string, cfg *Config) (a, b *Conn) {
	t.Helper()
	var wg sync.WaitGroup
	var err error
	wg.Go(func() { b, err = l.Accept(within(t)) })
	a, dialErr := Dial(within(t), to, cfg)
	wg.Wait()
	check(t, errors.Join(dialErr, err))
	return a, b
}

// poll waits for a completion.
func poll(t testing.TB, cq *verbs.CQ) verbs.WC {
	t.Helper()
	wcs := make([]verbs.WC, 1)
	for ctx := within(t); ctx.Err() == nil; runtime.Gosched() {
		if n, err := cq.Poll(wcs); err != nil {
			t.Fatal(err)
		} else if n == 1 {
			return wcs[0]
		}
	}
	t.Fatal("nothing completes")
	return verbs.WC{}
}

// receives returns a Setup that posts a receive into the buffer.
func receives(buf []byte) func(*Conn) error {
	return func(c *Conn) error {
		mr, err := c.RegMR(buf, verbs.AccessLocalWrite)
		if err != nil {
			return err
		}
		_, err = c.QP().PostRecv([]verbs.RecvWR{{ID: 7, SGL: []verbs.SGE{mr.SGE(0, len(buf))}}})
		return err
	}
}

// send sends text, and checks that the peer's buffer has it.
func send(t testing.TB, from, to *Conn, text string, buf []byte) {
	t.Helper()
	_, err := from.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Flags: verbs.SendSignaled, Inline: []byte(text)}})
	check(t, err)
	wc := poll(t, to.RecvCQ())
	check(t, wc.Err())
	if got := string(buf[:wc.ByteLen]); got != text {
		t.Errorf("%q has come, not %q", got, text)
	}
	wc = poll(t, from.SendCQ())
	check(t, wc.Err())
}

// Connections are made over each link, from the same device and from another one. Private data and
// messages go both ways; the side that does not close hears of it.
func TestConnect(t *testing.T) {
	for _, typ := range []verbs.QPType{verbs.RC, verbs.UC} {
		for _, link := range []verbs.LinkMode{"", verbs.LinkUDP, verbs.LinkLocal, verbs.LinkLoop} {
			for _, same := range []bool{true, false} {
				t.Run(fmt.Sprintf("%v,%q,%v", typ, link, same), func(t *testing.T) {
					server := device(t, link)
					client := server
					if !same {
						client = device(t, link)
					}
					testConnect(t, typ, server, client)
				})
			}
		}
	}
}

func testConnect(t *testing.T, typ verbs.QPType, server, client *verbs.Device) {
	toServer, toClient := make([]byte, 16), make([]byte, 16)
	l := listenOn(t, ":0", &Config{Type: typ, Device: server, Private: []byte("welcome"), Setup: receives(toServer)})
	at := fmt.Sprintf("%v:%d", server.Addr(), l.Addr().Port())
	a, b := pair(t, l, at, &Config{Type: typ, Device: client, Private: []byte("hello"), Setup: receives(toClient)})
	if p := a.Private(); len(p) != MaxAcceptPrivate || !bytes.HasPrefix(p, []byte("welcome\x00")) {
		t.Errorf("the listener says %q", p)
	}
	if p := b.Private(); len(p) != MaxDialPrivate || !bytes.HasPrefix(p, []byte("hello\x00")) {
		t.Errorf("the dialer says %q", p)
	}
	if a.RemoteAddr() != b.LocalAddr() || a.LocalAddr() != b.RemoteAddr() || a.RemoteAddr().String() != at || a.LocalAddr().Addr() != client.Addr() {
		t.Errorf("from %v to %v, seen as from %v to %v", a.LocalAddr(), a.RemoteAddr(), b.RemoteAddr(), b.LocalAddr())
	}
	send(t, a, b, "ping", toServer)
	send(t, b, a, "pong", toClient)
	if a.Err() != nil || b.Err() != nil {
		t.Errorf("ended: %v, %v", a.Err(), b.Err())
	}

	// A receive that is posted, and a peer that closes: it is flushed.
	mr, err := b.RegMR(make([]byte, 8), verbs.AccessLocalWrite)
	check(t, err)
	_, err = b.QP().PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, 8)}}})
	check(t, err)
	closeAll(t, a, a)
	select {
	case <-b.Done():
	case <-within(t).Done():
		t.Fatal("the peer does not hear of the end")
	}
	if wc := poll(t, b.RecvCQ()); wc.Status != verbs.WCWRFlushErr {
		t.Errorf("the receive ends with %v", wc.Status)
	}
	if !errors.Is(a.Err(), net.ErrClosed) || !errors.Is(b.Err(), ErrDisconnected) {
		t.Errorf("ended with %v and %v", a.Err(), b.Err())
	}
	closeAll(t, b, b)
}

// A listener without a host listens at all addresses of the device, of both versions.
func TestAddresses(t *testing.T) {
	d, err := verbs.Open("both", &verbs.Config{Link: verbs.LinkLoop, Addrs: []netip.Addr{netip.MustParseAddr("127.84.1.1"), netip.IPv6Loopback()}})
	check(t, err)
	cfg := &Config{Device: d}
	l := listenOn(t, ":0", cfg)
	port := fmt.Sprintf(":%d", l.Addr().Port())
	for host, want := range map[string]string{"": "[::1]", "127.84.1.1": "127.84.1.1", "[::1]": "[::1]", "localhost": "127.84.1.1", "127.0.0.1": "127.84.1.1"} {
		a, b := pair(t, l, host+port, cfg)
		if got := a.RemoteAddr().String(); got != want+port || b.LocalAddr() != a.RemoteAddr() {
			t.Errorf("%q: a connection to %v, not to %v", host, got, want)
		}
		closeAll(t, b, a)
	}
	if _, err := Listen(within(t), "127.84.1.1"+port, cfg); !errors.Is(err, syscall.EADDRNOTAVAIL) {
		t.Errorf("the port is taken twice: %v", err)
	}
	closeAll(t, l)
	l = listenOn(t, "127.84.1.1"+port, cfg)
	if _, err := Dial(within(t), "[::1]"+port, cfg); !errors.Is(err, ErrRefused) {
		t.Errorf("IPv6, where nobody listens: %v", err)
	}
	closeAll(t, l, d)
}

// What Setup says is what the peer hears, and nobody else may say it.
func TestSetPrivate(t *testing.T) {
	d := device(t, "")
	say := func(what string, room int) func(*Conn) error {
		return func(c *Conn) error {
			if err := c.SetPrivate(make([]byte, room+1)); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("%d bytes: %v", room+1, err)
			}
			return c.SetPrivate([]byte(what))
		}
	}
	l := listenOn(t, anyPort(d), &Config{Device: d, Private: []byte("not this"), Setup: say("key", MaxAcceptPrivate)})
	a, b := pair(t, l, l.Addr().String(), &Config{Device: d, Setup: say("name", MaxDialPrivate)})
	if !bytes.HasPrefix(a.Private(), []byte("key\x00")) || !bytes.HasPrefix(b.Private(), []byte("name\x00")) {
		t.Errorf("%q and %q", a.Private(), b.Private())
	}
	if err := a.SetPrivate(nil); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("SetPrivate returns %v", err)
	}
	closeAll(t, a, b)
}

// What both sides agree on is in the queue pairs.
func TestParameters(t *testing.T) {
	d := device(t, "")
	l := listenOn(t, ":0", &Config{Device: d, ResponderResources: 4, InitiatorDepth: -1, RNRRetry: 5, MinRNRTimer: 3, Access: verbs.AccessRemoteRead})
	a, b := pair(t, l, fmt.Sprintf("%v:%d", d.Addr(), l.Addr().Port()),
		&Config{Device: d, InitiatorDepth: 9, RetryCount: 3, RNRRetry: -1, AckTimeout: 18, TOS: 0x68})
	active, err := a.QP().Query()
	check(t, err)
	passive, err := b.QP().Query()
	check(t, err)
	if active.MaxRDAtomic != 4 || active.MaxDestRDAtomic != 0 || passive.MaxRDAtomic != 0 || passive.MaxDestRDAtomic != 4 {
		t.Errorf("READs: %d and %d, %d and %d", active.MaxRDAtomic, active.MaxDestRDAtomic, passive.MaxRDAtomic, passive.MaxDestRDAtomic)
	}
	if active.RetryCnt != 3 || passive.RetryCnt != 3 || active.RNRRetry != 5 || passive.RNRRetry != 0 || active.Timeout != 18 || passive.MinRNRTimer != 3 {
		t.Errorf("active %+v, passive %+v", active, passive)
	}
	if active.AV.TrafficClass != 0x68 || passive.AV.TrafficClass != 0x68 || passive.Access&verbs.AccessRemoteWrite != 0 {
		t.Errorf("traffic classes %#x, %#x, access %v", active.AV.TrafficClass, passive.AV.TrafficClass, passive.Access)
	}
	closeAll(t, b, a)
}

// Objects of the program are used, and stay.
func TestOwnObjects(t *testing.T) {
	d := device(t, "")
	pd, err := d.AllocPD()
	check(t, err)
	cq, err := d.CreateCQ(16, nil)
	check(t, err)
	srq, err := pd.CreateSRQ(&verbs.SRQConfig{MaxWR: 4, MaxSGE: 1})
	check(t, err)
	buf := make([]byte, 8)
	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite)
	check(t, err)
	_, err = srq.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, 8)}}})
	check(t, err)
	l := listenOn(t, anyPort(d), &Config{Device: d, PD: pd, RecvCQ: cq, SRQ: srq})
	a, b := pair(t, l, l.Addr().String(), &Config{Device: d, PD: pd, SendCQ: cq})
	if b.PD() != pd || b.RecvCQ() != cq || b.SendCQ() == cq || a.SendCQ() != cq || a.RecvCQ() == cq || a.Device() != d {
		t.Error("other objects are used")
	}
	_, err = a.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("shared")}})
	check(t, err)
	check(t, ptr(poll(t, cq)).Err())
	if string(buf[:6]) != "shared" {
		t.Errorf("%q has come", buf)
	}
	closeAll(t, a, b, mr, srq, cq, pd)
}

func ptr[T any](v T) *T { return &v }

// A region of the program's in the connection's own domain keeps Close from its end, once.
func TestCloseBusy(t *testing.T) {
	d := device(t, "")
	l := listenOn(t, anyPort(d), &Config{Device: d})
	a, b := pair(t, l, l.Addr().String(), &Config{Device: d})
	mr, err := a.PD().RegMR(make([]byte, 8), 0)
	check(t, err)
	if err := a.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Close returns %v", err)
	}
	if !errors.Is(a.Err(), ErrClosed) {
		t.Errorf("the connection has ended with %v", a.Err())
	}
	closeAll(t, mr, a, b)
}

// Without a device the package opens it, shares it and closes it. 127.77.0.0/24 is for programs that
// name no address, so the test takes another one.
func TestOwnDevice(t *testing.T) {
	at := fmt.Sprintf("127.80.%d.%d", os.Getpid()>>8&0xff, 1+os.Getpid()%250) // other tests run beside this one
	l := listenOn(t, at+":0", nil)
	a, b := pair(t, l, l.Addr().String(), nil)
	if a.Device() != b.Device() {
		t.Error("the two sides have two devices")
	}
	if _, err := Listen(within(t), l.Addr().String(), nil); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("the port is taken twice: %v", err)
	}
	closeAll(t, l, b)
	if _, err := verbs.Open(at, nil); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("the device is closed while a connection is open: %v", err)
	}
	closeAll(t, a)
	d, err := verbs.Open(at, nil)
	check(t, err)
	closeAll(t, d)
}

// A device cannot be closed under a listener.
func TestDeviceInUse(t *testing.T) {
	d := device(t, "")
	l := listenOn(t, anyPort(d), &Config{Device: d})
	if err := d.Close(); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("Close returns %v", err)
	}
	closeAll(t, l, l)
	if _, err := l.Accept(within(t)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Accept returns %v", err)
	}
}

// Refusals come with their reason and private data, and errors.Is knows them.
func TestReject(t *testing.T) {
	d := device(t, "")
	cfg := &Config{Device: d}
	l := listenOn(t, anyPort(d), cfg)
	at := l.Addr().String()
	refused := func(want Reason, private string) {
		t.Helper()
		_, err := Dial(within(t), at, cfg)
		var rej *RejectError
		if !errors.As(err, &rej) || rej.Reason != want || !bytes.HasPrefix(rej.Private, []byte(private)) {
			t.Errorf("refused with %v", err)
		}
		if !errors.Is(err, ErrRefused) || !errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("errors.Is does not know %v", err)
		}
		var op *net.OpError
		if !errors.As(err, &op) || op.Op != "dial" || op.Addr.String() != at {
			t.Errorf("the error is %#v", err)
		}
	}
	serve := func(f func(*Request)) *sync.WaitGroup {
		var wg sync.WaitGroup
		wg.Go(func() {
			r, err := l.Next(within(t))
			if err != nil {
				t.Error(err)
				return
			}
			f(r)
		})
		return &wg
	}
	wg := serve(func(r *Request) {
		if err := r.Reject(0, make([]byte, MaxRejectPrivate+1)); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("too much private data: %v", err)
		}
		if err := r.Reject(0, []byte("try later\x00")); err != nil {
			t.Error(err)
		}
		if err := r.Reject(0, nil); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("rejected twice: %v", err)
		}
		if _, err := r.Accept(within(t), nil); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("accepted after that: %v", err)
		}
	})
	refused(ReasonProgram, "try later\x00")
	wg.Wait()
	wg = serve(func(r *Request) {
		if err := r.Reject(ReasonNoResources, nil); err != nil {
			t.Error(err)
		}
	})
	refused(ReasonNoResources, "")
	wg.Wait()
	// A Setup that fails refuses, and the program that listens gets its error.
	failed := errors.New("no setup")
	wg = serve(func(r *Request) {
		if _, err := r.Accept(within(t), &Config{Setup: func(*Conn) error { return failed }}); !errors.Is(err, failed) {
			t.Errorf("Accept returns %v", err)
		}
	})
	refused(ReasonProgram, "")
	wg.Wait()
	closeAll(t, l)
	refused(ReasonNoListener, "")
}

// A context that has ended, or ends while the peer does not answer, ends Dial; the peer hears of it.
func TestDialContext(t *testing.T) {
	d := device(t, "")
	cfg := &Config{Device: d}
	l := listenOn(t, anyPort(d), cfg)
	at := l.Addr().String()

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Dial(ctx, at, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
	if _, err := Listen(ctx, ":0", cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("Listen: %v", err)
	}
	if _, err := l.Accept(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Accept: %v", err)
	}

	ctx, cancel = context.WithCancel(context.Background())
	var wg sync.WaitGroup
	var dialErr error
	wg.Go(func() { _, dialErr = Dial(ctx, at, cfg) })
	r, err := l.Next(within(t))
	check(t, err)
	cancel()
	wg.Wait()
	if !errors.Is(dialErr, context.Canceled) {
		t.Errorf("cancelled after: %v", dialErr)
	}
	for ctx := within(t); len(r.conn.events) == 0; runtime.Gosched() {
		check(t, ctx.Err())
	}
	_, err = r.Accept(within(t), nil)
	var rej *RejectError
	if !errors.As(err, &rej) || rej.Reason != ReasonTimeout {
		t.Errorf("the request that was given up: %v", err)
	}

	// Nobody has the address: the deadline cuts the long timers.
	ctx, cancel = context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, "127.79.255.250:1", cfg)
	var op *net.OpError
	if !errors.Is(err, context.DeadlineExceeded) || !errors.As(err, &op) || !op.Timeout() {
		t.Errorf("the deadline: %v", err)
	}
}

// A listener that is closed refuses requests that wait, and ends Accept.
func TestListenerClosed(t *testing.T) {
	d := device(t, "")
	cfg := &Config{Device: d}
	l := listenOn(t, anyPort(d), cfg)
	const n = 8
	errs := make(chan error, n)
	for range n {
		go func() {
			_, err := Dial(within(t), l.Addr().String(), cfg)
			errs <- err
		}()
	}
	waiting := func() int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.again.Len() + l.fresh.Len()
	}
	for ctx := within(t); waiting() < n; runtime.Gosched() {
		check(t, ctx.Err())
	}
	closeAll(t, l)
	for range n {
		if err := <-errs; !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("Dial returns %v", err)
		}
	}

	// So is one that the program has taken and not accepted.
	l = listenOn(t, anyPort(d), cfg)
	go func() {
		_, err := Dial(within(t), l.Addr().String(), cfg)
		errs <- err
	}()
	r, err := l.Next(within(t))
	check(t, err)
	closeAll(t, l)
	if _, err := r.Accept(within(t), nil); !errors.Is(err, ErrClosed) {
		t.Errorf("Accept of a request whose listener is closed: %v", err)
	}
	if err := <-errs; !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("Dial returns %v", err)
	}

	l = listenOn(t, anyPort(d), cfg)
	go func() {
		_, err := l.Accept(context.Background())
		errs <- err
	}()
	closeAll(t, l)
	if err := <-errs; !errors.Is(err, ErrClosed) {
		t.Errorf("Accept returns %v", err)
	}
}

// 200 connections are made at once; on each a message goes both ways, and both sides close at the same
// time.
func TestMany(t *testing.T) {
	server, client := device(t, ""), device(t, "")
	cap := verbs.QPCap{MaxSendWR: 2, MaxRecvWR: 2, MaxSendSGE: 1, MaxRecvSGE: 1, MaxInlineData: 16}
	l := listenOn(t, anyPort(server), &Config{Device: server, Cap: cap, Setup: receives(make([]byte, 16))})
	const n = 200
	var wg sync.WaitGroup
	ctx := within(t)
	one := func(c *Conn, err error) {
		if err != nil {
			t.Error(err)
			return
		}
		if _, err := c.QP().PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("x"), Flags: verbs.SendSignaled}}); err != nil {
			t.Error(err)
		}
		wcs := make([]verbs.WC, 2)
		for got := 0; got < 2 && ctx.Err() == nil; runtime.Gosched() {
			n, err := c.RecvCQ().Poll(wcs)
			if err != nil {
				t.Error(err)
				break
			}
			for _, wc := range wcs[:n] {
				// The peer may have closed after its own two completions, before it has acknowledged
				// this side's message a second time: a send may end flushed, the receive not.
				if wc.Status != verbs.WCSuccess && wc.Op == verbs.WCRecv {
					t.Errorf("%v: %v", wc.Op, wc.Status)
				}
			}
			got += n
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for range n {
		wg.Go(func() { one(l.Accept(ctx)) })
		wg.Go(func() {
			one(Dial(ctx, l.Addr().String(), &Config{Device: client, Cap: cap, Setup: receives(make([]byte, 16))}))
		})
	}
	wg.Wait()
}

// A Config that cannot be is refused, and so is an address.
func TestInvalid(t *testing.T) {
	d := device(t, "")
	pd, err := d.AllocPD()
	check(t, err)
	defer closeAll(t, pd)
	for _, cfg := range []*Config{
		{Type: verbs.UD},
		{Private: make([]byte, MaxDialPrivate+1)},
		{PD: pd},
		{AckTimeout: 32},
		{Device: new(verbs.Device)},
	} {
		if _, err := Dial(within(t), "127.79.255.250:1", cfg); !errors.Is(err, syscall.EINVAL) {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	for _, at := range []string{"", "127.79.1.13", "127.79.1.13:x"} {
		if _, err := Dial(within(t), at, &Config{Device: d}); err == nil {
			t.Errorf("%q is an address", at)
		}
	}
	if _, err := Listen(within(t), "192.0.2.1:1", &Config{Device: d}); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("an address of another host: %v", err)
	}
}

// Datagram services are found by address; a datagram goes there.
func TestDatagrams(t *testing.T) {
	server, client := device(t, ""), device(t, "")
	type side struct {
		pd *verbs.PD
		cq *verbs.CQ
		qp *verbs.QP
	}
	open := func(d *verbs.Device) (s side) {
		var err error
		s.pd, err = d.AllocPD()
		check(t, err)
		s.cq, err = d.CreateCQ(4, nil)
		check(t, err)
		s.qp, err = s.pd.CreateQP(&verbs.QPConfig{Type: verbs.UD, SendCQ: s.cq, RecvCQ: s.cq, Cap: verbs.QPCap{MaxSendWR: 2, MaxRecvWR: 2, MaxRecvSGE: 1, MaxInlineData: 16}})
		check(t, err)
		t.Cleanup(func() { closeAll(t, s.qp, s.cq, s.pd) })
		return s
	}
	a, b := open(client), open(server)
	if _, err := Announce(within(t), ":0", b.qp, &Config{Device: server}); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("a queue pair without the Q_Key: %v", err)
	}
	check(t, ReadyUD(a.qp))
	check(t, ReadyUD(b.qp))
	buf := make([]byte, verbs.GRHLength+8)
	mr, err := b.pd.RegMR(buf, verbs.AccessLocalWrite)
	check(t, err)
	t.Cleanup(func() { closeAll(t, mr) })
	_, err = b.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{mr.SGE(0, len(buf))}}})
	check(t, err)
	s, err := Announce(within(t), anyPort(server), b.qp, &Config{Device: server, Answer: func(from netip.AddrPort, private []byte) ([]byte, bool) {
		return append([]byte("for "), bytes.TrimRight(private, "\x00")...), from.Addr() == client.Addr() && private[0] != 'x'
	}})
	check(t, err)
	peer, err := Resolve(within(t), s.Addr().String(), &Config{Device: client, Private: []byte("me")})
	check(t, err)
	if peer.QPN != b.qp.Number() || peer.QKey != QKey || peer.RemoteAddr != s.Addr() || len(peer.Private) != MaxAnswerPrivate || !bytes.HasPrefix(peer.Private, []byte("for me\x00")) {
		t.Errorf("resolved to %+v", peer)
	}
	ah, err := a.pd.CreateAH(peer.AH)
	check(t, err)
	_, err = a.qp.PostSend([]verbs.SendWR{{Op: verbs.OpSend, Inline: []byte("datagram"), AH: ah, RemoteQPN: peer.QPN, RemoteQKey: peer.QKey}})
	check(t, err)
	check(t, ptr(poll(t, b.cq)).Err())
	if string(buf[verbs.GRHLength:]) != "datagram" {
		t.Errorf("%q has come", buf[verbs.GRHLength:])
	}
	check(t, ah.Close())

	var rej *RejectError
	if _, err := Resolve(within(t), s.Addr().String(), &Config{Device: client, Private: []byte("x")}); !errors.As(err, &rej) || rej.Reason != ReasonProgram {
		t.Errorf("refused: %v", err)
	}
	closeAll(t, s, s)
	if _, err := Resolve(within(t), s.Addr().String(), &Config{Device: client}); !errors.As(err, &rej) || rej.Reason != ReasonNoListener {
		t.Errorf("nobody answers: %v", err)
	}
}

// Each event that ends an attempt is an error that programs can tell from others.
func TestFailures(t *testing.T) {
	for _, c := range []struct {
		e    cma.Event
		want error
	}{
		{cma.Event{Type: cma.Unreachable, Status: -int(syscall.ETIMEDOUT)}, syscall.ETIMEDOUT},
		{cma.Event{Type: cma.AddrError, Status: -int(syscall.ENODEV)}, syscall.ENODEV},
		{cma.Event{Type: cma.ConnectError, Status: -int(syscall.EINVAL)}, syscall.EINVAL},
		{cma.Event{Type: cma.Unreachable, Status: 3}, ErrRefused},
		{cma.Event{Type: cma.Unreachable, Status: 9}, ErrRefused},
		{cma.Event{Type: cma.Rejected, Status: 99}, syscall.ECONNREFUSED},
		{cma.Event{Type: cma.Disconnected}, ErrDisconnected},
		{cma.Event{Type: cma.Established}, nil},
	} {
		if err := failure(&c.e); !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%+v is %v", c.e, err)
		}
	}
	if s := (&RejectError{Reason: 99}).Error(); s != "connection refused: reason 99" {
		t.Error(s)
	}
	if err := opError("dial", netip.AddrPort{}, syscall.ETIMEDOUT); !err.(net.Error).Timeout() {
		t.Errorf("%v is no timeout", err)
	}
}
