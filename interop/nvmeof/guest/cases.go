package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/cm"
	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/interop/nvmeof"
	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/fabrics"
	"github.com/verbena-rdma/verbena/verbs"
)

const (
	ourNQN    = "nqn.2026-01.io.verbena:disk"
	kernelNQN = "nqn.2026-01.io.verbena:kernel"
	diskSize  = 192 << 20
)

// form is when a case is run, besides when it is chosen by its name.
type form int

const (
	always form = iota
	long        // in the long form
	chosen      // never
)

// cases, in their order.
var cases = []struct {
	name string
	form form
	run  func() (figure string, err error)
}{
	{"host/data", always, hostData},
	{"host/no in-capsule data", long, hostNoInCapsule},
	{"host/ext4", always, hostExt4},
	{"host/fio", always, hostFio},
	{"host/restart", always, hostRestart},
	{"host/killed", long, hostKilled},
	{"host/killed queue pair", always, hostKilledQueue},
	{"host/reset", always, hostReset},
	{"host/discovery", always, hostDiscovery},
	{"offload/peer memory", always, offloaded},
	{"offload/system memory", always, notOffloaded},
	{"target/data", always, targetData},
	{"target/refusals", always, targetRefusals},
	{"speed", chosen, speed},
}

// --- our target, the kernel's host ---

// target is a process of examples/nvmet.
type target struct {
	cmd  *exec.Cmd
	said bytes.Buffer
	done chan error
}

func startTarget(args ...string) (*target, error) {
	t := &target{done: make(chan error, 1)}
	t.cmd = exec.Command("ip", append([]string{"netns", "exec", namespace, program, "-listen", ourAddr + ":4420", "-nqn", ourNQN, "-v"}, args...)...)
	t.cmd.Stdout, t.cmd.Stderr = &t.said, os.Stderr
	if err := t.cmd.Start(); err != nil {
		return nil, err
	}
	go func() { t.done <- t.cmd.Wait() }()
	return t, nil
}

func (t *target) stop(sig syscall.Signal) error {
	if err := t.cmd.Process.Signal(sig); err != nil {
		return err
	}
	select {
	case err := <-t.done:
		if sig != syscall.SIGKILL && err != nil {
			return fmt.Errorf("the target ends with %w\n%s", err, t.said.String())
		}
		return nil
	case <-time.After(30 * time.Second):
		return errors.New("the target does not end")
	}
}

// connect has the kernel's host connect to a target, and returns the name of its block device.
func connect(addr, nqn, more string) (disk string, err error) {
	options := "transport=rdma,traddr=" + addr + ",trsvcid=4420,nqn=" + nqn + ",hostnqn=nqn.2014-08.org.nvmexpress:uuid:2cd2c43b-a90a-45c1-a8cd-86b33ab273b5" +
		",hostid=2cd2c43b-a90a-45c1-a8cd-86b33ab273b5" + more
	f, err := os.OpenFile("/dev/nvme-fabrics", os.O_RDWR, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) { // until the target listens
		if _, err = f.WriteString(options); err == nil || time.Now().After(end) {
			break
		}
	}
	if err != nil {
		return "", fmt.Errorf("connect to %s: %w\n%s", nqn, err, dmesg())
	}
	b := make([]byte, 256)
	n, err := f.Read(b)
	if err != nil {
		return "", err
	}
	var instance, cntlid int
	if _, err := fmt.Sscanf(string(b[:n]), "instance=%d,cntlid=%d", &instance, &cntlid); err != nil {
		return "", fmt.Errorf("%q: %w", b[:n], err)
	}
	controller = fmt.Sprintf("/sys/class/nvme-fabrics/ctl/nvme%d", instance)
	err = eventually("the disk appears", 30*time.Second, func() bool {
		found, _ := filepath.Glob(fmt.Sprintf("/sys/block/nvme%dn*", instance)) // the pattern is good
		for _, f := range found {
			disk = "/dev/" + filepath.Base(f)
			if _, err := os.Stat(disk); err == nil {
				return true
			}
		}
		return false
	})
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, dmesg())
	}
	return disk, err
}

// controller is the kernel's controller that was connected last.
var controller string

func disconnect() error {
	return os.WriteFile(controller+"/delete_controller", []byte("1"), 0)
}

