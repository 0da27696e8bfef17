package main

// Running programs that were built for libibverbs.

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/verbena-rdma/verbena/clib/settings"
	"github.com/verbena-rdma/verbena/cmd/verbena/internal/sys"
)

type execCmd struct {
	Addr    string            `placeholder:"ADDR" help:"Addresses that devices stand on (VERBENA_ADDR)."`
	Devices string            `placeholder:"NAME" help:"Devices or interfaces that the program sees (VERBENA_DEVICES)."`
	Link    string            `placeholder:"LINK" help:"How requests travel: any, loop, local, udp (VERBENA_LINK)."`
	PCAP    string            `name:"pcap" placeholder:"FILE" help:"Write packets to a file (VERBENA_PCAP)."`
	Stats   string            `placeholder:"FILE" help:"Write counters to a file, or stderr (VERBENA_STATS)."`
	Log     bool              `help:"Say why a verb failed (VERBENA_LOG)."`
	GPU     gpuFlag           `name:"gpu" help:"Show software GPUs, by libraries with the interfaces of HSA and HIP. They are refused where a driver of real GPUs is; with --gpu=soft they are not."`
	GPUSet  string            `name:"gpu-set" placeholder:"SETTINGS" help:"What the GPUs are like, as count=2,vram=4G,bar=256M (VERBENA_GPU)."`
	Set     map[string]string `short:"e" placeholder:"NAME=VALUE" help:"Set another variable; see verbena env --help."`

	Program []string `arg:"" passthrough:"" help:"The program and its arguments."`
}

// Help is shown below the flags.
func (execCmd) Help() string {
	return `Runs a program that was built for libibverbs with Verbena's library instead of the system's: it finds software devices, one for each network interface. Nothing has to be installed and nobody has to be root.

Examples, each in two terminals:

    verbena exec -- ibv_rc_pingpong -g 0
    verbena exec -- ibv_rc_pingpong -g 0 localhost

    verbena exec --addr 127.77.0.1 -- ib_write_bw
    verbena exec --addr 127.77.0.1 -- ib_write_bw localhost

With --gpu, programs that were built for HSA or HIP find software GPUs, whose memory the devices reach (docs/gpu.md):

    verbena exec --gpu -e UCX_TLS=rc,rocm_copy -- mpirun -n 2 ucx_perftest -m rocm -t tag_bw -n 10000`
}

// gpuFlag is the flag --gpu, which may have the value soft.
type gpuFlag struct{ on, soft bool }

// IsBool reports that the flag needs no value.
func (*gpuFlag) IsBool() bool { return true }

// Decode reads the value, if there is one.
func (g *gpuFlag) Decode(ctx *kong.DecodeContext) error {
	g.on = true
	if ctx.Scan.Peek().Type != kong.FlagValueToken {
		return nil
	}
	value := fmt.Sprint(ctx.Scan.Pop().Value)
	g.soft = value == "soft"
	if !g.soft {
		return fmt.Errorf("%q: it has no value, or soft", value)
	}
	return nil
}

// drivers are files of the drivers of real GPUs.
var drivers = []string{"/dev/nvidiactl", "/dev/kfd"}

// gpuDir returns the directory of the libraries of GPUs in that of libibverbs.so.1. It fails where a program could find a
// real GPU, unless the software GPUs are asked for by name.
func (g *gpuFlag) gpuDir(dir string) (string, error) {
	for _, file := range drivers {
		if isFile(file) && !g.soft {
			return "", fmt.Errorf("%s: there is a driver of real GPUs here; --gpu=soft hides it", file)
		}
	}
	dir = filepath.Join(dir, "gpu")
	if !isFile(dir) {
		return "", fmt.Errorf("no directory %s: build it with \"make clib\"", dir)
	}
	return dir, nil
}

// libDirVar overrides where the library is looked for.
const libDirVar = "VERBENA_LIB"

// libDir finds the directory of libibverbs.so.1: beside the command as built, or
// as installed.
func libDir() (string, error) {
	var tried []string
	look := func(dir string) bool {
		tried = append(tried, dir)
		return isFile(filepath.Join(dir, "libibverbs.so.1"))
	}
	if dir := os.Getenv(libDirVar); dir != "" {
		if look(dir) {
			return filepath.Abs(dir)
		}
	} else {
		self, err := os.Executable()
		if err != nil {
			return "", err
		}
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		for _, rel := range []string{"lib", "../lib/verbena"} {
			if dir := filepath.Join(filepath.Dir(self), rel); look(dir) {
				return dir, nil
			}
		}
	}
	return "", fmt.Errorf("no libibverbs.so.1 in %s: build it with \"make clib\", or set %s to its directory", strings.Join(tried, " or "), libDirVar)
}

