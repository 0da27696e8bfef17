package importer_test

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/mem"
)

// All tests check the lock rules, and none may leave a goroutine.
func TestMain(m *testing.M) {
	dmabuf.CheckLocks(true)
	if how := os.Getenv(childVar); how != "" {
		if how == "exporter" || how == "exporter of files" {
			beExporter(how)
		}
		beImporter(how)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

const size = 3*4096 + 100

var errnos = []syscall.Errno{syscall.EBUSY, syscall.EOPNOTSUPP, syscall.ENODEV, syscall.ENOMEM, syscall.EINVAL, syscall.EIO}

// exporter is an exporter whose operations fail or hang as the test wants, and which counts what
// importers have.
type exporter struct {
	t      *testing.T
	buffer *dmabuf.Buffer
	bytes  []byte

	mu                                 sync.Mutex // guards what follows
	attached, pinned, mapped, released int
	maps                               int // calls of Map that were answered well
	fail                               map[string]error
	hang                               map[string]chan struct{} // closed when the operation may go on
	hangs                              map[string]int           // how many calls hang
	table                              func() *dmabuf.Table
}

func export(t *testing.T) *exporter {
	t.Helper()
	e := &exporter{t: t, bytes: make([]byte, 4*4096), fail: map[string]error{}, hang: map[string]chan struct{}{}, hangs: map[string]int{}}
	e.table = e.whole
	b, err := dmabuf.Export(dmabuf.Config{Size: size, Exporter: "test", Ops: dmabuf.Ops{
		Attach: func(*dmabuf.Attachment) error { return e.op("attach", &e.attached, 1) },
		Detach: func(*dmabuf.Attachment) { e.undo("detach", &e.attached) },
		Pin:    func(*dmabuf.Attachment) error { return e.op("pin", &e.pinned, 1) },
		Unpin:  func(*dmabuf.Attachment) { e.undo("unpin", &e.pinned) },
		Map: func(*dmabuf.Attachment, dmabuf.Direction) (*dmabuf.Table, error) {
			if err := e.op("map", &e.maps, 1); err != nil {
				return nil, err
			}
			e.mu.Lock()
			defer e.mu.Unlock()
			table := e.table()
			if table != nil {
				e.mapped++
			}
			return table, nil
		},
		Unmap:          func(*dmabuf.Attachment, *dmabuf.Table, dmabuf.Direction) { e.undo("unmap", &e.mapped) },
		Release:        func(*dmabuf.Buffer) { _ = e.op("release", &e.released, 1) },
		BeginCPUAccess: func(*dmabuf.Buffer, dmabuf.Direction) error { return e.op("begin", new(int), 0) },
		EndCPUAccess:   func(*dmabuf.Buffer, dmabuf.Direction) error { return e.op("end", new(int), 0) },
		Mmap: func(_ *dmabuf.Buffer, off, n uint64) ([]byte, error) {
			return e.bytes[off:][:n], e.op("mmap", new(int), 0)
		},
		Vmap:   func(*dmabuf.Buffer) ([]byte, error) { return e.bytes, e.op("vmap", new(int), 0) },
		Vunmap: func(*dmabuf.Buffer, []byte) {},
	}})
	check(t, err)
	e.buffer = b
	return e
}

// whole is a good table.
func (e *exporter) whole() *dmabuf.Table { return dmabuf.NewTable(e.bytes[:5000], e.bytes[5000:size]) }

// op hangs for as long as the test wants, then fails if the test wants, or counts.
func (e *exporter) op(name string, count *int, by int) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if c := e.hang[name]; c != nil {
		e.hangs[name]++
		e.mu.Unlock()
		<-c
		e.mu.Lock()
		e.hangs[name]--
	}
	if err := e.fail[name]; err != nil {
		return err
	}
	*count += by
	return nil
}

func (e *exporter) undo(name string, count *int) {
	if err := e.op(name, count, -1); err != nil {
		e.t.Errorf("%s cannot fail", name)
	}
}

// set has an operation fail from now on; nil: it succeeds.
func (e *exporter) set(name string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fail[name] = err
}

// setTable has Map return something else; nil: a good table.
func (e *exporter) setTable(table func() *dmabuf.Table) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.table = table; table == nil {
		e.table = e.whole
	}
}

// stop has an operation hang, until goOn is called.
func (e *exporter) stop(name string) (goOn func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	c := make(chan struct{})
	e.hang[name] = c
	return sync.OnceFunc(func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.hang, name)
		close(c)
	})
}

// awaitHang waits until a call of an operation hangs.
func (e *exporter) awaitHang(name string) {
	e.t.Helper()
	eventually(e.t, name+" hangs", func() bool {
		e.mu.Lock()
		defer e.mu.Unlock()
		return e.hangs[name] > 0
	})
}

// counts returns what importers have.
func (e *exporter) counts() string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return fmt.Sprintf("%d attached, %d pinned, %d mapped, %d released", e.attached, e.pinned, e.mapped, e.released)
}

// idle is what counts returns when there is no importer, and over when the buffer is gone, too.
const (
	idle = "0 attached, 0 pinned, 0 mapped, 0 released"
	over = "0 attached, 0 pinned, 0 mapped, 1 released"
)

func (e *exporter) wantCounts(what, want string) {
	e.t.Helper()
	if got := e.counts(); got != want {
		e.t.Errorf("%s: %s, should be %s", what, got, want)
	}
}

