package nvme

// The registers of a controller (NVMe Base 1.4, 3.1), which fabrics call properties.

// Registers is a controller's register space: the first BAR of a real one, or a model of it. Accesses are of the size
// that they say, and are not reordered.
type Registers interface {
	Read32(off uint32) uint32
	Write32(off uint32, v uint32)
	Read64(off uint32) uint64
	Write64(off uint32, v uint64)
}

// Offsets of registers.
const (
	RegCAP    uint32 = 0x00 // 8 bytes: what the controller can do
	RegVS     uint32 = 0x08 // version
	RegINTMS  uint32 = 0x0c // interrupts to mask
	RegINTMC  uint32 = 0x10 // interrupts to unmask
	RegCC     uint32 = 0x14 // configuration
	RegCSTS   uint32 = 0x1c // status
	RegNSSR   uint32 = 0x20 // subsystem reset
	RegAQA    uint32 = 0x24 // sizes of the admin queues
	RegASQ    uint32 = 0x28 // 8 bytes: where the admin submission queue is
	RegACQ    uint32 = 0x30 // 8 bytes: where the admin completion queue is
	RegCMBLOC uint32 = 0x38
	RegCMBSZ  uint32 = 0x3c
	RegCMBMSC uint32 = 0x50 // 8 bytes
	RegCMBSTS uint32 = 0x58

	RegDoorbells uint32 = 0x1000
)

// Versions, as RegVS has them.
const (
	Version14 uint32 = 1<<16 | 4<<8
	Version20 uint32 = 2 << 16
)

// NSSRMagic written to RegNSSR resets the subsystem: "NVMe".
const NSSRMagic uint32 = 0x4e564d65

// CAP is the register of capabilities.
type CAP uint64

// Bits of CAP.
const (
	CAPContiguous     CAP = 1 << 16 // queues must be contiguous
	CAPSubsystemReset CAP = 1 << 36
	CAPNVM            CAP = 1 << 37 // the NVM command set
	CAPNoIOCommands   CAP = 1 << 44
	CAPPMR            CAP = 1 << 56
	CAPCMB            CAP = 1 << 57 // there is a CMB, and RegCMBMSC enables it
)

// MakeCAP makes a value: entries of the longest queue, the time that the controller needs to become ready in units of
// 500 ms, and bits.
func MakeCAP(queueEntries int, timeout uint8, bits CAP) CAP {
	return CAP(uint16(queueEntries-1)) | CAP(timeout)<<24 | bits
}

// MaxEntries returns how many entries the longest queue has.
func (c CAP) MaxEntries() int { return int(c&0xffff) + 1 }

// Timeout returns how long to wait for CSTS.RDY, in units of 500 ms.
func (c CAP) Timeout() uint8 { return uint8(c >> 24) }

// Stride returns the distance of doorbells in bytes.
func (c CAP) Stride() uint32 { return 4 << (c >> 32 & 0xf) }

// MinPage and MaxPage return the limits of the host's page size, as powers of two.
func (c CAP) MinPage() uint { return uint(c>>48&0xf) + 12 }

// MaxPage is MinPage's counterpart.
func (c CAP) MaxPage() uint { return uint(c>>52&0xf) + 12 }

// CC is the register of configuration.
type CC uint32

// Bits of CC.
const (
	CCEnable         CC = 1
	CCShutdownMask   CC = 3 << 14
	CCShutdownNormal CC = 1 << 14
	CCShutdownAbrupt CC = 2 << 14
)

// MakeCC makes a value that enables the NVM command set with entries of 64 and 16 bytes. pageShift is the power of two
// of the host's page size.
func MakeCC(pageShift uint) CC {
	return CCEnable | CC(pageShift-12)<<7 | 6<<16 | 4<<20
}

// PageShift returns the host's page size as a power of two.
func (c CC) PageShift() uint { return uint(c>>7&0xf) + 12 }

// CommandSet returns CC.CSS.
func (c CC) CommandSet() uint8 { return uint8(c >> 4 & 7) }

// Arbitration returns CC.AMS.
func (c CC) Arbitration() uint8 { return uint8(c >> 11 & 7) }