// variables returns the environment variables that make the loader of a program find the
// library, and preload libverbena-files.so: it shows programs the files of a device in
// sysfs, and closes ranges of memory before they are mapped over. The address sanitizer
// refuses libraries that are preloaded before it; ASAN_OPTIONS switches that off, since
// here it does no harm. What CUDA is told is in forCUDA.
func variables(dir string) map[string]string {
	vars := map[string]string{"LD_LIBRARY_PATH": inFront("LD_LIBRARY_PATH", dir)}
	if file := filepath.Join(dir, "libverbena-files.so"); isFile(file) {
		vars["LD_PRELOAD"] = inFront("LD_PRELOAD", file)
		vars["ASAN_OPTIONS"] = inFront("ASAN_OPTIONS", "verify_asan_link_order=0")
	}
	for name, value := range forCUDA {
		if os.Getenv(name) == "" {
			vars[name] = value
		}
	}
	return vars
}

// forCUDA are variables of CUDA, unless the program's environment has them.
//
// Queues to the GPU: with few, copies of the device would have to wait for the program's kernels
// (internal/cuda/queues.go); with 32, the most that there are, the fourth process on a GPU finds no
// memory for its own.
//
// Modules: CUDA loads a kernel when it is first used, and for that waits for all that runs, and
// holds all copies of the process. If a kernel of NCCL's runs, which waits for bytes, none of them
// ever ends. So all are loaded in the beginning.
var forCUDA = map[string]string{"CUDA_DEVICE_MAX_CONNECTIONS": "16", "CUDA_MODULE_LOADING": "EAGER"}

// inFront returns a variable's value with a path in front of the others.
func inFront(name, path string) string {
	old := os.Getenv(name)
	if old == "" || old == path || strings.HasPrefix(old, path+":") {
		return path + strings.TrimPrefix(old, path)
	}
	return path + ":" + old
}

func isFile(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

func (c *execCmd) Run(context.Context) error {
	args := c.Program
	if len(args) > 0 && args[0] == "--" {
		args = args[1:]
	}
	if len(args) == 0 {
		return usagef("which program?")
	}
	dir, err := libDir()
	if err != nil {
		return err
	}
	set := variables(dir)
	if c.GPU.on {
		gpus, err := c.GPU.gpuDir(dir)
		if err != nil {
			return err
		}
		set["LD_LIBRARY_PATH"] = gpus + ":" + set["LD_LIBRARY_PATH"]
	}
	for name, value := range map[string]string{"VERBENA_ADDR": c.Addr, "VERBENA_DEVICES": c.Devices,
		"VERBENA_LINK": c.Link, "VERBENA_PCAP": c.PCAP, "VERBENA_STATS": c.Stats, "VERBENA_GPU": c.GPUSet} {
		if value != "" {
			set[name] = value
		}
	}
	if c.Log {
		set["VERBENA_LOG"] = "1"
	}
	for name, value := range c.Set {
		set[name] = value
	}
	for name, value := range set {
		if err := os.Setenv(name, value); err != nil {
			return usagef("%s=%s: %w", name, value, err)
		}
	}
	if _, err := settings.Parse(os.Getenv, os.Getpid()); err != nil {
		return usageError{err}
	}
	path, err := exec.LookPath(args[0])
	if err != nil {
		var not *exec.Error
		if errors.As(err, &not) {
			err = not.Err
		}
		return fmt.Errorf("%s: %w", args[0], err)
	}
	if !hasWatcher(os.Getenv(watcherVar)) { // an exec within an exec has one already
		name, err := startWatcher(dir)
		if err != nil && c.Log {
			fmt.Fprintln(os.Stderr, "verbena exec: peers will not hear of the program's death:", err)
		}
		if err := os.Setenv(watcherVar, name); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s: %w", path, sys.Exec(path, args, os.Environ()))
}

type envCmd struct{}

// Help lists the variables, below the flags.
func (envCmd) Help() string {
	var b strings.Builder
	b.WriteString(`Prints what a shell has to set so that programs find Verbena's libibverbs: eval "$(verbena env)".

The library itself reads these variables:
`)
	for _, v := range settings.Vars {
		fmt.Fprintf(&b, "\n    %s\n        %s\n        Unset: %s.\n", v.Name, v.Help, v.Default)
	}
	fmt.Fprintf(&b, "\n    %s\n        Where \"verbena exec\" and \"verbena env\" find the library.\n        Unset: beside the command, or in ../lib/verbena.\n", libDirVar)
	return b.String()
}

func (envCmd) Run(context.Context) error {
	dir, err := libDir()
	if err != nil {
		return err
	}
	vars := variables(dir)
	for _, name := range slices.Sorted(maps.Keys(vars)) {
		fmt.Printf("export %s=%s\n", name, shellQuote(vars[name]))
	}
	return nil
}

// shellQuote makes one word of a string, for a POSIX shell.
func shellQuote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
