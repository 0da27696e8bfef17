package sys

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMemfd(t *testing.T) {
	const size = 3 * 4096
	fd, err := NewMemfd("verbena-test", size)
	if err != nil {
		t.Fatal(err)
	}
	defer CloseFD(fd)
	a, err := MapMemfd(fd, size)
	if err != nil {
		t.Fatal(err)
	}
	b, err := MapMemfd(fd, size)
	if err != nil {
		t.Fatal(err)
	}
	a[size-1] = 7
	if b[size-1] != 7 || len(a) != size {
		t.Error("two mappings of one file differ")
	}
	for _, n := range []int64{0, size - 1, size + 1} {
		if err := unix.Ftruncate(fd, n); !errors.Is(err, unix.EPERM) {
			t.Errorf("truncated to %d: %v", n, err)
		}
	}
	for _, n := range []int{-1, 0, size - 4096, size + 4096} {
		if b, err := MapMemfd(fd, n); err == nil {
			t.Errorf("%d bytes were mapped", len(b))
		}
	}
	for _, m := range [][]byte{a, b} {
		if err := Unmap(m); err != nil {
			t.Error(err)
		}
	}
}

// What could fault under us is not mapped.
func TestMapMemfdRefuses(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags int
		seals int
		want  error
	}{
		{"no seals", unix.MFD_ALLOW_SEALING, 0, unix.EPERM},
		{"never to be sealed", 0, 0, unix.EPERM},
		{"may shrink", unix.MFD_ALLOW_SEALING, unix.F_SEAL_GROW | unix.F_SEAL_SEAL, unix.EPERM},
		{"may grow", unix.MFD_ALLOW_SEALING, unix.F_SEAL_SHRINK | unix.F_SEAL_SEAL, unix.EPERM},
		{"may be sealed more", unix.MFD_ALLOW_SEALING, unix.F_SEAL_SHRINK | unix.F_SEAL_GROW, unix.EPERM},
		{"huge pages", unix.MFD_ALLOW_SEALING | unix.MFD_HUGETLB, memfdSeals, unix.EINVAL},
		{"read only", unix.MFD_ALLOW_SEALING, memfdSeals | unix.F_SEAL_WRITE, unix.EPERM},
	} {
		t.Run(c.name, func(t *testing.T) {
			const size = 2 << 20
			fd, err := unix.MemfdCreate("verbena-test", unix.MFD_CLOEXEC|c.flags)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Ftruncate(fd, size); err != nil {
				t.Fatal(err)
			}
			if c.seals != 0 {
				if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, c.seals); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := MapMemfd(fd, size); !errors.Is(err, c.want) {
				t.Errorf("%v, should be %v", err, c.want)
			}
		})
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	if _, err := MapMemfd(p[0], 4096); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a pipe: %v", err)
	}
	if _, err := OpenEvent(p[1]); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a pipe as an event: %v", err)
	}
}
