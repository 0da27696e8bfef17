package store

// What clients do at the same time is recorded, and held to what the store promises. A value says which PUT it is of, and its
// other bytes follow from that: a mixture of two is found out.

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// op is an operation of a client.
type op struct {
	client, n  int // of a PUT; of a GET: that of the value which it has found
	kind       byte
	key        string
	version    uint64 // 0: a GET that has found nothing, or a change whose outcome is not known
	start, end int64  // end of a change whose outcome is not known: never
	whose      int    // the client that has called
}

const (
	opGet = 'G'
	never = int64(1) << 62
)

// now is a clock that all processes of the host share.
func now() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return ts.Nano()
}

// valueOf returns the value of the n-th PUT of a client.
func valueOf(client, n int) []byte {
	r := rand.New(rand.NewPCG(uint64(client), uint64(n)))
	b := fmt.Appendf(nil, "%d:%d:", client, n)
	for i := r.IntN(MaxValue - len(b)); i > 0; i-- {
		b = append(b, byte(r.Uint32()))
	}
	return b
}

// parseValue returns the PUT that a value is of.
func parseValue(b []byte) (client, n int, err error) {
	parts := strings.SplitN(string(b), ":", 3)
	if len(parts) == 3 {
		client, _ = strconv.Atoi(parts[0]) // the comparison finds what is no number
		n, _ = strconv.Atoi(parts[1])
	}
	if string(valueOf(client, n)) != string(b) {
		return 0, 0, fmt.Errorf("%q is the value of no PUT", b)
	}
	return client, n, nil
}

// check returns what is wrong with a history, nil if nothing is.
func check(ops []op) error {
	byKey := make(map[string][]op)
	versions := make(map[uint64]string) // which change has a version
	started := make(map[[2]int]*op)     // PUTs
	observed := make(map[[2]int]uint64) // the version by which a PUT was seen
	acknowledged := make(map[int][]*op) // changes of a client
	note := func(version uint64, what string) error {
		if was, ok := versions[version]; ok && was != what {
			return fmt.Errorf("version %d is that of %s, and of %s", version, was, what)
		}
		versions[version] = what
		return nil
	}
	for i := range ops {
		o := &ops[i]
		byKey[o.key] = append(byKey[o.key], *o)
		if o.kind == opGet {
			continue
		}
		if o.kind == opPut {
			started[[2]int{o.client, o.n}] = o
		}
		if o.end != never {
			acknowledged[o.client] = append(acknowledged[o.client], o)
			if err := note(o.version, fmt.Sprintf("%c %d:%d", o.kind, o.client, o.n)); err != nil {
				return err
			}
		}
	}
	for i := range ops {
		o := &ops[i]
		if o.kind != opGet || o.version == 0 {
			continue
		}
		id := [2]int{o.client, o.n}
		put := started[id]
		if put == nil || put.key != o.key || put.start > o.end {
			return fmt.Errorf("a GET of %s has found %d:%d, which nobody has put there by then", o.key, o.client, o.n)
		}
		observed[id] = o.version
		if err := note(o.version, fmt.Sprintf("%c %d:%d", opPut, o.client, o.n)); err != nil {
			return err
		}
		if put.end != never && put.version != o.version {
			return fmt.Errorf("a GET of %d:%d: version %d, the PUT has had %d", o.client, o.n, o.version, put.version)
		}
	}
	// A change without an answer is not made after a later one of the same client.
	for id, version := range observed {
		put := started[id]
		for _, later := range acknowledged[put.client] {
			if put.end == never && later.start > put.start && later.version < version {
				return fmt.Errorf("PUT %d:%d without an answer was made after a later change of its client", put.client, put.n)
			}
		}
	}
	for key, all := range byKey {
		if err := checkKeyHistory(all); err != nil {
			return fmt.Errorf("key %s: %w", key, err)
		}
	}
	return nil
}

