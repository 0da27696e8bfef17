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
	Limit  time.Duration // after which the machine is switched off. Zero: 10 minutes
}

// ConsoleLog is the file in the shared directory that has what the kernel and the
// guest's program said.
const ConsoleLog = "console.log"

// Results is the file in the shared directory whose lines Run hands on while the
// guest writes them.
const Results = "results.jsonl"

// Run boots the machine and waits until it is off. Each line that the guest adds to
// Results is given to line, in order. A guest that does not switch itself off in
// time is an error, and so is one that cannot be booted.
//
// The machine never outlives the caller: the kernel ends it with the thread that
// started it.
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
	cancel() // if it is not off, the results cannot be read
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
	qemu, err := find("qemu-system-x86_64")
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
	// Software emulation works everywhere, and alike. Where /dev/kvm boots Debian's
	// kernels, VERBENA_VM_ACCEL=kvm is quicker.
	accel := os.Getenv("VERBENA_VM_ACCEL")
	if accel == "" {
		accel = "tcg,thread=multi"
	}
	// An emulator multiplies without carries bit by bit, which makes of the quickest
	// way to a checksum the slowest; without the instruction programs use tables.
	const cpu = "max,-pclmulqdq"
	log, err := os.Create(filepath.Join(m.Share, ConsoleLog))
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, qemu, "-machine", "q35", "-accel", accel, "-cpu", cpu,
		"-m", strconv.Itoa(mem), "-smp", strconv.Itoa(cpus),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "stdio", "-net", "none",
		"-virtfs", "local,path="+strings.ReplaceAll(m.Share, ",", ",,")+",mount_tag=share,security_model=none,multidevs=remap",
		"-kernel", m.Kernel.Image, "-initrd", m.Image,
		"-append", "console=ttyS0 quiet panic=-1 random.trust_cpu=on")
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.WaitDelay = 5 * time.Second
	runtime.LockOSThread() // the signal comes when the thread ends
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	return errors.Join(err, log.Close())
}

// follow hands on the lines of a file that grows until the end is announced.
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
				last = true // once more, for what was written meanwhile
			case <-time.After(100 * time.Millisecond):
			}
		}
	}
}

// lastWords returns the end of what the guest said.
func (m *Machine) lastWords() string {
	b, err := os.ReadFile(filepath.Join(m.Share, ConsoleLog))
	if err != nil {
		return ""
	}
	const most = 3000
	if len(b) > most {
		b = b[len(b)-most:]
	}
	return "the console's last words:\n" + string(b)
}
