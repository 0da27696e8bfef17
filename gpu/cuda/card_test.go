//go:build cuda

package cuda_test

// These tests need a GPU, or software GPUs: see none_test.go.

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/gpu/cuda"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	kib = 1 << 10
	mib = 1 << 20
	all = verbs.AccessLocalWrite | verbs.AccessRemoteRead | verbs.AccessRemoteWrite | verbs.AccessRemoteAtomic
)

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" {
		child()
		return
	}
	os.Exit(m.Run())
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func must[T any](t testing.TB) func(T, error) T {
	return func(v T, err error) T {
		t.Helper()
		check(t, err)
		return v
	}
}

func open(t testing.TB) *cuda.Device {
	t.Helper()
	d := must[*cuda.Device](t)(cuda.Open(0))
	t.Cleanup(func() { check(t, d.Close()) })
	return d
}

// software is set where the GPUs are software, which has no memory of cuMemCreate.
var software = os.Getenv("VERBENA_TEST_CUDA") == "software"

// shareable allocates memory that is shared by descriptor; where there is none, memory of the other kind.
func shareable(t testing.TB, d *cuda.Device, n uint64) *cuda.Buffer {
	t.Helper()
	b, err := d.AllocShareable(n)
	if software {
		if !errors.Is(err, syscall.EOPNOTSUPP) {
			t.Fatalf("AllocShareable of a software GPU: %v", err)
		}
		b, err = d.Alloc(n)
	}
	check(t, err)
	return b
}

func random(t testing.TB, n int) []byte {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func holds(t testing.TB, what string, b *cuda.Buffer, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if n, err := b.ReadAt(got, 0); err != nil || n != len(want) {
		t.Fatalf("%s: %d bytes, %v", what, n, err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s: other bytes", what)
	}
}

func wantErrno(t testing.TB, what string, err error, want ...syscall.Errno) {
	t.Helper()
	for _, e := range want {
		if errors.Is(err, e) {
			return
		}
	}
	t.Errorf("%s: %v, should be one of %v", what, err, want)
}

func TestDevice(t *testing.T) {
	n, err := cuda.Count()
	check(t, err)
	for _, bad := range []int{-1, n, 1 << 30} {
		if _, err := cuda.Open(bad); !errors.Is(err, syscall.ENODEV) {
			t.Errorf("GPU %d of %d: %v", bad, n, err)
		}
	}
	d := must[*cuda.Device](t)(cuda.Open(n - 1))
	free, total, err := d.Memory()
	check(t, err)
	if d.Name() == "" || d.UUID() == [16]byte{} || free > total || total == 0 {
		t.Errorf("%q, %x, %d of %d bytes", d.Name(), d.UUID(), free, total)
	}
	again := must[*cuda.Device](t)(cuda.Open(n - 1))
	check(t, d.Close())
	check(t, d.Close())
	if _, err := d.Alloc(4096); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("Alloc of a GPU that is closed: %v", err)
	}
	if _, _, err := d.Memory(); !errors.Is(err, syscall.ENODEV) {
		t.Errorf("Memory of a GPU that is closed: %v", err)
	}
	b := must[*cuda.Buffer](t)(again.Alloc(4096)) // the other one is open
	want := random(t, 4096)
	must[int](t)(b.WriteAt(want, 0))
	holds(t, "the other one's", b, want)
	check(t, again.Close())
	if _, err := b.ReadAt(want, 0); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("memory of a GPU that is closed: %v", err)
	}
}

