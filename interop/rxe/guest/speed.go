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
	"os/exec"
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

func compareSpeed(rounds int) error {
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
	s := result.Speed{Rounds: rounds}
	for range rounds {
		for _, m := range []struct {
			to      *[]float64
			measure func() (float64, error)
		}{
			{&s.Bandwidth.Kernel, kernelBandwidth},
			{&s.Bandwidth.Ours, ourBandwidth},
			{&s.Latency.Kernel, kernelLatency},
			{&s.Latency.Ours, ourLatency},
			{&s.UDP, floorLatency},
			{&s.SendLatency.Kernel, kernelSendLatency},
			{&s.SendLatency.Ours, ourSendLatency},
		} {
			v, err := m.measure()
			if err != nil {
				return err
			}
			*m.to = append(*m.to, v)
		}
	}
	s.Bandwidth.Ratio = ratio(&s.Bandwidth)
	s.Latency.Ratio = ratio(&s.Latency)
	s.SendLatency.Ratio = ratio(&s.SendLatency)
	return errors.Join(report(result.Line{Speed: &s}), report(result.Line{Done: true}))
}

// ratio returns the median of the rounds' ratios.
func ratio(c *result.Comparison) float64 {
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
func couple(server, client []string) (string, error) {
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
	if err != nil {
		cancel()
	}
	err = errors.Join(err, srv.Wait())
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
	for line := range strings.Lines(out) {
		f := strings.Fields(line)
		if len(f) <= field {
			continue
		}
		if _, err := strconv.Atoi(f[0]); err != nil {
			continue
		}
		if v, err := strconv.ParseFloat(f[field], 64); err == nil {
			return v, nil
		}
	}
	return 0, fmt.Errorf("%s printed no figures:\n%s", program, out)
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
