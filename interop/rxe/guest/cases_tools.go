package main

// Unmodified programs of ibverbs-utils and perftest on the kernel's device; package tools
// plays the other side on ours.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os/exec"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/tools"
	"github.com/verbena-rdma/verbena/verbs"
)

func programs() (rows []*testCase) {
	for _, p := range []struct {
		cfg   tools.PingpongConfig
		name  string
		short bool
	}{
		{tools.PingpongConfig{Program: tools.RCPingpong, Size: 65536, MTU: verbs.MTU1024, Check: true}, "", true},
		{tools.PingpongConfig{Program: tools.RCPingpong, Size: 5000, MTU: verbs.MTU4096, Check: true}, "/5000", false},
		{tools.PingpongConfig{Program: tools.UCPingpong, Size: 10_000, MTU: verbs.MTU1024, Check: true}, "", true},
		{tools.PingpongConfig{Program: tools.UDPingpong, Size: 2048, Check: true}, "", true},
		{tools.PingpongConfig{Program: tools.SRQPingpong, Size: 4096, MTU: verbs.MTU1024, QPs: 8}, "", true},
	} {
		p.cfg.Iters = 100
		rows = append(rows, everyWay(testCase{name: "tools/" + p.cfg.Program.String() + p.name, shortV4: p.short}, func(s *scene) error { return s.pingpong(p.cfg) })...)
	}
	for _, p := range []struct {
		cfg   tools.PerftestConfig
		name  string
		short bool
	}{
		{tools.PerftestConfig{Test: tools.WriteBW, Size: 65536, MTU: verbs.MTU4096}, "", true},
		{tools.PerftestConfig{Test: tools.ReadBW, Size: 65536, MTU: verbs.MTU4096}, "", true},
		{tools.PerftestConfig{Test: tools.SendBW, Size: 65536, MTU: verbs.MTU4096}, "", true},
		{tools.PerftestConfig{Test: tools.AtomicBW}, "", true},
		{tools.PerftestConfig{Test: tools.AtomicBW, CAS: true}, "/cas", false},
		{tools.PerftestConfig{Test: tools.WriteLat, Size: 8}, "", true},
		{tools.PerftestConfig{Test: tools.ReadLat, Size: 8}, "", false},
		{tools.PerftestConfig{Test: tools.SendLat, Size: 8}, "", false},
		{tools.PerftestConfig{Test: tools.AtomicLat}, "", false},
		{tools.PerftestConfig{Test: tools.WriteBW, Size: 10_000, MTU: verbs.MTU256, QPs: 4}, "/qps4", false},
		{tools.PerftestConfig{Test: tools.WriteBW, Size: 65536, MTU: verbs.MTU1024, Duplex: true}, "/duplex", false},
		{tools.PerftestConfig{Test: tools.SendBW, Size: 20_000, MTU: verbs.MTU1024, Duplex: true}, "/duplex", false},
		{tools.PerftestConfig{Test: tools.ReadBW, Size: 20_000, MTU: verbs.MTU512, Duplex: true}, "/duplex", false},
		{tools.PerftestConfig{Test: tools.WriteBW, Type: verbs.UC, Size: 4000, MTU: verbs.MTU1024}, "/uc", false},
		{tools.PerftestConfig{Test: tools.SendBW, Type: verbs.UC, Size: 4000, MTU: verbs.MTU1024, Gap: time.Millisecond}, "/uc", false},
		{tools.PerftestConfig{Test: tools.SendBW, Type: verbs.UD, Size: 1024, Gap: time.Millisecond}, "/ud", false},
		{tools.PerftestConfig{Test: tools.SendLat, Type: verbs.UC, Size: 8}, "/uc", false},
		{tools.PerftestConfig{Test: tools.SendLat, Type: verbs.UD, Size: 8}, "/ud", false},
	} {
		p.cfg.Iters = 100
		rows = append(rows, everyWay(testCase{name: "tools/" + p.cfg.Test.String() + p.name, shortV4: p.short}, func(s *scene) error { return s.perftest(p.cfg) })...)
	}
	return rows
}

// peer returns our side's configuration. The programs exchange the numbers of their queue
// pairs over TCP, always by IPv4: the ping-pongs support nothing else. The family of a case is
// that of its packets.
func (s *scene) peer() tools.Peer {
	if s.weInit { // the program listens
		return tools.Peer{Role: tools.Client, Addr: families["v4"].kernel.String(), DialTimeout: 20 * time.Second}
	}
	return tools.Peer{Role: tools.Server, Addr: families["v4"].ours.String()}
}

func (s *scene) pingpong(cfg tools.PingpongConfig) error {
	args := []string{cfg.Program.String(), "-d", rxeDev, "-g", fmt.Sprint(s.kernel.sgid), "-s", fmt.Sprint(cfg.Size), "-n", fmt.Sprint(cfg.Iters)}
	if cfg.MTU != 0 {
		args = append(args, "-m", cfg.MTU.String())
	}
	if cfg.QPs != 0 {
		args = append(args, "-q", fmt.Sprint(cfg.QPs))
	}
	if cfg.Check {
		args = append(args, "-c")
	}
	return s.against(args, func(ctx context.Context, peer tools.Peer) error {
		cfg.Peer, cfg.Timeout = peer, patientTimeout
		_, err := tools.Pingpong(ctx, s.ours.dev, cfg)
		return err
	})
}

func (s *scene) perftest(cfg tools.PerftestConfig) error {
	args := []string{cfg.Test.String(), "-F", "-d", rxeDev, "-x", fmt.Sprint(s.kernel.sgid), "-n", fmt.Sprint(cfg.Iters), "-u", fmt.Sprint(patientTimeout)}
	if cfg.Size != 0 {
		args = append(args, "-s", fmt.Sprint(cfg.Size))
	}
	if cfg.MTU != 0 {
		args = append(args, "-m", cfg.MTU.String())
	}
	if cfg.Type != 0 {
		args = append(args, "-c", cfg.Type.String())
	}
	if cfg.QPs != 0 {
		args = append(args, "-q", fmt.Sprint(cfg.QPs))
	}
	if cfg.Duplex {
		args = append(args, "-b")
	}
	if cfg.CAS {
		args = append(args, "-A", "CMP_AND_SWAP")
	}
	return s.against(args, func(ctx context.Context, peer tools.Peer) error {
		cfg.Peer, cfg.Timeout = peer, patientTimeout
		_, err := tools.Perftest(ctx, s.ours.dev, cfg)
		return err
	})
}

// against runs a program in the kernel's namespace and our side here. The server is started
// first. Both must succeed.
func (s *scene) against(args []string, play func(context.Context, tools.Peer) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	peer := s.peer()
	if peer.Role == tools.Server {
		args = append(args, families["v4"].ours.String())
	}
	args = inKernelNS(args...)
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.WaitDelay = time.Second
	ended := make(chan error, 1)
	start := func() {
		if err := cmd.Start(); err != nil {
			ended <- err
			return
		}
		go func() { ended <- cmd.Wait() }()
	}
	started := true
	if peer.Role == tools.Server {
		started = false
		peer.Listening = func(net.Addr) { started = true; start() }
	} else {
		start()
	}
	err := play(ctx, peer)
	if err != nil {
		cancel() // the program would wait for us
	}
	if started {
		if e := <-ended; e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", strings.Join(args, " "), e))
		}
	}
	if err != nil {
		return fmt.Errorf("%w\nthe program said:\n%s", err, said.String())
	}
	return nil
}