// dmesg returns the end of what the kernel has said.
func dmesg() string {
	out, _ := exec.Command("dmesg").Output()
	if len(out) > 3000 {
		out = out[len(out)-3000:]
	}
	return string(out)
}

// with runs a case with a target of ours and the kernel's host.
func with(args []string, more string, run func(disk string, t *target) error) (err error) {
	t, err := startTarget(args...)
	if err != nil {
		return err
	}
	disk, err := connect(ourAddr, ourNQN, more)
	if err == nil {
		err = run(disk, t)
		err = errors.Join(err, disconnect())
	}
	return errors.Join(err, t.stop(syscall.SIGTERM))
}

func inMemory() []string { return []string{"-size", fmt.Sprint(diskSize), "-block", "512"} }

// compare writes random bytes to a block device, by requests of all lengths and past the cache, and reads them.
func compare(disk string) error {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	f, err := sys.OpenDirect(disk)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	const most = 2 << 20
	_, room, err := sys.NewMappedFile("nvme", 2*most) // whole pages; the process ends soon
	if err != nil {
		return err
	}
	want, got := room[:most], room[most:]
	for _, n := range []int{512, 1024, 4096, 4608, 8192, 64 << 10, 128 << 10, 1 << 20, most} {
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
		}
	}
	return nil
}

func hostData() (string, error) {
	return "", with(inMemory(), "", func(disk string, _ *target) error { return compare(disk) })
}

func hostNoInCapsule() (string, error) {
	return "", with(append(inMemory(), "-in-capsule", "0"), ",nr_io_queues=2", func(disk string, _ *target) error { return compare(disk) })
}

