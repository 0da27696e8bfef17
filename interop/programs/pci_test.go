package programs

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Programs that look for the PCI device of a device find the one that VERBENA_PCI names: by the number of the device,
// whatever it is called.
func TestPCIPath(t *testing.T) {
	bin := compile(t, "pci")
	const first, second = "/sys/devices/pcifffe:1b/fffe:1b:00.0", "/sys/devices/pcifffd:e1/fffd:e1:1f.7"
	cases := []struct {
		pci, name string
		want      []string
	}{
		{"", "", []string{"-", "-"}},
		{"fffe:1b:00.0", "", []string{first, "-"}},
		{"0000fffe:1B:00.0, fffd:e1:1f.7", "", []string{first, second}},
		{"fffe:1b:00.0,fffd:e1:1f.7", "mlx5", []string{first, second}},
	}
	// One that there is: its directory is where the kernel has it.
	if all, _ := filepath.Glob("/sys/bus/pci/devices/*"); len(all) > 0 { // a machine may have none
		real, err := filepath.EvalSymlinks(all[len(all)-1])
		if err != nil {
			t.Fatal(err)
		}
		cases = append(cases, struct {
			pci, name string
			want      []string
		}{filepath.Base(all[len(all)-1]), "", []string{real, "-"}})
	}
	for _, c := range cases {
		env := []string{"VERBENA_ADDR=" + address() + ";" + address(), "VERBENA_PCI=" + c.pci, "VERBENA_NAME=" + c.name}
		if out := run(t, side{args: slices.Concat([]string{bin}, c.want), env: env}); !strings.HasSuffix(out, "ok\n") {
			t.Errorf("VERBENA_PCI=%s: it says\n%s", c.pci, out)
		}
	}
}
