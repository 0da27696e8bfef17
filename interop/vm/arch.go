package vm

// The kinds of processors that a guest may have. On amd64 it runs programs of the host. On another
// one it runs Debian's packages, unpacked: Contents.Tree.

import "fmt"

// Amd64 and Arm64 are names of processors, which Go and Debian call the same.
const (
	Amd64 = "amd64"
	Arm64 = "arm64"
)

// processor is how the emulator is called for a guest.
type processor struct {
	emulator Program
	machine  []string // arguments
	console  string   // the kernel's name of the serial port
	boot     string   // parameters of the kernel
}

var processors = map[string]processor{
	// The emulator does carry-less multiplications bit by bit, so the fastest way to compute a
	// checksum becomes the slowest. Without the instruction programs use tables.
	Amd64: {Program{"qemu-system-x86_64", "qemu-system-x86"}, []string{"-machine", "q35", "-cpu", "max,-pclmulqdq"}, "ttyS0",
		// On a busy host an emulated timer can be so late that the kernel takes it for broken, and panics.
		"no_timer_check"},
	// A processor of servers, with the atomic instructions of ARM 8.1. With "max" the emulator would spend
	// its time on signing addresses.
	Arm64: {Program{"qemu-system-aarch64", "qemu-system-arm"}, []string{"-machine", "virt", "-cpu", "neoverse-n1"}, "ttyAMA0", ""},
}

func processorOf(arch string) (processor, error) {
	p, ok := processors[arch]
	if !ok {
		return p, fmt.Errorf("no guest has a processor of the kind %q", arch)
	}
	return p, nil
}
