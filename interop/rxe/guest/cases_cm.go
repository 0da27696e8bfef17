package main

// The connection manager: unmodified programs of rdmacm-utils and perftest, on the kernel's device
// with the kernel's connection manager at one end, and on ours, by the drop-in libibverbs, at the
// other.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cmMeeting is a server and its client. "IP" in the commands stands for the server's address, "FAM"
// for its family as these programs name it.
type cmMeeting struct {
	name           string
	server, client string
	stays          bool   // the server serves until it is told to end
	lossy          bool   // messages have to be repeated
	crossing       bool   // both programs end their connections by themselves, and DREQs may cross
	race           string // a regular expression: the client has lost a race between the programs
	short          bool
}

// cmRefused is what programs print when nobody listens: the server has not started yet. After rpoll,
// rstream prints an errno that rpoll has not set.
const cmRefused = `RDMA_CM_EVENT_REJECTED[,;] error:? 8|RDMA_CM_EVENT_UNREACHABLE, error: 1|Connection refused|rpoll: `

// cmLost is what perftest's clients print when the server does not listen yet. Its sides first talk
// over one connection, and then the server makes another listener, while the client connects to it.
const cmLost = cmRefused + `|RDMA_CM_EVENT_UNREACHABLE; error: 1|Unexpected CM event bl blka 8`

func connections() (rows []*testCase) {
	for _, m := range []cmMeeting{
		{name: "rping", crossing: true, server: "rping -s -C 10 -V -a IP", client: "rping -c -C 10 -V -a IP", short: true},
		{name: "rping/own", crossing: true, server: "rping -s -q -C 10 -V -a IP", client: "rping -c -q -C 10 -V -a IP"},
		{name: "ucmatose", server: "ucmatose -b IP -f FAM -c 10", client: "ucmatose -s IP -f FAM -c 10", race: cmRefused, short: true},
		{name: "ucmatose/tos", server: "ucmatose -b IP -f FAM -c 3 -t 8", client: "ucmatose -s IP -f FAM -c 3 -t 8", race: cmRefused},
		{name: "udaddy", server: "udaddy -b IP -c 3", client: "udaddy -s IP -c 3", short: true},
		{name: "rdma_client", crossing: true, server: "rdma_server -s IP", client: "rdma_client -s IP", short: true},
		{name: "cmtime", server: "cmtime -b IP", client: "cmtime -s IP -c 20", stays: true},
		{name: "rstream", crossing: true, server: "rstream -S 4096 -C 100 -b IP", client: "rstream -s IP -S 4096 -C 100"},
		{name: "riostream", crossing: true, server: "riostream -S 4096 -C 20 -b IP", client: "riostream -s IP -S 4096 -C 20"},
		{name: "ib_write_bw", server: "ib_write_bw -R -F -n 100", client: "ib_write_bw -R -F -n 100 IP", crossing: true, race: cmLost, short: true},
		{name: "ib_read_bw", server: "ib_read_bw -R -F -n 100", client: "ib_read_bw -R -F -n 100 IP", crossing: true, race: cmLost},
		{name: "ib_atomic_bw", server: "ib_atomic_bw -R -F -n 100", client: "ib_atomic_bw -R -F -n 100 IP", crossing: true, race: cmLost},
		{name: "ib_send_lat", server: "ib_send_lat -R -F -n 100", client: "ib_send_lat -R -F -n 100 IP", crossing: true, race: cmLost},
	} {
		families := bothFamilies
		if strings.HasPrefix(m.name, "ib_") {
			families = families[:1] // perftest asks for IPv6 by an option of its own
		}
		for _, row := range everyWay(testCase{name: "cm/" + m.name, shortV4: m.short, short: m.name == "rping"}, func(s *scene) error { return s.meet(&m) }) {
			if slices.Contains(families, row.family) {
				rows = append(rows, row)
			}
		}
	}
	// Three of ten packets are lost, either way: both sides repeat their messages after seconds.
	lossy := cmMeeting{server: "cmtime -b IP", client: "cmtime -s IP -c 10", stays: true, lossy: true}
	rows = append(rows, everyWay(testCase{name: "cm/loss", netem: "loss 30%"}, func(s *scene) error { return s.meet(&lossy) })...)
	rows = append(rows, everyWay(testCase{name: "cm/closed", shortV4: true}, (*scene).closedPort)...)
	rows = append(rows, everyWay(testCase{name: "cm/stopped"}, (*scene).stoppedServer)...)
	return append(rows, everyWay(testCase{name: "cm/killed", shortV4: true}, (*scene).killedServer)...)
}

