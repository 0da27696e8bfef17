package main

// A case, top-down:
//
//  1. drive chooses the cases of the order and announces them.
//  2. perform gives a case its scene: the network, a device of ours with a capture, and
//     the kernel's device, for which one kverbs serves many cases.
//  3. The case runs under a time limit, after which kverbs is killed.
//  4. The objects of the case are destroyed. If that fails, kverbs is started anew.

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
	"github.com/verbena-rdma/verbena/verbs"
)

// testCase is a row of the table.
type testCase struct {
	name    string // parts joined by "/"; see table.go
	short   bool   // part of the short form
	shortV4 bool   // the same, but over IPv4 only
	soak    bool   // a long case, run only with Order.Soak
	peers   bool   // one that needs the controllers of vm.Peers, run only with Order.Peers

	family string // "v4" or "v6"
	frame  int    // the interfaces' MTU. Zero: 9000
	netem  string // arguments of tc's netem, to lose or reorder packets. Empty: none
	noGSO  bool   // we send packet by packet
	quiet  bool   // no capture: it would be too large
	window int    // of our device; zero: its default

	limit time.Duration // zero: defaultLimit
	run   func(*scene) error
}

// weInitiate reports whether we initiate, by the name.
func (c *testCase) weInitiate() bool { return strings.HasSuffix(c.name, "/we") }

const defaultLimit = 5 * time.Minute // generous: the host may be busy

// skipError is the error of a case that this kernel cannot run.
type skipError string

func (e skipError) Error() string { return string(e) }

// scene is what a case runs with: itself and the two devices.
type scene struct {
	*testCase
	ours   *ours
	kernel *kernel
	weInit bool // we initiate
}

func drive() error {
	order, err := readOrder()
	if err != nil {
		return err
	}
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return err
	}
	if err := waitForPath(); err != nil {
		return err
	}
	plan := result.Plan{Release: strings.TrimSpace(string(release))}
	if order.Bench > 0 {
		return errors.Join(report(result.Line{Plan: &plan}), compareSpeed(order))
	}
	cases, err := choose(order)
	if err != nil {
		return err
	}
	if order.Peers {
		if err := peerSetup(); err != nil {
			return err
		}
	}
	for _, c := range cases {
		plan.Cases = append(plan.Cases, c.name)
	}
	if err := report(result.Line{Plan: &plan}); err != nil {
		return err
	}
	s := stage{order: order}
	defer s.close()
	for _, c := range cases {
		r := s.perform(c)
		if err := report(result.Line{Case: r}); err != nil {
			return err
		}
	}
	return report(result.Line{Done: true})
}

// choose picks the cases of an order.
func choose(o *result.Order) ([]*testCase, error) {
	pick, err := regexp.Compile(o.Run)
	if err != nil {
		return nil, err
	}
	var picked []*testCase
	for _, c := range table() {
		if pick.MatchString(c.name) && (!o.Short || c.short) && c.soak == o.Soak && c.peers == o.Peers {
			picked = append(picked, c)
		}
	}
	if len(picked) == 0 {
		return nil, fmt.Errorf("no case is called %q", o.Run)
	}
	return picked, nil
}

// stage is what the cases share.
type stage struct {
	order  *result.Order
	kernel *kernel // nil: none runs
	frame  int     // the interfaces' MTU as it is; zero: the default
}

func (s *stage) close() {
	if s.kernel != nil {
		s.kernel.stop()
	}
}

// perform runs a case.
func (s *stage) perform(c *testCase) *result.Case {
	began := time.Now()
	capture := filepath.Join(scratch, "case.pcapng")
	recorded := func() error { return nil }
	if s.order.Record {
		recorded = record(fileName(c) + ".pcap")
	}
	err := errors.Join(s.play(c, capture), recorded())
	r := &result.Case{Name: c.name, Took: time.Since(began)}
	var skip skipError
	switch {
	case errors.As(err, &skip):
		r.Skip = skip.Error()
	case err != nil:
		r.Err = err.Error()
	}
	if r.Err != "" || s.order.Keep && r.Skip == "" {
		r.Capture = fileName(c) + ".pcapng"
		if err := keepCapture(capture, r.Capture); err != nil {
			r.Capture = ""
			fmt.Fprintln(os.Stderr, "guest: no capture of", c.name, err)
		}
	}
	_ = os.Remove(capture) // there is none if the device could not be opened
	return r
}

