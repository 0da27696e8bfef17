package importer_test

// Importers in another process of a buffer whose exporter is a program's own: it has memory files.

import (
	"context"
	"encoding/binary"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/verbena-rdma/verbena/dmabuf"
)

// filePlace is memory in two memory files. The buffer lies in them in two pieces.
type filePlace struct {
	fds    [2]int
	mapped [2][]byte
}

const (
	fileSize  = 16 << 10
	firstPart = 3 * 4096 // of the buffer
)

// newFilePlace makes such memory, with seals for both files.
func newFilePlace(t *testing.T, seals int) *filePlace {
	t.Helper()
	p, err := makeFilePlace(seals)
	check(t, err)
	return p
}

func makeFilePlace(seals int) (*filePlace, error) {
	p := &filePlace{}
	for i := range p.fds {
		fd, err := unix.MemfdCreate("exporter", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
		if err == nil {
			err = unix.Ftruncate(fd, fileSize)
		}
		if err == nil {
			_, err = unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, seals)
		}
		if err == nil {
			p.fds[i] = fd
			p.mapped[i], err = unix.Mmap(fd, 0, fileSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		}
		if err != nil {
			return nil, err
		}
	}
	return p, nil
}

// table returns where the bytes of the buffer are: the second file comes first.
func (p *filePlace) table() *dmabuf.Table {
	return dmabuf.NewFileTable(
		dmabuf.FileSegment{FD: p.fds[1], Offset: 4096, Bytes: p.mapped[1][4096:][:firstPart]},
		dmabuf.FileSegment{FD: p.fds[0], Offset: 8, Bytes: p.mapped[0][8:][:remoteSize-firstPart]},
	)
}

// free poisons the memory and gives it up.
func (p *filePlace) free(t *testing.T) {
	t.Helper()
	for i, b := range p.mapped {
		for j := range b {
			b[j] = poison
		}
		check(t, unix.Munmap(b))
		check(t, unix.Close(p.fds[i]))
	}
}

// fileExporter is an exporter given by its operations.
type fileExporter struct {
	t      *testing.T
	buffer *dmabuf.Buffer
	table  func(*filePlace) *dmabuf.Table

	// What follows is guarded by the reservation lock.
	place   *filePlace
	evicted bool // importers get another place
	revoked bool
	pins    int
}

func newFileExporter(t *testing.T, seals int, table func(*filePlace) *dmabuf.Table) *fileExporter {
	t.Helper()
	e := &fileExporter{t: t, place: newFilePlace(t, seals), table: table}
	var err error
	e.buffer, err = dmabuf.Export(dmabuf.Config{Size: remoteSize, Exporter: "test", Ops: dmabuf.Ops{
		Pin:     func(*dmabuf.Attachment) error { e.pins++; return nil },
		Unpin:   func(*dmabuf.Attachment) { e.pins-- },
		Map:     e.mapping,
		Unmap:   func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) {},
		Release: func(*dmabuf.Buffer) { e.place.free(t) },
	}})
	check(t, err)
	t.Cleanup(e.buffer.Put)
	return e
}

// mapping is the operation Map. It brings memory back that was evicted.
func (e *fileExporter) mapping(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) {
	if e.revoked {
		return nil, syscall.ENODEV
	}
	if e.evicted {
		e.moveLocked()
		e.evicted = false
	}
	return e.table(e.place), nil
}

// moveLocked copies the bytes to other files.
func (e *fileExporter) moveLocked() {
	to := newFilePlace(e.t, unix.F_SEAL_SHRINK)
	for i := range to.mapped {
		copy(to.mapped[i], e.place.mapped[i])
	}
	e.place.free(e.t)
	e.place = to
}

// stop keeps importers out, and calls do, unless they do not answer while ctx lasts.
func (e *fileExporter) stop(ctx context.Context, do func()) error {
	r := e.buffer.Reservation()
	r.Lock()
	defer r.Unlock()
	e.buffer.InvalidateMappings()
	err := r.Wait(ctx, dmabuf.Bookkeep)
	if err == nil {
		do()
	}
	return err
}