func TestBuffer(t *testing.T) {
	d := open(t)
	for _, kind := range []struct {
		name  string
		alloc func(uint64) (*cuda.Buffer, error)
	}{{"Alloc", d.Alloc}, {"AllocShareable", d.AllocShareable}} {
		if software && kind.name == "AllocShareable" {
			continue // see shareable
		}
		t.Run(kind.name, func(t *testing.T) {
			if _, err := kind.alloc(0); err == nil {
				t.Error("no bytes were allocated")
			}
			_, err := kind.alloc(1 << 50)
			wantErrno(t, "2^50 bytes", err, syscall.ENOMEM, syscall.EINVAL)
			_, err = kind.alloc(^uint64(0))
			wantErrno(t, "2^64-1 bytes", err, syscall.ENOMEM, syscall.EINVAL)
			const n = mib + 17
			b := must[*cuda.Buffer](t)(kind.alloc(n))
			if b.Len() != n || b.Size() < n || b.Addr() == 0 {
				t.Errorf("%v, size %d", b, b.Size())
			}
			want := random(t, n)
			must[int](t)(b.WriteAt(want, 0))
			holds(t, "what was written", b, want)
			copy(want[70001:], "in the middle")
			must[int](t)(b.WriteAt([]byte("in the middle"), 70001))
			holds(t, "what was changed", b, want)

			got := make([]byte, 100)
			if k, err := b.ReadAt(got, n-40); k != 40 || !errors.Is(err, io.EOF) || !bytes.Equal(got[:40], want[n-40:]) {
				t.Errorf("reading beyond the end: %d, %v", k, err)
			}
			for _, off := range []int64{-1, n + 1, 1 << 62, -1 << 63} {
				if _, err := b.ReadAt(got, off); !errors.Is(err, syscall.EFAULT) {
					t.Errorf("reading at %d: %v", off, err)
				}
				if _, err := b.WriteAt(got, off); !errors.Is(err, syscall.EFAULT) {
					t.Errorf("writing at %d: %v", off, err)
				}
			}
			if k, err := b.WriteAt(got, n-99); k != 0 || !errors.Is(err, syscall.EFAULT) {
				t.Errorf("writing beyond the end: %d, %v", k, err)
			}
			if k, err := b.WriteAt(nil, n); k != 0 || err != nil {
				t.Errorf("no bytes: %d, %v", k, err)
			}

			c := must[*cuda.Buffer](t)(kind.alloc(n - 17))
			if k, err := c.Copy(b); k != n-17 || err != nil {
				t.Errorf("Copy: %d, %v", k, err)
			}
			holds(t, "the copy", c, want[:n-17])
			if _, err := c.Copy(nil); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("a copy of nothing: %v", err)
			}
			check(t, b.Free())
			check(t, b.Free())
			if _, err := c.Copy(b); !errors.Is(err, syscall.EINVAL) {
				t.Errorf("a copy of what is freed: %v", err)
			}
			for what, call := range map[string]func() error{
				"ReadAt":    func() error { _, err := b.ReadAt(got, 0); return err },
				"WriteAt":   func() error { _, err := b.WriteAt(got, 0); return err },
				"IPCHandle": func() error { _, err := b.IPCHandle(); return err },
				"File":      func() error { _, err := b.File(); return err },
				"DMABuf":    func() error { _, _, err := b.DMABuf(); return err },
			} {
				if err := call(); !errors.Is(err, syscall.EINVAL) {
					t.Errorf("%s of what is freed: %v", what, err)
				}
			}
			holds(t, "the copy, when the other one is freed", c, want[:n-17])
		})
	}
}

// side is a queue pair and what belongs to it.
type side struct {
	t   testing.TB
	dev *verbs.Device
	pd  *verbs.PD
	cq  *verbs.CQ
	qp  *verbs.QP
}

func newSide(t testing.TB) *side {
	t.Helper()
	s := &side{t: t}
	s.dev = must[*verbs.Device](t)(verbs.Open("", nil))
	t.Cleanup(func() {
		check(t, s.qp.Close())
		check(t, s.cq.Close())
		check(t, s.pd.Close())
		check(t, s.dev.Close())
	})
	s.pd = must[*verbs.PD](t)(s.dev.AllocPD())
	s.cq = must[*verbs.CQ](t)(s.dev.CreateCQ(256, nil))
	s.qp = must[*verbs.QP](t)(s.pd.CreateQP(&verbs.QPConfig{Type: verbs.RC, SendCQ: s.cq, RecvCQ: s.cq,
		Cap: verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 4, MaxRecvSGE: 4}}))
	return s
}

func peers(t testing.TB) (alice, bob *side) {
	t.Helper()
	alice, bob = newSide(t), newSide(t)
	check(t, alice.qp.Connect(bob.qp.Endpoint(), nil))
	check(t, bob.qp.Connect(alice.qp.Endpoint(), nil))
	return alice, bob
}

