package vm

// Packages of another release, which are unpacked and not installed: for tests with older and newer
// programs than the host has, and with programs that are built in another way.

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// FindPackages returns a directory with the files of a suite's packages for a processor and of all that
// they depend on, from the cache or from the archive. What was fetched within the last month is used as it
// is. If the archive cannot be read, older files from the cache will do.
func FindPackages(ctx context.Context, suite, arch string, names ...string) (string, error) {
	if _, err := processorOf(arch); err != nil {
		return "", err
	}
	sum := sha256.Sum256([]byte(strings.Join(names, " ")))
	return findTree(suite, fmt.Sprintf("%s%s-%x", suite, suffix(arch), sum[:6]), strings.Join(names, ", "), func(dir, tree string) error {
		return fetchTree(ctx, dir, tree, "deb", suite, arch, func(a *apt, fresh string) error { return a.packages(fresh, names) })
	})
}

// FindSource returns a directory with the source of a suite's package as its authors have released it, without
// Debian's changes. It is kept as the packages of FindPackages are.
func FindSource(ctx context.Context, suite, name string) (string, error) {
	return findTree(suite, suite+"-source-"+name, "the source of "+name, func(dir, tree string) error {
		return fetchTree(ctx, dir, tree, "deb-src", suite, Amd64, func(a *apt, fresh string) error { return a.source(fresh, name) })
	})
}

// findTree returns a tree of the cache, which fetch makes, or makes anew.
func findTree(suite, key, what string, fetch func(dir, tree string) error) (string, error) {
	if !suiteName.MatchString(suite) {
		return "", fmt.Errorf("%q is not the name of a Debian suite", suite)
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "packages")
	tree := filepath.Join(dir, key)
	st, err := os.Stat(tree)
	cached := err == nil
	if cached && time.Since(st.ModTime()) < lookupAge {
		return tree, nil
	}
	if err := fetch(dir, tree); err != nil && !cached {
		return "", fmt.Errorf("%s of Debian %s not in the cache, and not fetched: %w", what, suite, err)
	}
	return tree, nil
}

// fetchTree has fill make a new tree, with the archive's packages of a kind, and puts it in the place of the old one.
func fetchTree(ctx context.Context, dir, tree, kind, suite, arch string, fill func(a *apt, fresh string) error) error {
	uri, err := archive(ctx)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	sweep(dir)
	tmp, err := os.MkdirTemp(dir, "tmp.")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(tmp) }() // sweep removes what is left
	a, err := newApt(ctx, tmp, kind, uri, suite, arch)
	if err != nil {
		return err
	}
	if _, err := a.run("apt-get", "-qq", "update"); err != nil {
		return err
	}
	fresh := filepath.Join(tmp, "tree")
	if err := fill(a, fresh); err != nil {
		return err
	}
	now := time.Now() // the archive's own time is that of a package
	if err := os.Chtimes(fresh, now, now); err != nil {
		return err
	}
	if err := os.Rename(tree, filepath.Join(tmp, "old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Another run may have been faster: its tree is as good.
	if err := os.Rename(fresh, tree); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return nil
}

// packages unpacks packages, and those that they depend on.
func (a *apt) packages(fresh string, names []string) error {
	if _, err := a.run("apt-get", append([]string{"-qq", "-y", "--no-install-recommends", "--download-only", "install"}, names...)...); err != nil {
		return err
	}
	debs, err := filepath.Glob(filepath.Join(a.dir, "cache", "archives", "*.deb"))
	if err != nil {
		return err
	}
	if len(debs) < len(names) {
		return fmt.Errorf("apt has downloaded %d packages, not all of %s", len(debs), strings.Join(names, ", "))
	}
	for _, deb := range debs {
		if err := run(a.ctx, "dpkg-deb", "-x", deb, fresh); err != nil {
			return err
		}
	}
	return nil
}

// original matches what apt-get prints of a package's original source: the address, the file and its checksum.
var original = regexp.MustCompile(`(?m)^'([^']+)' (\S+\.orig\.tar\.\w+) \d+ (\w+:[0-9a-f]+)$`)

// source unpacks the original source of a package. A mirror need not have the rest of the source package.
func (a *apt) source(fresh, name string) error {
	out, err := a.run("apt-get", "-qq", "--print-uris", "source", name)
	if err != nil {
		return err
	}
	found := original.FindStringSubmatch(out)
	if found == nil {
		return fmt.Errorf("apt-get names no original source of %s:\n%s", name, out)
	}
	file := filepath.Join(a.dir, "down", found[2])
	if _, err := a.run("/usr/lib/apt/apt-helper", "download-file", found[1], file, found[3]); err != nil {
		return err
	}
	if err := os.Mkdir(fresh, 0o755); err != nil {
		return err
	}
	return run(a.ctx, "tar", "-xf", file, "-C", fresh, "--strip-components=1", "--no-same-owner")
}
