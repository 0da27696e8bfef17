package nvme

// What NVMe over Fabrics adds to commands (NVMe over Fabrics 1.1, 3). The transport executes these: they are about
// its queues, and about the registers that a controller without a PCI function has.

import (
	"bytes"
	"strings"
)

// FabricsType is the type of a command with OpcodeFabrics.
type FabricsType uint8

// Types of fabrics commands.
const (
	FabricsPropertySet FabricsType = 0x00
	FabricsConnect     FabricsType = 0x01
	FabricsPropertyGet FabricsType = 0x04
	FabricsAuthSend    FabricsType = 0x05
	FabricsAuthReceive FabricsType = 0x06
	FabricsDisconnect  FabricsType = 0x08
)

// DiscoveryNQN is the name of every discovery subsystem.
const DiscoveryNQN = "nqn.2014-08.org.nvmexpress.discovery"

// MaxNQN is the most bytes that a qualified name has.
const MaxNQN = 223

// CNTLIDDynamic in connect data asks for any controller.
const CNTLIDDynamic uint16 = 0xffff

// FabricsType returns the type of a fabrics command.
func (c *Command) FabricsType() FabricsType { return FabricsType(c.NSID) }

// Connect is the part of a connect command that lies in the submission queue entry.
type Connect struct {
	RecordFormat uint16
	QID          uint16 // 0: the admin queue
	SQSize       uint16 // less one
	Attributes   uint8
	KATO         uint32 // keep-alive timeout in milliseconds; 0: none
}

// ConnectParameters returns those of a connect command.
func (c *Command) ConnectParameters() Connect {
	return Connect{RecordFormat: uint16(c.CDW10), QID: uint16(c.CDW10 >> 16),
		SQSize: uint16(c.CDW11), Attributes: uint8(c.CDW11 >> 16), KATO: c.CDW12}
}

// ConnectCommand makes the command, without its data pointer.
func ConnectCommand(p Connect) Command {
	return Command{Opcode: OpcodeFabrics, NSID: uint32(FabricsConnect),
		CDW10: uint32(p.RecordFormat) | uint32(p.QID)<<16,
		CDW11: uint32(p.SQSize) | uint32(p.Attributes)<<16, CDW12: p.KATO}
}

// ConnectDataSize is the length of a connect command's data.
const ConnectDataSize = 1024

// ConnectData is the data of a connect command.
type ConnectData struct {
	HostID          [16]byte
	CNTLID          uint16 // CNTLIDDynamic for a new controller
	SubNQN, HostNQN string
}

// Where the fields of a connect command and of its data lie, for ConnectResult.
const (
	ConnectQIDOffset     = 42
	ConnectSQSizeOffset  = 44
	ConnectKATOOffset    = 48
	ConnectHostIDOffset  = 0
	ConnectCNTLIDOffset  = 16
	ConnectSubNQNOffset  = 256
	ConnectHostNQNOffset = 512
)

// ConnectResult is the result of a connect command that ends in StatusConnectInvalidParameter: which field was wrong.
func ConnectResult(inData bool, offset uint16) uint64 {
	if inData {
		return 1<<16 | uint64(offset)
	}
	return uint64(offset)
}

// ParseConnectData reads connect data. A name ends at its first zero byte; ok is false if there is none, if a name is
// empty or longer than MaxNQN, and offset says which it was.
func ParseConnectData(b *[ConnectDataSize]byte) (d ConnectData, offset uint16, ok bool) {
	d.HostID = [16]byte(b[:16])
	d.CNTLID = le.Uint16(b[ConnectCNTLIDOffset:])
	if d.SubNQN, ok = parseNQN(b[ConnectSubNQNOffset:ConnectHostNQNOffset]); !ok {
		return d, ConnectSubNQNOffset, false
	}
	if d.HostNQN, ok = parseNQN(b[ConnectHostNQNOffset : ConnectHostNQNOffset+256]); !ok {
		return d, ConnectHostNQNOffset, false
	}
	return d, 0, true
}

// Put writes connect data. Of names it writes MaxNQN bytes at most.
func (d *ConnectData) Put(b *[ConnectDataSize]byte) {
	clear(b[:])
	copy(b[:16], d.HostID[:])
	le.PutUint16(b[ConnectCNTLIDOffset:], d.CNTLID)
	copy(b[ConnectSubNQNOffset:][:MaxNQN], d.SubNQN)
	copy(b[ConnectHostNQNOffset:][:MaxNQN], d.HostNQN)
}

func parseNQN(b []byte) (string, bool) {
	end := bytes.IndexByte(b, 0)
	if end <= 0 || end > MaxNQN {
		return "", false
	}
	return string(b[:end]), true
}

// validNQN reports whether a subsystem may have the name.
func validNQN(s string) bool {
	return s != "" && len(s) <= MaxNQN && strings.HasPrefix(s, "nqn.") && !strings.ContainsRune(s, 0)
}

// Property is what a property get or set command names.
type Property struct {
	Offset uint32
	Wide   bool   // 8 bytes, not 4
	Value  uint64 // of a set
}

// Property returns that of a property get or set command.
func (c *Command) Property() Property {
	return Property{Offset: c.CDW11, Wide: c.CDW10&7 == 1, Value: uint64(c.CDW12) | uint64(c.CDW13)<<32}
}

// PropertyCommand makes a property get or set command.
func PropertyCommand(t FabricsType, p Property) Command {
	c := Command{Opcode: OpcodeFabrics, NSID: uint32(t), CDW11: p.Offset, CDW12: uint32(p.Value), CDW13: uint32(p.Value >> 32)}
	if p.Wide {
		c.CDW10 = 1
	}
	return c
}
