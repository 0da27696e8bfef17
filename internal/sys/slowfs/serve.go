package slowfs

// The server: as much of the FUSE protocol (linux/fuse.h) as a file system needs that
// consists of one file, its root.

import (
	"encoding/binary"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// The requests that the server handles; it answers others with ENOSYS.
const (
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opWrite       = 16
	opStatfs      = 17
	opRelease     = 18
	opFsync       = 20
	opFlush       = 25
	opInit        = 26
	opInterrupt   = 36
	opBatchForget = 42
)

const (
	headerIn, headerOut = 40, 16
	largest             = 1 << 20 // of a write
)

type server struct {
	fd   int
	data []byte

	mu   sync.Mutex // guards what follows
	hold bool
	wait []request // reads that wait
}

type request struct {
	unique  uint64
	off, n  uint64
	opcode  uint32
	payload []byte
}

func serve(target string) error {
	size, err := strconv.ParseInt(os.Getenv(variable+"_SIZE"), 10, 64)
	if err != nil {
		return err
	}
	s := &server{data: make([]byte, size)}
	for i := range s.data {
		s.data[i] = Byte(int64(i))
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	if s.fd, err = unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	options := fmt.Sprintf("fd=%d,rootmode=100644,user_id=%d,group_id=%d,allow_other", s.fd, os.Getuid(), os.Getgid())
	if err := unix.Mount("slow", target, "fuse", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("mount: %w", err)
	}
	fmt.Println("ready")
	go s.obey()
	return s.loop()
}

// obey reads the test's commands from standard input: hold reads, or answer them.
func (s *server) obey() {
	var b [1]byte
	for {
		if n, err := os.Stdin.Read(b[:]); n != 1 || err != nil {
			os.Exit(0) // the test has ended
		}
		s.mu.Lock()
		s.hold = b[0] == 'h'
		wait := s.wait
		if !s.hold {
			s.wait = nil
		}
		s.mu.Unlock()
		if b[0] == 'g' {
			for _, r := range wait {
				s.read(r)
			}
		}
		fmt.Println("done")
	}
}

func (s *server) loop() error {
	buf := make([]byte, largest+8192)
	for {
		n, err := unix.Read(s.fd, buf)
		switch {
		case err == unix.EINTR || err == unix.ENOENT || err == unix.EAGAIN:
			continue
		case err == unix.ENODEV:
			return nil // unmounted
		case err != nil:
			return err
		case n < headerIn:
			return fmt.Errorf("a request of %d bytes", n)
		}
		s.handle(request{
			opcode: binary.NativeEndian.Uint32(buf[4:]), unique: binary.NativeEndian.Uint64(buf[8:]), payload: buf[headerIn:n],
		})
	}
}

func (s *server) handle(r request) {
	le := binary.NativeEndian
	switch r.opcode {
	case opForget, opBatchForget, opInterrupt: // no answer
	case opInit:
		out := make([]byte, 64)
		le.PutUint32(out, 7)
		le.PutUint32(out[4:], min(31, le.Uint32(r.payload[4:])))
		le.PutUint32(out[8:], 0) // nothing is read ahead
		le.PutUint16(out[16:], 64)
		le.PutUint16(out[18:], 48)
		le.PutUint32(out[20:], largest)
		le.PutUint32(out[24:], 1)
		s.answer(r.unique, 0, out)
	case opGetattr:
		out := make([]byte, 104)
		le.PutUint64(out, 3600)
		attr := out[16:]
		le.PutUint64(attr, 1)
		le.PutUint64(attr[8:], uint64(len(s.data)))
		le.PutUint64(attr[16:], uint64(len(s.data)+511)/512)
		le.PutUint32(attr[60:], unix.S_IFREG|0o644)
		le.PutUint32(attr[64:], 1)
		le.PutUint32(attr[68:], uint32(os.Getuid()))
		le.PutUint32(attr[72:], uint32(os.Getgid()))
		le.PutUint32(attr[80:], 4096)
		s.answer(r.unique, 0, out)
	case opOpen:
		s.answer(r.unique, 0, make([]byte, 16))
	case opRead:
		r.off, r.n = le.Uint64(r.payload[8:]), uint64(le.Uint32(r.payload[16:]))
		s.mu.Lock()
		hold := s.hold
		if hold {
			r.payload = nil // the buffer is used again
			s.wait = append(s.wait, r)
		}
		s.mu.Unlock()
		if !hold {
			s.read(r)
		}
	case opWrite:
		off, n := le.Uint64(r.payload[8:]), le.Uint32(r.payload[16:])
		copy(s.data[min(off, uint64(len(s.data))):], r.payload[40:][:n])
		out := make([]byte, 8)
		le.PutUint32(out, n)
		s.answer(r.unique, 0, out)
	case opStatfs:
		s.answer(r.unique, 0, make([]byte, 80))
	case opRelease, opFsync, opFlush:
		s.answer(r.unique, 0, nil)
	default:
		s.answer(r.unique, unix.ENOSYS, nil)
	}
}

func (s *server) read(r request) {
	from := min(r.off, uint64(len(s.data)))
	s.answer(r.unique, 0, s.data[from:min(from+r.n, uint64(len(s.data)))])
}

func (s *server) answer(unique uint64, errno unix.Errno, out []byte) {
	b := make([]byte, headerOut, headerOut+len(out))
	binary.NativeEndian.PutUint32(b, uint32(headerOut+len(out)))
	binary.NativeEndian.PutUint32(b[4:], uint32(-int32(errno)))
	binary.NativeEndian.PutUint64(b[8:], unique)
	_, _ = unix.Write(s.fd, append(b, out...)) // ENOENT: the request was interrupted
}
