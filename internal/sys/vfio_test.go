package sys

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPCIBARs(t *testing.T) {
	const text = `0x00000000febd4000 0x00000000febd7fff 0x0000000000140204
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000800000000 0x0000000800ffffff 0x000000000014220c
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
0x0000000000000000 0x0000000000000000 0x0000000000000000
`
	bars, err := parseBARs(text)
	want := [6]PCIRange{{0xfebd4000, 0x4000}, {}, {0x800000000, 16 << 20}}
	if err != nil || bars != want {
		t.Errorf("%+v, %v", bars, err)
	}
	for _, bad := range []string{"", "nothing", "0x5 0x4 0x0"} {
		if _, err := parseBARs(bad); !errors.Is(err, unix.EINVAL) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := PCIBARs("ffff:ff:1f.7"); !errors.Is(err, unix.ENOENT) {
		t.Error(err)
	}
}
