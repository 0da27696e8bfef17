package importer_test

// Buffers in memory files (dmabuf.NewFileTable) whose importers, in other processes, are told of every
// thing that an exporter does, and are stopped and killed; and exporters that end.

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// An importer brings back what was evicted; what is revoked is gone, also for one that has pinned it.
func TestRemoteOpsRevoked(t *testing.T) {
	for _, how := range []string{"dynamic", "pinned"} {
		e := newFileExporter(t, unix.F_SEAL_SHRINK, (*filePlace).table)
		c := startImporter(t, how, e.buffer)
		c.says("ready")
		want := uint64(0)
		for range 3 {
			c.add(words)
			c.says("added")
			if want += words; e.sum() != want {
				t.Errorf("%s: the words add up to %d, want %d", how, e.sum(), want)
			}
			if how == "dynamic" {
				check(t, e.stop(within(t, time.Minute), func() { e.evicted = true }))
			}
		}
		check(t, e.stop(within(t, time.Minute), func() { e.revoked = true }))
		eventually(t, "no pin is left", func() bool {
			e.buffer.Reservation().Lock()
			defer e.buffer.Reservation().Unlock()
			return e.pins == 0
		})
		c.add(1)
		if line := c.says("failed:"); !strings.Contains(line, mem.FaultRevoked.String()) {
			t.Errorf("%s: %s", how, line)
		}
		if e.sum() != want {
			t.Errorf("%s: the words add up to %d after the end, want %d", how, e.sum(), want)
		}
	}
}

// Importers are stopped, go on, and are killed at any moment, while the exporter moves and evicts the
// buffer. The exporter does not wait for an importer that was killed. One that is stopped delays a move until
// the move's context ends, and no longer. Every addition that an importer has reported is there.
func TestRemoteOpsStorm(t *testing.T) {
	rng := random(t)
	e := newFileExporter(t, unix.F_SEAL_SHRINK, (*filePlace).table)
	const each = 2000
	least, most := uint64(0), uint64(0) // of the sum
	lives := 4
	if testing.Short() {
		lives = 2
	}
	for range lives {
		c := startImporter(t, "dynamic", e.buffer)
		c.says("ready")
		said := make(chan struct{})
		go func() {
			defer close(said)
			for c.out.Scan() {
				if !strings.HasPrefix(c.out.Text(), "added") {
					t.Error(c.out.Text())
				}
				said <- struct{}{}
			}
		}()
		c.add(each)
		most += each
		moved, refused := 0, 0
		for events := 10 + rng.IntN(20); events > 0; events-- {
			stopped := rng.IntN(3) == 0
			if stopped {
				c.stop()
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			if stopped {
				cancel()
				ctx, cancel = context.WithTimeout(t.Context(), 5*time.Millisecond)
			}
			do := e.moveLocked
			if rng.IntN(3) == 0 {
				do = func() { e.evicted = true }
			}
			switch err := e.stop(ctx, do); {
			case err == nil:
				moved++
			case stopped:
				refused++
			default:
				t.Fatalf("moving the buffer: %v", err)
			}
			cancel()
			if stopped {
				check(t, c.cmd.Process.Signal(syscall.SIGCONT))
			}
			select {
			case <-said:
				c.add(each)
				least += each
				most += each
			case <-time.After(time.Duration(rng.IntN(2000)) * time.Microsecond):
			}
		}
		if rng.IntN(2) == 0 {
			c.stop()
		}
		check(t, c.cmd.Process.Kill())
		for range said {
			least += each
		}
		e.move()
		if got := e.sum(); got < least || got > most {
			t.Errorf("the words add up to %d, want %d to %d", got, least, most)
		} else { // what was added without a word
			least, most = got, got
		}
		t.Logf("%d moves, %d that a stopped process has delayed", moved, refused)
	}
}

// random returns random numbers from a seed that is printed.
func random(t *testing.T) *rand.Rand {
	seed := rand.Uint64()
	if s := os.Getenv("VERBENA_SEED"); s != "" {
		var err error
		seed, err = strconv.ParseUint(s, 0, 64)
		check(t, err)
	}
	t.Logf("VERBENA_SEED=%#x", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// beExporter is another process with a buffer. It prints the buffer's descriptor, and moves the buffer
// all the time after a line was read.
func beExporter(how string) {
	fail := func(err error) {
		if err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
	}
	var b *dmabuf.Buffer
	var move func() error
	if how == "exporter" {
		m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: remoteSize})
		fail(err)
		b, move = m.Buffer(), func() error { return m.Move(context.Background()) }
	} else {
		p, err := makeFilePlace(unix.F_SEAL_SHRINK)
		fail(err)
		b, err = dmabuf.Export(dmabuf.Config{Size: remoteSize, Ops: dmabuf.Ops{
			Map:     func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) { return p.table(), nil },
			Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
			Release: func(*dmabuf.Buffer) {},
		}})
		fail(err)
		move = func() error {
			b.Reservation().Lock()
			defer b.Reservation().Unlock()
			b.InvalidateMappings()
			return b.Reservation().Wait(context.Background(), dmabuf.Bookkeep)
		}
	}
	fd, err := b.FD()
	fail(err)
	fmt.Println("descriptor", fd)
	bufio.NewScanner(os.Stdin).Scan()
	for {
		fail(move())
		time.Sleep(100 * time.Microsecond)
	}
}

// openOf opens a descriptor of another process.
func (c *child) openOf(line string) *os.File {
	c.t.Helper()
	fd := strings.TrimPrefix(line, "descriptor ")
	f, err := os.OpenFile(fmt.Sprintf("/proc/%d/fd/%s", c.cmd.Process.Pid, fd), os.O_RDWR, 0)
	check(c.t, err)
	return f
}

// The process of an exporter is stopped, and goes on; it is killed, at any moment: accesses wait or
// end, and what an importer has can be given up.
func TestRemoteExporterEnds(t *testing.T) {
	for _, how := range []string{"exporter", "exporter of files"} {
		t.Run(how, func(t *testing.T) {
			c := startChild(t, how)
			f := c.openOf(c.says("descriptor"))
			b, err := dmabuf.Get(int(f.Fd()))
			check(t, err)
			check(t, f.Close())
			table := newTable()
			r := register(t, table, b, importer.Config{Length: remoteSize})
			r.works(t, "at first", 1)
			_, err = fmt.Fprintln(c.in, "move")
			check(t, err)
			for i := range 200 {
				r.works(t, "it moves", byte(i))
			}
			c.stop()
			over := make(chan struct{})
			go func() {
				defer close(over)
				for {
					if f := r.write(0, []byte("x")); !f.OK() {
						if f.Kind != mem.FaultRevoked {
							t.Errorf("a write ends with %v", f)
						}
						return
					}
				}
			}()
			check(t, c.cmd.Process.Signal(syscall.SIGCONT))
			check(t, c.cmd.Process.Kill())
			<-over
			r.fails(t, "its exporter has ended", mem.FaultRevoked)
			if _, err := importer.Import(b, importer.Config{Length: remoteSize}); !errors.Is(err, syscall.ENODEV) {
				t.Errorf("importing a buffer whose exporter has ended: %v", err)
			}
			check(t, r.Close())
			b.Put()
		})
	}
}
