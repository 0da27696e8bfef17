package vm

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
)

// Program is a program or a file that the host must have.
type Program struct {
	Name    string
	Package string // the Debian package that has it
}

// hostPrograms are the programs that this package runs.
var hostPrograms = []Program{
	{"depmod", "kmod"},
	{"modprobe", "kmod"},
	{"xz", "xz-utils"},
	{"dpkg-deb", "dpkg"},
	{"apt-get", "apt"},
	{"ldd", "libc-bin"},
}

// MissingError lists what the host lacks.
type MissingError struct {
	What     []string // programs, or descriptions
	Packages []string // Debian packages that have them
}

func (e *MissingError) Error() string {
	s := "missing: " + strings.Join(e.What, ", ")
	if len(e.Packages) > 0 {
		s += "; as root: apt-get install --no-install-recommends " + strings.Join(e.Packages, " ")
	}
	return s
}

// Check returns a *MissingError if the host lacks what this package needs for guests with a
// processor, or one of the programs.
func Check(arch string, programs ...Program) error {
	if runtime.GOOS != "linux" || runtime.GOARCH != Amd64 {
		return &MissingError{What: []string{"an amd64 Linux host (the guest runs the host's programs)"}}
	}
	guest, err := processorOf(arch)
	if err != nil {
		return err
	}
	var e MissingError
	for _, p := range slices.Concat([]Program{guest.emulator}, hostPrograms, programs) {
		if _, err := find(p.Name); err != nil {
			e.What = append(e.What, p.Name)
			e.Packages = append(e.Packages, p.Package)
		}
	}
	if len(e.What) == 0 {
		return nil
	}
	slices.Sort(e.Packages)
	e.Packages = slices.Compact(e.Packages)
	return &e
}

// find finds a program, also in directories that an ordinary user's PATH does not have. A
// name with a slash is a path, in which * matches; the first match counts.
func find(name string) (string, error) {
	if strings.Contains(name, "/") {
		found, err := filepath.Glob(name)
		if err == nil && len(found) == 0 {
			err = fmt.Errorf("%s: %w", name, os.ErrNotExist)
		}
		if err != nil {
			return "", err
		}
		return found[0], nil
	}
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		p := filepath.Join(dir, name)
		if _, err := os.Stat(p); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s: %w", name, exec.ErrNotFound)
}

// CacheDir returns the directory for kernels and images.
func CacheDir() (string, error) {
	if dir := os.Getenv("VERBENA_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("no directory to keep kernels in, set VERBENA_CACHE: %w", err)
	}
	return filepath.Join(dir, "verbena"), nil
}
