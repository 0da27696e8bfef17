package pci

// Data pointers: PRP entries and lists (NVMe Base 1.4, 4.3) and SGLs (4.4) become pieces of memory. Each queue has a
// mapper, whose room is used again for each command. Lists lie in memory that the host may change meanwhile, so each
// entry is read once.

import (
	"encoding/binary"

	"github.com/verbena-rdma/verbena/nvme"
)

// place is a set of where memory of one kind lies.
type place uint8

const (
	elsewhere place = 1 << iota // on the bus
	ownCMB
)

// mapper finds the memory of a command.
type mapper struct {
	c      *Controller
	page   uint64 // the host's page size
	use    nvme.CMBSZ
	pieces [][]byte
	data   place // of the data so far
	own    int   // bytes of data in the CMB so far
	lists  place // of PRP lists and SGL segments so far
	queue  place // of the command itself
}

const (
	descriptorSize = 16
	maxDescriptors = 4096 // of one command, so that a circle of segments ends
)

// bytes returns the memory at an address, as far as it lies in one piece, and whether that is the controller's own.
func (c *Controller) bytes(addr uint64, n int) ([]byte, place) {
	if b := c.window.Load().find(addr, n); b != nil {
		return b, ownCMB
	}
	return c.cfg.Bus.Bytes(addr, n), elsewhere
}

// whole returns n bytes in one piece, or nil.
func (c *Controller) whole(addr uint64, n int) ([]byte, place) {
	b, at := c.bytes(addr, n)
	if len(b) < n {
		return nil, at
	}
	return b[:n], at
}

// mapData finds n bytes of a command's data.
func (m *mapper) mapData(admin bool, cmd *nvme.Command, n int, dir nvme.Direction) ([][]byte, nvme.Status) {
	m.pieces, m.data, m.lists, m.own = m.pieces[:0], 0, 0, 0
	m.use = nvme.CMBSZRead
	if dir == nvme.FromHost {
		m.use = nvme.CMBSZWrite
	}
	var st nvme.Status
	switch cmd.Flags & nvme.FlagPSDTMask {
	case nvme.FlagPRP:
		st = m.prp(cmd, n)
	case nvme.FlagSGL, nvme.FlagSGLMetaSGL:
		if admin { // NVMe Base 1.4, 4.2: admin commands use PRPs
			return nil, nvme.StatusInvalidField | nvme.StatusDNR
		}
		st = m.sgl(cmd.SGL(), n)
	default:
		st = nvme.StatusInvalidField | nvme.StatusDNR
	}
	if st == nvme.StatusSuccess {
		st = m.checkMix()
	}
	if st == nvme.StatusSuccess {
		m.c.cmbBytes.Add(uint64(m.own))
		m.c.busBytes.Add(uint64(n - m.own))
	}
	return m.pieces, st
}

// checkMix applies the limits of CMBLOC.
func (m *mapper) checkMix() nvme.Status {
	both := elsewhere | ownCMB
	switch cmb := m.c.cmb; {
	case m.data == both && !cmb.mayMix(nvme.CMBLOCDataMixed),
		m.lists == both && !cmb.mayMix(nvme.CMBLOCListsMixed),
		m.lists != 0 && m.lists != m.queue && !cmb.mayMix(nvme.CMBLOCIndependent):
		return nvme.StatusInvalidCMBUse | nvme.StatusDNR
	}
	return nvme.StatusSuccess
}

// add adds n bytes of data at an address.
func (m *mapper) add(addr uint64, n int) nvme.Status {
	for n > 0 {
		b, at := m.c.bytes(addr, n)
		if len(b) == 0 {
			return nvme.StatusDataTransferError | nvme.StatusDNR
		}
		if at == ownCMB && !m.c.cmb.allows(m.use) {
			return nvme.StatusInvalidCMBUse | nvme.StatusDNR
		}
		b = b[:min(len(b), n)]
		m.data |= at
		if at == ownCMB {
			m.own += len(b)
		}
		m.pieces = append(m.pieces, b)
		n -= len(b)
		if n > 0 && uint64(len(b)) > ^addr { // addresses end here
			return nvme.StatusDataTransferError | nvme.StatusDNR
		}
		addr += uint64(len(b))
	}
	return nvme.StatusSuccess
}

// list returns n bytes of a PRP list or SGL segment.
func (m *mapper) list(addr uint64, n int) ([]byte, nvme.Status) {
	b, at := m.c.whole(addr, n)
	switch {
	case b == nil:
		return nil, nvme.StatusDataTransferError | nvme.StatusDNR
	case at == ownCMB && !m.c.cmb.allows(nvme.CMBSZLists):
		return nil, nvme.StatusInvalidCMBUse | nvme.StatusDNR
	}
	m.lists |= at
	return b, nvme.StatusSuccess
}

