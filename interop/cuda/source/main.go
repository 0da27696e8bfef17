// Command source prints a directory with the source of a package of Debian's newest release, which it fetches if it is
// not in the cache: for perftest.sh.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/verbena-rdma/verbena/interop/vm"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "source:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("the name of one package, not %d arguments", len(args))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	dir, err := vm.FindSource(ctx, "sid", args[0])
	if err != nil {
		return err
	}
	fmt.Println(dir)
	return nil
}