// commands returns the commands of a server and its client, of which we are one.
func (s *scene) commands(server, client string) (serve, connect []string) {
	f := families[s.family]
	kernel := inKernelNS
	ours := func(args ...string) []string {
		return append([]string{verbena, "exec", "--addr", f.ours.String(), "--"}, args...)
	}
	at, serves, connects := f.ours, ours, kernel
	if s.weInit {
		at, serves, connects = f.kernel, kernel, ours
	}
	family := map[string]string{"v4": "ip", "v6": "ipv6"}[s.family]
	fill := func(command string) (args []string) {
		for _, a := range strings.Fields(command) {
			args = append(args, strings.NewReplacer("IP", at.String(), "FAM", family).Replace(a))
		}
		return args
	}
	return serves(fill(server)...), connects(fill(client)...)
}

// running is a program that was started.
type running struct {
	cmd  *exec.Cmd
	said bytes.Buffer
	done chan error
}

func begin(ctx context.Context, args []string) (*running, error) {
	r := &running{cmd: exec.CommandContext(ctx, args[0], args[1:]...), done: make(chan error, 1)}
	r.cmd.Stdout, r.cmd.Stderr = &r.said, &r.said
	r.cmd.WaitDelay = time.Second
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { r.done <- r.cmd.Wait() }()
	return r, nil
}

// meet runs both programs, which must succeed. On this clean path, the kernel's connection manager
// must neither get a message twice nor have to repeat one.
func (s *scene) meet(m *cmMeeting) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	serve, connect := s.commands(m.server, m.client)
	again, lost := regexp.MustCompile(cmRefused), regexp.MustCompile(m.race)
	var before map[string]uint64
	for {
		var err error
		if before, err = repeatedMessages(); err != nil {
			return err
		}
		server, err := begin(ctx, serve)
		if err != nil {
			return err
		}
		var client *running
		for {
			if m.race != "" {
				time.Sleep(time.Second) // a server that is listening loses no race
			}
			if client, err = begin(ctx, connect); err != nil {
				return err
			}
			err = <-client.done
			if err == nil || m.race != "" || !again.MatchString(client.said.String()) || ctx.Err() != nil {
				break
			}
			time.Sleep(100 * time.Millisecond)
		}
		if err != nil && m.race != "" && lost.MatchString(client.said.String()) && ctx.Err() == nil {
			_ = server.cmd.Process.Kill()
			<-server.done
			continue
		}
		if m.stays || err != nil {
			_ = server.cmd.Process.Kill() // it serves on
			<-server.done
		} else if e := <-server.done; e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", strings.Join(serve, " "), e))
		}
		if err != nil {
			return fmt.Errorf("%s: %w\n%s\nthe server said:\n%s", strings.Join(connect, " "), err, client.said.String(), server.said.String())
		}
		break
	}
	after, err := repeatedMessages()
	if err != nil {
		return err
	}
	if m.lossy {
		return nil
	}
	for name, n := range after {
		if m.crossing && (strings.HasSuffix(name, "/dreq") || strings.HasSuffix(name, "/drep")) {
			continue // a DREQ that comes after the kernel's own counts as a duplicate
		}
		if n != before[name] {
			err = errors.Join(err, fmt.Errorf("the kernel's %s went from %d to %d", name, before[name], n))
		}
	}
	return err
}

