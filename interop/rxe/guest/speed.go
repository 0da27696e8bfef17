package main

// Comparison of speeds, ours and the kernel's, measured in turn in one machine. Two devices of
// the kernel talk over the pair of interfaces that the cases use. Two of ours talk over
// another pair, in two more namespaces, since in one namespace both would need the same
// UDP port.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

const (
	roundTime  = 3 * time.Second
	secondRxe  = "rxe1"
	speedLimit = time.Minute // for one measurement
)

// The namespaces and addresses of our two devices.
var speedNS = [2]string{"speed0", "speed1"}

const (
	speedTarget    = "10.80.0.1"
	speedInitiator = "10.80.0.2"
)

// compareSpeed measures what the order names, or everything if it names nothing.
func compareSpeed(order *result.Order) error {
	wanted, err := regexp.Compile(order.Run)
	if err != nil {
		return err
	}
	s := result.Speed{Rounds: order.Bench}
	if wanted.MatchString("lossy") { // before the second device takes our port
		if s.Lossy, err = lossy(s.Rounds, oursToKernel, kernelToOurs); err != nil {
			return err
		}
	}
	if err := run("rdma", "link", "add", secondRxe, "type", "rxe", "netdev", oursIf); err != nil {
		return fmt.Errorf("this kernel's rxe supports one namespace only: %w", err)
	}
	if err := all(
		"ip netns add "+speedNS[0],
		"ip netns add "+speedNS[1],
		"ip -n "+speedNS[0]+" link set lo up",
		"ip -n "+speedNS[1]+" link set lo up",
		"ip -n "+speedNS[0]+" link add e0 type veth peer name e1 netns "+speedNS[1],
		"ip -n "+speedNS[0]+" addr add "+speedTarget+"/24 dev e0",
		"ip -n "+speedNS[1]+" addr add "+speedInitiator+"/24 dev e1",
		fmt.Sprintf("ip -n %s link set e0 mtu %d up", speedNS[0], defaultFrame),
		fmt.Sprintf("ip -n %s link set e1 mtu %d up", speedNS[1], defaultFrame),
	); err != nil {
		return err
	}
	time.Sleep(2 * time.Second) // until both ends are up
	if wanted.MatchString("lossy") {
		more, err := lossy(s.Rounds, kernelToKernel)
		if err != nil {
			return err
		}
		s.Lossy = append(s.Lossy, more...)
	}
	if wanted.MatchString("bottleneck") {
		if s.Bottlenecks, err = bottlenecked(s.Rounds); err != nil {
			return err
		}
	}
	kinds := []struct {
		name         string
		to           *result.Comparison
		kernel, ours func() (float64, error) // kernel may be nil
	}{
		{"bandwidth", &s.Bandwidth, kernelBandwidth, ourBandwidth},
		{"latency", &s.Latency, kernelLatency, ourLatency},
		{"udp", &result.Comparison{}, nil, floorLatency},
		{"send latency", &s.SendLatency, kernelSendLatency, ourSendLatency},
		{"connect", &s.Connect, kernelConnect, ourConnect},
	}
	for range s.Rounds {
		for i := range kinds {
			k := &kinds[i]
			if !wanted.MatchString(k.name) {
				continue
			}
			for _, side := range []struct {
				to      *[]float64
				measure func() (float64, error)
			}{{&k.to.Kernel, k.kernel}, {&k.to.Ours, k.ours}} {
				if side.measure == nil {
					continue
				}
				v, err := side.measure()
				if err != nil {
					return err
				}
				*side.to = append(*side.to, v)
			}
		}
	}
	for i := range kinds {
		if k := &kinds[i]; k.kernel == nil {
			s.UDP = k.to.Ours
		} else {
			k.to.Ratio = ratio(k.to)
		}
	}
	return errors.Join(report(result.Line{Speed: &s}), report(result.Line{Done: true}))
}

// ratio returns the median of the rounds' ratios, 0 if nothing was measured.
func ratio(c *result.Comparison) float64 {
	if len(c.Ours) == 0 {
		return 0
	}
	var r []float64
	for i := range c.Ours {
		r = append(r, c.Ours[i]/c.Kernel[i])
	}
	slices.Sort(r)
	return r[len(r)/2]
}

// apart is couple with a processor for each program: two programs that spin on one processor
// would measure the scheduler.
func apart(server, client []string) (string, error) {
	on := func(cpus string, args []string) []string {
		return slices.Insert(slices.Clone(args), inNS, "taskset", cpus)
	}
	return couple(on("1", server), on("2", client))
}

// couple runs a server and a client, and returns what the client printed.
func couple(server, client []string) (string, error) { return meeting(server, client, false) }

// serving is couple for a server that does not end by itself.
func serving(server, client []string) (string, error) { return meeting(server, client, true) }

func meeting(server, client []string, stays bool) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), speedLimit)
	defer cancel()
	srv := exec.CommandContext(ctx, server[0], server[1:]...)
	var said bytes.Buffer
	srv.Stdout, srv.Stderr = &said, &said
	if err := srv.Start(); err != nil {
		return "", err
	}
	time.Sleep(time.Second) // until it listens
	var out, complaints bytes.Buffer
	cl := exec.CommandContext(ctx, client[0], client[1:]...)
	cl.Stdout, cl.Stderr = &out, &complaints
	err := cl.Run()
	if err != nil || stays {
		cancel()
	}
	if ended := srv.Wait(); !stays {
		err = errors.Join(err, ended)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s%s\nthe other side:\n%s", strings.Join(client, " "), err, out.String(), complaints.String(), said.String())
	}
	return out.String(), nil
}

