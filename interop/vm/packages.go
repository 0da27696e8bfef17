package vm

// Packages of another release, which are unpacked and not installed: for tests with older and newer
// programs than the host has.

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
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
	if !suiteName.MatchString(suite) {
		return "", fmt.Errorf("%q is not the name of a Debian suite", suite)
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	dir := filepath.Join(cache, "packages")
	sum := sha256.Sum256([]byte(strings.Join(names, " ")))
	tree := filepath.Join(dir, fmt.Sprintf("%s%s-%x", suite, suffix(arch), sum[:6]))
	st, err := os.Stat(tree)
	cached := err == nil
	if cached && time.Since(st.ModTime()) < lookupAge {
		return tree, nil
	}
	if err := fetchPackages(ctx, dir, tree, suite, arch, names); err != nil && !cached {
		return "", fmt.Errorf("%s of Debian %s not in the cache, and not fetched: %w", strings.Join(names, ", "), suite, err)
	}
	return tree, nil
}

// fetchPackages unpacks packages into a new tree and puts it in the place of the old one.
func fetchPackages(ctx context.Context, dir, tree, suite, arch string, names []string) error {
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
	a, err := newApt(ctx, tmp, uri, suite, arch)
	if err != nil {
		return err
	}
	if _, err := a.run("apt-get", "-qq", "update"); err != nil {
		return err
	}
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
	fresh := filepath.Join(tmp, "tree")
	for _, deb := range debs {
		if err := run(ctx, "dpkg-deb", "-x", deb, fresh); err != nil {
			return err
		}
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