// prp follows the two PRP entries of a command.
func (m *mapper) prp(cmd *nvme.Command, n int) nvme.Status {
	prp1, prp2 := cmd.PRP()
	if prp1%4 != 0 {
		return nvme.StatusPRPOffset | nvme.StatusDNR
	}
	first := min(n, int(m.page-prp1%m.page))
	if st := m.add(prp1, first); st != nvme.StatusSuccess {
		return st
	}
	switch n -= first; {
	case n == 0:
		return nvme.StatusSuccess
	case n <= int(m.page):
		return m.prpEntry(prp2, n)
	}
	if prp2%8 != 0 {
		return nvme.StatusPRPOffset | nvme.StatusDNR
	}
	return m.prpList(prp2, n)
}

// prpEntry adds the data of an entry other than the first: it begins at a page.
func (m *mapper) prpEntry(prp uint64, n int) nvme.Status {
	if prp%m.page != 0 {
		return nvme.StatusPRPOffset | nvme.StatusDNR
	}
	return m.add(prp, n)
}

// prpList follows a list of entries. If the rest of its page does not hold all, its last entry is the next list, which
// begins at a page: so each list but the first has entries for data, and a circle ends.
func (m *mapper) prpList(addr uint64, n int) nvme.Status {
	for {
		need := (uint64(n) + m.page - 1) / m.page
		room := (m.page - addr%m.page) / 8
		b, st := m.list(addr, int(8*min(need, room)))
		if st != nvme.StatusSuccess {
			return st
		}
		more := need > room
		for len(b) > 0 && (!more || len(b) > 8) {
			part := min(n, int(m.page))
			if st := m.prpEntry(binary.LittleEndian.Uint64(b), part); st != nvme.StatusSuccess {
				return st
			}
			b, n = b[8:], n-part
		}
		if !more {
			return nvme.StatusSuccess
		}
		if addr = binary.LittleEndian.Uint64(b); addr%m.page != 0 {
			return nvme.StatusPRPOffset | nvme.StatusDNR
		}
	}
}

// sgl follows the SGL of a command: one data block, or segments of descriptors. Only the last descriptor of a segment
// leads to another one, and no descriptor of a last segment does.
func (m *mapper) sgl(d nvme.SGL, n int) nvme.Status {
	switch d.Type {
	case nvme.SGLData:
		if st := m.sglData(d, &n); st != nvme.StatusSuccess {
			return st
		}
	case nvme.SGLSegment, nvme.SGLLastSegment:
		if st := m.segments(d, &n); st != nvme.StatusSuccess {
			return st
		}
	default:
		return nvme.StatusSGLType | nvme.StatusDNR
	}
	if n != 0 {
		return nvme.StatusDataSGLLength | nvme.StatusDNR
	}
	return nvme.StatusSuccess
}

// segments follows a segment and those that it leads to. n is how many bytes are still missing.
func (m *mapper) segments(d nvme.SGL, n *int) nvme.Status {
	for seen := 0; ; {
		if d.Sub != nvme.SGLAddress {
			return nvme.StatusSGLType | nvme.StatusDNR
		}
		count := int(d.Length / descriptorSize)
		if d.Length%descriptorSize != 0 || count == 0 {
			return nvme.StatusInvalidSGLSegment | nvme.StatusDNR
		}
		if seen += count; seen > maxDescriptors {
			return nvme.StatusInvalidSGLCount | nvme.StatusDNR
		}
		b, st := m.list(d.Addr, int(d.Length))
		if st != nvme.StatusSuccess {
			return st
		}
		last := d.Type == nvme.SGLLastSegment
		var next nvme.SGL
		for i := range count {
			e := nvme.ParseSGL((*[16]byte)(b[descriptorSize*i:]))
			leads := e.Type == nvme.SGLSegment || e.Type == nvme.SGLLastSegment
			switch {
			case leads && !last && i == count-1:
				next = e
			case leads:
				return nvme.StatusInvalidSGLSegment | nvme.StatusDNR
			case !last && i == count-1: // a segment that is not the last leads on
				return nvme.StatusInvalidSGLSegment | nvme.StatusDNR
			default:
				if st := m.sglData(e, n); st != nvme.StatusSuccess {
					return st
				}
			}
		}
		if last {
			return nvme.StatusSuccess
		}
		d = next
	}
}

// sglData adds a data block, which may be empty.
func (m *mapper) sglData(d nvme.SGL, n *int) nvme.Status {
	switch {
	case d.Type != nvme.SGLData || d.Sub != nvme.SGLAddress:
		return nvme.StatusSGLType | nvme.StatusDNR
	case uint64(d.Length) > uint64(*n): // longer than the data, which SGLS does not allow
		return nvme.StatusDataSGLLength | nvme.StatusDNR
	}
	*n -= int(d.Length)
	return m.add(d.Addr, int(d.Length))
}
