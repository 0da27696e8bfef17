package main

// Comparison of speeds on bad networks: our device with the kernel's over a pair of interfaces that
// loses packets, in both directions, beside two devices of the kernel; and two devices of ours behind
// a bottleneck of the kernel's making, beside TCP.

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/verbena-rdma/verbena/interop/rxe/result"
)

var lossRates = []string{"0%", "0.1%", "1%"}

// kinds of pairs on the lossy network, by who initiates.
const (
	oursToKernel   = "ours to rxe"
	kernelToOurs   = "rxe to ours"
	kernelToKernel = "rxe to rxe"
)

// lossy measures WRITEs of 64 KiB at each loss, by ib_write_bw on both sides, between pairs.
func lossy(rounds int, pairs ...string) (rows []result.Figures, err error) {
	// A segmented send would be lost as a whole.
	if err := run("ip", "link", "set", "dev", oursIf, "gso_max_segs", "1"); err != nil {
		return nil, err
	}
	defer func() {
		err = errors.Join(err, run("ip", "link", "set", "dev", oursIf, "gso_max_segs", "65535"))
	}()
	for _, loss := range lossRates {
		if err := impair("limit 10000 loss " + loss); err != nil {
			return nil, err
		}
		for _, pair := range pairs {
			f := result.Figures{Name: fmt.Sprintf("%s, %s lost", pair, loss)}
			for range rounds {
				v, err := lossyWrites(pair)
				if err != nil {
					return nil, errors.Join(fmt.Errorf("%s: %w", f.Name, err), repair())
				}
				f.Values = append(f.Values, v)
			}
			rows = append(rows, f)
		}
		if err := repair(); err != nil {
			return nil, err
		}
	}
	return rows, nil
}

// lossyWrites returns MB/s.
func lossyWrites(pair string) (float64, error) {
	args := []string{"ib_write_bw", "-F", "-m", "4096", "-s", "65536", "-D", fmt.Sprint(roundTime.Seconds()), "--report_gbits", "-u", "14"}
	kernel := ns(kernelNS, append(args, "-d", rxeDev, "-x", "1")...)
	ours := ns(oursNS, append([]string{verbena, "exec", "--addr", families["v4"].ours.String(), "--"}, append(args, "-x", "0")...)...)
	second := ns(oursNS, append(args, "-d", secondRxe, "-x", "1")...)
	at := families["v4"].kernel.String()
	var out string
	var err error
	switch pair {
	case oursToKernel:
		out, err = couple(kernel, append(ours, at))
	case kernelToOurs:
		out, err = couple(ours, append(kernel, families["v4"].ours.String()))
	default:
		out, err = couple(kernel, append(second, at))
	}
	if err != nil {
		return 0, err
	}
	gbits, err := figure(out, 3)
	return gbits * 1000 / 8, err
}

// bottlenecks are what the kernel puts between two devices of ours: arguments of tc qdisc add, one
// after the other.
var bottlenecks = []struct {
	name  string
	rules []string
}{
	{"netem 100 Mb/s, 10 ms, 100 packets", []string{"root netem rate 100mbit delay 5ms limit 100"}},
	{"netem 100 Mb/s, 10 ms, 1 % lost", []string{"root netem rate 100mbit delay 5ms limit 1000 loss 1%"}},
	{"fq_codel 100 Mb/s", []string{"root handle 1: tbf rate 100mbit burst 64kb limit 10mb", "parent 1: fq_codel ecn"}},
}

// bottlenecked measures WRITEs of 64 KiB of ours, and TCP, behind each bottleneck.
func bottlenecked(rounds int) (rows []result.Figures, err error) {
	for _, b := range bottlenecks {
		for i, ns := range speedNS {
			for _, rule := range b.rules {
				if err := all(fmt.Sprintf("ip netns exec %s tc qdisc add dev e%d %s", ns, i, rule)); err != nil {
					return nil, err
				}
			}
		}
		ours, tcp := result.Figures{Name: b.name + ", WRITE"}, result.Figures{Name: b.name + ", TCP"}
		for range rounds {
			r, err := perf(couple, "--op", "write", "--size", "64K", "--depth", "32")
			if err != nil {
				return nil, fmt.Errorf("%s: %w", ours.Name, err)
			}
			ours.Values = append(ours.Values, r.GBytesPerS*1000)
			v, err := tcpBandwidth()
			if err != nil {
				return nil, fmt.Errorf("%s: %w", tcp.Name, err)
			}
			tcp.Values = append(tcp.Values, v)
		}
		rows = append(rows, ours, tcp)
		for i, ns := range speedNS {
			if err := all(fmt.Sprintf("ip netns exec %s tc qdisc del dev e%d root", ns, i)); err != nil {
				return nil, err
			}
		}
	}
	return rows, nil
}

// tcpBandwidth returns MB/s of iperf3.
func tcpBandwidth() (float64, error) {
	out, err := serving(ns(speedNS[0], "iperf3", "-s", "-1", "-B", speedTarget), ns(speedNS[1], "iperf3", "-c", speedTarget, "-J", "-t", fmt.Sprint(roundTime.Seconds())))
	if err != nil {
		return 0, err
	}
	var r struct {
		End struct {
			Received struct {
				BitsPerSecond float64 `json:"bits_per_second"`
			} `json:"sum_received"`
		} `json:"end"`
	}
	if err := json.Unmarshal([]byte(out), &r); err != nil {
		return 0, err
	}
	if r.End.Received.BitsPerSecond <= 0 {
		return 0, fmt.Errorf("iperf3 has received nothing:\n%s", out)
	}
	return r.End.Received.BitsPerSecond / 8e6, nil
}

// figure returns a field of perftest's line of figures.
func figure(out string, field int) (float64, error) {
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
	return 0, fmt.Errorf("perftest printed no figures:\n%s", out)
}