// inNS is the index of the program in the result of ns.
const inNS = 4

// coupling is couple, or apart.
type coupling func(server, client []string) (string, error)

// ns returns a command that runs a program in a namespace.
func ns(name string, args ...string) []string {
	return append([]string{"ip", "netns", "exec", name}, args...)
}

// perftest runs a program of perftest between the kernel's devices, and returns a field of
// its line of figures.
func perftest(couple coupling, program string, field int, args ...string) (float64, error) {
	at := func(dev string, more ...string) []string {
		all := append([]string{program, "-F", "-d", dev, "-x", "1", "-m", "4096"}, args...)
		return append(all, more...)
	}
	out, err := couple(ns(kernelNS, at(rxeDev)...), ns(oursNS, at(secondRxe, families["v4"].kernel.String())...))
	if err != nil {
		return 0, err
	}
	return figure(out, field)
}

// kernelBandwidth returns MB/s, of 10^6 bytes.
func kernelBandwidth() (float64, error) {
	gbits, err := perftest(couple, "ib_write_bw", 3, "-s", "65536", "-D", fmt.Sprint(roundTime.Seconds()), "--report_gbits")
	return gbits * 1000 / 8, err
}

// kernelLatency returns the median, in µs.
func kernelLatency() (float64, error) {
	return perftest(apart, "ib_write_lat", 4, "-s", "8", "-n", "5000")
}

func kernelSendLatency() (float64, error) {
	return perftest(apart, "ib_send_lat", 4, "-s", "8", "-n", "5000")
}

// perf runs "verbena perf" between our devices.
func perf(couple coupling, args ...string) (r struct {
	GBytesPerS float64 `json:"gbytes_per_s"`
	Lat        struct {
		P50 float64 `json:"p50"`
	} `json:"lat_us"`
}, err error) {
	client := ns(speedNS[1], append([]string{verbena, "perf", "--connect", speedTarget, "--device", speedInitiator,
		"--mtu", "4096", "--json", "--duration", roundTime.String()}, args...)...)
	out, err := couple(ns(speedNS[0], verbena, "perf", "--listen="+speedTarget, "--device", speedTarget), client)
	if err == nil {
		err = json.Unmarshal([]byte(out), &r)
	}
	return r, err
}

func ourBandwidth() (float64, error) {
	r, err := perf(couple, "--op", "write", "--size", "64K", "--depth", "128") // as many as ib_write_bw
	return r.GBytesPerS * 1000, err
}

func ourLatency() (float64, error) {
	r, err := perf(apart, "--op", "write", "--lat", "--size", "8")
	return r.Lat.P50, err
}

func ourSendLatency() (float64, error) {
	r, err := perf(apart, "--op", "send", "--lat", "--size", "8")
	return r.Lat.P50, err
}

// floorLatency returns half of the median round trip of plain UDP, in µs.
func floorLatency() (float64, error) {
	out, err := apart(ns(speedNS[0], udpFloor, "pong", speedTarget, speedInitiator), ns(speedNS[1], udpFloor, "ping", speedInitiator, speedTarget))
	if err != nil {
		return 0, err
	}
	return strconv.ParseFloat(strings.TrimSpace(out), 64)
}

// connectCount is how many connections a run of cmtime makes, all at once.
const connectCount = "100"

// cmtime runs cmtime between two devices, by the commands that start a program on each, and returns
// the time of a connection in µs: the sum of all steps, from the making of its id to the end of it.
func cmtime(server, client func(args ...string) []string, at string) (float64, error) {
	out, err := serving(server("cmtime", "-b", at), client("cmtime", "-s", at, "-c", connectCount))
	if err != nil {
		return 0, err
	}
	fmt.Fprintf(os.Stderr, "%s\n%s", strings.Join(client("cmtime"), " "), out) // the steps one by one, on the console
	return cmtimeSum(out)
}

// cmtimeSteps is how many steps cmtime of rdma-core 44 prints.
const cmtimeSteps = 7

// cmtimeSum adds up the last column of what cmtime prints: µs of a connection, by step.
func cmtimeSum(out string) (sum float64, err error) {
	steps := 0
	for line := range strings.Lines(out) {
		name, figures, is := strings.Cut(line, ":")
		f := strings.Fields(figures)
		if !is || len(f) != 4 {
			continue
		}
		v, err := strconv.ParseFloat(f[3], 64)
		if err != nil {
			continue
		}
		if v <= 0 {
			return 0, fmt.Errorf("cmtime: the step %q took no time:\n%s", strings.TrimSpace(name), out)
		}
		sum += v
		steps++
	}
	if steps != cmtimeSteps {
		return 0, fmt.Errorf("cmtime printed %d steps, not %d:\n%s", steps, cmtimeSteps, out)
	}
	return sum, nil
}

func kernelConnect() (float64, error) {
	in := func(name string) func(args ...string) []string {
		return func(args ...string) []string { return ns(name, args...) }
	}
	return cmtime(in(kernelNS), in(oursNS), families["v4"].kernel.String())
}

func ourConnect() (float64, error) {
	on := func(name, addr string) func(args ...string) []string {
		return func(args ...string) []string {
			return ns(name, append([]string{verbena, "exec", "--addr", addr, "--"}, args...)...)
		}
	}
	return cmtime(on(speedNS[0], speedTarget), on(speedNS[1], speedInitiator), speedTarget)
}
