package vm

// A kernel, top-down:
//
//  1. FindKernel looks into the cache. A kernel that was looked up within the last month is
//     used as it is.
//  2. archive asks apt for the archive that the host's Debian packages come from.
//  3. fetchKernel reads the index of the suite there, with a state of apt's of its own, and
//     finds the kernel that linux-image-amd64 (or -arm64) depends on. apt checks signatures and sums,
//     and uses the host's proxies.
//  4. download unpacks the kernel into the cache; nothing is installed.

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Kernel is an unpacked kernel with its modules.
type Kernel struct {
	Suite   string // "stable", "sid" or a release's name
	Arch    string // Amd64 or Arm64
	Release string // as uname -r has it
	Version string // of the Debian package
	Dir     string `json:"-"` // the unpacked packages, with the modules' index of depmod
	Image   string `json:"-"` // the kernel itself
}

var suiteName = regexp.MustCompile(`^[a-z][a-z0-9-]*$`)

// lookupAge is for how long FindKernel trusts the cache about which kernel a suite has.
const lookupAge = 30 * 24 * time.Hour

// FindKernel returns a suite's kernel for a processor, from the cache or from the archive. If the
// archive cannot be read, an older kernel from the cache will do.
func FindKernel(ctx context.Context, suite, arch string) (*Kernel, error) {
	if _, err := processorOf(arch); err != nil {
		return nil, err
	}
	if !suiteName.MatchString(suite) {
		return nil, fmt.Errorf("%q is not the name of a Debian suite", suite)
	}
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	record := filepath.Join(cache, "kernels", suite+suffix(arch)+".json")
	k, age := readRecord(record, arch)
	if k != nil && age < lookupAge {
		return k, nil
	}
	fresh, err := fetchKernel(ctx, filepath.Join(cache, "kernels"), suite, arch)
	if err != nil {
		if k != nil {
			return k, nil
		}
		return nil, fmt.Errorf("no %s kernel of Debian %s in the cache, and none could be fetched: %w", arch, suite, err)
	}
	b, err := json.Marshal(fresh)
	if err != nil {
		return nil, err
	}
	return fresh, writeFile(record, bytes.NewReader(b))
}

// suffix distinguishes what the cache has for other processors.
func suffix(arch string) string {
	if arch == Amd64 {
		return ""
	}
	return "-" + arch
}

// readRecord reads which kernel a suite has, and how long ago that was looked up; nil if there
// is no record, or the kernel is not in the cache.
func readRecord(name, arch string) (*Kernel, time.Duration) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, 0
	}
	st, err := os.Stat(name)
	if err != nil {
		return nil, 0
	}
	k := new(Kernel)
	if json.Unmarshal(b, k) != nil {
		return nil, 0
	}
	k.Arch = arch
	k.Dir = filepath.Join(filepath.Dir(name), k.Version+suffix(arch))
	if k.Image, err = kernelImage(k.Dir, k.Release); err != nil {
		return nil, 0
	}
	return k, time.Since(st.ModTime())
}

// archive returns the address of the archive that the host's Debian packages come
// from.
func archive(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "apt-get", "indextargets",
		"--format", "$(LABEL) $(REPO_URI)", "Created-By: Packages").Output()
	if err != nil {
		return "", fmt.Errorf("apt-get indextargets: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		if label, uri, _ := strings.Cut(strings.TrimSpace(line), " "); label == "Debian" {
			return uri, nil
		}
	}
	return "", &MissingError{What: []string{"a Debian archive among apt's sources, to take kernels from (after apt-get update)"}}
}

// apt runs apt-get and apt-cache with a state of its own.
type apt struct {
	ctx  context.Context
	dir  string
	opts []string
}

// newApt returns one for packages (kind deb) or sources (deb-src) of a suite.
func newApt(ctx context.Context, dir, kind, uri, suite, arch string) (*apt, error) {
	for _, d := range []string{"lists/partial", "cache/archives/partial", "down"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	for name, text := range map[string]string{"sources.list": kind + " " + uri + " " + suite + " main\n", "status": ""} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	a := &apt{ctx: ctx, dir: dir}
	for _, o := range []string{
		"Dir::Etc::SourceList=" + filepath.Join(dir, "sources.list"),
		"Dir::Etc::SourceParts=/dev/null",
		"Dir::State::Lists=" + filepath.Join(dir, "lists"),
		"Dir::State::Status=" + filepath.Join(dir, "status"),
		"Dir::Cache=" + filepath.Join(dir, "cache"),
		"APT::Architecture=" + arch,
		"APT::Architectures=" + arch,
		"APT::Sandbox::User=", // another user could not write here
		"Acquire::Languages=none",
		// Old packages, of a mirror that is behind, will do.
		"Acquire::Check-Valid-Until=false",
		"Debug::NoLocking=1", // the directory is ours alone
	} {
		a.opts = append(a.opts, "-o", o)
	}
	return a, nil
}

func (a *apt) run(command string, args ...string) (string, error) {
	cmd := exec.CommandContext(a.ctx, command, append(a.opts, args...)...)
	cmd.Dir = filepath.Join(a.dir, "down")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("%s %s: %w\n%s", command, strings.Join(args, " "), err, stderr.String())
	}
	return string(out), err
}