func fileName(c *testCase) string { return strings.ReplaceAll(c.name, "/", "_") }

// record records frames at our interface until stop is called.
func record(name string) (stop func() error) {
	file := filepath.Join(scratch, name)
	cmd := exec.Command("dumpcap", "-q", "-P", "-i", oursIf, "-f", "udp port 4791", "-w", file)
	said, err := cmd.StderrPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return func() error { return err }
	}
	// dumpcap prints the name of the file when it has begun.
	lines := bufio.NewScanner(said)
	for lines.Scan() && !strings.HasPrefix(lines.Text(), "File:") {
	}
	return func() error {
		time.Sleep(300 * time.Millisecond) // dumpcap reads in blocks
		err := cmd.Process.Signal(os.Interrupt)
		_, copyErr := io.Copy(io.Discard, said)
		err = errors.Join(err, copyErr, cmd.Wait())
		if err == nil {
			err = keepCapture(file, name)
		}
		return errors.Join(err, os.Remove(file))
	}
}

func keepCapture(from, name string) error {
	dir := filepath.Join(share, result.CaptureDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return errors.Join(err, in.Close())
	}
	_, err = io.CopyBuffer(out, in, make([]byte, 128<<10))
	return errors.Join(err, in.Close(), out.Close())
}

// play makes the scene, runs the case and destroys what it made.
func (s *stage) play(c *testCase, capture string) (err error) {
	if err := s.dress(c); err != nil {
		return err
	}
	if c.netem != "" {
		if err := impair(c.netem); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, repair()) }()
	}
	if s.kernel == nil {
		if s.kernel, err = startKernel(rxeDev); err != nil {
			s.restart()
			return err
		}
	}
	k := s.kernel
	addrs := families[c.family]
	if err := k.stand(addrs.kernel); err != nil {
		s.restart()
		return err
	}
	cfg := verbs.Config{PCAP: capture, NoGSO: c.noGSO, Window: c.window}
	if c.quiet {
		cfg.PCAP = ""
	}
	o, err := openOurs(addrs.ours, cfg)
	if err != nil {
		return err
	}
	// Killing kverbs ends a case that hangs: all waiting on our side has limits.
	limit := c.limit
	if limit == 0 {
		limit = defaultLimit
	}
	var late sync.Once
	overdue := false
	watchdog := time.AfterFunc(limit, func() {
		late.Do(func() { overdue = true; k.kill() })
	})
	err = c.run(&scene{testCase: c, ours: o, kernel: k, weInit: c.weInitiate()})
	watchdog.Stop()
	late.Do(func() {}) // if the watchdog has fired, this waits for it
	if overdue {
		err = errors.Join(fmt.Errorf("not done after %v", limit), err)
	}
	if err != nil {
		err = fmt.Errorf("%w\ncounters:%s", err, o.counters())
	}
	// Our device is closed last: until then it answers the kernel's.
	if clearErr := k.clear(); clearErr != nil {
		s.restart()
		if err == nil && !errors.Is(clearErr, errKilled) {
			err = fmt.Errorf("clearing up: %w", clearErr)
		}
	}
	if clearErr := o.clear(); clearErr != nil && err == nil {
		err = fmt.Errorf("clearing up: %w", clearErr)
	}
	return err
}

// dress sets the interfaces' MTU for a case.
func (s *stage) dress(c *testCase) error {
	frame := c.frame
	if frame == 0 {
		frame = defaultFrame
	}
	if s.frame == 0 {
		s.frame = defaultFrame
	}
	if frame == s.frame {
		return nil
	}
	s.frame = frame
	return setFrame(frame)
}

// restart ends kverbs; the next case starts another one.
func (s *stage) restart() {
	if s.kernel != nil {
		s.kernel.stop()
	}
	s.kernel = nil
}