func (s *side) reg(b *cuda.Buffer) *verbs.MR {
	s.t.Helper()
	mr := must[*verbs.MR](s.t)(s.pd.RegGPU(b, all))
	s.t.Cleanup(func() { check(s.t, mr.Close()) })
	return mr
}

// alloc returns a region of memory of the host.
func (s *side) alloc(n int) *verbs.MR {
	s.t.Helper()
	mr := must[*verbs.MR](s.t)(s.pd.AllocMR(n, all))
	s.t.Cleanup(func() { check(s.t, mr.Close()) })
	return mr
}

// wait waits for the next completion.
func (s *side) wait() verbs.WC {
	s.t.Helper()
	wcs := make([]verbs.WC, 1)
	for end := time.Now().Add(time.Minute); ; runtime.Gosched() {
		n, err := s.cq.Poll(wcs)
		check(s.t, err)
		if n == 1 {
			return wcs[0]
		}
		if time.Now().After(end) {
			s.t.Fatal("no completion")
		}
	}
}

// do executes one request, and returns how it ends.
func (s *side) do(wr verbs.SendWR) verbs.WCStatus {
	s.t.Helper()
	wr.Flags |= verbs.SendSignaled
	if _, err := s.qp.PostSend([]verbs.SendWR{wr}); err != nil {
		s.t.Fatal(err)
	}
	return s.wait().Status
}

// Every kind of request moves bytes between GPUs' memory, and between it and the host's.
func TestRequests(t *testing.T) {
	d := open(t)
	alice, bob := peers(t)
	const n = 3*mib + 5
	from, to := must[*cuda.Buffer](t)(d.Alloc(n)), shareable(t, d, n)
	fromMR, toMR := alice.reg(from), bob.reg(to)
	if toMR.Addr() != to.Addr() || toMR.Length() != n {
		t.Errorf("a region of %d bytes at %#x, should be %d at %#x", toMR.Length(), toMR.Addr(), n, to.Addr())
	}
	host := alice.alloc(n)

	want := random(t, n)
	must[int](t)(from.WriteAt(want, 0))
	request := func(op verbs.Opcode, local *verbs.MR, off, k int) {
		t.Helper()
		if s := alice.do(verbs.SendWR{Op: op, SGL: []verbs.SGE{local.SGE(off, k)}, RemoteAddr: toMR.Addr() + uint64(off), RKey: toMR.RKey()}); s != verbs.WCSuccess {
			t.Fatalf("%v of %d bytes: %v", op, k, s)
		}
	}
	request(verbs.OpRDMAWrite, fromMR, 0, n)
	holds(t, "WRITE", to, want)
	request(verbs.OpRDMARead, host, 0, n)
	if !bytes.Equal(host.Bytes(), want) {
		t.Error("READ into memory of the host: other bytes")
	}
	fresh := random(t, n)
	copy(host.Bytes(), fresh)
	request(verbs.OpRDMAWrite, host, 13, 70000)
	copy(want[13:70013], fresh[13:])
	holds(t, "WRITE from memory of the host", to, want)
	request(verbs.OpRDMARead, fromMR, 0, n)
	holds(t, "READ", from, want)

	check(t, must2(bob.qp.PostRecv([]verbs.RecvWR{{SGL: []verbs.SGE{toMR.SGE(1, 5000)}}})))
	if s := alice.do(verbs.SendWR{Op: verbs.OpSend, SGL: []verbs.SGE{host.SGE(0, 4999)}}); s != verbs.WCSuccess {
		t.Fatalf("SEND: %v", s)
	}
	if wc := bob.wait(); wc.Status != verbs.WCSuccess || wc.ByteLen != 4999 {
		t.Fatalf("a receive: %v, %d bytes", wc.Status, wc.ByteLen)
	}
	copy(want[1:], host.Bytes()[:4999])
	holds(t, "SEND", to, want)

	word := make([]byte, 8)
	binary.LittleEndian.PutUint64(word, 1<<40)
	must[int](t)(to.WriteAt(word, 64-int64(to.Addr()%8)))
	at := to.Addr() + 64 - to.Addr()%8
	add := verbs.SendWR{Op: verbs.OpAtomicFetchAdd, SGL: []verbs.SGE{fromMR.SGE(8, 8)}, RemoteAddr: at, RKey: toMR.RKey(), CompareAdd: 5}
	for i := range uint64(3) {
		if s := alice.do(add); s != verbs.WCSuccess {
			t.Fatalf("FETCH_AND_ADD: %v", s)
		}
		must[int](t)(from.ReadAt(word, 8))
		if got := binary.LittleEndian.Uint64(word); got != 1<<40+5*i {
			t.Errorf("FETCH_AND_ADD returns %#x, should be %#x", got, uint64(1<<40+5*i))
		}
	}
}

