package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"

	"github.com/verbena-rdma/verbena/verbs"
)

type psCmd struct {
	JSON bool `name:"json" help:"Print a JSON array of devices, with everything."`
	QPs  bool `name:"qps" short:"q" help:"Show the queue pairs of each process too, and the shard that each is in."`
	MRs  bool `name:"mrs" short:"m" help:"Show the memory regions and windows of each process too, and its device memory."`
	XRC  bool `name:"xrc" short:"x" help:"Show the XRC domains of each process too."`
}

// Help is shown below the flags.
func (psCmd) Help() string {
	return `Lists the processes of this user that have a device open, in this network namespace, and what they have on it, as "rdma resource" does for adapters.

Examples:

    verbena ps
    verbena ps --qps --mrs --xrc
    verbena ps --json`
}

func (c *psCmd) Run(context.Context) error {
	all, err := verbs.Resources()
	if err != nil {
		return err
	}
	if c.JSON {
		enc := json.NewEncoder(os.Stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(all)
	}
	return c.print(os.Stdout, all)
}

func (c *psCmd) print(w io.Writer, all []verbs.DeviceResources) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "ADDRESS\tPID\tPROGRAM\tQPS\tMRS\tREGISTERED\tMWS\tDM\tXRCDS\tCQS\tSENT\tRECEIVED\tAGAIN")
	for _, d := range all {
		for i := range d.Processes {
			c.process(t, d.Addr.String(), &d.Processes[i])
		}
	}
	return t.Flush()
}

func (c *psCmd) process(w io.Writer, addr string, p *verbs.ProcessResources) {
	pid := fmt.Sprint(p.PID)
	if !p.Answered {
		fmt.Fprintf(w, "%s\t%s\t(does not answer)\n", addr, pid)
		return
	}
	registered, dm := uint64(0), uint64(0)
	for _, m := range p.MRs {
		registered += m.Length
	}
	for _, m := range p.DMs {
		dm += m.Length
	}
	fmt.Fprintf(w, "%s\t%s\t%s\t%d\t%d\t%s\t%d\t%s\t%d\t%d\t%s\t%s\t%d\n", addr, pid, p.Program, len(p.QPs), len(p.MRs), bytesOf(registered),
		len(p.MWs), bytesOf(dm), len(p.XRCDs), p.CQs, bytesOf(p.Counters["tx_bytes"]), bytesOf(p.Counters["rx_bytes"]), p.Counters["retransmitted_packets"])
	if c.QPs {
		for _, q := range p.QPs {
			peer := ""
			if !q.DestGID.IsZero() {
				peer = fmt.Sprintf("→ %v 0x%06x", q.DestGID.Addr(), q.DestQPN)
			}
			fmt.Fprintf(w, "\t\tQP 0x%06x\t%s\t%s\t%s\tshard %d\t\t\t\t%s\t%s\t%d\n", q.Number, q.Type, q.State, peer, q.Shard, bytesOf(q.TxBytes), bytesOf(q.RxBytes), q.Retransmits)
		}
	}
	if c.MRs {
		printMemory(w, p)
	}
	if c.XRC {
		for _, x := range p.XRCDs {
			file := "no file"
			if x.File != "" {
				file = "file " + x.File
			}
			fmt.Fprintf(w, "\t\tXRCD %d\t%d\t\t%s%sopened %d times, %d SRQs\n", x.Number, x.QPs, file, toLast, x.Opens, x.SRQs)
		}
	}
}

// toLast leaves all columns between REGISTERED and the last one empty.
const toLast = "\t\t\t\t\t\t\t"

// printMemory writes a line for each region, window and buffer of device memory.
func printMemory(w io.Writer, p *verbs.ProcessResources) {
	for _, m := range p.MRs {
		fmt.Fprintf(w, "\t\tMR %#x\t%s\t\t%s%s%s\n", m.Addr, m.Kind, bytesOf(m.Length), toLast, m.Access)
	}
	for _, m := range p.MWs {
		if !m.Bound {
			fmt.Fprintf(w, "\t\tMW\t%s\t\tfree%s\n", m.Type, toLast)
			continue
		}
		fmt.Fprintf(w, "\t\tMW %#x\t%s\t\t%s%s%s\n", m.Addr, m.Type, bytesOf(m.Length), toLast, m.Access)
	}
	for _, m := range p.DMs {
		fmt.Fprintf(w, "\t\tDM %d\t%s\t%d\t%s%s\n", m.Number, m.Class, m.MRs, bytesOf(m.Length), toLast)
	}
}

// bytesOf formats a number of bytes for people, with one decimal.
func bytesOf(n uint64) string {
	unit, v := 0, float64(n)
	for ; v >= 1024 && unit < len(byteUnits)-1; unit++ {
		v /= 1024
	}
	if unit == 0 {
		return fmt.Sprintf("%d B", n)
	}
	return fmt.Sprintf("%.1f %s", v, byteUnits[unit])
}

var byteUnits = [...]string{"B", "KiB", "MiB", "GiB", "TiB"}
