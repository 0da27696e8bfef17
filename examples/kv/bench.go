package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/verbena-rdma/verbena/examples/kv/store"
)

const benchKeys = 64

// tally is what a client of the benchmark has done.
type tally struct {
	gets, puts []time.Duration
	torn       uint64
	err        error
}

// bench has clients GET and PUT at random keys, each one after the other, and prints how fast that is.
func bench(ctx context.Context, args []string) error {
	err := with(ctx, args[0], func(ctx context.Context, c *store.Client) error {
		for i := range benchKeys {
			if _, err := c.Put(ctx, benchKey(i), make([]byte, 64)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	all := make([]tally, *clients)
	var running sync.WaitGroup
	for i := range all {
		running.Go(func() { all[i].err = all[i].run(ctx, args[0]) })
	}
	running.Wait()
	var sum tally
	for _, t := range all {
		sum.gets, sum.puts = append(sum.gets, t.gets...), append(sum.puts, t.puts...)
		sum.torn += t.torn
		sum.err = errors.Join(sum.err, t.err)
	}
	for _, x := range []struct {
		what string
		took []time.Duration
	}{{"GET", sum.gets}, {"PUT", sum.puts}} {
		if n := len(x.took); n > 0 {
			slices.Sort(x.took)
			fmt.Printf("%s: %.0f a second by %d clients; %v at the median, %v for one in a hundred\n",
				x.what, float64(n)/long.Seconds(), *clients, x.took[n/2], x.took[n*99/100])
		}
	}
	fmt.Println("torn READs, repeated:", sum.torn)
	return sum.err
}

func benchKey(i int) string { return fmt.Sprint("bench ", i) }

func (t *tally) run(ctx context.Context, address string) (err error) {
	c, err := store.Dial(ctx, address, nil)
	if err != nil {
		return err
	}
	defer func() { t.torn, err = c.Torn(), errors.Join(err, c.Close()) }()
	value := make([]byte, 64)
	for end := time.Now().Add(*long); ; {
		began := time.Now()
		if began.After(end) {
			return nil
		}
		key := benchKey(rand.IntN(benchKeys))
		if rand.IntN(100) < *puts {
			_, err = c.Put(ctx, key, value)
			t.puts = append(t.puts, time.Since(began))
		} else {
			_, _, err = c.Get(ctx, key)
			t.gets = append(t.gets, time.Since(began))
		}
		if err != nil {
			return err
		}
	}
}