var (
	dependsOnImage = regexp.MustCompile(`(?m)^Depends:.*?\blinux-image-([0-9][^ ,]*)`)
	versionLine    = regexp.MustCompile(`(?m)^Version: (\S+)`)
)

// fetchKernel looks up a suite's kernel, and downloads it unless it is in the cache.
func fetchKernel(ctx context.Context, dir, suite, arch string) (*Kernel, error) {
	uri, err := archive(ctx)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	sweep(dir)
	tmp, err := os.MkdirTemp(dir, "tmp.")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // sweep removes what is left
	a, err := newApt(ctx, tmp, "deb", uri, suite, arch)
	if err != nil {
		return nil, err
	}
	if _, err := a.run("apt-get", "-qq", "update"); err != nil {
		return nil, err
	}
	// If update has failed with a warning only, nothing is found here.
	newest := "linux-image-" + arch
	meta, err := a.run("apt-cache", "show", "--no-all-versions", newest)
	if err != nil {
		return nil, err
	}
	image, version := dependsOnImage.FindStringSubmatch(meta), versionLine.FindStringSubmatch(meta)
	if image == nil || version == nil {
		return nil, fmt.Errorf("%s of %s depends on no kernel:\n%s", newest, suite, meta)
	}
	k := &Kernel{Suite: suite, Arch: arch, Release: image[1], Version: version[1]}
	k.Dir = filepath.Join(dir, k.Version+suffix(arch))
	if k.Image, err = kernelImage(k.Dir, k.Release); err == nil {
		return k, nil
	}
	tree := filepath.Join(tmp, "tree")
	if err := a.download(tree, k.Release); err != nil {
		return nil, err
	}
	// Another run may have been faster: its tree is the same.
	if err := os.Rename(tree, k.Dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	k.Image, err = kernelImage(k.Dir, k.Release)
	return k, err
}

// sweep removes what killed runs have left, as far as it can.
func sweep(dir string) {
	old, _ := filepath.Glob(filepath.Join(dir, "tmp.*")) // the pattern is valid
	for _, name := range old {
		if st, err := os.Stat(name); err == nil && time.Since(st.ModTime()) > 24*time.Hour {
			_ = os.RemoveAll(name)
		}
	}
}

// download unpacks a kernel's packages into tree. Newer kernels come in several.
func (a *apt) download(tree, release string) error {
	for _, part := range []string{"image", "modules", "binary"} {
		name := "linux-" + part + "-" + release
		if part != "image" {
			if out, err := a.run("apt-cache", "show", name); err != nil || out == "" {
				continue
			}
		}
		if _, err := a.run("apt-get", "-qq", "download", name); err != nil {
			return err
		}
	}
	debs, err := filepath.Glob(filepath.Join(a.dir, "down", "*.deb"))
	if err != nil {
		return err
	}
	for _, deb := range debs {
		if err := run(a.ctx, "dpkg-deb", "-x", deb, tree); err != nil {
			return err
		}
	}
	lib := filepath.Join(tree, "lib")
	if _, err := os.Lstat(lib); errors.Is(err, fs.ErrNotExist) {
		if err := os.Symlink("usr/lib", lib); err != nil {
			return err
		}
	}
	return run(a.ctx, "depmod", "-b", tree, release)
}

// kernelImage finds the kernel in the unpacked tree.
func kernelImage(tree, release string) (string, error) {
	for _, name := range []string{"boot/vmlinuz-" + release, "usr/lib/modules/" + release + "/vmlinuz"} {
		path := filepath.Join(tree, name)
		if _, err := os.Stat(path); err == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("no kernel %s under %s", release, tree)
}

// run runs a program whose output matters only if it fails.
func run(ctx context.Context, name string, args ...string) error {
	path, err := find(name)
	if err != nil {
		return err
	}
	if out, err := exec.CommandContext(ctx, path, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}
