package gpu

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// child is the other process of TestIPC: it shares memory, and does what it is asked for.
func child() {
	d, err := Open("soft:0", &Config{VRAM: 4 * mib})
	if err != nil {
		panic(err)
	}
	whole, err := d.Alloc(mib)
	if err != nil {
		panic(err)
	}
	b, err := whole.Sub(5000, 500_000)
	if err != nil {
		panic(err)
	}
	if _, err := b.WriteAt(random(500_000, 42), 0); err != nil {
		panic(err)
	}
	h, err := b.IPCHandle()
	fmt.Println(hex.EncodeToString(h[:]), err)
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "read":
			got := make([]byte, 10)
			_, err := b.ReadAt(got, 100)
			fmt.Printf("%x %v\n", got, err)
		case "move":
			fmt.Println("moved", whole.Prefetch(context30()))
		case "free":
			fmt.Println("freed", b.Free(), whole.Free())
		case "serve": // memory again
			again, err := d.Alloc(4096)
			if err != nil {
				panic(err)
			}
			h, err := again.IPCHandle()
			fmt.Println(hex.EncodeToString(h[:]), err)
		}
	}
}

// TestIPC: a process works on another one's memory, follows it when it moves, and is refused when it is freed or its
// process has ended.
func TestIPC(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "VERBENA_GPU_CHILD=1")
	cmd.Stderr = os.Stderr
	in := must2(cmd.StdinPipe())(t)
	out := bufio.NewScanner(must2(cmd.StdoutPipe())(t))
	check(t, cmd.Start())
	ended := false
	defer func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	}()
	line := func() string {
		t.Helper()
		if !out.Scan() {
			t.Fatal("the other process has ended")
		}
		return out.Text()
	}
	ask := func(what string) string {
		t.Helper()
		_, err := fmt.Fprintln(in, what)
		check(t, err)
		return line()
	}
	handle := func(text string) (h IPCHandle) {
		t.Helper()
		raw, errText, _ := strings.Cut(text, " ")
		if n, err := hex.Decode(h[:], []byte(raw)); n != len(h) || err != nil || errText != "<nil>" {
			t.Fatalf("a handle %q", text)
		}
		return h
	}
	h := handle(line())

	d := open(t, "soft:0", Config{VRAM: 2 * mib})
	b := must[*Buffer](t)(d.OpenIPC(h))
	data := random(500_000, 42)
	holds(t, "the other process's memory", b, data)
	s := newStream(t, d)
	check(t, s.Fill(b.At(100, 10), 0x77))
	check(t, s.Sync(longTime(t)))
	if got := ask("read"); got != "77777777777777777777 <nil>" {
		t.Errorf("the other process reads %s", got)
	}
	if got := ask("move"); got != "moved <nil>" {
		t.Errorf("the memory is %s", got)
	}
	copy(data[100:], bytes.Repeat([]byte{0x77}, 10))
	mine := alloc(t, d, 500_000)
	check(t, s.Copy(mine.All(), b.All()))
	check(t, s.Sync(longTime(t)))
	holds(t, "a copy of what has moved", mine, data)
	_, err := b.IPCHandle()
	wantErr(t, "a handle of imported memory", err, syscall.EOPNOTSUPP)

	bad := h
	bad[30]++
	_, err = d.OpenIPC(bad)
	wantErr(t, "a handle that was never made", err, ErrHandle)
	bad = h
	bad[0]++
	_, err = d.OpenIPC(bad)
	wantErr(t, "no handle", err, ErrHandle)
	bad = h
	bad[9]++
	_, err = d.OpenIPC(bad)
	wantErr(t, "a handle of no process", err, ErrDead)

	if got := ask("free"); got != "freed <nil> <nil>" {
		t.Errorf("the memory is %s", got)
	}
	// The other process does not wait until this one has noticed; its memory is not used again before.
	eventually(t, "the memory that was freed is revoked", func() bool {
		_, err = b.ReadAt(make([]byte, 1), 0)
		return err != nil
	})
	wantErr(t, "memory that was freed", err, syscall.ENODEV)
	again := handle(ask("serve"))
	_, err = d.OpenIPC(h)
	wantErr(t, "a handle of freed memory", err, ErrHandle)
	c := must[*Buffer](t)(d.OpenIPC(again))
	holds(t, "other memory", c, make([]byte, 4096))

	check(t, cmd.Process.Kill())
	_ = cmd.Wait()
	ended = true
	eventually(t, "the memory of a process that was killed is revoked", func() bool {
		_, err := c.ReadAt(make([]byte, 1), 0)
		return err != nil
	})
	_, err = c.ReadAt(make([]byte, 1), 0)
	wantErr(t, "memory of a process that was killed", err, syscall.ENODEV)
	_, err = d.OpenIPC(again)
	wantErr(t, "a handle of a process that was killed", err, ErrDead)
	wantErr(t, "a handle of a process that was killed", err, syscall.ESRCH)
	check(t, b.Free())
	check(t, c.Free())
}