func must2[T any](_ T, err error) error { return err }

// By its address, memory is registered without a Buffer; what is not the GPU's is refused.
func TestAddress(t *testing.T) {
	d := open(t)
	alice, bob := peers(t)
	b := must[*cuda.Buffer](t)(d.Alloc(mib))
	want := random(t, mib)
	must[int](t)(b.WriteAt(want, 0))
	mr := must[*verbs.MR](t)(bob.pd.RegMRAttr(verbs.MRAttr{Device: d, Addr: b.Addr() + 4096, Length: 8192, Access: all}))
	defer func() { check(t, mr.Close()) }()
	host := alice.alloc(8192)
	if s := alice.do(verbs.SendWR{Op: verbs.OpRDMARead, SGL: []verbs.SGE{host.SGE(0, 8192)}, RemoteAddr: b.Addr() + 4096, RKey: mr.RKey()}); s != verbs.WCSuccess {
		t.Fatalf("READ: %v", s)
	}
	if !bytes.Equal(host.Bytes()[:8192], want[4096:12288]) {
		t.Error("READ: other bytes")
	}
	heap := make([]byte, 4096)
	for what, r := range map[string][2]uint64{
		"nothing":             {b.Addr(), 0},
		"what wraps":          {b.Addr(), ^uint64(0)},
		"too much":            {b.Addr(), 1 << 40},
		"no memory":           {4096, 4096},
		"memory of the host":  {host.Addr(), 4096},
		"memory of the heap":  {addrOf(heap), 4096},
		"an address too high": {^uint64(4095), 4096},
	} {
		_, err := bob.pd.RegMRAttr(verbs.MRAttr{Device: d, Addr: r[0], Length: r[1], Access: all})
		wantErrno(t, what, err, syscall.EFAULT, syscall.EINVAL)
		_, err = d.Adopt(r[0], r[1])
		wantErrno(t, what+", adopted", err, syscall.EFAULT, syscall.EINVAL)
	}
	for _, access := range []verbs.Access{verbs.AccessRemoteWrite, verbs.AccessLocalWrite | verbs.AccessOnDemand} {
		_, err := bob.pd.RegGPU(b, access)
		wantErrno(t, fmt.Sprintf("access %#x", uint32(access)), err, syscall.EINVAL)
	}
	if _, err := bob.pd.RegGPU(nil, all); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("no memory: %v", err)
	}
}

// Memory that is freed is out of the device's reach, and that of others stays.
func TestFreed(t *testing.T) {
	d := open(t)
	whole := must[*cuda.Buffer](t)(d.Alloc(mib))
	first := must[*cuda.Buffer](t)(d.Adopt(whole.Addr(), 64*kib))
	second := must[*cuda.Buffer](t)(d.Adopt(whole.Addr()+64*kib, 64*kib))
	alice, bob := peers(t)
	host := alice.alloc(4096)
	firstMR, secondMR := bob.reg(first), bob.reg(second)
	write := func(mr *verbs.MR) verbs.WCStatus {
		t.Helper()
		return alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{host.SGE(0, 4096)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()})
	}
	for _, mr := range []*verbs.MR{firstMR, secondMR} {
		if s := write(mr); s != verbs.WCSuccess {
			t.Fatal(s)
		}
	}
	check(t, first.Free())
	if s := write(secondMR); s != verbs.WCSuccess {
		t.Errorf("the part that is not freed: %v", s)
	}
	if s := write(firstMR); s != verbs.WCRemAccessErr {
		t.Errorf("the part that is freed: %v", s)
	}
	alice, bob = peers(t)
	host = alice.alloc(4096)
	thirdMR := bob.reg(second)
	if s := write(thirdMR); s != verbs.WCSuccess {
		t.Fatal(s)
	}
	check(t, whole.Free()) // and with it what was adopted
	if s := write(thirdMR); s != verbs.WCRemAccessErr {
		t.Errorf("memory that its owner has freed: %v", s)
	}
}