// repeatedMessages returns the counters of the kernel's connection manager for messages that it had to
// repeat, or got twice. Its namespace has a sysfs of its own.
func repeatedMessages() (map[string]uint64, error) {
	args := inKernelNS("sh", "-c", "cd /sys/class/infiniband/"+rxeDev+"/ports/1 && grep . cm_rx_duplicates/* cm_tx_retries/*")
	out, err := exec.Command(args[0], args[1:]...).Output()
	if err != nil {
		return nil, fmt.Errorf("the kernel's counters of its connection manager: %w", err)
	}
	all := map[string]uint64{}
	for line := range strings.Lines(string(out)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		if all[name], err = strconv.ParseUint(value, 10, 64); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// closedPort: a client of a port where nobody listens is told so.
func (s *scene) closedPort() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_, connect := s.commands("", "rping -c -C 1 -a IP -p 9")
	c, err := begin(ctx, connect)
	if err != nil {
		return err
	}
	if err := <-c.done; err == nil || !strings.Contains(c.said.String(), "RDMA_CM_EVENT_REJECTED, error 8") {
		return fmt.Errorf("%v: %s", err, c.said.String())
	}
	return nil
}

// afterServer runs a test of an rping server and its client. The test starts the client when the server
// has had the time to listen; if the client is refused all the same, the server was slow to start, and
// the test is run again with more time.
func (s *scene) afterServer(server, client string, test func(server *running, connect func() (*running, error)) error) error {
	refused := regexp.MustCompile(cmRefused)
	for patience := 2 * time.Second; ; patience *= 2 {
		err := func() error {
			ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
			defer cancel() // it also ends what still runs
			serve, connect := s.commands(server, client)
			srv, err := begin(ctx, serve)
			if err != nil {
				return err
			}
			time.Sleep(patience)
			return test(srv, func() (*running, error) { return begin(ctx, connect) })
		}()
		if err == nil || patience > 16*time.Second || !refused.MatchString(err.Error()) {
			return err
		}
	}
}

// killedServer: the client of a server that is killed is told so.
func (s *scene) killedServer() error {
	return s.afterServer("rping -s -v -a IP", "rping -c -v -a IP", func(server *running, connect func() (*running, error)) error {
		client, err := connect()
		if err != nil {
			return err
		}
		time.Sleep(2 * time.Second)
		if err := server.cmd.Process.Kill(); err != nil {
			return err
		}
		<-server.done
		select {
		case err = <-client.done:
		case <-time.After(90 * time.Second):
			return fmt.Errorf("the client has not heard of it in 90 s")
		}
		if !strings.Contains(client.said.String(), "rdma-ping-1:") {
			return fmt.Errorf("they were not connected: %v: %s", err, client.said.String())
		}
		return nil
	})
}

// stoppedServer: a server that is stopped when the request comes accepts it later. Until then the client
// repeats the request, and the kernel answers that it takes longer (MRA).
func (s *scene) stoppedServer() error {
	return s.afterServer("rping -s -C 5 -v -a IP", "rping -c -C 5 -v -a IP", func(server *running, connect func() (*running, error)) error {
		if err := server.cmd.Process.Signal(syscall.SIGSTOP); err != nil {
			return err
		}
		client, err := connect()
		if err != nil {
			return err
		}
		time.Sleep(7 * time.Second) // a request is repeated after 4.6 s
		if err := server.cmd.Process.Signal(syscall.SIGCONT); err != nil {
			return err
		}
		if err := <-client.done; err != nil {
			return fmt.Errorf("the client: %w:\n%s", err, client.said.String())
		}
		if err := <-server.done; err != nil {
			return fmt.Errorf("the server: %w:\n%s", err, server.said.String())
		}
		return nil
	})
}
