package main

// Requests that are refused, and those that a listener's backlog has no room for: cmpeer on the
// kernel's device, against cmpeer on ours by the drop-in libibverbs, and against package cm in Go.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
)

// What the two sides say in private data, and where they meet.
const (
	cmpeerPort = "7200"
	clientSays = "may-I-come-in"
	refusal    = "not-today"
	welcome    = "welcome"

	backlog = 2
	crowd   = 4 // requests at once, more than the backlog
)

func refusals() (rows []*testCase) {
	for _, c := range []struct {
		testCase
		run func(*scene) error
	}{
		{testCase{name: "cm/reject"}, (*scene).refused},
		{testCase{name: "cm/go/reject", shortV4: true}, (*scene).refusedInGo},
		{testCase{name: "cm/backlog"}, (*scene).fullBacklog},
		{testCase{name: "cm/go/backlog"}, (*scene).fullBacklogInGo},
	} {
		rows = append(rows, everyWay(c.testCase, c.run)...)
	}
	for _, family := range bothFamilies {
		rows = append(rows, &testCase{name: "cm/native/" + family + "/we", family: family, short: family == "v4", run: (*scene).nativeAddresses})
	}
	return rows
}

// The commands of cmpeer.
func peerConnects(count int) string {
	return fmt.Sprintf("%s connect IP %s %d %s", cmPeer, cmpeerPort, count, clientSays)
}

func peerRejects(count int) string {
	return fmt.Sprintf("%s reject IP %s %d %s", cmPeer, cmpeerPort, count, refusal)
}

func peerAccepts() string {
	return fmt.Sprintf("%s accept IP %s %d %s %d", cmPeer, cmpeerPort, crowd, welcome, backlog)
}

// until waits for a line that begins with start, of the output of a program that goes on after it.
func (r *running) until(ctx context.Context, start string) error {
	for !strings.Contains("\n"+r.said.String(), "\n"+start) {
		select {
		case err := <-r.done:
			r.done <- err
			return fmt.Errorf("%s has ended (%v) before it said %q:\n%s", strings.Join(r.cmd.Args, " "), err, start, r.said.String())
		case <-ctx.Done():
			return fmt.Errorf("%s has not said %q: %w:\n%s", strings.Join(r.cmd.Args, " "), start, ctx.Err(), r.said.String())
		case <-time.After(10 * time.Millisecond):
		}
	}
	return nil
}

// finish waits for a program, which must succeed and must have said certain lines, in any order, besides
// others that begin otherwise.
func (r *running) finish(prefix string, want ...string) error {
	err := <-r.done
	var got []string
	for line := range strings.Lines(r.said.String()) {
		if strings.HasPrefix(line, prefix) {
			got = append(got, strings.TrimSuffix(line, "\n"))
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		return fmt.Errorf("%s: %v, lines of %q are %q, want %q; all:\n%s", strings.Join(r.cmd.Args, " "), err, prefix, got, want, r.said.String())
	}
	return nil
}

// Lines of cmpeer. The receiver of private data gets all of the room that the message has.
var (
	requestLine  = fmt.Sprintf("request len=%d private=%s", cm.MaxDialPrivate, clientSays)
	acceptedLine = fmt.Sprintf("established len=%d private=%s", cm.MaxAcceptPrivate, welcome)
)

func rejectedLine(reason cm.Reason, private string) string {
	return fmt.Sprintf("rejected status=%d len=%d private=%s", reason, cm.MaxRejectPrivate, private)
}

// nativeAddresses: addresses of family AF_IB, which RoCE does not have, get the kernel's verdict.
func (s *scene) nativeAddresses() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel() // it also ends what still runs
	// Each side has its own address, and the other's.
	one, other := s.commands(cmPeer+" native IP OWN", cmPeer+" native OWN IP")
	var said [2]string
	for i, args := range [][]string{one, other} {
		r, err := begin(ctx, args)
		if err != nil {
			return err
		}
		if err := <-r.done; err != nil {
			return fmt.Errorf("%s: %w:\n%s", strings.Join(args, " "), err, r.said.String())
		}
		said[i] = r.said.String()
	}
	if said[0] == said[1] {
		return nil
	}
	var diff strings.Builder
	a, b := strings.Split(said[0], "\n"), strings.Split(said[1], "\n")
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			fmt.Fprintf(&diff, "%q, %q\n", a[min(i, len(a)-1)], b[min(i, len(b)-1)])
		}
	}
	return fmt.Errorf("%s and %s differ:\n%s", strings.Join(one, " "), strings.Join(other, " "), diff.String())
}

// refused: a server refuses two requests, with private data.
func (s *scene) refused() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel() // it also ends what still runs
	before, err := repeatedMessages()
	if err != nil {
		return err
	}
	serve, connect := s.commands(peerRejects(2), peerConnects(2))
	server, err := begin(ctx, serve)
	if err != nil {
		return err
	}
	if err := server.until(ctx, "listening"); err != nil {
		return err
	}
	client, err := begin(ctx, connect)
	if err != nil {
		return err
	}
	line := rejectedLine(cm.ReasonProgram, refusal)
	if err := errors.Join(client.finish("rejected", line, line), server.finish("request", requestLine, requestLine)); err != nil {
		return err
	}
	return noneRepeated(before, false)
}