// Memory is freed while peers write into it and read it: they get access errors, and the GPU stays usable.
func TestFreedUnderTraffic(t *testing.T) {
	d := open(t)
	for round := range 12 {
		b := must[*cuda.Buffer](t)(d.Alloc(mib))
		alice, bob := peers(t)
		mr := bob.reg(b)
		mine := must[*cuda.Buffer](t)(d.Alloc(mib))
		mineMR := alice.reg(mine)
		op := []verbs.Opcode{verbs.OpRDMAWrite, verbs.OpRDMARead}[round%2]
		length := []int{8, 5000, 300 * kib}[round%3]
		var traffic sync.WaitGroup
		started := make(chan struct{})
		traffic.Go(func() {
			for i := 0; ; i++ {
				s := alice.do(verbs.SendWR{Op: op, SGL: []verbs.SGE{mineMR.SGE(0, length)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()})
				if i == 3 {
					close(started)
				}
				if s != verbs.WCSuccess {
					if s != verbs.WCRemAccessErr || i < 3 {
						t.Errorf("round %d: request %d ends with %v", round, i, s)
					}
					return
				}
			}
		})
		<-started
		time.Sleep(time.Duration(rand.IntN(2000)) * time.Microsecond)
		check(t, b.Free())
		traffic.Wait()
		want := random(t, mib)
		must[int](t)(mine.WriteAt(want, 0))
		holds(t, "what was not freed", mine, want)
		if t.Failed() {
			return
		}
	}
}

// A GPU is closed while regions stand on its memory.
func TestClosedWithRegions(t *testing.T) {
	d := must[*cuda.Device](t)(cuda.Open(0))
	b := must[*cuda.Buffer](t)(d.Alloc(mib))
	alice, bob := peers(t)
	mr := bob.reg(b)
	host := alice.alloc(4096)
	write := func() verbs.WCStatus {
		return alice.do(verbs.SendWR{Op: verbs.OpRDMAWrite, SGL: []verbs.SGE{host.SGE(0, 4096)}, RemoteAddr: mr.Addr(), RKey: mr.RKey()})
	}
	if s := write(); s != verbs.WCSuccess {
		t.Fatal(s)
	}
	check(t, d.Close())
	if s := write(); s != verbs.WCRemAccessErr {
		t.Errorf("a request after that: %v", s)
	}
	if err := b.Free(); err != nil {
		t.Errorf("Free after that: %v", err)
	}
}

// childEnv tells the test binary to be a process that opens memory.
const childEnv = "VERBENA_TEST_CUDA_CHILD"

// child opens memory of its parent, by a handle or by descriptor 3, compares it with what it finds in descriptor 4,
// and writes bytes of its own.
func child() {
	fail := func(err error) {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
	}
	d, err := cuda.Open(0)
	fail(err)
	var size uint64
	var b *cuda.Buffer
	if what := os.Getenv(childEnv); strings.HasPrefix(what, "size ") {
		_, err = fmt.Sscanf(what, "size %d", &size)
		fail(err)
		b, err = d.Import(os.NewFile(3, "memory"), size)
	} else {
		var raw []byte
		_, err = fmt.Sscanf(what, "handle %x", &raw)
		fail(err)
		b, err = d.OpenIPC(cuda.IPCHandle(raw))
	}
	fail(err)
	want, err := io.ReadAll(os.Stdin)
	fail(err)
	got := make([]byte, len(want))
	_, err = b.ReadAt(got, 0)
	fail(err)
	if !bytes.Equal(got, want) {
		fail(errors.New("other bytes"))
	}
	_, err = b.WriteAt([]byte("the child was here"), 100)
	fail(err)
	fail(b.Free())
	fail(d.Close())
	fmt.Println("done")
}

func runChild(t *testing.T, what string, in []byte, files ...*os.File) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+what)
	cmd.Stdin, cmd.ExtraFiles = bytes.NewReader(in), files
	if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != "done" {
		t.Fatalf("%v: %s", err, out)
	}
}

