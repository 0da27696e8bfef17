package main

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
)

const (
	targetName    = "iqn.2026-01.org.example:disk"
	initiatorName = "iqn.2026-01.org.example:initiator"
	backing       = "/tmp/backing"
	diskSize      = 64 << 20
)

// --- tgtd on our device, the kernel's initiator ---

// tgt is a tgtd with one disk.
type tgt struct {
	cmd  *exec.Cmd
	said bytes.Buffer
	done chan error
}

var ipc = []string{"TGT_IPC_SOCKET=/tmp/ipc"}

func tgtadm(args string) error {
	return doWith(ipc, append([]string{"tgtadm", "--lld", "iser"}, strings.Fields(args)...)...)
}

func startTgt() (*tgt, error) {
	if err := errors.Join(os.WriteFile(backing, nil, 0o600), os.Truncate(backing, diskSize)); err != nil {
		return nil, err
	}
	d := &tgt{done: make(chan error, 1)}
	d.cmd = ours(ipc, "tgtd", "-f", "--iscsi", "portal="+ourAddr+":3261", "--iser", "portal="+ourAddr+",port=3260,pool_sz_mb=64")
	d.cmd.Stdout, d.cmd.Stderr = &d.said, &d.said
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { d.done <- d.cmd.Wait() }()
	if err := eventually("tgtd answers", func() bool { return tgtadm("--mode sys --op show") == nil }); err != nil {
		return nil, errors.Join(err, d.kill())
	}
	for _, args := range []string{
		"--mode target --op new --tid 1 --targetname " + targetName,
		"--mode logicalunit --op new --tid 1 --lun 1 --backing-store " + backing,
		"--mode target --op bind --tid 1 --initiator-address ALL",
		"--mode target --op bind --tid 1 --initiator-name " + initiatorName,
	} {
		if err := tgtadm(args); err != nil {
			return nil, errors.Join(err, d.kill())
		}
	}
	return d, nil
}

// kill ends tgtd, and returns what it has said.
func (d *tgt) kill() error {
	_ = d.cmd.Process.Kill() // it may have ended
	<-d.done
	return errors.New("tgtd says: " + d.said.String())
}

// disks returns the SCSI disks of the kernel.
func disks() []string {
	found, _ := filepath.Glob("/sys/block/sd*") // the pattern is good
	return found
}

// with has the kernel log in to tgtd, and runs a case on the disk.
func with(run func(disk string) error) error {
	d, err := startTgt()
	if err != nil {
		return err
	}
	return errors.Join(onDisk(run, d), d.end())
}

// end waits until tgtd has forgotten the session, and ends it.
func (d *tgt) end() error {
	err := eventually("tgtd forgets the session", func() bool { return tgtadm("--mode target --op delete --tid 1") == nil })
	if err == nil {
		err = tgtadm("--mode sys --op delete")
	}
	if err != nil {
		return errors.Join(err, d.kill())
	}
	if err := <-d.done; err != nil {
		return fmt.Errorf("tgtd: %w\n%s", err, d.said.String())
	}
	return nil
}

func onDisk(run func(disk string) error, d *tgt) error {
	for _, args := range []string{"-I iser -o new", "-o update -n node.session.timeo.replacement_timeout -v 5", "--login"} {
		if err := iscsiadm(args); err != nil {
			return errors.Join(err, errors.New("tgtd says: "+d.said.String()))
		}
	}
	var disk string
	if err := eventually("the disk appears", func() bool {
		for _, name := range disks() {
			disk = "/dev/" + filepath.Base(name)
		}
		_, err := os.Stat(disk)
		return disk != "" && err == nil
	}); err != nil {
		return errors.Join(err, errors.New("tgtd says: "+d.said.String()))
	}
	out, err := exec.Command("iscsiadm", "-m", "session").Output()
	if err != nil || !bytes.HasPrefix(out, []byte("iser: ")) {
		return fmt.Errorf("the sessions are %q, %w", out, err)
	}
	return errors.Join(run(disk), iscsiadm("--logout"))
}

// iscsiadm does something with the target.
func iscsiadm(args string) error {
	return do(append([]string{"iscsiadm", "-m", "node", "-T", targetName, "-p", ourAddr + ":3260"}, strings.Fields(args)...)...)
}

func initiatorData() (string, error) {
	return "", with(compare)
}

// compare writes random bytes past the cache by requests of all lengths, reads them, and looks into tgtd's file.
func compare(disk string) error {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	f, err := sys.OpenDirect(disk)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }() // what was written is compared
	const most = 2 << 20
	_, room, err := sys.NewMappedFile("iser", 2*most) // whole pages; the process ends soon
	if err != nil {
		return err
	}
	want, got := room[:most], room[most:]
	for _, n := range []int{512, 1024, 4096, 4608, 8192, 64 << 10, 128 << 10, 512 << 10, 1 << 20, most} {
		for range 4 {
			for i := range want[:n] {
				want[i] = byte(r.Uint32())
			}
			off := int64(r.IntN((diskSize-n)/512)) * 512
			if k, err := f.WriteAt(want[:n], off); err != nil || k != n {
				return fmt.Errorf("writing %d bytes at %d: %d, %w", n, off, k, err)
			}
			clear(got[:n])
			if k, err := f.ReadAt(got[:n], off); err != nil || k != n {
				return fmt.Errorf("reading %d bytes at %d: %d, %w", n, off, k, err)
			}
			if !bytes.Equal(got[:n], want[:n]) {
				return fmt.Errorf("%d bytes at %d are others (seed %d)", n, off, seed)
			}
			if err := inFile(want[:n], off); err != nil {
				return err
			}
		}
	}
	return nil
}