// end waits until the importers have left, and looks whether the test's reference is the last.
func (e *exporter) end() {
	e.t.Helper()
	eventually(e.t, "the importers leave", func() bool { return e.counts() == idle })
	r := e.buffer.Reservation()
	// The goroutine that leaves may still hold a reference after the exporter's Detach.
	eventually(e.t, "no importer is attached", func() bool {
		r.Lock()
		defer r.Unlock()
		return len(e.buffer.Attachments()) == 0
	})
	e.buffer.Put()
	eventually(e.t, "the buffer is released", func() bool { return e.counts() == over })
}

// move tells the importers that the buffer moves.
func (e *exporter) move() {
	r := e.buffer.Reservation()
	r.Lock()
	defer r.Unlock()
	e.buffer.InvalidateMappings()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	var op *ib.OpError
	if !errors.Is(err, want) || !errors.As(err, &op) {
		t.Errorf("%s: %v, should be %v", what, err, want)
	}
}

// eventually waits for a condition, for very long.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !is(); {
		if time.Now().After(end) {
			stacks := make([]byte, 1<<20)
			t.Fatalf("not: %s\n%s", what, stacks[:runtime.Stack(stacks, true)])
		}
		time.Sleep(time.Millisecond)
	}
}

// impatient makes the importer's patience short, until the function that it returns is called, or
// the test ends.
func impatient(t *testing.T) (patient func()) {
	was := importer.Patience
	importer.Patience = 10 * time.Millisecond
	patient = func() { importer.Patience = was }
	t.Cleanup(patient)
	return patient
}

// forgetful makes refusals last for a moment only, until the test ends.
func forgetful(t *testing.T) {
	was := importer.Refusal
	importer.Refusal = 20 * time.Millisecond
	t.Cleanup(func() { importer.Refusal = was })
}

// forgotten waits until a refusal is over.
func (r region) forgotten(t *testing.T) {
	t.Helper()
	eventually(t, "the refusal ends", func() bool {
		_, kind := r.backing.Run(0, 1, 0)
		return kind != mem.FaultStorage
	})
}

// watchdog ends the program with all stacks if a test takes far too long. The function that it
// returns ends it.
func watchdog(t *testing.T) (stop func() bool) {
	return time.AfterFunc(4*time.Minute, func() {
		stacks := make([]byte, 4<<20)
		fmt.Fprintf(os.Stderr, "%s hangs\n%s\n", t.Name(), stacks[:runtime.Stack(stacks, true)])
		os.Exit(2)
	}).Stop
}

// iova is where regions begin in requests.
const iova = 0x7000_0000

var self = mem.Actor{PD: 1, QPN: 5}

// region is a region of a part of a buffer.
type region struct {
	*mem.Region
	table   *mem.Table
	backing *importer.Backing
}

// register imports and registers a part of a buffer.
func register(t *testing.T, table *mem.Table, b *dmabuf.Buffer, cfg importer.Config) region {
	t.Helper()
	backing, err := importer.Import(b, cfg)
	check(t, err)
	r, err := table.Register(regionOn(backing))
	check(t, err)
	return region{r, table, backing}
}

func regionOn(b mem.Backing) mem.RegionConfig {
	return mem.RegionConfig{PD: self.PD, Access: ib.AccessLocalWrite | ib.AccessRemote, IOVA: iova, Length: b.Len(), Backing: b, Invalidatable: true}
}

func (r region) list(key uint32, off uint64, n int) *mem.List {
	return &mem.List{Table: r.table, Actor: self, Access: ib.AccessRemoteWrite, SGEs: []ib.SGE{{Addr: iova + off, Length: uint32(n), LKey: key}}}
}

// write and read copy by the region's key, as a queue pair does: if the bytes have to be fetched
// they wait, and try again.
func (r region) write(off uint64, b []byte) mem.Fault {
	return insist(func() mem.Fault {
		f, _ := mem.Copy(r.list(r.Key(), off, len(b)), &mem.List{Raw: [][]byte{b}}, uint64(len(b)), true)
		return f
	})
}

func (r region) read(off uint64, b []byte) mem.Fault {
	return insist(func() mem.Fault {
		f, _ := mem.Copy(&mem.List{Raw: [][]byte{b}}, r.list(r.Key(), off, len(b)), uint64(len(b)), false)
		return f
	})
}

func insist(do func() mem.Fault) mem.Fault {
	for {
		f := do()
		if f.Kind != mem.FaultPending {
			return f
		}
		f.Await() // what it returns, the next attempt meets
	}
}

// works writes to the region and reads what it has written.
func (r region) works(t *testing.T, what string, mark byte) {
	t.Helper()
	b, got := bytes.Repeat([]byte{mark}, 2000), make([]byte, 2000)
	off := r.Length() - 2000
	if f := r.write(off, b); !f.OK() {
		t.Fatalf("%s: %v", what, f)
	}
	if f := r.read(off, got); !f.OK() || !bytes.Equal(got, b) {
		t.Fatalf("%s: %v, bytes %x", what, f, got[:8])
	}
}

// fails wants accesses to end with a fault.
func (r region) fails(t *testing.T, what string, want mem.FaultKind) {
	t.Helper()
	b := make([]byte, 10)
	if f := r.read(0, b); f.Kind != want {
		t.Errorf("%s: a read ends with %v, should be %v", what, f, want)
	}
	if f := r.write(r.Length()-10, b); f.Kind != want {
		t.Errorf("%s: a write ends with %v, should be %v", what, f, want)
	}
}

func newTable() *mem.Table { return mem.NewTable(mem.TableConfig{}) }

// all is the configuration of a region of the whole buffer.
func all(pinned bool) importer.Config { return importer.Config{Length: size, Pinned: pinned} }