// Another process opens memory, reads it and writes it.
func TestShared(t *testing.T) {
	d := open(t)
	b := must[*cuda.Buffer](t)(d.Alloc(mib))
	want := random(t, mib)
	must[int](t)(b.WriteAt(want, 0))
	h := must[cuda.IPCHandle](t)(b.IPCHandle())
	runChild(t, fmt.Sprintf("handle %x", h[:]), want)
	copy(want[100:], "the child was here")
	holds(t, "by handle", b, want)

	if _, err := b.File(); err == nil {
		t.Error("memory that is shared by handle has a descriptor")
	}
	var bad cuda.IPCHandle
	if _, err := d.OpenIPC(bad); err == nil {
		t.Error("a handle of nothing was opened")
	}
	null := must[*os.File](t)(os.Open(os.DevNull))
	defer null.Close()
	if _, err := d.Import(null, mib); err == nil {
		t.Error("/dev/null was imported")
	}
	check(t, null.Close())
	if _, err := d.Import(null, mib); !errors.Is(err, syscall.EBADF) {
		t.Errorf("a closed file: %v", err)
	}
}

// The same by descriptor.
func TestSharedByDescriptor(t *testing.T) {
	d := open(t)
	c := shareable(t, d, mib)
	if software {
		return // it was checked that there is no such memory
	}
	if _, err := c.IPCHandle(); err == nil {
		t.Error("memory that is shared by descriptor has a handle")
	}
	want := random(t, mib)
	must[int](t)(c.WriteAt(want, 0))
	f := must[*os.File](t)(c.File())
	runChild(t, fmt.Sprintf("size %d", c.Size()), want, f)
	copy(want[100:], "the child was here")
	holds(t, "by descriptor", c, want)
	// This process may import it, too.
	twin := must[*cuda.Buffer](t)(d.Import(f, c.Size()))
	check(t, f.Close())
	holds(t, "imported by its owner", twin, want)
	check(t, c.Free())
	holds(t, "the twin of what is freed", twin, want)
}

// The kernel's dma-buf of the memory is as long as the pages that it lies in.
func TestDMABuf(t *testing.T) {
	d := open(t)
	b := must[*cuda.Buffer](t)(d.Alloc(3*mib + 100))
	f, off, err := b.DMABuf()
	check(t, err)
	defer f.Close()
	n, err := f.Seek(0, io.SeekEnd)
	if page := uint64(os.Getpagesize()); err != nil || uint64(n) != (off+b.Len()+page-1)/page*page {
		t.Errorf("%d bytes, the memory begins at %d; %v", n, off, err)
	}
}

// Many goroutines allocate, copy, register and free.
func TestTogether(t *testing.T) {
	d := open(t)
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	s := newSide(t)
	var all8 sync.WaitGroup
	for g := range uint64(8) {
		all8.Go(func() {
			r := rand.New(rand.NewPCG(seed, g))
			var last *cuda.Buffer
			for range 40 {
				n := 1 + r.IntN(200*kib)
				alloc := d.Alloc
				if !software && r.IntN(4) == 0 {
					alloc = d.AllocShareable
				}
				b, err := alloc(uint64(n))
				if err != nil {
					t.Error(err)
					return
				}
				want := make([]byte, n)
				for i := range want {
					want[i] = byte(r.Uint32())
				}
				if _, err := b.WriteAt(want, 0); err != nil {
					t.Error(err)
				}
				mr, err := s.pd.RegGPU(b, all)
				if err != nil {
					t.Error(err)
					return
				}
				if last != nil {
					if _, err := last.Copy(b); err != nil {
						t.Error(err)
					}
					if err := last.Free(); err != nil {
						t.Error(err)
					}
				}
				got := make([]byte, n)
				if _, err := b.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
					t.Errorf("other bytes, %v", err)
				}
				if last = b; r.IntN(2) == 0 {
					if err := b.Free(); err != nil {
						t.Error(err)
					}
					last = nil
				}
				if err := mr.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all8.Wait()
}
