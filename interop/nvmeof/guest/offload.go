package main

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/verbena-rdma/verbena/interop/vm"
)

// errNoPeers: this kernel gives no memory of devices to processes.
var errNoPeers = errors.New("kernel: it has no PCI_P2PDMA")

// offloaded serves a disk of an NVMe controller: data passes through the memory of another controller behind the same
// switch, and not through memory of the system. The emulator confirms that: see the test.
func offloaded() (string, error) {
	memory, err1 := vm.FindPeer(vm.PeerCMB)
	disk, err2 := vm.FindPeer(vm.PeerNear)
	if err := errors.Join(err1, err2); err != nil {
		return "", err
	}
	allocate := "/sys/bus/pci/devices/" + memory.At + "/p2pmem/"
	if _, err := os.Stat(allocate + "allocate"); err != nil {
		return "", errNoPeers
	}
	if err := vm.TellPeers(share); err != nil {
		return "", err
	}
	before, err := availableBytes(allocate)
	if err != nil {
		return "", err
	}
	figure, err := throughDisk(disk, []string{"-p2pmem", memory.At}, func() error {
		if n, err := availableBytes(allocate); err != nil || n > before-(3<<20) {
			return fmt.Errorf("%d of %d bytes of the controller's memory are free while the target has its own of it, %w", n, before, err)
		}
		return nil
	})
	if err != nil {
		return "", err
	}
	if n, err := availableBytes(allocate); err != nil || n != before {
		return "", fmt.Errorf("%d of %d bytes of the controller's memory are free afterwards, %w", n, before, err)
	}
	return figure, nil
}

// notOffloaded is the same through memory of the system, with another disk, so that the emulator can tell them apart.
func notOffloaded() (string, error) {
	disk, err := vm.FindPeer(vm.PeerFar)
	if err != nil {
		return "", err
	}
	return throughDisk(disk, []string{"-direct"}, func() error { return nil })
}

func availableBytes(dir string) (uint64, error) {
	b, err := os.ReadFile(dir + "available")
	if err != nil {
		return 0, err
	}
	return strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
}

var movedByDisk = regexp.MustCompile(`the disk has moved (\d+) bytes itself, (\d+) were copied; (\d+) queues`)

// throughDisk has the kernel's host verify a disk that our target serves, and returns what the target says of it at its
// end. during is called while it serves.
func throughDisk(disk vm.Peer, args []string, during func() error) (string, error) {
	t, err := startTarget(append([]string{"-file", disk.Disk, "-block", "512", "-in-capsule", "0"}, args...)...)
	if err != nil {
		return "", err
	}
	name, err := connect(ourAddr, ourNQN, "")
	if err == nil {
		err = during()
		for _, bs := range []string{"4k", "128k"} {
			if err == nil {
				_, _, err = fio(name, "--rw=randwrite", "--bs="+bs, "--size=1m", "--iodepth=8", "--verify=crc32c", "--verify_fatal=1", "--randseed=5")
			}
		}
		err = errors.Join(err, disconnect())
	}
	if err = errors.Join(err, t.stop(syscall.SIGTERM)); err != nil {
		return "", err
	}
	m := movedByDisk.FindStringSubmatch(t.said.String())
	if m == nil || m[2] != "0" || m[3] != "0" {
		return "", fmt.Errorf("the target says %q", t.said.String())
	}
	if n, err := strconv.Atoi(m[1]); err != nil || n < 4<<20 { // two times 1 MiB, there and back
		return "", fmt.Errorf("the target says %q", t.said.String())
	}
	return m[0], nil
}