// hostExt4 makes a file system, fills it, and finds everything when it is mounted again.
func hostExt4() (string, error) {
	return "", with(inMemory(), "", func(disk string, _ *target) error {
		if err := doAll("mkfs.ext4 -q "+disk, "mkdir -p /tmp/mnt", "mount -t ext4 "+disk+" /tmp/mnt"); err != nil {
			return err
		}
		r := rand.New(rand.NewPCG(7, 7))
		file := func(i int) []byte {
			b := make([]byte, 1+r.IntN(300<<10))
			for j := range b {
				b[j] = byte(i*31 + j)
			}
			return b
		}
		var all [][]byte
		for i := range 100 {
			all = append(all, file(i))
			if err := os.WriteFile(fmt.Sprintf("/tmp/mnt/%d", i), all[i], 0o600); err != nil {
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

// fio runs fio, and returns what it measures.
func fio(disk string, args ...string) (iops, bandwidth float64, err error) {
	all := append([]string{"--name=j", "--filename=" + disk, "--direct=1", "--ioengine=libaio", "--output-format=json"}, args...)
	out, err := exec.Command("fio", all...).Output()
	if err != nil {
		return 0, 0, fmt.Errorf("fio %s: %w\n%s\n%s", strings.Join(all, " "), err, out, dmesg())
	}
	var r struct {
		Jobs []struct {
			Error       int
			Read, Write struct {
				IOPS float64 `json:"iops"`
				BW   float64 `json:"bw_bytes"`
			}
		}
	}
	if i := bytes.IndexByte(out, '{'); i >= 0 {
		out = out[i:]
	}
	if err := json.Unmarshal(out, &r); err != nil {
		return 0, 0, err
	}
	for _, j := range r.Jobs {
		if j.Error != 0 {
			return 0, 0, fmt.Errorf("fio: error %d", j.Error)
		}
		iops += j.Read.IOPS + j.Write.IOPS
		bandwidth += j.Read.BW + j.Write.BW
	}
	return iops, bandwidth, nil
}

func verify(disk string) error {
	size := "--size=6m"
	if full {
		size = "--size=64m"
	}
	for _, bs := range []string{"4k", "128k"} {
		if _, _, err := fio(disk, "--rw=randwrite", "--bs="+bs, size, "--iodepth=16", "--verify=crc32c", "--verify_fatal=1", "--randseed=5"); err != nil {
			return err
		}
	}
	return nil
}

func hostFio() (string, error) {
	return "", with(inMemory(), "", func(disk string, _ *target) error { return verify(disk) })
}

// under runs fio with verify, and in the middle of it something that makes the kernel's host connect again: fio sees nothing
// of it. happen gets the target, and returns the one that is there afterwards.
func under(more string, happen func(t *target, args []string) (*target, error)) error {
	const image = "/tmp/disk.img"
	if err := os.WriteFile(image, nil, 0o600); err != nil {
		return err
	}
	if err := os.Truncate(image, 64<<20); err != nil {
		return err
	}
	defer func() { _ = os.Remove(image) }()
	args := []string{"-file", image, "-block", "4096"}
	t, err := startTarget(args...)
	if err != nil {
		return err
	}
	disk, err := connect(ourAddr, ourNQN, ",reconnect_delay=1,ctrl_loss_tmo=120"+more)
	if err != nil {
		return errors.Join(err, t.stop(syscall.SIGKILL))
	}
	ended := make(chan error, 1)
	go func() {
		_, _, err := fio(disk, "--rw=randwrite", "--bs=4k", "--size=4m", "--iodepth=8", "--verify=crc32c", "--verify_fatal=1", "--rate=,1m",
			"--cpus_allowed=0") // whose queue is the first one
		ended <- err
	}()
	time.Sleep(1500 * time.Millisecond)
	if t, err = happen(t, args); err != nil {
		return err
	}
	select {
	case err = <-ended:
	case <-time.After(3 * time.Minute):
		err = fmt.Errorf("fio does not end\n%s", dmesg())
	}
	return errors.Join(err, disconnect(), t.stop(syscall.SIGTERM))
}

// over ends the target in the middle of fio, and starts it again.
func over(sig syscall.Signal) error {
	return under(",keep_alive_tmo=2", func(t *target, args []string) (*target, error) {
		if err := t.stop(sig); err != nil {
			return nil, err
		}
		time.Sleep(500 * time.Millisecond)
		return startTarget(args...)
	})
}

func hostRestart() (string, error) { return "", over(syscall.SIGTERM) }
func hostKilled() (string, error)  { return "", over(syscall.SIGKILL) }

// hostKilledQueue has one queue pair of the target fail, that of the I/O queue that fio uses. The target stays, and with it the
// host's two other queues, until the host connects all three again.
func hostKilledQueue() (string, error) {
	var same *target
	err := under(",nr_io_queues=2", func(t *target, _ []string) (*target, error) {
		same = t
		return t, t.cmd.Process.Signal(syscall.SIGUSR1)
	})
	if err != nil {
		return "", err
	}
	said := same.said.String()
	_, last, failed := strings.Cut(said, "fails: <nil>\n")
	var queues int
	if _, err := fmt.Sscanf(last, "%d queues,", &queues); err != nil || !failed || queues < 6 {
		return "", fmt.Errorf("the queue has not failed, or the host has not connected three queues again: %s", said)
	}
	return fmt.Sprintf("%d queues", queues), nil
}

// hostReset has the kernel's host reset the controller while fio uses it, twice.
func hostReset() (string, error) {
	var same *target
	err := under("", func(t *target, _ []string) (*target, error) {
		same = t
		for range 2 {
			if err := os.WriteFile(controller+"/reset_controller", []byte("1"), 0); err != nil { // it returns when that is done
				return nil, fmt.Errorf("%w\n%s", err, dmesg())
			}
			time.Sleep(200 * time.Millisecond)
		}
		return t, nil
	})
	if err != nil {
		return "", err
	}
	var queues int
	_, last, _ := strings.Cut(same.said.String(), "\n")
	if _, err := fmt.Sscanf(last, "%d queues,", &queues); err != nil || queues < 6 {
		return "", fmt.Errorf("the host has not connected its queues again: %s", same.said.String())
	}
	return fmt.Sprintf("%d queues", queues), nil
}

// hostDiscovery has the kernel's host ask which subsystems there are.
func hostDiscovery() (string, error) {
	t, err := startTarget(inMemory()...)
	if err != nil {
		return "", err
	}
	err = func() error {
		f, err := os.OpenFile("/dev/nvme-fabrics", os.O_RDWR, 0)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(100 * time.Millisecond) {
			if _, err = f.WriteString("transport=rdma,traddr=" + ourAddr + ",trsvcid=4420,nqn=" + nvme.DiscoveryNQN + ",hostnqn=nqn.2014-08.org.nvmexpress:uuid:2cd2c43b-a90a-45c1-a8cd-86b33ab273b5,hostid=2cd2c43b-a90a-45c1-a8cd-86b33ab273b5"); err == nil || time.Now().After(end) {
				break
			}
		}
		if err != nil {
			return fmt.Errorf("%w\n%s", err, dmesg())
		}
		b := make([]byte, 256)
		n, err := f.Read(b)
		if err != nil {
			return err
		}
		var instance int
		if _, err := fmt.Sscanf(string(b[:n]), "instance=%d", &instance); err != nil {
			return err
		}
		controller = fmt.Sprintf("/sys/class/nvme-fabrics/ctl/nvme%d", instance)
		page := make([]byte, 4096)
		if err := discoveryPage(fmt.Sprintf("/dev/nvme%d", instance), page); err != nil {
			return err
		}
		if !bytes.Contains(page, []byte(ourNQN)) || !bytes.Contains(page, []byte(ourAddr)) {
			return fmt.Errorf("the log page has neither %s nor %s: %q", ourNQN, ourAddr, bytes.Trim(page, "\x00 "))
		}
		return disconnect()
	}()
	return "", errors.Join(err, t.stop(syscall.SIGTERM))
}

// discoveryPage has a controller of the kernel's read the log page.
func discoveryPage(device string, b []byte) error {
	f, err := os.Open(device)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	return sys.NVMeLogPage(int(f.Fd()), 0x70, b)
}

// --- the kernel's target, our host ---

const configfs = "/sys/kernel/config/nvmet/"

// kernelTarget serves a ramdisk by the kernel's target.
func kernelTarget() (stop func() error, err error) {
	sub, port := configfs+"subsystems/"+kernelNQN, configfs+"ports/1"
	write := func(path, text string) {
		if err == nil {
			err = os.WriteFile(path, []byte(text), 0)
		}
	}
	mkdir := func(path string) {
		if err == nil {
			err = os.Mkdir(path, 0o755)
		}
	}
	mkdir(sub)
	write(sub+"/attr_allow_any_host", "1")
	mkdir(sub + "/namespaces/1")
	write(sub+"/namespaces/1/device_path", "/dev/ram0")
	write(sub+"/namespaces/1/enable", "1")
	mkdir(port)
	write(port+"/addr_trtype", "rdma")
	write(port+"/addr_adrfam", "ipv4")
	write(port+"/addr_traddr", kernelAddr)
	write(port+"/addr_trsvcid", "4420")
	if err == nil {
		err = os.Symlink(sub, port+"/subsystems/"+kernelNQN)
	}
	if err != nil {
		return nil, fmt.Errorf("%w\n%s", err, dmesg())
	}
	return func() error {
		return errors.Join(os.Remove(port+"/subsystems/"+kernelNQN), os.Remove(port), os.Remove(sub+"/namespaces/1"), os.Remove(sub))
	}, nil
}

// inOurs runs a role of this program in our namespace.
func inOurs(role string) (err error) {
	stop, err := kernelTarget()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	return do("ip", "netns", "exec", namespace, "/tmp/main", role)
}

func targetData() (string, error)     { return "", inOurs("data") }
func targetRefusals() (string, error) { return "", inOurs("refusals") }

// role is what this program does in our namespace.
func role(args []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	dev, err := verbs.Open("", &verbs.Config{Addrs: []netip.Addr{netip.MustParseAddr(ourAddr)}})
	if err != nil {
		return err
	}
	defer func() { _ = dev.Close() }()
	cfg := fabrics.HostConfig{NQN: kernelNQN, Queues: 2, QueueSize: 32, Config: cm.Config{Device: dev}}
	if args[0] == "refusals" {
		return refusals(ctx, cfg)
	}
	h, err := fabrics.Dial(ctx, kernelAddr+":4420", cfg)
	if err != nil {
		return err
	}
	defer func() { _ = h.Close() }()
	d, err := h.Namespace(ctx, 1)
	if err != nil {
		return err
	}
	return model(d)
}

// model writes and reads a disk at random, and compares it with an array.
func model(d *fabrics.Disk) error {
	seed := rand.Uint64()
	r := rand.New(rand.NewPCG(seed, 0))
	size := int(min(d.Size(), 8<<20))
	array := make([]byte, size)
	if _, err := d.WriteAt(array, 0); err != nil {
		return err
	}
	for i := range 150 {
		n := (1 + r.IntN(1+r.IntN(256))) * d.BlockSize()
		off := r.IntN((size-n)/d.BlockSize()) * d.BlockSize()
		b := make([]byte, n)
		if i%2 == 0 {
			for j := range b {
				b[j] = byte(r.Uint32())
			}
			copy(array[off:], b)
			if _, err := d.WriteAt(b, int64(off)); err != nil {
				return fmt.Errorf("writing %d bytes at %d: %w (seed %d)", n, off, err, seed)
			}
			continue
		}
		if _, err := d.ReadAt(b, int64(off)); err != nil || !bytes.Equal(b, array[off:off+n]) {
			return fmt.Errorf("reading %d bytes at %d: %w, or other bytes (seed %d)", n, off, err, seed)
		}
	}
	return d.Flush()
}

// refusals has the kernel's target refuse what it should.
func refusals(ctx context.Context, cfg fabrics.HostConfig) error {
	bad := cfg
	bad.NQN = "nqn.2026-01.io.verbena:none"
	_, err := fabrics.Dial(ctx, kernelAddr+":4420", bad)
	var st *fabrics.StatusError
	if !errors.As(err, &st) || st.Status&^nvme.StatusDNR != nvme.StatusConnectInvalidParameter {
		return fmt.Errorf("no such subsystem: %w", err)
	}
	for what, c := range map[string]struct {
		private []byte
		want    fabrics.Refusal
	}{
		"a format that is not known": {[]byte{1, 0, 0, 0, 32, 0, 31, 0, 31: 0}, fabrics.RefusedFormat},
		"a first queue of 64":        {[]byte{0, 0, 0, 0, 64, 0, 63, 0, 31: 0}, fabrics.RefusedSendSize},
	} {
		_, err := cm.Dial(ctx, kernelAddr+":4420", &cm.Config{Device: cfg.Config.Device, Private: c.private})
		var no *cm.RejectError
		if !errors.As(err, &no) || no.Reason != cm.ReasonProgram || fabrics.Refusal(uint16(no.Private[2])|uint16(no.Private[3])<<8) != c.want {
			return fmt.Errorf("%s: %w, should be refused for %v", what, err, c.want)
		}
	}
	return nil
}

// --- speed ---

// speed compares our target with the kernel's: the same host, the same fio, one after the other, three times. The median of
// the ratios must not be below nvmeof.Floor.
func speed() (string, error) {
	measure := func(disk string) (v [2]float64, err error) {
		if v[0], _, err = fio(disk, "--rw=randread", "--bs=4k", "--iodepth=32", "--runtime=2", "--time_based"); err != nil {
			return v, err
		}
		_, v[1], err = fio(disk, "--rw=read", "--bs=128k", "--iodepth=16", "--runtime=2", "--time_based")
		return v, err
	}
	var figures []string
	var ratios [2][]float64
	for range 3 {
		var ours, theirs [2]float64
		err := with(inMemory(), "", func(disk string, _ *target) (err error) {
			ours, err = measure(disk)
			return err
		})
		if err != nil {
			return "", err
		}
		stop, err := kernelTarget()
		if err != nil {
			return "", err
		}
		disk, err := connect(kernelAddr, kernelNQN, "")
		if err == nil {
			theirs, err = measure(disk)
			err = errors.Join(err, disconnect())
		}
		if err = errors.Join(err, stop()); err != nil {
			return "", err
		}
		for i := range ratios {
			ratios[i] = append(ratios[i], ours[i]/theirs[i])
		}
		figures = append(figures, fmt.Sprintf("4 KiB %.0f IOPS, %.2f of nvmet-rdma's; 128 KiB %.1f MB/s, %.2f", ours[0], ours[0]/theirs[0], ours[1]/1e6, ours[1]/theirs[1]))
	}
	var err error
	for i, what := range []string{"4 KiB", "128 KiB"} {
		slices.Sort(ratios[i])
		if m := ratios[i][1]; m < nvmeof.Floor {
			err = errors.Join(err, fmt.Errorf("%s: %.2f of nvmet-rdma's speed, should be %v at least", what, m, nvmeof.Floor))
		}
	}
	return strings.Join(figures, "; then "), err
}