// Shutdown returns CC.SHN, in its place.
func (c CC) Shutdown() CC { return c & CCShutdownMask }

// SQEntry returns the size of I/O submission queue entries as a power of two.
func (c CC) SQEntry() uint8 { return uint8(c >> 16 & 0xf) }

// CQEntry returns the size of I/O completion queue entries as a power of two.
func (c CC) CQEntry() uint8 { return uint8(c >> 20 & 0xf) }

// CSTS is the register of status.
type CSTS uint32

// Bits of CSTS.
const (
	CSTSReady          CSTS = 1
	CSTSFatal          CSTS = 1 << 1
	CSTSShutdownMask   CSTS = 3 << 2
	CSTSShuttingDown   CSTS = 1 << 2
	CSTSShutdownDone   CSTS = 2 << 2
	CSTSSubsystemReset CSTS = 1 << 4
)

// CMBLOC is where the controller memory buffer lies, and what may lie in it.
type CMBLOC uint32

// Bits of CMBLOC: without them the controller refuses the combination.
const (
	CMBLOCQueueMixed  CMBLOC = 1 << 3 // CQMMS: a queue partly in the CMB
	CMBLOCQueuePages  CMBLOC = 1 << 4 // CQPDS: a queue in pages that are not contiguous
	CMBLOCListsMixed  CMBLOC = 1 << 5 // CDPMLS: PRP lists or SGLs of one command partly in the CMB
	CMBLOCIndependent CMBLOC = 1 << 6 // CDPCILS: PRP lists or SGLs elsewhere than the command
	CMBLOCDataMixed   CMBLOC = 1 << 7 // CDMMMS: data of one command partly in the CMB
	CMBLOCDwordData   CMBLOC = 1 << 8 // CQDA: queues aligned to dwords
)

// BAR returns which BAR has the buffer.
func (l CMBLOC) BAR() int { return int(l & 7) }

// Offset returns where in the BAR the buffer begins, in the units of CMBSZ.
func (l CMBLOC) Offset(sz CMBSZ) uint64 { return uint64(l>>12) * sz.Unit() }

// CMBSZ is the size of the controller memory buffer, and what it can be used for.
type CMBSZ uint32

// Bits of CMBSZ.
const (
	CMBSZSQ    CMBSZ = 1 << 0 // submission queues
	CMBSZCQ    CMBSZ = 1 << 1 // completion queues
	CMBSZLists CMBSZ = 1 << 2 // PRP lists and SGL segments
	CMBSZRead  CMBSZ = 1 << 3 // data of reads, to the host
	CMBSZWrite CMBSZ = 1 << 4 // data of writes, from the host

	CMBSZAll = CMBSZSQ | CMBSZCQ | CMBSZLists | CMBSZRead | CMBSZWrite
)

// MakeCMBSZ makes a value for a size in multiples of 4 KiB; ok is false if the register cannot hold it.
func MakeCMBSZ(size uint64, bits CMBSZ) (sz CMBSZ, ok bool) {
	for unit := range uint64(7) {
		bytes := uint64(4096) << (4 * unit)
		if n := size / bytes; size%bytes == 0 && n > 0 && n < 1<<20 {
			return CMBSZ(n)<<12 | CMBSZ(unit)<<8 | bits&CMBSZAll, true
		}
	}
	return 0, false
}

// Unit returns the unit of the size in bytes. Units that are reserved count as the largest.
func (s CMBSZ) Unit() uint64 { return 4096 << (4 * min(uint64(s>>8&0xf), 6)) }

// Size returns the size in bytes.
func (s CMBSZ) Size() uint64 { return uint64(s>>12) * s.Unit() }

// Bits of RegCMBMSC; bits 63:12 are the buffer's address on the bus.
const (
	CMBMSCRegisters uint64 = 1 << 0 // CRE: RegCMBLOC and RegCMBSZ can be read
	CMBMSCEnable    uint64 = 1 << 1 // CMSE: the controller decodes the address
)

// CMBSTSInvalid in RegCMBSTS: the address in RegCMBMSC cannot be used.
const CMBSTSInvalid uint32 = 1
