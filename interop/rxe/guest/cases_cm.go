package main

// The connection manager: unmodified programs of rdmacm-utils and perftest, on the kernel's device
// with the kernel's connection manager at one end, and on ours, by the drop-in libibverbs, at the
// other.

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// cmMeeting is a server and its client. "IP" in the commands stands for the server's address, "OWN" for
// the client's, "FAM" for their family as these programs name it.
type cmMeeting struct {
	name           string
	server, client string
	stays          bool   // the server serves until it is told to end
	lossy          bool   // messages have to be repeated
	crossing       bool   // both programs end their connections by themselves, and DREQs may cross
	race           string // a regular expression: the client has lost a race between the programs
	endRace        string // the same, for a race that either program may lose when all is done
	short          bool
}

// cmRefused is what programs print when nobody listens: the server has not started yet. After rpoll,
// rstream prints an errno that rpoll has not set.
const cmRefused = `RDMA_CM_EVENT_REJECTED[,;] error:? 8|RDMA_CM_EVENT_UNREACHABLE, error: 1|Connection refused|rpoll: `

// cmLost is what perftest's clients print when the server does not listen yet. Its sides first talk
// over one connection, and then the server makes another listener, while the client connects to it.
const cmLost = cmRefused + `|RDMA_CM_EVENT_UNREACHABLE; error: 1|Unexpected CM event bl blka 8`

// rpingEnd is what rping of rdma-core 44 prints when it loses a race with itself, and fails: at its end it
// closes the channel that one of its threads may still read. Today's rping ends that thread first.
const rpingEnd = `(?m)^rdma_get_cm_event: Bad file descriptor$`

func connections() (rows []*testCase) {
	for _, m := range []cmMeeting{
		{name: "rping", crossing: true, endRace: rpingEnd, server: "rping -s -C 10 -V -a IP", client: "rping -c -C 10 -V -a IP", short: true},
		{name: "rping/own", crossing: true, endRace: rpingEnd, server: "rping -s -q -C 10 -V -a IP", client: "rping -c -q -C 10 -V -a IP"},
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
		ways := everyWay(testCase{name: "cm/" + m.name, shortV4: m.short, short: m.name == "rping"}, func(s *scene) error { return s.meet(&m) })
		if strings.HasPrefix(m.name, "ib_") {
			ways = onlyV4(ways) // perftest 4.5 connects to no IPv6 address
		}
		rows = append(rows, ways...)
	}
	// Three of ten packets are lost, either way: both sides repeat their messages after seconds.
	lossy := cmMeeting{server: "cmtime -b IP", client: "cmtime -s IP -c 10", stays: true, lossy: true}
	rows = append(rows, everyWay(testCase{name: "cm/loss", netem: "loss 30%"}, func(s *scene) error { return s.meet(&lossy) })...)
	rows = append(rows, everyWay(testCase{name: "cm/closed", shortV4: true}, (*scene).closedPort)...)
	rows = append(rows, everyWay(testCase{name: "cm/stopped"}, (*scene).stoppedServer)...)
	rows = append(rows, everyWay(testCase{name: "cm/killed", shortV4: true}, (*scene).killedServer)...)
	// rcopy takes no IPv6 address, and the kernel joins no group of IPv6 on RoCE v2.
	rows = append(rows, onlyV4(everyWay(testCase{name: "cm/rcopy"}, (*scene).copiedFile))...)
	return append(rows, onlyV4(everyWay(testCase{name: "cm/mckey"}, (*scene).multicast))...)
}

// onlyV4 returns the rows of IPv4.
func onlyV4(rows []*testCase) []*testCase {
	return slices.DeleteFunc(rows, func(c *testCase) bool { return c.family != "v4" })
}

// commands returns the commands of a server and its client, of which we are one.
func (s *scene) commands(server, client string) (serve, connect []string) {
	f := families[s.family]
	kernel := inKernelNS
	ours := func(args ...string) []string {
		return append([]string{verbena, "exec", "--addr", f.ours.String(), "--"}, args...)
	}
	serves, connects := ours, kernel
	if s.weInit {
		serves, connects = kernel, ours
	}
	return serves(s.fill(server)...), connects(s.fill(client)...)
}

// serverAddr returns the address of the server: the initiator is the client.
func (s *scene) serverAddr() netip.Addr {
	if s.weInit {
		return families[s.family].kernel
	}
	return families[s.family].ours
}

// fill returns the words of a command, with the server's address, the client's (OWN), and the family
// filled in.
func (s *scene) fill(command string) (args []string) {
	client := families[s.family].ours
	if !s.weInit {
		client = families[s.family].kernel
	}
	words := strings.NewReplacer("IP", s.serverAddr().String(), "OWN", client.String(),
		"FAM", map[string]string{"v4": "ip", "v6": "ipv6"}[s.family])
	for _, a := range strings.Fields(command) {
		args = append(args, words.Replace(a))
	}
	return args
}

// running is a program that was started.
type running struct {
	cmd  *exec.Cmd
	said output
	in   io.WriteCloser // its input
	done chan error
}

// output is what a program has printed so far.
type output struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

// String returns all of it.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

func begin(ctx context.Context, args []string) (*running, error) {
	r := &running{cmd: exec.CommandContext(ctx, args[0], args[1:]...), done: make(chan error, 1)}
	r.cmd.Stdout, r.cmd.Stderr = &r.said, &r.said
	r.cmd.WaitDelay = time.Second
	var err error
	if r.in, err = r.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	if err := r.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { r.done <- r.cmd.Wait() }()
	return r, nil
}