// TestOwnIPC: handles of the process itself.
func TestOwnIPC(t *testing.T) {
	d, other := open(t, "soft:0", Config{VRAM: mib}), open(t, "soft:1", Config{VRAM: mib})
	a := alloc(t, d, 10_000)
	h := must[IPCHandle](t)(must[*Buffer](t)(a.Sub(100, 50)).IPCHandle())
	b := must[*Buffer](t)(d.OpenIPC(h))
	if b.ID() != a.ID() || b.Addr() != a.Addr()+100 || b.Len() != 50 {
		t.Error("a handle of the same GPU is other memory")
	}
	c := must[*Buffer](t)(other.OpenIPC(h))
	if _, err := c.WriteAt([]byte("hello"), 45); err != nil {
		t.Error(err)
	}
	got := make([]byte, 5)
	if _, err := a.ReadAt(got, 145); err != nil || string(got) != "hello" {
		t.Errorf("by another GPU of the process: %q, %v", got, err)
	}
	check(t, d.Close())
	_, err := other.OpenIPC(h)
	wantErr(t, "the device is closed", err, ErrHandle)
	ipc.mu.Lock()
	if ipc.listener != nil || len(ipc.handles) != 0 {
		t.Error("the process still listens")
	}
	ipc.mu.Unlock()
	_, err = a.IPCHandle()
	wantErr(t, "a handle of what is freed", err, ErrFreed)
}

