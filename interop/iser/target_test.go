package iser

// tgtd as a target: a process with disks that are files.

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/verbena-rdma/verbena/interop/clibtest"
)

// What the targets and initiators are called. The releases 1.0.83 to 1.0.94 of tgtd let an initiator in over iSER only if both its
// address and its name are bound to the target.
const (
	targetName    = "iqn.2026-01.org.example:disk"
	initiatorName = "iqn.2026-01.org.example:initiator"
	port          = 3260
)

// target is a running tgtd with one disk.
type target struct {
	*clibtest.Process

	addr  string
	file  string // the disk
	stats string // the file that the device's counters are written to
	admin []string
	env   []string
}

// url returns the disk's address.
func (d *target) url() string { return fmt.Sprintf("iser://%s:%d/%s/1", d.addr, port, targetName) }

// place is where a program runs.
type place struct {
	addr string
	env  []string
	wrap []string
}

func (p place) program(args ...string) clibtest.Program {
	return clibtest.Program{Args: args, Env: append([]string{"VERBENA_ADDR=" + p.addr}, p.env...), Wrap: p.wrap}
}

// startTarget starts tgtd with a disk of some MiB. tgtd also listens to TCP, at another port.
func startTarget(t *testing.T, at place, megabytes int64) *target {
	t.Helper()
	clibtest.Need(t, os.Getuid() == 0, "tgtd needs root")
	tgtd, tgtadm := clibtest.Tool(t, "tgtd", "tgt"), clibtest.Tool(t, "tgtadm", "tgt")
	dir, err := os.MkdirTemp("", "verbena-iser") // a short name: that of a socket has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	d := &target{addr: at.addr, file: filepath.Join(dir, "disk"), stats: filepath.Join(dir, "stats"),
		admin: []string{tgtadm, "--lld", "iser"}, env: []string{"TGT_IPC_SOCKET=" + filepath.Join(dir, "ipc")}}
	if err := os.WriteFile(d.file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(d.file, megabytes<<20); err != nil {
		t.Fatal(err)
	}
	p := at.program(tgtd, "-f", "--iscsi", fmt.Sprintf("portal=%s:%d", at.addr, port+1), "--iser", fmt.Sprintf("portal=%s,port=%d,pool_sz_mb=64", at.addr, port))
	p.Env = append(append(p.Env, d.env...), "VERBENA_STATS="+d.stats)
	d.Process = clibtest.Start(t, p)
	clibtest.Until(t, "tgtd answers", func() bool { return d.try("--mode", "sys", "--op", "show") == nil }, d.Process)
	for _, args := range [][]string{
		{"--mode", "target", "--op", "new", "--tid", "1", "--targetname", targetName},
		{"--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", "1", "--backing-store", d.file},
		{"--mode", "target", "--op", "bind", "--tid", "1", "--initiator-address", "ALL"},
		{"--mode", "target", "--op", "bind", "--tid", "1", "--initiator-name", initiatorName},
	} {
		if err := d.try(args...); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// try gives tgtd a command.
func (d *target) try(args ...string) error {
	cmd := exec.Command(d.admin[0], append(d.admin[1:len(d.admin):len(d.admin)], args...)...)
	cmd.Env = append(os.Environ(), d.env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("tgtadm %v: %w\n%s", args, err, out)
	}
	return nil
}

// quit ends tgtd, which must succeed, and returns the counters of its device. It waits until tgtd has forgotten the last
// session: tgtd 1.0.85 crashes if a target is deleted by force while it has one over iSER.
func (d *target) quit(t *testing.T) map[string]uint64 {
	t.Helper()
	clibtest.Until(t, "tgtd forgets the last session", func() bool { return d.try("--mode", "target", "--op", "delete", "--tid", "1") == nil }, d.Process)
	if err := d.try("--mode", "sys", "--op", "delete"); err != nil {
		t.Fatal(err)
	}
	d.Finish(t)
	return clibtest.Counters(t, d.stats)
}
