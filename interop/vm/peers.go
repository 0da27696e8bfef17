package vm

// Peer-to-peer DMA in a guest: Peers makes the machine; in the guest, FindPeer finds its controllers and TellPeers says
// where the memory is; afterwards PeerUses reads what the emulator has noted.

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// The NVMe controllers of Peers. The number is the serial number, and that of the controller's only namespace.
const (
	PeerCMB  = 1 // has memory for others
	PeerNear = 2 // is behind the same switch
	PeerFar  = 3 // is on another root port: the kernel does not let it use that memory
)

const (
	peerDisk  = 32 << 20
	peerTrace = "nvme.trace"
	peerRange = "peers.json"
)

// Peers returns arguments of the emulator for a machine with peer-to-peer DMA: NVMe controllers, one of which has 16 MiB
// of memory. It makes their disks in the shared directory, where the emulator also notes what the controllers do.
//
// The machine has no IOMMU: with one, the emulator does not route what goes from one controller to the other.
func Peers(share string) ([]string, error) {
	args := []string{"-device", "pcie-root-port,id=port1,bus=pcie.0,chassis=1,slot=1", "-device", "x3130-upstream,id=up,bus=port1",
		"-device", "xio3130-downstream,id=down1,bus=up,chassis=2,slot=2", "-device", "xio3130-downstream,id=down2,bus=up,chassis=3,slot=3",
		"-device", "pcie-root-port,id=port2,bus=pcie.0,chassis=4,slot=4",
		"-trace", "pci_nvme_io_cmd", "-trace", "pci_nvme_map_addr", "-D", filepath.Join(share, peerTrace)}
	for number, place := range map[int]string{PeerCMB: "down1,cmb_size_mb=16", PeerNear: "down2", PeerFar: "port2"} {
		file := filepath.Join(share, fmt.Sprintf("disk%d", number))
		if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Truncate(file, peerDisk)); err != nil {
			return nil, err
		}
		args = append(args, "-blockdev", fmt.Sprintf("driver=file,node-name=disk%d,filename=%s", number, file),
			"-device", fmt.Sprintf("nvme,id=nvme%d,serial=%d,bus=%s", number, number, place),
			"-device", fmt.Sprintf("nvme-ns,drive=disk%d,bus=nvme%d,nsid=%d", number, number, number))
	}
	return args, nil
}

// Peer is a controller of Peers, as the guest has it.
type Peer struct {
	At   string // PCI address
	Disk string // in /dev
}

// FindPeer returns a controller, when the guest's kernel has its disk.
func FindPeer(number int) (p Peer, err error) {
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		if p, err = findPeer(number); err == nil || time.Now().After(end) {
			return p, err
		}
	}
}

func findPeer(number int) (Peer, error) {
	found, err := filepath.Glob("/sys/bus/pci/devices/*/nvme/nvme*/serial")
	if err != nil {
		return Peer{}, err
	}
	for _, name := range found {
		b, err := os.ReadFile(name) //nolint:gosec // a file of /sys
		if err != nil {
			return Peer{}, err
		}
		if strings.TrimSpace(string(b)) != strconv.Itoa(number) {
			continue
		}
		controller := filepath.Dir(name)
		disks, err := filepath.Glob(controller + "/nvme*n*")
		if err != nil || len(disks) != 1 {
			return Peer{}, fmt.Errorf("controller %d has the disks %v, %w", number, disks, err)
		}
		p := Peer{At: filepath.Base(filepath.Dir(filepath.Dir(controller))), Disk: "/dev/" + filepath.Base(disks[0])}
		_, err = os.Stat(p.Disk)
		return p, err
	}
	return Peer{}, fmt.Errorf("there is no NVMe controller %d", number)
}

// span is where the memory for others is, as devices address it.
type span struct{ Start, Size uint64 }

// TellPeers writes to the shared directory where the memory of PeerCMB is.
func TellPeers(share string) error {
	p, err := FindPeer(PeerCMB)
	if err != nil {
		return err
	}
	b, err := os.ReadFile("/sys/bus/pci/devices/" + p.At + "/resource")
	if err != nil {
		return err
	}
	bars := strings.Split(string(b), "\n")
	var start, last uint64
	if len(bars) < 3 {
		return fmt.Errorf("%s has no BAR 2: %q", p.At, b)
	}
	if _, err := fmt.Sscanf(bars[2], "0x%x 0x%x", &start, &last); err != nil || last <= start {
		return fmt.Errorf("BAR 2 of %s: %q, %w", p.At, bars[2], err)
	}
	if b, err = json.Marshal(span{start, last - start + 1}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(share, peerRange), b, 0o644) //nolint:gosec // for the host
}

// PeerUse is what the commands of a controller have read and written, in bytes.
type PeerUse struct {
	Memory uint64 // in the memory for others
	Before uint64 // elsewhere, before that: the kernel looks for partitions
	After  uint64 // elsewhere, since then
}

var (
	tracedCommand = regexp.MustCompile(`pci_nvme_io_cmd .*nsid (0x[0-9a-f]+)`)
	tracedAddress = regexp.MustCompile(`pci_nvme_map_addr addr (0x[0-9a-f]+) len (\d+)`)
)

// PeerUses returns what each controller has used, as the emulator has noted it. The emulator finds the memory of one
// command at a time, so an address belongs to the command before it.
func PeerUses(share string) (map[int]*PeerUse, error) {
	b, err := os.ReadFile(filepath.Join(share, peerRange)) //nolint:gosec // the caller's directory
	if err != nil {
		return nil, err
	}
	var memory span
	if err := json.Unmarshal(b, &memory); err != nil {
		return nil, err
	}
	f, err := os.Open(filepath.Join(share, peerTrace)) //nolint:gosec // the caller's directory
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }() // it was only read
	all := map[int]*PeerUse{PeerCMB: {}, PeerNear: {}, PeerFar: {}}
	var use *PeerUse
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		if m := tracedCommand.FindSubmatch(lines.Bytes()); m != nil {
			n, _ := strconv.ParseUint(string(m[1]), 0, 32) // not a number: no controller has it
			use = all[int(n)]                              //nolint:gosec // 32 bits
		}
		m := tracedAddress.FindSubmatch(lines.Bytes())
		if m == nil || use == nil {
			continue
		}
		addr, err1 := strconv.ParseUint(string(m[1]), 0, 64)
		n, err2 := strconv.ParseUint(string(m[2]), 10, 64)
		if err := errors.Join(err1, err2); err != nil {
			return nil, err
		}
		use.add(addr-memory.Start < memory.Size, n)
	}
	return all, lines.Err()
}

func (u *PeerUse) add(inMemory bool, n uint64) {
	switch {
	case inMemory:
		u.Memory += n
	case u.Memory == 0:
		u.Before += n
	default:
		u.After += n
	}
}
