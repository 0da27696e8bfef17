package sys

// userfaultfd(2), in the one way in which it is used here: in write-protect mode,
// with nothing protected. The kernel then intercepts no access to the memory, and
// reports what happens to the mappings.

import (
	"errors"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// From the kernel's linux/userfaultfd.h.
const (
	userModeOnly = 1 // to userfaultfd(2): no privilege needed

	uffdAPI        = 0xaa
	uffdioAPI      = 0xc018aa3f
	uffdioRegister = 0xc020aa00
	uffdioUnreg    = 0x8010aa01

	registerWP = 1 << 1

	featureFlagWP        = 1 << 0
	featureRemap         = 1 << 2
	featureRemove        = 1 << 3
	featureUnmap         = 1 << 6
	featureWPHugeShmem   = 1 << 12
	featureWPUnpopulated = 1 << 13
	featureWPAsync       = 1 << 15

	eventRemap  = 0x14
	eventRemove = 0x15
	eventUnmap  = 0x16
)

const featuresWanted = featureFlagWP | featureRemap | featureRemove | featureUnmap |
	featureWPHugeShmem | featureWPUnpopulated | featureWPAsync

// The kernel's structs of these calls.
type (
	uffdioAPIArg      struct{ api, features, ioctls uint64 }
	uffdioRegisterArg struct{ start, length, mode, ioctls uint64 }
	uffdioRangeArg    struct{ start, length uint64 }
)

// openUserfault returns a userfaultfd with all features that the notifier needs. The
// error says what is missing and wraps the errno.
func openUserfault() (int, error) {
	fd, errno := userfaultfd()
	switch errno {
	case 0:
	case unix.ENOSYS:
		return -1, fmt.Errorf("the kernel has no userfaultfd, or seccomp hides it: %w", errno)
	case unix.EPERM:
		return -1, fmt.Errorf("seccomp forbids userfaultfd: %w", errno)
	case unix.EINVAL:
		return -1, fmt.Errorf("the kernel's userfaultfd needs privilege (before Linux 5.11): %w", errno)
	default:
		return -1, fmt.Errorf("userfaultfd: %w", errno)
	}
	err := handshake(fd, featuresWanted)
	if err == nil {
		return fd, nil
	}
	_ = unix.Close(fd)
	if errors.Is(err, unix.EINVAL) { // one of the features: which?
		return -1, fmt.Errorf("%s: %w", missingFeatures(), err)
	}
	return -1, fmt.Errorf("userfaultfd refuses its handshake: %w", err)
}

func userfaultfd() (int, unix.Errno) {
	fd, _, errno := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK|userModeOnly, 0, 0)
	return int(fd), errno
}

// handshake asks for features. It must be the first call on a new descriptor, and the
// only one of its kind.
func handshake(fd int, features uint64) error {
	arg := uffdioAPIArg{api: uffdAPI, features: features}
	return errnoOrNil(ioctl(fd, uffdioAPI, unsafe.Pointer(&arg)))
}

// missingFeatures says which feature the kernel lacks. It asks by a descriptor of its
// own.
func missingFeatures() string {
	const old = "the kernel's userfaultfd is too old"
	fd, errno := userfaultfd()
	if errno != 0 {
		return old
	}
	defer func() { _ = unix.Close(fd) }()
	arg := uffdioAPIArg{api: uffdAPI}
	if _, _, e := ioctl(fd, uffdioAPI, unsafe.Pointer(&arg)); e != 0 {
		return old
	}
	for _, f := range []struct {
		bit  uint64
		name string
	}{
		{featureRemap | featureRemove | featureUnmap, "the events (Linux 4.11)"},
		{featureFlagWP, "write protection (Linux 5.7)"},
		{featureWPHugeShmem, "WP_HUGETLBFS_SHMEM (Linux 5.19)"},
		{featureWPUnpopulated, "WP_UNPOPULATED (Linux 6.4)"},
		{featureWPAsync, "WP_ASYNC (Linux 6.7)"},
	} {
		if arg.features&f.bit != f.bit {
			return "the kernel's userfaultfd lacks " + f.name
		}
	}
	return "the kernel's userfaultfd refuses a combination of features"
}

func userfaultRegister(fd int, start, end uintptr) error {
	arg := uffdioRegisterArg{start: uint64(start), length: uint64(end - start), mode: registerWP}
	return errnoOrNil(ioctl(fd, uffdioRegister, unsafe.Pointer(&arg)))
}

func userfaultUnregister(fd int, start, end uintptr) error {
	arg := uffdioRangeArg{start: uint64(start), length: uint64(end - start)}
	return errnoOrNil(ioctl(fd, uffdioUnreg, unsafe.Pointer(&arg)))
}

// ioctl is sound where arg points to the struct that the request is defined with:
// the kernel knows its size from the request's number and uses nothing behind it.
// The pointer becomes a number only in the call, which keeps it alive.
func ioctl(fd int, request uintptr, arg unsafe.Pointer) (r, _ uintptr, errno unix.Errno) {
	return unix.Syscall(unix.SYS_IOCTL, uintptr(fd), request, uintptr(arg))
}