// move moves the buffer to other files.
func (e *fileExporter) move() {
	e.t.Helper()
	check(e.t, e.stop(within(e.t, time.Minute), e.moveLocked))
}

// sum returns the sum of the words.
func (e *fileExporter) sum() (total uint64) {
	r := e.buffer.Reservation()
	r.Lock()
	defer r.Unlock()
	t := e.place.table()
	for off := uint64(0); off < words*8; off += 8 {
		total += binary.NativeEndian.Uint64(t.At(off, 8))
	}
	return total
}

// The buffer of a program's own exporter, in memory files, moves while another process writes to it:
// nothing is lost. One that is stopped delays the exporter's wait for the fences, and no longer than
// its context.
func TestRemoteOps(t *testing.T) {
	e := newFileExporter(t, unix.F_SEAL_SHRINK, (*filePlace).table)
	c := startImporter(t, "dynamic", e.buffer)
	c.says("ready")
	const rounds, each = 10, 5000
	said := make(chan string)
	go func() {
		defer close(said)
		for range rounds {
			c.add(each)
			said <- c.says("added")
		}
	}()
	last, moves := "", 0
	for more := true; more; moves++ {
		e.move()
		select {
		case line, ok := <-said:
			if more = ok; ok {
				last = line
			}
		case <-time.After(200 * time.Microsecond):
		}
	}
	if got := e.sum(); got != rounds*each {
		t.Errorf("the words add up to %d, want %d", got, rounds*each)
	}
	t.Logf("%d moves; the other process: %s", moves, last)
	if strings.HasSuffix(last, "moves 0") {
		t.Error("the other process has seen no move")
	}
	c.add(1)
	c.says("added")
	c.stop()
	r := e.buffer.Reservation()
	r.Lock()
	e.buffer.InvalidateMappings()
	if err := r.Wait(within(t, 20*time.Millisecond), dmabuf.Bookkeep); err == nil {
		t.Error("a stopped process is not waited for")
	}
	r.Unlock()
	check(t, c.cmd.Process.Signal(syscall.SIGCONT))
	e.move()
	check(t, c.in.Close())
	c.says("closed")
}

// Memory that another process cannot map, or that can shrink under it, is refused there; in the process
// itself it can be imported.
func TestRemoteOpsRefused(t *testing.T) {
	for what, e := range map[string]*fileExporter{
		"no files": newFileExporter(t, unix.F_SEAL_SHRINK, func(p *filePlace) *dmabuf.Table {
			return dmabuf.NewTable(p.mapped[0], p.mapped[1])
		}),
		"files that can shrink": newFileExporter(t, 0, (*filePlace).table),
		"no descriptors": newFileExporter(t, unix.F_SEAL_SHRINK, func(p *filePlace) *dmabuf.Table {
			return dmabuf.NewFileTable(dmabuf.FileSegment{FD: -1, Bytes: p.mapped[0]}, dmabuf.FileSegment{FD: 1 << 30, Bytes: p.mapped[1]})
		}),
		"not in the file": newFileExporter(t, unix.F_SEAL_SHRINK, func(p *filePlace) *dmabuf.Table {
			return dmabuf.NewFileTable(dmabuf.FileSegment{FD: p.fds[0], Offset: 1 << 40, Bytes: p.mapped[0]}, dmabuf.FileSegment{FD: p.fds[1], Bytes: p.mapped[1]})
		}),
	} {
		want := syscall.EOPNOTSUPP
		if what == "not in the file" {
			want = syscall.ENODEV // the importer finds out, and takes the exporter for broken
		}
		c := startImporter(t, "dynamic", e.buffer)
		if line := c.says("failed:"); !strings.Contains(line, want.Error()) {
			t.Errorf("%s: %s, want %v", what, line, want)
		}
		r := register(t, newTable(), e.buffer, all(false))
		r.works(t, what, 1)
		check(t, r.Close())
	}
}
