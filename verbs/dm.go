package verbs

import (
	"os"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// DM is device memory: a buffer that belongs to the device and has no address in
// the program. It is zero-based: its bytes are named by their offsets. The program
// reaches it by [DM.WriteAt] and [DM.ReadAt], queue pairs and peers by the regions
// that [PD.RegDMMR] makes on it. See ibv_alloc_dm(3).
//
// All processes that share a device share its device memory (MaxDMSize in
// [DeviceAttr]), but no process sees another's buffers. A new buffer is zero. The
// buffers of a process that has ended are free again.
type DM struct {
	p provider.DM
}

func (dm *DM) ok() bool { return dm != nil && dm.p != nil }

// DMConfig describes the buffer that [Device.AllocDMWith] allocates.
type DMConfig struct {
	// Length is the number of bytes, at least 1.
	Length uint64

	// LogAlign is the alignment of the buffer's place in the device's memory, as a
	// power of two. Zero: any place.
	LogAlign int

	// Class is what the program may do with the memory. Zero (DMPlain): copy.
	Class DMClass

	// Export allows [DM.Export]. Such a buffer has a file of its own, in whole pages,
	// and begins at offset 0 of it, which suits any LogAlign.
	Export bool
}

// AllocDM allocates a buffer of device memory, of any length and with an alignment of
// 1<<logAlign. See ibv_alloc_dm(3).
//
// Errors: those of [Device.AllocDMWith].
func (d *Device) AllocDM(length uint64, logAlign int) (*DM, error) {
	return d.AllocDMWith(DMConfig{Length: length, LogAlign: logAlign})
}

// AllocDMWith allocates a buffer of device memory.
//
// Errors: EINVAL for a length of 0, an alignment that is negative or above 2^62, or an
// unknown class; ENOMEM if the device does not have that much left, or not in one
// piece; ENODEV if the device is closed; EINVAL for a nil device.
func (d *Device) AllocDMWith(cfg DMConfig) (*DM, error) {
	if !d.ok() {
		return nil, invalid("alloc_dm", "nil device")
	}
	p, err := d.p.AllocDM(provider.DMConfig{Length: cfg.Length, LogAlign: cfg.LogAlign, Class: cfg.Class, Export: cfg.Export})
	if err != nil {
		return nil, err
	}
	return &DM{p}, nil
}

// Length returns the number of bytes.
func (dm *DM) Length() uint64 { return dm.p.Length() }

// Class returns the class of memory.
func (dm *DM) Class() DMClass { return dm.p.Class() }

// WriteAt copies b to the buffer, from an offset on: all of it or, if it does not
// fit, nothing. It makes DM an io.WriterAt. See ibv_memcpy_to_dm(3).
//
// Errors: EFAULT if the range is not inside the buffer, or b is not mapped; EINVAL
// for a negative offset, and for a buffer that is nil or freed.
func (dm *DM) WriteAt(b []byte, off int64) (int, error) {
	if !dm.ok() {
		return 0, invalid("memcpy_to_dm", "nil device memory")
	}
	return dm.p.WriteAt(b, off)
}

// ReadAt copies the buffer's bytes from an offset on to b: all of b or, if there
// are fewer, nothing. It makes DM an io.ReaderAt. See ibv_memcpy_from_dm(3).
//
// Errors: those of WriteAt.
func (dm *DM) ReadAt(b []byte, off int64) (int, error) {
	if !dm.ok() {
		return 0, invalid("memcpy_from_dm", "nil device memory")
	}
	return dm.p.ReadAt(b, off)
}

// Bytes returns the buffer itself. The program may access it while the device does:
// the program's atomic instructions and the device's atomics are atomic towards each
// other. The slice must not be used after [DM.Close].
//
// Errors: EOPNOTSUPP if the memory is not of the class [DMCoherent]; EINVAL for a
// buffer that is nil or freed.
func (dm *DM) Bytes() ([]byte, error) {
	if !dm.ok() {
		return nil, invalid("map_dm", "nil device memory")
	}
	return dm.p.Bytes()
}

// Export returns an open file that shows the buffer from offset off on, for another
// device or process. A process that maps the file shared sees what the device sees,
// and the device sees what that process writes. The file shows no other buffer. It is
// the caller's to close, and outlives the buffer; its length cannot be changed.
//
// Errors: EOPNOTSUPP if the memory was not allocated with Export; EMFILE if there
// is no descriptor left; EINVAL for a buffer that is nil or freed.
func (dm *DM) Export() (f *os.File, off int64, err error) {
	if !dm.ok() {
		return nil, 0, invalid("export_dm", "nil device memory")
	}
	return dm.p.Export()
}

// DMABuf returns a dma-buf of the buffer, with a reference that is the caller's to give back
// ([dmabuf.Buffer.Put]). Other devices can register it ([PD.RegDMABufMR]), but not hold it in
// place. When the device memory is closed, the dma-buf is revoked. See
// ibv_dm_export_dmabuf_fd(3).
//
// Errors: EINVAL for a buffer that is nil or freed; EOPNOTSUPP if the device cannot do it.
func (dm *DM) DMABuf() (*dmabuf.Buffer, error) {
	if !dm.ok() {
		return nil, invalid("export_dm", "nil device memory")
	}
	return importer.ExportDM(dm.p)
}

// Close frees the buffer. It is idempotent. See ibv_free_dm(3).
//
// Errors: EBUSY while regions are registered on it; EINVAL for a nil buffer.
func (dm *DM) Close() error {
	if !dm.ok() {
		return invalid("free_dm", "nil device memory")
	}
	return dm.p.Close()
}

// RegDMMR registers length bytes of device memory from offset off on. One buffer may
// have several regions, which may overlap. The rights must include AccessZeroBased:
// requests name the region's first byte as 0. See ibv_reg_dm_mr(3).
//
// Errors: EINVAL without AccessZeroBased, with AccessOnDemand or
// AccessFlushPersistent, for a range that is not inside the buffer (an empty one may
// be), for a buffer that is nil, freed or of another device, and for a domain that is
// nil or closed; otherwise those of [PD.RegMR].
func (pd *PD) RegDMMR(dm *DM, off, length uint64, access Access) (*MR, error) {
	if !pd.ok() {
		return nil, invalid("reg_dm_mr", "nil protection domain")
	}
	if !dm.ok() {
		return nil, invalid("reg_dm_mr", "nil device memory")
	}
	p, err := pd.p.RegDMMR(dm.p, off, length, access)
	if err != nil {
		return nil, err
	}
	return &MR{p: p}, nil
}
