package nvme

// Commands and completions as they lie in queues and capsules: little-endian, 64 and 16 bytes
// (NVMe Base 1.4, 4.2 and 4.6).

import (
	"encoding/binary"
	"fmt"
)

var le = binary.LittleEndian

// Opcodes of admin commands.
const (
	AdminDeleteSQ           uint8 = 0x00
	AdminCreateSQ           uint8 = 0x01
	AdminGetLogPage         uint8 = 0x02
	AdminDeleteCQ           uint8 = 0x04
	AdminCreateCQ           uint8 = 0x05
	AdminIdentify           uint8 = 0x06
	AdminAbort              uint8 = 0x08
	AdminSetFeatures        uint8 = 0x09
	AdminGetFeatures        uint8 = 0x0a
	AdminAsyncEventRequest  uint8 = 0x0c
	AdminKeepAlive          uint8 = 0x18
	OpcodeFabrics           uint8 = 0x7f // of both kinds of queue; the transport executes it
	numOpcodes                    = 256
	maxAbortableCommandsACL       = 3 // zero-based
)

// Opcodes of I/O commands.
const (
	IOFlush             uint8 = 0x00
	IOWrite             uint8 = 0x01
	IORead              uint8 = 0x02
	IOCompare           uint8 = 0x05
	IOWriteZeroes       uint8 = 0x08
	IODatasetManagement uint8 = 0x09
)

// Bits of Command.Flags.
const (
	FlagFuseMask   uint8 = 0x03 // fused operations
	FlagPSDTMask   uint8 = 0xc0 // how DPTR is to be read
	FlagPRP        uint8 = 0x00
	FlagSGL        uint8 = 0x40 // SGL; the metadata pointer is an address
	FlagSGLMetaSGL uint8 = 0x80 // SGL; the metadata pointer is an SGL
)

// Bits of CDW12 of reads, writes and write zeroes, and of CDW11 of dataset management.
const (
	CDW12FUA        uint32 = 1 << 30 // the data is on stable storage before the command completes
	CDW12Deallocate uint32 = 1 << 25 // of write zeroes
	CDW11Deallocate uint32 = 1 << 2  // of dataset management
)

// NSIDAll names all namespaces.
const NSIDAll uint32 = 0xffffffff

// Command is a submission queue entry.
type Command struct {
	Opcode, Flags uint8
	CID           uint16 // chosen by the host, returned in the completion
	NSID          uint32
	CDW2, CDW3    uint32
	MPTR          uint64
	DPTR          [16]byte // two PRP entries, or an SGL descriptor

	CDW10, CDW11, CDW12, CDW13, CDW14, CDW15 uint32
}

// ParseCommand reads a submission queue entry. Every one can be read.
func ParseCommand(b *[64]byte) Command {
	return Command{
		Opcode: b[0], Flags: b[1], CID: le.Uint16(b[2:]),
		NSID: le.Uint32(b[4:]),
		CDW2: le.Uint32(b[8:]), CDW3: le.Uint32(b[12:]),
		MPTR: le.Uint64(b[16:]),
		DPTR: [16]byte(b[24:40]),

		CDW10: le.Uint32(b[40:]), CDW11: le.Uint32(b[44:]), CDW12: le.Uint32(b[48:]),
		CDW13: le.Uint32(b[52:]), CDW14: le.Uint32(b[56:]), CDW15: le.Uint32(b[60:]),
	}
}

// Put writes a submission queue entry.
func (c *Command) Put(b *[64]byte) {
	b[0], b[1] = c.Opcode, c.Flags
	le.PutUint16(b[2:], c.CID)
	le.PutUint32(b[4:], c.NSID)
	le.PutUint32(b[8:], c.CDW2)
	le.PutUint32(b[12:], c.CDW3)
	le.PutUint64(b[16:], c.MPTR)
	copy(b[24:40], c.DPTR[:])
	le.PutUint32(b[40:], c.CDW10)
	le.PutUint32(b[44:], c.CDW11)
	le.PutUint32(b[48:], c.CDW12)
	le.PutUint32(b[52:], c.CDW13)
	le.PutUint32(b[56:], c.CDW14)
	le.PutUint32(b[60:], c.CDW15)
}

// PRP returns the two PRP entries of the data pointer.
func (c *Command) PRP() (prp1, prp2 uint64) {
	return le.Uint64(c.DPTR[:]), le.Uint64(c.DPTR[8:])
}

// SetPRP makes the data pointer two PRP entries.
func (c *Command) SetPRP(prp1, prp2 uint64) {
	c.Flags &^= FlagPSDTMask
	le.PutUint64(c.DPTR[:], prp1)
	le.PutUint64(c.DPTR[8:], prp2)
}

