package vm

// An image, top-down:
//
//  1. collect lists its contents: programs and files with the libraries that they need,
//     modules with those that they need.
//  2. key makes a digest of that list and the times of all files. An image with that key
//     may be in the cache.
//  3. pack writes it.

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"time"
)

// Contents is what a guest gets besides the kernel.
type Contents struct {
	Programs []Program // of the host; in the guest's PATH
	Files    []Program // other files of the host, by path, in which * matches; at the same path in the guest
	Modules  []string  // kernel modules to load, in this order, after those that they need
	// Tree, if set, is a directory of FindPackages, with busybox-static among the packages. The guest
	// gets its programs and libraries, at their paths, and neither Programs nor Files of the host.
	Tree string
}

// baseModules are what every guest needs for the shared directory.
var baseModules = []string{"virtio_pci", "9pnet_virtio", "9p"}

// initScript is the guest's first program. It gets no arguments: all that differs between
// runs is in the shared directory.
const initScript = `#!/bin/sh
export PATH=/usr/bin:/bin HOME=/tmp
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts /run/netns; mount -t tmpfs tmp /dev/shm; mount -t tmpfs -o size=90% tmp /tmp
for m in $(cat /modules/order); do insmod /modules/$m || echo "init: no module $m"; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=262144 share /share || echo "init: no share"
cp /share/` + GuestProgram + ` /tmp/main && chmod +x /tmp/main && /tmp/main
echo "init: the guest's program ended with status $?"
sync; poweroff -f
`

// GuestProgram is the file in the shared directory that the guest runs, with the
// directory mounted as /share. When it ends, the machine is switched off.
const GuestProgram = "main"

// collected lists the host's files for an image.
type collected struct {
	tree     string // "": none
	programs []string
	files    []string
	libs     []string
	modules  []string // in the order of loading
}

// Image returns the path of an initramfs for the kernel, from the cache if it is there.
func Image(ctx context.Context, k *Kernel, c Contents) (string, error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	all, err := collect(ctx, k, c)
	if err != nil {
		return "", err
	}
	key, err := all.key(k)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "images")
	name := filepath.Join(dir, k.imageName()+"-"+key+".cpio")
	if _, err := os.Stat(name); err == nil {
		return name, nil
	}
	err = writeFileBy(name, func(w io.Writer) error { return all.pack(ctx, w) })
	if err == nil {
		err = forget(dir, k.imageName(), name)
	}
	return name, err
}

// imageName returns the beginning of the names of images with the kernel.
func (k *Kernel) imageName() string {
	if k.Arch == Amd64 {
		return k.Version
	}
	return k.Arch + "-" + k.Version
}

// forget deletes older images of a kernel, except those of the last hour, which another run
// may be about to boot.
func forget(dir, begin, keep string) error {
	old, err := filepath.Glob(filepath.Join(dir, begin+"-*.cpio"))
	if err != nil {
		return err
	}
	for _, name := range old {
		st, err := os.Stat(name)
		if name == keep || err != nil || time.Since(st.ModTime()) < time.Hour {
			continue
		}
		if err := os.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func collect(ctx context.Context, k *Kernel, c Contents) (*collected, error) {
	all := &collected{tree: c.Tree}
	if (c.Tree == "") != (k.Arch == runtime.GOARCH) || c.Tree != "" && len(c.Programs)+len(c.Files) > 0 {
		return nil, fmt.Errorf("a guest with %s runs programs of the host or of a tree, not %+v", k.Arch, c)
	}
	programs := append([]Program{{"busybox", "busybox-static"}}, c.Programs...)
	if err := Check(k.Arch, append(slices.Clone(programs), c.Files...)...); err != nil {
		return nil, err
	}
	if c.Tree == "" {
		if err := all.fromHost(ctx, programs, c.Files); err != nil {
			return nil, err
		}
	}
	for _, m := range append(slices.Clone(baseModules), c.Modules...) {
		files, err := modulesFor(ctx, k, m)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if !slices.Contains(all.modules, f) {
				all.modules = append(all.modules, f)
			}
		}
	}
	return all, nil
}

// fromHost adds programs and files of the host, with their libraries.
func (c *collected) fromHost(ctx context.Context, programs, files []Program) error {
	for _, list := range []struct {
		from []Program
		to   *[]string
	}{{programs, &c.programs}, {files, &c.files}} {
		for _, p := range list.from {
			path, err := find(p.Name)
			if err != nil {
				return err
			}
			*list.to = append(*list.to, path)
			libs, err := libraries(ctx, path)
			if err != nil {
				return err
			}
			c.libs = append(c.libs, libs...)
		}
	}
	// The C library loads it by name when a thread is cancelled.
	if gcc, err := find("/usr/lib/*/libgcc_s.so.1"); err == nil {
		c.libs = append(c.libs, gcc)
	}
	slices.Sort(c.libs)
	c.libs = slices.Compact(c.libs)
	return nil
}

var libraryPath = regexp.MustCompile(`(?m)(/\S+) \(0x[0-9a-f]+\)$`)

// libraries returns the shared libraries that a file needs, directly or not.
func libraries(ctx context.Context, path string) ([]string, error) {
	out, err := exec.CommandContext(ctx, "ldd", path).CombinedOutput()
	if err != nil {
		// A static program, a script or a text: ldd reports that only by this message.
		if s := string(out); strings.Contains(s, "not a dynamic executable") || strings.Contains(s, "statically linked") {
			return nil, nil
		}
		return nil, fmt.Errorf("ldd %s: %w\n%s", path, err, out)
	}
	var libs []string
	for _, m := range libraryPath.FindAllStringSubmatch(string(out), -1) {
		libs = append(libs, m[1])
	}
	return libs, nil
}

// modulesFor returns the files of a module and of those that it needs, in the order of
// loading. A module that is built into the kernel has no file, and the packages of some
// kernels do not list those: a module that is not found is taken to be built in. If it is
// not, the guest's program will fail.
func modulesFor(ctx context.Context, k *Kernel, name string) ([]string, error) {
	modprobe, err := find("modprobe")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, modprobe, "-d", k.Dir, "-S", k.Release, "-C", "/dev/null", "--show-depends", name)
	out, err := cmd.CombinedOutput()
	if err != nil {
		if bytes.Contains(out, []byte("not found in directory")) {
			return nil, nil
		}
		return nil, fmt.Errorf("kernel %s, module %s: %w\n%s", k.Release, name, err, out)
	}
	var files []string
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == "insmod" {
			files = append(files, f[1])
		}
	}
	return files, nil
}