// refusedInGo: the kernel's server refuses us, or we refuse the kernel's client.
func (s *scene) refusedInGo() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel() // it also ends what still runs
	before, err := repeatedMessages()
	if err != nil {
		return err
	}
	if s.weInit {
		err = s.kernelRefuses(ctx)
	} else {
		err = s.weRefuse(ctx)
	}
	if err != nil {
		return err
	}
	return noneRepeated(before, false)
}

// goAddr is where the server is, for package cm.
func (s *scene) goAddr() string { return net.JoinHostPort(s.serverAddr().String(), cmpeerPort) }

// kernelRefuses dials the kernel's server, which refuses.
func (s *scene) kernelRefuses(ctx context.Context) error {
	server, err := begin(ctx, inKernelNS(s.fill(peerRejects(1))...))
	if err != nil {
		return err
	}
	if err := server.until(ctx, "listening"); err != nil {
		return err
	}
	c, err := cm.Dial(ctx, s.goAddr(), &cm.Config{Device: s.ours.dev, Private: []byte(clientSays)})
	if err == nil {
		return errors.Join(errors.New("the server has refused, and Dial has succeeded"), c.Close())
	}
	if err := checkRefusal(err, cm.ReasonProgram, refusal); err != nil {
		return err
	}
	if err := server.finish("request", requestLine); err != nil {
		return err
	}
	// Now nobody listens, and the kernel itself refuses.
	_, err = cm.Dial(ctx, s.goAddr(), &cm.Config{Device: s.ours.dev})
	return checkRefusal(err, cm.ReasonNoListener, "")
}

// checkRefusal checks an error of Dial.
func checkRefusal(err error, reason cm.Reason, private string) error {
	var op *net.OpError
	var refused *cm.RejectError
	switch {
	case !errors.Is(err, cm.ErrRefused) || !errors.Is(err, syscall.ECONNREFUSED) || !errors.As(err, &op) || !errors.As(err, &refused):
		return fmt.Errorf("no refusal, but %w", err)
	case refused.Reason != reason:
		return fmt.Errorf("the reason is %d (%w), want %d", refused.Reason, err, reason)
	}
	return checkPrivate(refused.Private, private, cm.MaxRejectPrivate)
}

// checkPrivate checks private data: text, and zeros behind it.
func checkPrivate(got []byte, text string, room int) error {
	want := append([]byte(text), make([]byte, room-len(text))...)
	if !bytes.Equal(got, want) {
		return fmt.Errorf("private data is %d bytes, %q, want %d, %q", len(got), got, room, want)
	}
	return nil
}

// weRefuse refuses requests of the kernel's client: with private data, for another reason, and because
// of an error on our side.
func (s *scene) weRefuse(ctx context.Context) error {
	failure := errors.New("no room for the queue pair")
	l, err := cm.Listen(ctx, s.goAddr(), &cm.Config{Device: s.ours.dev, Setup: func(*cm.Conn) error { return failure }})
	if err != nil {
		return err
	}
	refuse := []func(*cm.Request) error{
		func(r *cm.Request) error { return r.Reject(cm.ReasonProgram, []byte(refusal)) },
		func(r *cm.Request) error { return r.Reject(cm.ReasonNoResources, nil) },
		func(r *cm.Request) error {
			if c, err := r.Accept(ctx, nil); !errors.Is(err, failure) {
				return fmt.Errorf("the request is accepted (%v), or not for this reason: %w, want %w", c, err, failure)
			}
			return nil
		},
	}
	client, err := begin(ctx, inKernelNS(s.fill(peerConnects(len(refuse)))...))
	for _, f := range refuse {
		var r *cm.Request
		if err == nil {
			r, err = l.Next(ctx)
		}
		if err == nil {
			err = errors.Join(checkPrivate(r.Private(), clientSays, cm.MaxDialPrivate), f(r))
		}
	}
	if err := errors.Join(err, l.Close()); err != nil {
		return err
	}
	return client.finish("rejected",
		rejectedLine(cm.ReasonProgram, refusal), rejectedLine(cm.ReasonNoResources, ""), rejectedLine(cm.ReasonProgram, ""))
}

// rxeCount returns a counter of the kernel's device.
func rxeCount(name string) (uint64, error) {
	args := inKernelNS("cat", "/sys/class/infiniband/"+rxeDev+"/ports/1/"+name)
	out, err := exec.Command(args[0], args[1:]...).Output()
	if err != nil {
		return 0, fmt.Errorf("the kernel's counter %s: %w", name, err)
	}
	return strconv.ParseUint(strings.TrimSpace(string(out)), 10, 64)
}