// TestLyingOwner: what a process answers that has memory of no handle, or that lies about it.
func TestLyingOwner(t *testing.T) {
	var h IPCHandle
	copy(h[:], ipcMagic)
	copy(h[8:], "0123456789abcdef")
	l := must[*net.UnixListener](t)(net.ListenUnix("unixpacket", &net.UnixAddr{Name: ipcName(h[8:24]), Net: "unixpacket"}))
	defer func() { check(t, l.Close()) }()
	m := must[*dmabuf.Memory](t)(dmabuf.Alloc(dmabuf.MemoryConfig{Size: 8192}))
	good := must[int](t)(m.Buffer().FD())
	null := must[*os.File](t)(os.Open(os.DevNull))
	d := open(t, "soft:0", Config{VRAM: mib})
	answer := func(words ...uint64) (b []byte) {
		for _, w := range words {
			b = binary.LittleEndian.AppendUint64(b, w)
		}
		return b
	}
	const most = ^uint64(0)
	for what, c := range map[string]struct {
		answer []byte
		fds    []int
		want   error // nil: it is right
	}{
		"it is right":         {answer(0, 4096, 100), []int{good}, nil},
		"an errno":            {answer(uint64(syscall.ENOMEM), 0, 0), nil, ErrHandle},
		"an errno of no kind": {answer(most, 0, 0), nil, ErrHandle},
		"an errno and a file": {answer(1, 0, 100), []int{good}, ErrHandle},
		"nothing":             {nil, nil, ErrDead},
		"half an answer":      {answer(0, 0), []int{good}, ErrDead},
		"no file":             {answer(0, 0, 100), nil, ErrHandle},
		"two files":           {answer(0, 0, 100), []int{good, good}, ErrHandle},
		"another file":        {answer(0, 0, 100), []int{int(null.Fd())}, syscall.EINVAL},
		"no bytes":            {answer(0, 0, 0), []int{good}, ErrRange},
		"behind the end":      {answer(0, 8192, 1), []int{good}, ErrRange},
		"too many bytes":      {answer(0, 4096, 4097), []int{good}, ErrRange},
		"a sum that wraps":    {answer(0, most-99, 200), []int{good}, ErrRange},
	} {
		answered := make(chan struct{})
		go func() {
			defer close(answered)
			c1, err := l.AcceptUnix()
			if err != nil {
				t.Error(err)
				return
			}
			_, _, _ = sys.RecvFDs(c1, make([]byte, 8))
			if c.answer != nil {
				_ = sys.SendFDs(c1, c.answer, c.fds...)
			}
			_ = c1.Close()
		}()
		b, err := d.OpenIPC(h)
		<-answered
		if c.want == nil {
			if err != nil || b.Len() != 100 {
				t.Errorf("%s: %v", what, err)
				continue
			}
			check(t, b.Free())
		} else if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, should be %v", what, err, c.want)
		}
	}
	check(t, sys.CloseFD(good))
	check(t, null.Close())
	check(t, m.Close())
}

// TestIPCOwnerKilled: the owner is killed at any moment of what is done with its memory. Operations end, well or
// with ENODEV, and the GPU goes on.
func TestIPCOwnerKilled(t *testing.T) {
	rng := rand.New(rand.NewPCG(seed(t), 3))
	d := open(t, "soft:0", Config{VRAM: 2 * mib})
	mine := alloc(t, d, 500_000)
	for range 6 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "VERBENA_GPU_CHILD=1")
		out := bufio.NewScanner(must2(cmd.StdoutPipe())(t))
		in := must2(cmd.StdinPipe())(t)
		check(t, cmd.Start())
		if !out.Scan() {
			t.Fatal("the other process has ended")
		}
		var h IPCHandle
		raw, _, _ := strings.Cut(out.Text(), " ")
		must[int](t)(hex.Decode(h[:], []byte(raw)))
		killed := make(chan error)
		wait := time.Duration(rng.IntN(3000)) * time.Microsecond
		go func() {
			_, _ = fmt.Fprintln(in, "move")
			time.Sleep(wait)
			err := cmd.Process.Kill()
			_ = cmd.Wait() // it was killed
			killed <- err
		}()
		s := newStream(t, d)
		b, err := d.OpenIPC(h)
		for i := 0; err == nil; i++ {
			if err = s.Copy(mine.All(), b.All()); err == nil {
				err = s.Copy(b.All(), mine.All())
			}
			if err == nil {
				err = s.Sync(longTime(t))
			}
		}
		if !errors.Is(err, syscall.ENODEV) && !errors.Is(err, ErrDead) && !errors.Is(err, syscall.EINVAL) {
			t.Errorf("killed after %v: %v", wait, err)
		}
		check(t, <-killed)
		if b != nil {
			check(t, b.Free())
		}
		check(t, s.Close())
	}
	s := newStream(t, d)
	check(t, s.Fill(mine.All(), 1))
	check(t, s.Sync(longTime(t)))
	holds(t, "the GPU's own memory", mine, bytes.Repeat([]byte{1}, 500_000))
}