// checkKeyHistory checks that operations of a key which do not overlap have versions in their order.
func checkKeyHistory(all []op) error {
	ends := slices.Clone(all)
	slices.SortFunc(ends, func(a, b op) int { return int(a.end - b.end) })
	slices.SortFunc(all, func(a, b op) int { return int(a.start - b.start) })
	var before op // of those that have ended before an operation begins: that with the highest version
	for _, o := range all {
		for len(ends) > 0 && ends[0].end < o.start {
			if ends[0].version > before.version {
				before = ends[0]
			}
			ends = ends[1:]
		}
		switch {
		case o.kind == opGet && o.version == 0:
			if before.version == 0 || before.kind == opDelete {
				break
			}
			deleted := slices.ContainsFunc(all, func(d op) bool {
				return d.kind == opDelete && d.start < o.end && (d.end == never || d.version > before.version)
			})
			if !deleted {
				return fmt.Errorf("a GET has found nothing, after version %d was there", before.version)
			}
		case o.kind == opGet && o.version < before.version, o.kind != opGet && o.end != never && o.version <= before.version:
			return fmt.Errorf("%c %d:%d: version %d, after version %d", o.kind, o.client, o.n, o.version, before.version)
		}
	}
	return nil
}

// The checker finds what it is for.
func TestCheck(t *testing.T) {
	put := op{client: 1, n: 1, kind: opPut, key: "k", version: 5, start: 10, end: 20}
	get := op{client: 1, n: 1, kind: opGet, key: "k", version: 5, start: 30, end: 40}
	change := func(o op, f func(*op)) op { f(&o); return o }
	second := change(put, func(o *op) { o.n, o.version, o.start, o.end = 2, 6, 21, 29 })
	del := op{client: 2, kind: opDelete, key: "k", version: 7, start: 32, end: 35}
	none := op{kind: opGet, key: "k", start: 30, end: 40}
	unknown := change(put, func(o *op) { o.version, o.end = 0, never })
	for what, h := range map[string]struct {
		ops  []op
		good bool
	}{
		"a GET after a PUT":                     {[]op{put, get}, true},
		"of a PUT without an answer":            {[]op{unknown, get}, true},
		"nothing before a PUT":                  {[]op{change(none, func(o *op) { o.start, o.end = 1, 15 }), put}, true},
		"nothing after a PUT":                   {[]op{put, none}, false},
		"nothing while it is deleted":           {[]op{put, del, none}, true},
		"nothing before it is deleted":          {[]op{put, del, change(none, func(o *op) { o.end = 31 })}, false},
		"a value of the future":                 {[]op{put, change(get, func(o *op) { o.start, o.end = 1, 2 })}, false},
		"a value of no PUT":                     {[]op{get}, false},
		"a value of another key":                {[]op{put, change(get, func(o *op) { o.key = "l" })}, false},
		"the value of before":                   {[]op{put, second, get}, false},
		"back, by GETs":                         {[]op{unknown, change(second, func(o *op) { o.start, o.end, o.version = 21, never, 0 }), change(get, func(o *op) { o.n, o.version, o.start, o.end = 2, 6, 22, 25 }), get}, false},
		"the same version twice":                {[]op{put, change(second, func(o *op) { o.version = 5 })}, false},
		"versions against the order":            {[]op{put, change(second, func(o *op) { o.version = 4 })}, false},
		"another version than the answer":       {[]op{put, change(get, func(o *op) { o.version = 8 })}, false},
		"late, after a later change of its own": {[]op{unknown, change(second, func(o *op) { o.version = 3 }), get}, false},
	} {
		if err := check(h.ops); (err == nil) != h.good {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, _, err := parseValue(append(valueOf(1, 2), 'x')); err == nil {
		t.Error("a value that is too long is taken")
	}
}

// history takes operations of many clients.
type history struct {
	mu   sync.Mutex // guards ops
	ops  []op
	done atomic.Int64
}

func (h *history) add(o op) {
	h.mu.Lock()
	h.ops = append(h.ops, o)
	h.mu.Unlock()
	h.done.Add(1)
}

// waitFor waits until so many more operations are done, and something else holds.
func (h *history) waitFor(ctx context.Context, more int, holds func() bool) error {
	for want := h.done.Load() + int64(more); h.done.Load() < want || !holds(); time.Sleep(time.Millisecond) {
		if ctx.Err() != nil {
			return fmt.Errorf("%d operations, want %d: %w", h.done.Load(), want, ctx.Err())
		}
	}
	return nil
}

// step has a client do an operation at random, and returns it.
func step(ctx context.Context, c *Client, client, n int, r *rand.Rand, keys int) (o op, err error) {
	o = op{client: client, n: n, whose: client, kind: opGet, key: fmt.Sprint("key ", r.IntN(keys))}
	switch k := r.IntN(100); {
	case k < 30:
		o.kind = opPut
	case k < 35:
		o.kind = opDelete
	}
	return perform(ctx, c, o)
}

// perform does an operation, and fills in what became of it.
func perform(ctx context.Context, c *Client, o op) (_ op, err error) {
	var value []byte
	o.start = now()
	switch o.kind {
	case opPut:
		o.version, err = c.Put(ctx, o.key, valueOf(o.client, o.n))
	case opDelete:
		o.version, err = c.Delete(ctx, o.key)
	default:
		value, o.version, err = c.Get(ctx, o.key)
	}
	o.end = now()
	switch {
	case errors.Is(err, ErrNotFound):
		o.kind = opGet // so a DELETE of nothing is, too
		return o, nil
	case errors.Is(err, ErrUnknown):
		o.end = never
		return o, nil
	case err == nil && o.kind == opGet:
		o.client, o.n, err = parseValue(value)
	}
	if err != nil {
		err = fmt.Errorf("%c %s: %w", o.kind, o.key, err)
	}
	return o, err
}

// play has clients do operations until stop reports true, each at least so many. A table of four keys for each of two buckets.
func play(t *testing.T, h *history, clients []*Client, least int, seed uint64, stop func() bool) {
	t.Helper()
	ctx := background(t)
	var all sync.WaitGroup
	for i, c := range clients {
		all.Go(func() {
			r := rand.New(rand.NewPCG(seed, uint64(i)))
			for n := 0; n < least || !stop(); n++ {
				o, err := step(ctx, c, i, n, r, 3)
				if err != nil {
					t.Error(err)
					return
				}
				h.add(o)
			}
		})
	}
	all.Wait()
	if err := check(h.ops); err != nil {
		t.Error(err)
	}
}

func seedOf(t testing.TB) uint64 {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		seed, _ = strconv.ParseUint(s, 10, 64) // the message shows what was taken
	}
	t.Logf("VERBENA_SEED=%d repeats the operations", seed)
	return seed
}

func full() bool { return os.Getenv("VERBENA_FULL") != "" }

// pick returns a number for the short form of a test, or for the long one.
func pick(short, long int) int {
	if full() {
		return long
	}
	return short
}

// Several clients GET, PUT and DELETE the same few keys at a time, and the history is one that the store may have.
func TestHistory(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			s := serve(t, must(NewTable(2))(t), link)
			var clients []*Client
			for range 4 {
				clients = append(clients, dial(t, s.Addr(), open(t, link)))
			}
			play(t, new(history), clients, pick(300, 10_000), seedOf(t), func() bool { return true })
			for _, c := range clients {
				if c.Connections() != 1 {
					t.Errorf("a client has made %d connections", c.Connections())
				}
			}
		})
	}
}

