// Command kv is a key-value store over RDMA. Clients GET by reading the server's memory, and the server's program does nothing
// for that; they PUT and DELETE by message:
//
//	kv serve -file table 127.77.1.1:7174
//	kv put 127.77.1.1:7174 colour green
//	kv get 127.77.1.1:7174 colour
//	kv delete 127.77.1.1:7174 colour
//	kv bench 127.77.1.1:7174
//
// Without arguments it shows all that within one process. The store itself is package store; docs/tutorial.md explains it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/examples/kv/store"
	"github.com/verbena-rdma/verbena/verbs"
)

// commands are what the program does, by name: with how many arguments behind the flags, and how.
var commands = map[string]struct {
	args int
	help string
	run  func(ctx context.Context, args []string) error
}{
	"serve":  {1, "serve [-file FILE] [-buckets N] [-pcap FILE] ADDR", serve},
	"put":    {3, "put ADDR KEY VALUE", put},
	"get":    {2, "get ADDR KEY", get},
	"delete": {2, "delete ADDR KEY", remove},
	"bench":  {1, "bench [-clients N] [-puts PERCENT] [-for TIME] ADDR", bench},
}

var (
	file    = flag.String("file", "", "serve: the `file` that the table is kept in, too; empty: it ends with the process")
	buckets = flag.Int("buckets", 256, "serve: how many buckets of four slots the table has")
	pcap    = flag.String("pcap", "", "serve: the `file` that packets are captured in; without it no packets are used between processes of a host")
	clients = flag.Int("clients", 4, "bench: how many clients")
	puts    = flag.Int("puts", 0, "bench: how many of a hundred operations are PUTs")
	long    = flag.Duration("for", 2*time.Second, "bench: how long")
)

// patience is how long a command waits for a server that is starting.
const patience = 10 * time.Second

func main() {
	flag.Usage = func() {
		for _, name := range []string{"serve", "put", "get", "delete", "bench"} {
			fmt.Fprintln(os.Stderr, "usage: kv", commands[name].help)
		}
		flag.PrintDefaults()
	}
	if len(os.Args) < 2 {
		check(demo())
		return
	}
	c, ok := commands[os.Args[1]]
	check(flag.CommandLine.Parse(os.Args[2:]))
	if !ok || flag.NArg() != c.args {
		flag.Usage()
		os.Exit(2)
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	check(c.run(ctx, flag.Args()))
}

func serve(ctx context.Context, args []string) (err error) {
	var dev *verbs.Device // nil: package cm opens it
	if *pcap != "" {
		host, _, err := net.SplitHostPort(args[0])
		if err != nil {
			return err
		}
		if dev, err = verbs.Open(host, &verbs.Config{Link: verbs.LinkUDP, PCAP: *pcap}); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, dev.Close()) }()
	}
	table, err := store.NewTable(*buckets)
	if *file != "" {
		table, err = store.OpenTable(*file, *buckets)
	}
	if err != nil {
		return err
	}
	s, err := store.Listen(ctx, args[0], table, dev)
	if err != nil {
		return errors.Join(err, table.Close())
	}
	fmt.Println("listening on", s.Addr())
	<-ctx.Done()
	return errors.Join(s.Close(), table.Close())
}

// with calls f with a client of the server.
func with(ctx context.Context, address string, f func(context.Context, *store.Client) error) (err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := store.Dial(ctx, address, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	return f(ctx, c)
}

func put(ctx context.Context, args []string) error {
	return with(ctx, args[0], func(ctx context.Context, c *store.Client) error {
		version, err := c.Put(ctx, args[1], []byte(args[2]))
		if err == nil {
			fmt.Println("version", version)
		}
		return err
	})
}

func get(ctx context.Context, args []string) error {
	return with(ctx, args[0], func(ctx context.Context, c *store.Client) error {
		value, _, err := c.Get(ctx, args[1])
		if err == nil {
			fmt.Printf("%s\n", value)
		}
		return err
	})
}

func remove(ctx context.Context, args []string) error {
	return with(ctx, args[0], func(ctx context.Context, c *store.Client) error {
		_, err := c.Delete(ctx, args[1])
		return err
	})
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "kv:", err)
		os.Exit(1)
	}
}
