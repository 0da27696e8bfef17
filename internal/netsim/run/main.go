// Command run simulates queue pairs on a bottleneck, and prints tables: see docs/network-sim.md.
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"

	"github.com/verbena-rdma/verbena/internal/netsim"
)

func main() {
	seeds := flag.Int("seeds", 1, "with how many seeds each case is run")
	only := flag.String("only", "", "run only cases whose names match this regular expression")
	write := flag.String("write", "", "renew the tables and plots in this directory, docs")
	flag.Parse()
	pattern, err := regexp.Compile(*only)
	if err == nil {
		err = netsim.Report(os.Stdout, *seeds, pattern, *write)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
