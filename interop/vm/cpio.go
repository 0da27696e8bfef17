package vm

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archiver writes an initramfs: a cpio archive in the form "newc", which the
// kernel documents under driver-api/early-userspace/buffer-format. Directories
// are made as they are needed.
type archiver struct {
	w    *bufio.Writer
	seen map[string]bool
	ino  int
}

func newArchiver(w io.Writer) *archiver {
	return &archiver{w: bufio.NewWriterSize(w, 1<<20), seen: map[string]bool{".": true}}
}

const (
	modeDir  = 0o040755
	modeFile = 0o100644
	modeExec = 0o100755
	modeLink = 0o120777
)

// clean makes a name in the archive of a path. There is one /usr, as on Debian:
// /bin, /sbin, /lib and /lib64 are links into it.
func clean(name string) string {
	name = strings.TrimPrefix(path.Clean(name), "/")
	top, rest, _ := strings.Cut(name, "/")
	switch top {
	case "bin", "sbin", "lib", "lib64":
		if rest != "" {
			return "usr/" + name
		}
	}
	return name
}

// entry writes one entry, with size bytes of content.
func (a *archiver) entry(name string, mode int, content io.Reader, size int64) error {
	name = clean(name)
	if a.seen[name] {
		return nil
	}
	if dir := path.Dir(name); !a.seen[dir] {
		if err := a.entry(dir, modeDir, nil, 0); err != nil {
			return err
		}
	}
	if size > math.MaxUint32 {
		return fmt.Errorf("%s: %d bytes do not fit the archive", name, size)
	}
	a.seen[name] = true
	a.ino++
	return a.record(name, mode, content, size)
}

func (a *archiver) record(name string, mode int, content io.Reader, size int64) error {
	// magic, ino, mode, uid, gid, nlink, mtime, size, device twice, namesize, check
	head := fmt.Sprintf("070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.ino, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, len(name)+1, 0, name)
	if _, err := a.w.WriteString(head + pad(len(head))); err != nil {
		return err
	}
	if size == 0 {
		return nil
	}
	n, err := io.Copy(a.w, io.LimitReader(content, size))
	if err == nil && n != size {
		err = fmt.Errorf("%s: %d bytes, want %d", name, n, size)
	}
	if err != nil {
		return err
	}
	_, err = a.w.WriteString(pad(int(size % 4)))
	return err
}

// pad fills up to a multiple of four.
func pad(n int) string { return "\x00\x00\x00"[:(4-n%4)%4] }

func (a *archiver) dir(name string) error { return a.entry(name, modeDir, nil, 0) }

func (a *archiver) link(name, to string) error {
	return a.entry(name, modeLink, strings.NewReader(to), int64(len(to)))
}

func (a *archiver) text(name, text string, mode int) error {
	return a.entry(name, mode, strings.NewReader(text), int64(len(text)))
}

// file copies a file of the host, or what it links to.
func (a *archiver) file(name, from string) (err error) {
	f, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return &fs.PathError{Op: "copy", Path: from, Err: errors.New("not a regular file")}
	}
	mode := modeFile
	if st.Mode()&0o111 != 0 {
		mode = modeExec
	}
	return a.entry(name, mode, f, st.Size())
}

// close ends the archive.
func (a *archiver) close() error {
	a.ino++
	if err := a.record("TRAILER!!!", 0, nil, 0); err != nil {
		return err
	}
	return a.w.Flush()
}

// writeFile makes a file that is whole from the moment it is there.
func writeFile(name string, content io.Reader) (err error) {
	return writeFileBy(name, func(w io.Writer) error {
		_, err := io.Copy(w, content)
		return err
	})
}

func writeFileBy(name string, write func(io.Writer) error) (err error) {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), "tmp.")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(f.Name()) // it is not there if the rename was done
		}
	}()
	if err := write(f); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := errors.Join(f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), name)
}
