package dmabuf

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// All tests check the lock rules.
func TestMain(m *testing.M) {
	CheckLocks(true)
	goleak.VerifyTestMain(m)
}

// exporter is an exporter that counts its operations, and looks whether the reservation is locked
// as the package's documentation says. It fails where it is told to.
type exporter struct {
	t      *testing.T
	buffer *Buffer
	bytes  []byte

	mu    sync.Mutex // guards calls and fail
	calls map[string]int
	fail  map[string]error

	// table, if set, is what Map returns.
	table func() *Table
}

const size = 3*4096 + 100

// export makes a buffer of an exporter with all operations, which change may change.
func export(t *testing.T, change func(*Config)) *exporter {
	t.Helper()
	e := &exporter{t: t, bytes: make([]byte, 4*4096), calls: map[string]int{}, fail: map[string]error{}}
	e.table = func() *Table { return NewTable(e.bytes[:5000], e.bytes[5000:size]) }
	cfg := Config{Ops: e.ops(), Size: size, Exporter: "test"}
	if change != nil {
		change(&cfg)
	}
	b, err := Export(cfg)
	if err != nil {
		t.Fatal(err)
	}
	e.buffer = b
	return e
}

func (e *exporter) ops() Ops {
	return Ops{
		Attach: func(*Attachment) error { return e.call("attach", false) },
		Detach: func(*Attachment) { e.must("detach", false) },
		Pin:    func(*Attachment) error { return e.call("pin", true) },
		Unpin:  func(*Attachment) { e.must("unpin", true) },
		Map: func(*Attachment, Direction) (*Table, error) {
			if err := e.call("map", true); err != nil {
				return nil, err
			}
			return e.table(), nil
		},
		Unmap:          func(*Attachment, *Table, Direction) { e.must("unmap", true) },
		Release:        func(*Buffer) { e.must("release", false) },
		BeginCPUAccess: func(*Buffer, Direction) error { return e.call("begin", false) },
		EndCPUAccess:   func(*Buffer, Direction) error { return e.call("end", false) },
		Mmap: func(_ *Buffer, off, n uint64) ([]byte, error) {
			return e.bytes[off:][:n], e.call("mmap", false)
		},
		Vmap:   func(*Buffer) ([]byte, error) { return e.bytes[:size], e.call("vmap", true) },
		Vunmap: func(*Buffer, []byte) { e.must("vunmap", true) },
	}
}

// call counts a call and returns the error that the test wants. locked is whether the reservation
// is locked in such a call.
func (e *exporter) call(op string, locked bool) error {
	if is := e.buffer.resv.check.id.Load() == goroutine(); is != locked {
		e.t.Errorf("%s: the reservation is locked by the caller: %v, should be %v", op, is, locked)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.calls[op]++
	return e.fail[op]
}

func (e *exporter) must(op string, locked bool) {
	if err := e.call(op, locked); err != nil {
		e.t.Errorf("%s cannot fail", op)
	}
}

// set has an operation fail from now on; nil: it succeeds.
func (e *exporter) set(op string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.fail[op] = err
}

// want compares how often operations were called: "map 2, unmap 1".
func (e *exporter) want(list string) {
	e.t.Helper()
	e.mu.Lock()
	defer e.mu.Unlock()
	for f := range strings.SplitSeq(list, ", ") {
		op, n, _ := strings.Cut(f, " ")
		if want, _ := strconv.Atoi(n); e.calls[op] != want {
			e.t.Errorf("%s was called %d times, should be %d", op, e.calls[op], want)
		}
	}
}

// end gives the test's reference back, and looks whether it was the last and nothing is left.
func (e *exporter) end() {
	e.t.Helper()
	if n := e.buffer.refs.Load(); n != 1 || len(e.buffer.attachments) != 0 {
		e.t.Errorf("%d references and %d attachments are left", n, len(e.buffer.attachments))
	}
	e.want("release 0")
	e.buffer.Put()
	e.want("release 1")
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, pair := range [][2]string{{"pin", "unpin"}, {"map", "unmap"}, {"attach", "detach"}, {"vmap", "vunmap"}} {
		if e.fail[pair[0]] == nil && e.calls[pair[0]] != e.calls[pair[1]] {
			e.t.Errorf("%d calls of %s and %d of %s", e.calls[pair[0]], pair[0], e.calls[pair[1]], pair[1])
		}
	}
}

// locked does something with the reservation locked.
func locked(r *Reservation, do func()) {
	r.Lock()
	defer r.Unlock()
	do()
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantErr(t *testing.T, what string, err, want error) {
	t.Helper()
	if want == nil && err != nil || want != nil && !errors.Is(err, want) {
		t.Errorf("%s: %v, should be %v", what, err, want)
	}
}

// wantPanic wants a panic whose text contains some words.
func wantPanic(t *testing.T, what, words string, do func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if text, _ := recover().(string); !strings.Contains(text, words) {
			t.Errorf("%s: panic %q, should contain %q", what, text, words)
		}
	}()
	do()
}

// background is a context that lasts as long as a test may wait for something that must happen.
func background(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// ended is a context that has ended.
func ended() context.Context {
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	return ctx
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

var errnos = []syscall.Errno{syscall.EBUSY, syscall.EOPNOTSUPP, syscall.ENODEV, syscall.ENOMEM, syscall.EINVAL}