// atDoor returns a function that waits until all requests of the crowd, which come after this call,
// are at the server.
func (s *scene) atDoor() (func(context.Context) error, error) {
	counter := "hw_counters/sent_pkts" // the kernel's counter of requests counts those that are answered
	if s.weInit {
		counter = "cm_rx_msgs/req"
	}
	before, err := rxeCount(counter)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		for {
			now, err := rxeCount(counter)
			if err != nil || now >= before+crowd {
				time.Sleep(300 * time.Millisecond) // what was sent is taken in
				return err
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("%s went from %d to %d: %w", counter, before, now, ctx.Err())
			case <-time.After(20 * time.Millisecond):
			}
		}
	}, nil
}

// requests returns the kernel's count of requests: as a server all that have come, as a client those that
// it has repeated.
func (s *scene) requests() (uint64, error) {
	if s.weInit {
		return rxeCount("cm_rx_msgs/req")
	}
	return rxeCount("cm_tx_retries/req")
}

// checkRepeats checks that the requests that were dropped were repeated. On a busy host others may have
// been, too.
func (s *scene) checkRepeats(before uint64) error {
	after, err := s.requests()
	want := uint64(crowd - backlog)
	if s.weInit {
		want += crowd
	}
	if err == nil && after-before < want {
		err = fmt.Errorf("the kernel's count of requests went from %d to %d, not by %d: none was dropped", before, after, want)
	}
	return err
}

// fullBacklog: of four requests a server keeps two, until it looks at them. The others are dropped, and
// repeated by the client.
func (s *scene) fullBacklog() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel() // it also ends what still runs
	serve, connect := s.commands(peerAccepts(), peerConnects(crowd))
	server, err := begin(ctx, serve)
	if err != nil {
		return err
	}
	if err := server.until(ctx, "listening"); err != nil {
		return err
	}
	before, err := s.requests()
	if err != nil {
		return err
	}
	arrived, err := s.atDoor()
	if err != nil {
		return err
	}
	client, err := begin(ctx, connect)
	if err != nil {
		return err
	}
	if err := arrived(ctx); err != nil {
		return err
	}
	if _, err := fmt.Fprintln(server.in, "go"); err != nil {
		return err
	}
	err = errors.Join(
		client.finish("established", slices.Repeat([]string{acceptedLine}, crowd)...),
		server.finish("request", slices.Repeat([]string{requestLine}, crowd)...))
	return errors.Join(err, s.checkRepeats(before))
}

// fullBacklogInGo is fullBacklog with package cm as one of the two.
func (s *scene) fullBacklogInGo() error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel() // it also ends what still runs
	before, err := s.requests()
	if err != nil {
		return err
	}
	arrived, err := s.atDoor()
	if err != nil {
		return err
	}
	if s.weInit {
		err = s.crowdOfOurs(ctx, arrived)
	} else {
		err = s.crowdOfKernel(ctx, arrived)
	}
	return errors.Join(err, s.checkRepeats(before))
}

// crowdOfOurs dials the kernel's server, all at once.
func (s *scene) crowdOfOurs(ctx context.Context, arrived func(context.Context) error) error {
	server, err := begin(ctx, inKernelNS(s.fill(peerAccepts())...))
	if err != nil {
		return err
	}
	if err := server.until(ctx, "listening"); err != nil {
		return err
	}
	conns, errs := make([]*cm.Conn, crowd), make([]error, crowd)
	var wg sync.WaitGroup
	for i := range crowd {
		wg.Go(func() {
			conns[i], errs[i] = cm.Dial(ctx, s.goAddr(), &cm.Config{Device: s.ours.dev, Private: []byte(clientSays)})
		})
	}
	err = arrived(ctx)
	if _, e := fmt.Fprintln(server.in, "go"); e != nil {
		err = errors.Join(err, e)
	}
	wg.Wait()
	for i, c := range conns {
		if c != nil {
			errs[i] = errors.Join(checkPrivate(c.Private(), welcome, cm.MaxAcceptPrivate), c.Close())
		}
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		return err
	}
	return server.finish("request", slices.Repeat([]string{requestLine}, crowd)...)
}

// crowdOfKernel accepts the kernel's requests when all are there.
func (s *scene) crowdOfKernel(ctx context.Context, arrived func(context.Context) error) error {
	l, err := cm.Listen(ctx, s.goAddr(), &cm.Config{Device: s.ours.dev, Private: []byte(welcome), Backlog: backlog})
	if err != nil {
		return err
	}
	client, err := begin(ctx, inKernelNS(s.fill(peerConnects(crowd))...))
	if err == nil {
		err = arrived(ctx)
	}
	var conns []*cm.Conn
	for range crowd {
		if err != nil {
			break
		}
		var c *cm.Conn
		if c, err = l.Accept(ctx); err == nil {
			conns = append(conns, c)
			err = checkPrivate(c.Private(), clientSays, cm.MaxDialPrivate)
		}
	}
	for _, c := range conns {
		if err == nil {
			<-c.Done() // the client ends them, and is ended with the context
		}
		err = errors.Join(err, c.Close())
	}
	if err := errors.Join(err, l.Close()); err != nil {
		return err
	}
	return client.finish("established", slices.Repeat([]string{acceptedLine}, crowd)...)
}
