package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// Machine is one run of a guest.
type Machine struct {
	Kernel *Kernel
	Image  string        // from Image
	Share  string        // a directory of the host; /share in the guest, which may write there
	MemMB  int           // zero: 3072
	CPUs   int           // zero: 2
	Limit  time.Duration // the machine is switched off after this time. Zero: 10 minutes
	Args   []string      // further arguments of the emulator
	Late   []string      // the same, behind the shared directory's device, which else may get a bus of theirs that is not for it
	Boot   string        // further parameters of the kernel

	// Counted: the guest's clock counts instructions, of which each takes 2 ns, and time in which there is nothing to do takes
	// none. Then figures of speed are what the work takes, whatever else the host does meanwhile. CPUs should be 1: the emulator
	// changes from one processor to the other only every 100 ms.
	Counted bool
}

// ConsoleLog is the file in the shared directory with the output of the kernel and the
// guest's program.
const ConsoleLog = "console.log"

// Results is the file in the shared directory whose lines Run passes on while the guest
// writes them.
const Results = "results.jsonl"

// Run boots the machine and waits until it is off. It calls line with each line that the guest
// appends to Results. It returns an error if the guest cannot be booted, or is not off in
// time.
//
// The machine never outlives the caller: the host's kernel kills the emulator when the thread
// that started it ends.
func (m *Machine) Run(ctx context.Context, line func([]byte)) error {
	limit := m.Limit
	if limit == 0 {
		limit = 10 * time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	results := filepath.Join(m.Share, Results)
	if err := os.WriteFile(results, nil, 0o644); err != nil {
		return err
	}
	f, err := os.Open(results)
	if err != nil {
		return err
	}
	ended := make(chan error, 1)
	var wg sync.WaitGroup
	wg.Go(func() { ended <- m.boot(ctx) })
	err = follow(f, ended, line)
	late := ctx.Err() != nil
	cancel() // follow has failed if the machine is not off
	wg.Wait()
	if late {
		err = fmt.Errorf("the machine was not done after %v: %w\n%s", limit, ctx.Err(), m.lastWords())
	} else if err != nil {
		err = fmt.Errorf("the machine: %w\n%s", err, m.lastWords())
	}
	return errors.Join(err, f.Close())
}

// boot runs the emulator.
func (m *Machine) boot(ctx context.Context) error {
	guest, err := processorOf(m.Kernel.Arch)
	if err != nil {
		return err
	}
	qemu, err := find(guest.emulator.Name)
	if err != nil {
		return err
	}
	mem, cpus := m.MemMB, m.CPUs
	if mem == 0 {
		mem = 3072
	}
	if cpus == 0 {
		cpus = 2
	}
	// Software emulation works everywhere in the same way. Where /dev/kvm can boot Debian's
	// kernels, VERBENA_VM_ACCEL=kvm is faster.
	accel := os.Getenv("VERBENA_VM_ACCEL")
	if accel == "" || m.Kernel.Arch != runtime.GOARCH {
		accel = "tcg,thread=multi"
	}
	var clock []string
	if m.Counted {
		accel, clock = "tcg,thread=single", []string{"-icount", "shift=1,sleep=off"}
	}
	log, err := os.Create(filepath.Join(m.Share, ConsoleLog))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, qemu, slices.Concat(guest.machine, m.Args, clock, []string{"-accel", accel,
		"-m", strconv.Itoa(mem), "-smp", strconv.Itoa(cpus),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-net", "none",
		"-virtfs", "local,path=" + strings.ReplaceAll(m.Share, ",", ",,") + ",mount_tag=share,security_model=none,multidevs=remap",
		"-kernel", m.Kernel.Image, "-initrd", m.Image,
		"-append", "console=" + guest.console + " quiet panic=-1 random.trust_cpu=on " + guest.boot + " " + m.Boot}, m.Late)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	runtime.LockOSThread() // Pdeathsig is sent when this thread ends
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	return errors.Join(err, log.Close())
}

// follow passes on the lines of a growing file, until ended has a value.
func follow(f *os.File, ended <-chan error, line func([]byte)) error {
	var rest []byte
	buf := make([]byte, 64<<10)
	for last := false; ; {
		n, err := f.Read(buf)
		rest = append(rest, buf[:n]...)
		for {
			i := bytes.IndexByte(rest, '\n')
			if i < 0 {
				break
			}
			line(rest[:i])
			rest = rest[i+1:]
		}
		switch {
		case n > 0:
		case err != nil && err != io.EOF:
			return err
		case last:
			return nil
		default:
			select {
			case err := <-ended:
				if err != nil {
					return err
				}
				last = true // read once more: lines may have been written meanwhile
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// lastWords returns the end of the console log.
func (m *Machine) lastWords() string {
	b, err := os.ReadFile(filepath.Join(m.Share, ConsoleLog))
	if err != nil {
		return ""
	}
	const most = 3000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return "the end of the console log:\n" + string(b)
}
