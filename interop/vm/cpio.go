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

	"github.com/cavaliergopher/cpio"
)

// archiver writes an initramfs: a cpio archive in the form "newc", which the
// kernel documents under driver-api/early-userspace/buffer-format. Directories
// are made as they are needed.
type archiver struct {
	w    *cpio.Writer
	buf  *bufio.Writer // what w writes to
	seen map[string]bool
}

func newArchiver(w io.Writer) *archiver {
	buf := bufio.NewWriterSize(w, 1<<20)
	return &archiver{w: cpio.NewWriter(buf), buf: buf, seen: map[string]bool{".": true}}
}

const (
	modeDir  = cpio.TypeDir | 0o755
	modeFile = cpio.TypeReg | 0o644
	modeExec = cpio.TypeReg | 0o755
	modeLink = cpio.TypeSymlink | 0o777
)

// clean returns the name of a path in the archive. As on Debian, /bin, /sbin, /lib and /lib64
// are links into /usr.
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
func (a *archiver) entry(name string, mode cpio.FileMode, content io.Reader, size int64) error {
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
	if err := a.w.WriteHeader(&cpio.Header{Name: name, Mode: mode, Links: 1, Size: size}); err != nil {
		return err
	}
	if size == 0 {
		return nil
	}
	if _, err := io.CopyN(a.w, content, size); err != nil {
		return fmt.Errorf("%s, of %d bytes: %w", name, size, err)
	}
	return nil
}

func (a *archiver) dir(name string) error { return a.entry(name, modeDir, nil, 0) }

// link writes a symbolic link, whose content is its target. The documentation of package cpio
// says that a link has no content; version 1.0.1 accepts it, which TestArchive checks.
func (a *archiver) link(name, to string) error {
	return a.entry(name, modeLink, strings.NewReader(to), int64(len(to)))
}

func (a *archiver) text(name, text string, mode cpio.FileMode) error {
	return a.entry(name, mode, strings.NewReader(text), int64(len(text)))
}

// file copies a file of the host; of a link, its target.
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
	mode := cpio.FileMode(modeFile)
	if st.Mode()&0o111 != 0 {
		mode = modeExec
	}
	return a.entry(name, mode, f, st.Size())
}

// close ends the archive.
func (a *archiver) close() error {
	if err := a.w.Close(); err != nil {
		return err
	}
	return a.buf.Flush()
}

// writeFile makes a file, which appears with all its content or not at all.
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
			_ = os.Remove(f.Name()) // what is left does no harm
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