// key returns a digest of the image's contents: of each file the name, size and time.
func (c *collected) key(k *Kernel) (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, initScript, k.Version, k.Arch)
	if c.tree != "" {
		st, err := os.Stat(c.tree)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, c.tree, st.ModTime().UnixNano())
	}
	for _, list := range [][]string{c.programs, c.files, c.libs, c.modules} {
		for _, f := range list {
			st, err := os.Stat(f)
			if err != nil {
				return "", err
			}
			fmt.Fprintln(h, f, st.Size(), st.ModTime().UnixNano())
		}
		fmt.Fprintln(h)
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:8]), nil
}

func (c *collected) pack(ctx context.Context, w io.Writer) error {
	a := newArchiver(w)
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "share", "etc", "modules", "usr/bin", "usr/sbin", "usr/lib", "usr/lib64"} {
		if err := a.dir(d); err != nil {
			return err
		}
	}
	for _, d := range []string{"bin", "sbin", "lib", "lib64"} {
		if err := a.link(d, "usr/"+d); err != nil {
			return err
		}
	}
	if c.tree != "" {
		if err := packTree(a, c.tree); err != nil {
			return err
		}
	}
	for _, p := range c.programs {
		if err := a.file("usr/bin/"+filepath.Base(p), p); err != nil {
			return err
		}
	}
	for _, f := range slices.Concat(c.files, c.libs) {
		if err := a.file(f, f); err != nil {
			return err
		}
	}
	// Busybox's commands come last: entry ignores those that are there as a program of the host.
	// The host's busybox lists them also for a guest with another processor.
	busybox, err := find("busybox")
	if err != nil {
		return err
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox --list: %w", err)
	}
	for _, name := range strings.Fields(string(applets)) {
		if err := a.link("usr/bin/"+name, "busybox"); err != nil {
			return err
		}
	}
	var order strings.Builder
	for _, m := range c.modules {
		name, err := packModule(ctx, a, m)
		if err != nil {
			return err
		}
		fmt.Fprintln(&order, name)
	}
	for name, text := range map[string]string{
		"modules/order": order.String(),
		"etc/passwd":    "root:x:0:0:root:/:/bin/sh\n",
		"etc/group":     "root:x:0:\n",
		"etc/hosts":     "127.0.0.1 localhost\n::1 localhost\n",
	} {
		if err := a.text(name, text, modeFile); err != nil {
			return err
		}
	}
	if err := a.text("init", initScript, modeExec); err != nil {
		return err
	}
	return a.close()
}

// notPacked are parts of packages that no program of a guest reads.
var notPacked = []string{"usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info", "usr/include", "var"}

// packTree adds all files of unpacked packages.
func packTree(a *archiver, tree string) error {
	return filepath.WalkDir(tree, func(file string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, err := filepath.Rel(tree, file)
		switch {
		case err != nil:
			return err
		case d.IsDir() && slices.Contains(notPacked, name):
			return filepath.SkipDir
		case d.IsDir() || strings.HasSuffix(name, ".a"):
			return nil
		case d.Type() == fs.ModeSymlink:
			to, err := os.Readlink(file)
			if err != nil {
				return err
			}
			return a.link(name, to)
		}
		return a.file(name, file)
	})
}

// packModule adds a module, without its compression, and returns its name.
func packModule(ctx context.Context, a *archiver, file string) (string, error) {
	base := filepath.Base(file)
	name, packed := strings.CutSuffix(base, ".xz")
	if !packed {
		return base, a.file("modules/"+base, file)
	}
	b, err := exec.CommandContext(ctx, "xz", "-dc", file).Output()
	if err != nil {
		return "", fmt.Errorf("xz -dc %s: %w", file, err)
	}
	return name, a.text("modules/"+name, string(b), modeFile)
}