// kill ends a program that serves on, or whose peer has failed.
func (r *running) kill() {
	_ = r.cmd.Process.Kill() // it may have ended by itself
	<-r.done
}

// lost reports whether the output of a program that has ended matches a regular expression; an empty one
// matches nothing.
func (r *running) lost(race string) bool {
	return race != "" && regexp.MustCompile(race).MatchString(r.said.String())
}

// meet runs both programs, which must succeed. On this clean path, the kernel's connection manager
// must neither get a message twice nor have to repeat one.
func (s *scene) meet(m *cmMeeting) error {
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	serve, connect := s.commands(m.server, m.client)
	again := regexp.MustCompile(cmRefused)
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
		if err != nil && client.lost(m.race) && ctx.Err() == nil {
			server.kill()
			continue
		}
		ended := server
		if err != nil {
			ended = client
		}
		if m.stays || err != nil {
			server.kill()
		} else if e := <-server.done; e != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", strings.Join(serve, " "), e))
		}
		if err != nil && ended.lost(m.endRace) && ctx.Err() == nil {
			continue
		}
		if err != nil {
			return fmt.Errorf("%s: %w\n%s\nthe server said:\n%s", strings.Join(connect, " "), err, client.said.String(), server.said.String())
		}
		break
	}
	if m.lossy {
		return nil
	}
	return noneRepeated(before, m.crossing)
}

// noneRepeated returns an error if the counters of repeatedMessages are not as before. With crossing,
// both sides end their connections by themselves.
func noneRepeated(before map[string]uint64, crossing bool) error {
	after, err := repeatedMessages()
	if err != nil {
		return err
	}
	for name, n := range after {
		if crossing && (strings.HasSuffix(name, "/dreq") || strings.HasSuffix(name, "/drep")) {
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
			ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
			defer cancel() // it also ends what still runs
			serve, connect := s.commands(server, client)
			srv, err := begin(ctx, serve)
			if err != nil {
				return err
			}
			time.Sleep(patience)
			err = test(srv, func() (*running, error) { return begin(ctx, connect) })
			if err != nil && refused.MatchString(err.Error()) {
				srv.kill() // the next one needs its port
				err = fmt.Errorf("%w\nthe server said:\n%s", err, srv.said.String())
			}
			return err
		}()
		if err == nil || patience > 16*time.Second || !refused.MatchString(err.Error()) {
			return err
		}
	}
}

// killedServer: the client of a server that is killed while they ping is told so. stdbuf makes the client's
// lines come when it prints them.
func (s *scene) killedServer() error {
	return s.afterServer("rping -s -v -a IP", "stdbuf -oL rping -c -v -a IP", func(server *running, connect func() (*running, error)) error {
		client, err := connect()
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := client.until(ctx, "ping data: rdma-ping-1:"); err != nil {
			return fmt.Errorf("they do not ping: %w", err)
		}
		if err := server.cmd.Process.Kill(); err != nil {
			return err
		}
		<-server.done
		select {
		case <-client.done:
			return nil
		case <-time.After(90 * time.Second):
			return fmt.Errorf("the client has not heard of it in 90 s:\n%s", client.said.String())
		}
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

// copiedFile: rcopy copies a file to its server.
func (s *scene) copiedFile() error {
	from, to := filepath.Join(scratch, "rcopy.from"), filepath.Join(scratch, "rcopy.to")
	want := make([]byte, 1<<20+17)
	pattern(len(want), 7, func(i int, b byte) bool { want[i] = b; return true })
	if err := os.WriteFile(from, want, 0o600); err != nil {
		return err
	}
	defer func() { _, _ = os.Remove(from), os.Remove(to) }() // the copy may not be there
	if err := s.meet(&cmMeeting{server: "rcopy", client: "rcopy " + from + " IP:" + to, stays: true, crossing: true}); err != nil {
		return err
	}
	got, err := os.ReadFile(to)
	if err == nil && !bytes.Equal(got, want) {
		err = fmt.Errorf("the copy of %d bytes has %d, or others", len(want), len(got))
	}
	return err
}

// multicast: a member of a group gets what the initiator sends to it. stdbuf makes mckey's lines come
// when it prints them.
//
// mckey's sender destroys its queue pair without waiting for its requests. We have sent them by then; rxe
// drops those that it has not begun, often all but one of 10. So one is enough for our receiver, and the
// kernel's sender is started again if none was sent.
func (s *scene) multicast() error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel() // it also ends what still runs
	count := 10
	if !s.weInit {
		count = 1
	}
	serve, connect := s.commands(fmt.Sprintf("stdbuf -oL mckey -m 239.79.0.1 -b IP -C %d", count), "mckey -m 239.79.0.1 -b OWN -s")
	receiver, err := begin(ctx, serve)
	if err != nil {
		return err
	}
	if err := receiver.until(ctx, "mckey: joined dgid: ::ffff:239.79.0.1 mlid 0x0 sl 0"); err != nil {
		return err
	}
	for {
		sender, err := begin(ctx, connect)
		if err != nil {
			return err
		}
		if err := <-sender.done; err != nil {
			return fmt.Errorf("%s: %w\n%s", strings.Join(connect, " "), err, sender.said.String())
		}
		if s.weInit {
			break
		}
		select {
		case err := <-receiver.done:
			receiver.done <- err
		case <-time.After(2 * time.Second):
			continue
		}
		break
	}
	return receiver.finish("data transfers", "data transfers complete")
}
