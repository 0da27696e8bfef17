// Command guest runs in a virtual machine with NVMe controllers, and asks its kernel which of them
// may use whose memory.
//
// Stages:
//
//  1. ACS redirect is set at ports by chance, before the kernel decides anything.
//  2. The machine is dumped, for the host.
//  3. For each controller with memory and each controller with a disk, the disk writes and reads
//     that memory (direct), and the kernel's NVMe target is offered it for that disk (offer).
package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"time"

	"github.com/verbena-rdma/verbena/internal/sys"
	"github.com/verbena-rdma/verbena/interop/p2p/result"
	"github.com/verbena-rdma/verbena/interop/vm"
	"github.com/verbena-rdma/verbena/p2p"
)

const share = "/share"

func main() {
	err := run()
	last := result.Line{Done: true}
	if err != nil {
		last = result.Line{Fatal: err.Error()}
	}
	if err := report(last); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		os.Exit(1)
	}
}

func report(l result.Line) error {
	b, err := json.Marshal(l)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(share, vm.Results), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	return errors.Join(err, f.Close())
}

func run() error {
	b, err := os.ReadFile(filepath.Join(share, result.OrderFile))
	if err != nil {
		return err
	}
	var order result.Order
	if err := json.Unmarshal(b, &order); err != nil {
		return err
	}
	if err := exec.Command("mount", "-t", "configfs", "config", "/sys/kernel/config").Run(); err != nil {
		return fmt.Errorf("mounting configfs: %w", err)
	}
	t, err := settled()
	if err != nil {
		return err
	}
	if order.Seed != 0 {
		if err := setACS(t, rand.New(rand.NewPCG(order.Seed, 1))); err != nil {
			return err
		}
		if t, err = p2p.ReadSys("/"); err != nil {
			return err
		}
	}
	if err := t.Dump(filepath.Join(share, result.DumpDir)); err != nil {
		return err
	}
	for _, provider := range t.Devices() {
		f, _ := t.Function(provider)
		if f.P2PMem == nil {
			continue
		}
		for _, client := range t.Devices() {
			disk, err := diskOf(client)
			if err != nil {
				return err
			}
			if disk == "" {
				continue
			}
			pair := &result.Pair{Provider: provider, Client: client, NVMet: text(offer(provider, disk)), Direct: text(direct(provider, disk))}
			if err := report(result.Line{Pair: pair}); err != nil {
				return err
			}
		}
	}
	return nil
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// settled returns the machine when each NVMe controller has its disk: the driver begins in the
// background.
func settled() (*p2p.Topology, error) {
	for range 300 {
		t, err := p2p.ReadSys("/")
		if err != nil {
			return nil, err
		}
		missing := 0
		for _, a := range t.Devices() {
			if f, _ := t.Function(a); f.Class == p2p.ClassNVMe {
				disk, err := diskOf(a)
				if err != nil {
					return nil, err
				}
				if disk == "" {
					missing++
				}
			}
		}
		if missing == 0 {
			return t, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return nil, errors.New("the disks do not come up")
}

// directory returns where the kernel has the files of a function.
func directory(a p2p.Address) string { return "/sys/bus/pci/devices/" + a.String() }

var diskName = regexp.MustCompile(`^nvme\d+n\d+$`)

// diskOf returns the disk of a controller; "" if it has none.
func diskOf(a p2p.Address) (string, error) {
	dirs, err := filepath.Glob(directory(a) + "/nvme/nvme*/nvme*")
	if err != nil {
		return "", err
	}
	for _, d := range dirs {
		if name := filepath.Base(d); diskName.MatchString(name) {
			if _, err := os.Stat("/dev/" + name); err == nil {
				return "/dev/" + name, nil
			}
		}
	}
	return "", nil
}

// setACS sets redirect bits at some of the ports that have ACS.
func setACS(t *p2p.Topology, random *rand.Rand) error {
	for _, a := range t.Functions() {
		f, _ := t.Function(a)
		if f.ACS == nil || random.IntN(2) == 0 {
			continue
		}
		bits := f.ACS.Capability & []p2p.ACSBits{p2p.RequestRedirect, p2p.CompletionRedirect, p2p.RequestRedirect | p2p.CompletionRedirect}[random.IntN(3)]
		if err := writeACS(a, bits); err != nil {
			return fmt.Errorf("ACS of %v: %w", a, err)
		}
	}
	return nil
}

// writeACS writes the control register of the extended capability 0x0d.
func writeACS(a p2p.Address, bits p2p.ACSBits) error {
	f, err := os.OpenFile(directory(a)+"/config", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	space := make([]byte, 4096)
	_, err = f.ReadAt(space, 0)
	at := 0x100
	for err == nil && binary.LittleEndian.Uint16(space[at:]) != 0x0d {
		if at = int(binary.LittleEndian.Uint16(space[at+2:]) >> 4); at < 0x100 {
			err = errors.New("there is no such capability")
		}
	}
	if err == nil {
		_, err = f.WriteAt(binary.LittleEndian.AppendUint16(nil, uint16(bits)), int64(at)+6)
	}
	return errors.Join(err, f.Close())
}

// direct lets a disk write from and read into the memory of a provider, and compares.
func direct(provider p2p.Address, disk string) error {
	p, err := p2p.OpenSysProvider(provider)
	if err != nil {
		return err
	}
	memory, release, err := p.Alloc(8192)
	if err != nil {
		return err
	}
	defer release()
	return exchange(memory, disk)
}

func exchange(memory []byte, disk string) error {
	device, err := sys.OpenDirect(disk)
	if err != nil {
		return err
	}
	data := make([]byte, len(memory))
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	copy(memory, data)
	if _, err = device.WriteAt(memory, 4096); err == nil {
		clear(memory)
		if _, err = device.ReadAt(memory, 4096); err == nil && !bytes.Equal(memory, data) {
			err = errors.New("the data differs")
		}
	}
	return errors.Join(err, device.Close())
}

// offer asks the kernel's NVMe target to export a disk with the memory of a provider.
func offer(provider p2p.Address, disk string) error {
	const subsystem = "/sys/kernel/config/nvmet/subsystems/judge"
	const namespace = subsystem + "/namespaces/1"
	write := func(name, value string) error { return os.WriteFile(namespace+"/"+name, []byte(value), 0) }
	err := os.MkdirAll(namespace, 0o755)
	if err == nil {
		err = write("device_path", disk)
	}
	if err == nil {
		err = write("p2pmem", provider.String())
	}
	if err == nil {
		if err = write("enable", "1"); err == nil {
			err = write("enable", "0")
		}
	}
	return errors.Join(err, os.Remove(namespace), os.Remove(subsystem))
}
