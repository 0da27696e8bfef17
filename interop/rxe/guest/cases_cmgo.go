package main

// Package cm in Go, on our device, against the unmodified programs of rdmacm-utils on the kernel's.
// Package cmtools plays our side.

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/cmtools"
)

// goMeeting is a program of the kernel's with our side of it. The words in the commands are those of
// cmMeeting.
type goMeeting struct {
	name           string
	server, client string                                        // the program
	serve, connect func(context.Context, *cmtools.Meeting) error // our side
	port           string
	count, size    int

	stays    bool   // the program serves until it is told to end
	crossing bool   // both sides end their connections by themselves, and DREQs may cross
	endRace  string // of cmMeeting
	short    bool   // over IPv4
}

func connectionsInGo() (rows []*testCase) {
	for _, m := range []goMeeting{
		{name: "rping", endRace: rpingEnd, server: "rping -s -C 10 -a IP", client: "rping -c -C 10 -V -a IP", short: true,
			serve: cmtools.RpingServer, connect: cmtools.RpingClient, port: cmtools.RpingPort, count: 10},
		{name: "rping/60000", endRace: rpingEnd, server: "rping -s -S 60000 -C 5 -a IP", client: "rping -c -S 60000 -C 5 -V -a IP",
			serve: cmtools.RpingServer, connect: cmtools.RpingClient, port: cmtools.RpingPort, count: 5, size: 60_000},
		{name: "rping/own", endRace: rpingEnd, server: "rping -s -q -C 10 -a IP", client: "rping -c -q -C 10 -V -a IP",
			serve: cmtools.RpingServer, connect: cmtools.RpingClient, port: cmtools.RpingPort, count: 10},
		{name: "ucmatose", server: "ucmatose -b IP -f FAM -c 10", client: "ucmatose -s IP -f FAM -c 10",
			serve: cmtools.UcmatoseServer, connect: cmtools.UcmatoseClient, port: cmtools.UcmatosePort, count: 10},
		{name: "udaddy", server: "udaddy -b IP -c 3", client: "udaddy -s IP -c 3", short: true,
			serve: cmtools.UdaddyServer, connect: cmtools.UdaddyClient, port: cmtools.UdaddyPort, count: 3},
		{name: "rdma_client", server: "rdma_server -s IP", client: "rdma_client -s IP",
			serve: cmtools.RdmaServer, connect: cmtools.RdmaClient, port: cmtools.RdmaServerPort},
		{name: "rdma_client/leaves", server: "rdma_server -s IP", client: "rdma_client -s IP", crossing: true,
			serve: cmtools.RdmaServerLeaves, connect: cmtools.RdmaClientLeaves, port: cmtools.RdmaServerPort},
		{name: "cmtime", server: "cmtime -b IP", client: "cmtime -s IP -c 20", stays: true,
			serve: cmtools.CmtimeServer, connect: cmtools.CmtimeClient, port: cmtools.CmtimePort, count: 20},
	} {
		rows = append(rows, everyWay(testCase{name: "cm/go/" + m.name, shortV4: m.short}, func(s *scene) error { return s.meetInGo(&m) })...)
	}
	return rows
}

// meetInGo runs the program and our side. Both must succeed, and the kernel's connection manager must
// neither get a message twice nor have to repeat one.
func (s *scene) meetInGo(m *goMeeting) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	for {
		before, err := repeatedMessages()
		if err != nil {
			return err
		}
		again, err := s.meetOnce(ctx, m)
		if err == nil {
			return noneRepeated(before, m.crossing)
		}
		if !again || ctx.Err() != nil {
			return err
		}
	}
}

// meetOnce runs them once. With an error, again reports whether our side has succeeded, and the program
// has lost its race at the end.
func (s *scene) meetOnce(ctx context.Context, m *goMeeting) (again bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	us := cmtools.Meeting{Device: s.ours.dev, Addr: net.JoinHostPort(s.serverAddr().String(), m.port), Count: m.count, Size: m.size}
	play, args := m.serve, inKernelNS(s.fill(m.client)...)
	if s.weInit {
		play, args = m.connect, inKernelNS(s.fill(m.server)...)
	}
	var program *running
	var failed error
	start := func() {
		if program, failed = begin(ctx, args); failed != nil {
			cancel() // we would wait for it
		}
	}
	if s.weInit {
		start()
	} else {
		us.Listening = start
	}
	err = errors.Join(play(ctx, &us), failed)
	if program == nil {
		return false, err
	}
	switch {
	case err != nil || m.stays && s.weInit:
		program.kill()
	default:
		err = <-program.done
		again = program.lost(m.endRace)
	}
	if err != nil {
		err = fmt.Errorf("%w\n%s said:\n%s", err, strings.Join(args, " "), program.said.String())
	}
	return again, err
}