// mover is another process with a dma-buf, which moves it all the time. It prints the descriptor, and how often the
// buffer has moved when its input ends.
func mover() {
	m, err := dmabuf.Alloc(dmabuf.MemoryConfig{Size: 64 << 10})
	if err != nil {
		panic(err)
	}
	fd, err := m.Buffer().FD()
	if err != nil {
		panic(err)
	}
	fmt.Println(fd)
	ended := make(chan struct{})
	go func() {
		bufio.NewScanner(os.Stdin).Scan()
		close(ended)
	}()
	for {
		select {
		case <-ended:
			fmt.Println(m.Moves())
			return
		case <-time.After(300 * time.Microsecond):
		}
		if err := m.Move(context30()); err != nil {
			panic(err)
		}
	}
}

// TestImportMovesAmidOperations: another process moves a buffer while operations of this one, which take their time,
// are at any point of their lives. All succeed, and each finds what the one before has written.
func TestImportMovesAmidOperations(t *testing.T) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "VERBENA_GPU_CHILD=mover")
	cmd.Stderr = os.Stderr
	in := must2(cmd.StdinPipe())(t)
	out := bufio.NewScanner(must2(cmd.StdoutPipe())(t))
	check(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill() // it has ended, or the test has failed
		_ = cmd.Wait()
	}()
	if !out.Scan() {
		t.Fatal("the other process has ended")
	}
	f := must[*os.File](t)(os.OpenFile(fmt.Sprintf("/proc/%d/fd/%s", cmd.Process.Pid, out.Text()), os.O_RDWR, 0))
	buf := must[*dmabuf.Buffer](t)(dmabuf.Get(int(f.Fd())))
	check(t, f.Close())
	d := open(t, "soft:0", Config{VRAM: mib, Costs: Costs{BAR: Cost{Latency: 2 * time.Millisecond}}})
	b := must[*Buffer](t)(d.Import(buf))
	buf.Put()
	var wg sync.WaitGroup
	for w := range 4 {
		wg.Go(func() {
			part := must[*Buffer](t)(b.Sub(uint64(w)*16384, 16384))
			data, got := make([]byte, 16384), make([]byte, 16384)
			for i := range 30 {
				copy(data, random(16384, uint64(w*1000+i)))
				if _, err := part.WriteAt(data, 0); err != nil {
					t.Errorf("write %d: %v", i, err)
					return
				}
				if _, err := part.ReadAt(got, 0); err != nil || !bytes.Equal(got, data) {
					t.Errorf("read %d: %v; the bytes are the same: %v", i, err, bytes.Equal(got, data))
					return
				}
			}
			if err := part.Free(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	check(t, in.Close())
	if !out.Scan() || out.Text() == "0" {
		t.Errorf("the other process has moved the buffer %q times", out.Text())
	}
	t.Logf("%s moves", out.Text())
	check(t, b.Free())
}

// TestManyOpenAtOnce opens a handle while the process of the memory already serves as many others as it does at once: it
// waits for its turn.
func TestManyOpenAtOnce(t *testing.T) {
	d := open(t, "soft:0", Config{VRAM: 4 * mib})
	b := alloc(t, d, 8192)
	h := must[IPCHandle](t)(b.IPCHandle())
	var others []*net.UnixConn
	for range maxIPC {
		c := must[*net.UnixConn](t)(net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: ipcName(h[8:24]), Net: "unixpacket"}))
		others = append(others, c)
	}
	ipc.mu.Lock()
	slots := ipc.slots
	ipc.mu.Unlock()
	eventually(t, "all others are served", func() bool { return len(slots) == maxIPC })
	done := make(chan error)
	go func() {
		fd, _, n, err := askFor("test", h[8:24], binary.LittleEndian.Uint64(h[24:]))
		if err == nil {
			err = sys.CloseFD(fd)
		}
		if n != 8192 {
			err = errors.Join(err, fmt.Errorf("%d bytes", n))
		}
		done <- err
	}()
	select {
	case err := <-done:
		t.Errorf("the handle was answered before its turn: %v", err)
	case <-time.After(50 * time.Millisecond): // it may take its time
		for _, c := range others {
			check(t, c.Close())
		}
		check(t, <-done)
	}
	for _, c := range others {
		_ = c.Close() // again, if all went well
	}
	check(t, b.Free())
}