// inFile checks that tgtd's file has some bytes.
func inFile(want []byte, off int64) error {
	b, err := os.Open(backing)
	if err != nil {
		return err
	}
	defer func() { _ = b.Close() }() // it was only read
	got := make([]byte, len(want))
	if _, err := b.ReadAt(got, off); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%d bytes at %d of tgtd's file are others", len(want), off)
	}
	return nil
}

// initiatorExt4 makes a file system, fills it, and finds everything when it is mounted again.
func initiatorExt4() (string, error) {
	return "", with(func(disk string) error {
		if err := doAll("mkfs.ext4 -q "+disk, "mkdir -p /tmp/mnt", "mount -t ext4 "+disk+" /tmp/mnt"); err != nil {
			return err
		}
		var all [][]byte
		r := rand.New(rand.NewPCG(7, 7))
		for i := range 100 {
			b := make([]byte, 1+r.IntN(300<<10))
			for j := range b {
				b[j] = byte(i*31 + j)
			}
			all = append(all, b)
			if err := os.WriteFile(fmt.Sprintf("/tmp/mnt/%d", i), b, 0o600); err != nil {
				return err
			}
		}
		if err := doAll("umount /tmp/mnt", "e2fsck -fn "+disk, "mount -t ext4 "+disk+" /tmp/mnt"); err != nil {
			return err
		}
		for i := range all {
			b, err := os.ReadFile(fmt.Sprintf("/tmp/mnt/%d", i))
			if err != nil || !bytes.Equal(b, all[i]) {
				return fmt.Errorf("file %d: %w, or other bytes", i, err)
			}
		}
		return do("umount", "/tmp/mnt")
	})
}

// verify has fio write with checksums, and read.
func verify(disk, size string) error {
	for _, bs := range []string{"4k", "128k"} {
		if err := do("fio", "--name=j", "--filename="+disk, "--direct=1", "--ioengine=libaio", "--rw=randwrite", "--bs="+bs, "--size="+size, "--iodepth=16",
			"--verify=crc32c", "--verify_fatal=1", "--randseed=5"); err != nil {
			return err
		}
	}
	return nil
}

func initiatorFio() (string, error) {
	return "", with(func(disk string) error { return verify(disk, "6m") })
}

// initiatorLoss drops one of a hundred packets in each direction.
func initiatorLoss() (string, error) {
	if err := doAll("tc qdisc add dev k0 root netem loss 1%", "ip netns exec "+namespace+" tc qdisc add dev u0 root netem loss 1%"); err != nil {
		return "", err
	}
	err := with(func(disk string) error { return verify(disk, "1m") })
	return "", errors.Join(err, doAll("tc qdisc del dev k0 root", "ip netns exec "+namespace+" tc qdisc del dev u0 root"))
}

// --- the kernel's target, libiscsi on our device ---

// targetData makes a disk in the kernel's memory, which testdata/disk.c writes, reads and compares. The target does not
// allow immediate data: libiscsi 1.19 announces such data and does not send them, by which disks get other bytes.
func targetData() (string, error) {
	const core, fabric = "/sys/kernel/config/target/core/rd_mcp_0/disk", "/sys/kernel/config/target/iscsi/" + targetName
	const group = fabric + "/tpgt_1"
	const portal = group + "/np/" + kernelAddr + ":3260"
	for _, step := range []struct{ path, value string }{
		{core, ""}, {core + "/control", "rd_pages=8192"}, {core + "/enable", "1"},
		{fabric, ""}, {group, ""}, {group + "/lun/lun_1", ""},
		{group + "/attrib/authentication", "0"}, {group + "/attrib/generate_node_acls", "1"},
		{group + "/attrib/demo_mode_write_protect", "0"}, {group + "/attrib/cache_dynamic_acls", "1"},
		{group + "/param/ImmediateData", "No"},
		{portal, ""}, {portal + "/iser", "1"}, {group + "/enable", "1"},
	} {
		var err error
		if step.value == "" {
			err = os.MkdirAll(step.path, 0o755)
		} else {
			err = os.WriteFile(step.path, []byte(step.value), 0)
		}
		if err != nil {
			return "", err
		}
		if strings.HasSuffix(step.path, "lun_1") {
			if err := os.Symlink(core, step.path+"/disk"); err != nil {
				return "", err
			}
		}
	}
	seed := fmt.Sprint(time.Now().UnixNano() & 0xffffffff) // the program's output names the words that are wrong
	return ok(ours(nil, diskTool, fmt.Sprintf("iser://%s:3260/%s/1", kernelAddr, targetName), initiatorName, seed, "500"))
}