// SGL returns the SGL descriptor of the data pointer.
func (c *Command) SGL() SGL { return ParseSGL(&c.DPTR) }

// SetSGL makes the data pointer an SGL descriptor.
func (c *Command) SetSGL(s SGL) {
	c.Flags = c.Flags&^FlagPSDTMask | FlagSGL
	s.Put(&c.DPTR)
}

// SLBA returns the first logical block of an I/O command.
func (c *Command) SLBA() uint64 { return uint64(c.CDW10) | uint64(c.CDW11)<<32 }

// SetLBA sets the blocks of a read, write, compare or write zeroes: 1 to 65536 of them.
func (c *Command) SetLBA(lba uint64, blocks int) {
	c.CDW10, c.CDW11 = uint32(lba), uint32(lba>>32)
	c.CDW12 = c.CDW12&^0xffff | uint32(blocks-1)&0xffff
}

// blocks returns the number of logical blocks, which the command has less one.
func (c *Command) blocks() uint64 { return uint64(c.CDW12&0xffff) + 1 }

// Completion is a completion queue entry.
type Completion struct {
	Result       uint64 // what the command returns besides data: dwords 0 and 1
	SQHead, SQID uint16 // the transport's
	CID          uint16
	Phase        bool // changes with each round of a completion queue; not used in capsules
	Status       Status
}

// ParseCompletion reads a completion queue entry. Every one can be read.
func ParseCompletion(b *[16]byte) Completion {
	last := le.Uint16(b[14:])
	return Completion{
		Result: le.Uint64(b[:]),
		SQHead: le.Uint16(b[8:]), SQID: le.Uint16(b[10:]), CID: le.Uint16(b[12:]),
		Phase: last&1 != 0, Status: Status(last >> 1),
	}
}

// Put writes a completion queue entry.
func (c *Completion) Put(b *[16]byte) {
	le.PutUint64(b[:], c.Result)
	le.PutUint32(b[8:], uint32(c.SQHead)|uint32(c.SQID)<<16)
	le.PutUint32(b[12:], c.last())
}

// last returns dword 3, whose phase bit makes an entry of a completion queue valid.
func (c *Completion) last() uint32 {
	v := uint32(c.CID) | uint32(c.Status)<<17
	if c.Phase {
		v |= 1 << 16
	}
	return v
}

// SGL is an SGL descriptor (NVMe Base 1.4, 4.4). Keyed descriptors, of NVMe over RDMA, have 24 bits of length.
type SGL struct {
	Addr   uint64
	Length uint32
	Key    uint32 // of a keyed descriptor
	Type   SGLType
	Sub    uint8 // 0: an address; 1: an offset into the capsule; 0xf of keyed ones: invalidate the key
}

// SGLType is the type of an SGL descriptor.
type SGLType uint8

// Types of SGL descriptors.
const (
	SGLData        SGLType = 0x0
	SGLBitBucket   SGLType = 0x1
	SGLSegment     SGLType = 0x2
	SGLLastSegment SGLType = 0x3
	SGLKeyed       SGLType = 0x4
	SGLTransport   SGLType = 0x5
)

// Sub-types of SGL descriptors.
const (
	SGLAddress    uint8 = 0x0
	SGLOffset     uint8 = 0x1
	SGLInvalidate uint8 = 0xf
)

// MaxKeyedLength is the most bytes that a keyed descriptor can name.
const MaxKeyedLength = 1<<24 - 1

// ParseSGL reads a descriptor. Every one can be read; whether it makes sense is its user's to check.
func ParseSGL(b *[16]byte) SGL {
	s := SGL{Addr: le.Uint64(b[:]), Type: SGLType(b[15] >> 4), Sub: b[15] & 0xf}
	if s.Type == SGLKeyed {
		s.Length = uint32(b[8]) | uint32(b[9])<<8 | uint32(b[10])<<16
		s.Key = le.Uint32(b[11:])
	} else {
		s.Length = le.Uint32(b[8:])
	}
	return s
}

// Put writes a descriptor. Of the length of a keyed one it writes 24 bits.
func (s *SGL) Put(b *[16]byte) {
	clear(b[:])
	le.PutUint64(b[:], s.Addr)
	le.PutUint32(b[8:], s.Length)
	if s.Type == SGLKeyed {
		le.PutUint32(b[11:], s.Key) // over the fourth byte of the length
	}
	b[15] = byte(s.Type)<<4 | s.Sub&0xf
}

// CommandName returns the name of an opcode.
func CommandName(admin bool, opcode uint8) string {
	if opcode == OpcodeFabrics {
		return "fabrics"
	}
	if name := tableOf(admin)[opcode].name; name != "" {
		return name
	}
	if admin {
		return fmt.Sprintf("admin command %#02x", opcode)
	}
	return fmt.Sprintf("I/O command %#02x", opcode)
}