// A writer that takes its time, piece by piece and in any order, is seen in the middle of its writing, and no client takes that
// for a value.
func TestTornReads(t *testing.T) {
	for name, link := range links {
		t.Run(name, func(t *testing.T) {
			s := serve(t, must(NewTable(1))(t), link)
			ctx, stop := context.WithCancel(background(t))
			defer stop()
			must(s.table.Put("key", valueOf(0, 0)))(t)
			var clients []*Client
			for range 2 {
				clients = append(clients, dial(t, s.Addr(), open(t, link)))
			}
			var all sync.WaitGroup
			all.Go(func() {
				r := rand.New(rand.NewPCG(seedOf(t), 0))
				for version := uint64(2); ctx.Err() == nil; version++ {
					e := entry{version, []byte("key"), valueOf(0, int(version)-1)}
					b := e.encode()
					for _, i := range r.Perm(slotSize / 8) {
						copy(s.table.memory[8*i:][:8], b[8*i:])
						if r.IntN(4) == 0 {
							time.Sleep(time.Microsecond) // lets clients look
						}
					}
					time.Sleep(time.Microsecond)
				}
			})
			var readers sync.WaitGroup
			for i, c := range clients {
				readers.Go(func() {
					last := uint64(0)
					for n := 0; n < 100 || c.Torn() == 0; n++ {
						value, version, err := c.Get(ctx, "key")
						if err != nil {
							t.Error(err)
							return
						}
						if _, number, err := parseValue(value); err != nil || uint64(number)+1 != version || version < last {
							t.Errorf("client %d: version %d after %d: %d, %v", i, version, last, number, err)
							return
						}
						last = version
					}
				})
			}
			readers.Wait()
			stop()
			all.Wait()
		})
	}
}
