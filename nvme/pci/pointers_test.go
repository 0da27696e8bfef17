package pci

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"

	"github.com/verbena-rdma/verbena/nvme"
)

// write makes a write of n bytes from the first block on.
func write(n int) nvme.Command {
	c := nvme.Command{Opcode: nvme.IOWrite, NSID: 1}
	c.SetLBA(0, n/512)
	return c
}

// wrote wants the namespace to begin with bytes.
func (m *machine) wrote(what string, want []byte) {
	m.t.Helper()
	got := make([]byte, len(want))
	if _, err := m.ns.ReadAt(got, 0); err != nil || !bytes.Equal(got, want) {
		m.t.Errorf("%s: %v, or other bytes were written", what, err)
	}
}

func TestPRP(t *testing.T) {
	m := newMachine(t, Config{})
	m.enable()
	m.ioQueue(4)
	rnd := seeded(t)
	for i := range m.at(dataAt, 2<<20) {
		m.mem[dataAt-memBase+i] = byte(rnd.Uint32())
	}
	page := func(i int) uint64 { return dataAt + 4096*uint64(i) }
	bytesOf := func(parts ...[2]uint64) (all []byte) {
		for _, p := range parts {
			all = append(all, m.at(p[0], int(p[1]))...)
		}
		return all
	}
	do := func(what string, n int, prp1, prp2 uint64, want []byte) {
		t.Helper()
		c := write(n)
		c.SetPRP(prp1, prp2)
		m.do(1, c, nvme.StatusSuccess)
		m.wrote(what, want)
	}
	do("one page", 4096, page(3), 0xdead, bytesOf([2]uint64{page(3), 4096}))
	do("part of a page", 1024, page(3)+1028, 0xdead, bytesOf([2]uint64{page(3) + 1028, 1024}))
	do("two pages", 4096, page(3)+2048, page(9), bytesOf([2]uint64{page(3) + 2048, 2048}, [2]uint64{page(9), 2048}))

	// A list, in the middle of a page.
	list := uint64(memBase + 0x40000)
	for i, p := range []int{7, 5, 30} {
		put64(m.at(list+256+8*uint64(i), 8), page(p))
	}
	do("a list", 4*4096-512, page(1)+512, list+256,
		bytesOf([2]uint64{page(1) + 512, 4096 - 512}, [2]uint64{page(7), 4096}, [2]uint64{page(5), 4096}, [2]uint64{page(30), 4096}))

	// Lists of lists: the first has one entry for data, the next as many as a page holds, the last the rest.
	first, second, third := list+4096-16, list+4096, list+3*4096
	put64(m.at(first, 8), page(2))
	put64(m.at(first+8, 8), second)
	want := bytesOf([2]uint64{page(0), 4096}, [2]uint64{page(2), 4096})
	for i := range 255 - 2 + 1 { // 1 MiB in all
		put64(m.at(second+8*uint64(i), 8), page(i+1))
		want = append(want, m.at(page(i+1), 4096)...)
	}
	do("a list that leads to another", 1<<20, page(0), first, want)

	// A list whose last place in the page is for data, since it is the last.
	put64(m.at(first, 8), page(11))
	put64(m.at(first+8, 8), page(12))
	do("a list up to the end of its page", 3*4096, page(10), first,
		bytesOf([2]uint64{page(10), 4096}, [2]uint64{page(11), 4096}, [2]uint64{page(12), 4096}))
	// Only a pointer in the first list.
	put64(m.at(list+4096-8, 8), third)
	put64(m.at(third, 8), page(20))
	put64(m.at(third+8, 8), page(21))
	do("a list that only leads to another", 3*4096, page(10), list+4096-8,
		bytesOf([2]uint64{page(10), 4096}, [2]uint64{page(20), 4096}, [2]uint64{page(21), 4096}))

	bad := func(what string, n int, prp1, prp2 uint64, want nvme.Status) {
		t.Helper()
		c := write(n)
		c.SetPRP(prp1, prp2)
		t.Run(what, func(t *testing.T) { m.t = t; m.do(1, c, want) })
	}
	bad("first entry not at 4 bytes", 512, page(0)+2, 0, nvme.StatusPRPOffset|dnr)
	bad("second entry not at a page", 8192, page(0), page(1)+4, nvme.StatusPRPOffset|dnr)
	bad("list not at 8 bytes", 3*4096, page(0), list+4, nvme.StatusPRPOffset|dnr)
	bad("nowhere", 512, 0, 0, nvme.StatusDataTransferError|dnr)
	bad("second entry nowhere", 8192, page(0), 0, nvme.StatusDataTransferError|dnr)
	bad("list nowhere", 3*4096, page(0), 0x8, nvme.StatusDataTransferError|dnr)
	bad("list at the end of addresses", 3*4096, page(0), ^uint64(7), nvme.StatusDataTransferError|dnr)
	bad("the last address", 4096, ^uint64(3), 0, nvme.StatusDataTransferError|dnr)
	bad("behind the memory", 8192, memBase+memSize-4096, memBase+memSize, nvme.StatusDataTransferError|dnr)
	put64(m.at(list, 8), page(1))
	put64(m.at(list+8, 8), page(1)+512)
	bad("an entry of a list not at a page", 3*4096, page(0), list, nvme.StatusPRPOffset|dnr)
	put64(m.at(list+4096-8, 8), list+4096-8)
	bad("a list that leads to itself", 3*4096, page(0), list+4096-8, nvme.StatusPRPOffset|dnr)
	for i := range 512 {
		put64(m.at(list+8*uint64(i), 8), list)
	}
	c := write(1 << 20)
	c.SetPRP(page(0), list+8)
	m.t = t
	m.do(1, c, nvme.StatusSuccess) // a circle, which has data enough
	c.Flags = 0xc0
	m.do(1, c, nvme.StatusInvalidField|dnr)
}

func sgl(typ nvme.SGLType, addr uint64, n int) nvme.SGL {
	return nvme.SGL{Addr: addr, Length: uint32(n), Type: typ}
}

func (m *machine) putSGLs(addr uint64, list ...nvme.SGL) {
	for i, d := range list {
		d.Put((*[16]byte)(m.at(addr+16*uint64(i), 16)))
	}
}

func TestSGL(t *testing.T) {
	m := newMachine(t, Config{})
	m.enable()
	m.ioQueue(4)
	for i := range m.at(dataAt, 65536) {
		m.mem[dataAt-memBase+i] = byte(i / 7)
	}
	const seg = uint64(memBase + 0x40000)
	do := func(what string, n int, d nvme.SGL, want nvme.Status) {
		t.Helper()
		c := write(n)
		c.SetSGL(d)
		t.Run(what, func(t *testing.T) { m.t = t; m.do(1, c, want) })
	}
	ok := nvme.StatusSuccess
	do("a block", 4096, sgl(nvme.SGLData, dataAt+3, 4096), ok)
	m.wrote("a block", m.at(dataAt+3, 4096))
	m.putSGLs(seg, sgl(nvme.SGLData, dataAt+1, 1), sgl(nvme.SGLData, 0, 0), sgl(nvme.SGLData, dataAt+5000, 1023))
	do("a last segment", 1024, sgl(nvme.SGLLastSegment, seg, 48), ok)
	m.wrote("a last segment", slices.Concat(m.at(dataAt+1, 1), m.at(dataAt+5000, 1023)))
	m.putSGLs(seg+1008, sgl(nvme.SGLData, dataAt, 512), sgl(nvme.SGLSegment, seg+2000, 32))
	m.putSGLs(seg+2000, sgl(nvme.SGLData, dataAt+100, 500), sgl(nvme.SGLLastSegment, seg+3000, 16))
	m.putSGLs(seg+3000, sgl(nvme.SGLData, dataAt+300, 12))
	do("segments", 1024, sgl(nvme.SGLSegment, seg+1008, 32), ok)
	m.wrote("segments", slices.Concat(m.at(dataAt, 512), m.at(dataAt+100, 500), m.at(dataAt+300, 12)))

	do("too short", 1024, sgl(nvme.SGLData, dataAt, 1023), nvme.StatusDataSGLLength|dnr)
	do("too long", 1024, sgl(nvme.SGLData, dataAt, 1025), nvme.StatusDataSGLLength|dnr)
	do("much too long", 1024, sgl(nvme.SGLData, dataAt, 1<<32-1), nvme.StatusDataSGLLength|dnr)
	do("nowhere", 1024, sgl(nvme.SGLData, 5, 1024), nvme.StatusDataTransferError|dnr)
	do("over the end of addresses", 1024, sgl(nvme.SGLData, ^uint64(511), 1024), nvme.StatusDataTransferError|dnr)
	do("bit bucket", 1024, sgl(nvme.SGLBitBucket, 0, 1024), nvme.StatusSGLType|dnr)
	do("keyed", 1024, sgl(nvme.SGLKeyed, dataAt, 1024), nvme.StatusSGLType|dnr)
	do("an offset", 1024, nvme.SGL{Addr: dataAt, Length: 1024, Sub: nvme.SGLOffset}, nvme.StatusSGLType|dnr)
	do("segment with an offset", 1024, nvme.SGL{Addr: seg, Length: 32, Type: nvme.SGLSegment, Sub: 1}, nvme.StatusSGLType|dnr)
	do("segment of 17 bytes", 1024, sgl(nvme.SGLLastSegment, seg, 17), nvme.StatusInvalidSGLSegment|dnr)
	do("empty segment", 1024, sgl(nvme.SGLLastSegment, seg, 0), nvme.StatusInvalidSGLSegment|dnr)
	do("segment nowhere", 1024, sgl(nvme.SGLLastSegment, 16, 16), nvme.StatusDataTransferError|dnr)
	do("a segment that is as long as can be", 1024, sgl(nvme.SGLLastSegment, seg, 0xfffffff0), nvme.StatusInvalidSGLCount|dnr)
	do("a segment that leads nowhere", 1024, sgl(nvme.SGLSegment, seg, 48), nvme.StatusInvalidSGLSegment|dnr)
	m.putSGLs(seg, sgl(nvme.SGLSegment, seg, 32), sgl(nvme.SGLSegment, seg, 32))
	do("a segment in the middle", 1024, sgl(nvme.SGLSegment, seg, 32), nvme.StatusInvalidSGLSegment|dnr)
	do("a segment in the last one", 1024, sgl(nvme.SGLLastSegment, seg, 32), nvme.StatusInvalidSGLSegment|dnr)
	m.putSGLs(seg, sgl(nvme.SGLData, dataAt, 0), sgl(nvme.SGLSegment, seg, 32))
	do("a circle", 1024, sgl(nvme.SGLSegment, seg, 32), nvme.StatusInvalidSGLCount|dnr)
	m.t = t
	c := nvme.Command{Opcode: nvme.AdminIdentify, CDW10: 1}
	c.SetSGL(sgl(nvme.SGLData, dataAt, 4096))
	m.do(0, c, nvme.StatusInvalidField|dnr)
}

// Data and lists in the CMB, as CMBLOC allows it.
func TestMixedPlaces(t *testing.T) {
	const at = uint64(0x5000000000)
	for _, tt := range []struct {
		what     string
		without  nvme.CMBSZ
		restrict nvme.CMBLOC
		prp1     uint64
		entries  []uint64
		list     uint64
		want     nvme.Status
	}{
		{"all", 0, 0, at, []uint64{dataAt, at + 4096}, at + 8192, nvme.StatusSuccess},
		{"mixed data", 0, nvme.CMBLOCDataMixed, at, []uint64{dataAt, at + 4096}, at + 8192, nvme.StatusInvalidCMBUse | dnr},
		{"data all in the CMB", 0, nvme.CMBLOCDataMixed, at, []uint64{at, at + 4096}, at + 8192, nvme.StatusSuccess},
		{"no lists", nvme.CMBSZLists, 0, dataAt, []uint64{dataAt, dataAt}, at + 8192, nvme.StatusInvalidCMBUse | dnr},
		{"list elsewhere than the command", 0, nvme.CMBLOCIndependent, dataAt, []uint64{dataAt, dataAt}, at + 8192, nvme.StatusInvalidCMBUse | dnr},
		{"no data of writes", nvme.CMBSZWrite, 0, dataAt, []uint64{at, dataAt}, memBase + 0x40000, nvme.StatusInvalidCMBUse | dnr},
		{"no data of reads", nvme.CMBSZRead, 0, dataAt, []uint64{at, dataAt}, memBase + 0x40000, nvme.StatusSuccess},
	} {
		t.Run(tt.what, func(t *testing.T) {
			buffer := make([]byte, 16384)
			m := newMachine(t, Config{CMB: &CMB{Memory: buffer, Without: tt.without, Restrict: tt.restrict}})
			m.c.Write64(nvme.RegCMBMSC, at|nvme.CMBMSCEnable)
			m.enable()
			m.ioQueue(4)
			b, _ := m.c.bytes(tt.list, 16)
			for i, e := range tt.entries {
				put64(b[8*i:], e)
			}
			c := write(3 * 4096)
			c.SetPRP(tt.prp1, tt.list)
			m.do(1, c, tt.want)
		})
	}
}

func TestSpace(t *testing.T) {
	var s Space
	check(t, s.Add(0x1000, make([]byte, 0x1000)))
	check(t, s.Add(0x3000, make([]byte, 0x1000)))
	check(t, s.Add(0x2000, make([]byte, 0x800)))
	check(t, s.Add(^uint64(0xff), make([]byte, 0x100)))
	for _, bad := range []struct {
		base uint64
		n    int
	}{{0, 0}, {0xfff, 2}, {0x1fff, 1}, {0x2800, 0x801}, {0, 1 << 20}, {^uint64(0xff), 0x101}, {^uint64(0), 1}} {
		if s.Add(bad.base, make([]byte, bad.n)) == nil {
			t.Errorf("%d bytes at %#x", bad.n, bad.base)
		}
	}
	for _, tt := range []struct {
		addr    uint64
		n, want int
	}{{0x1000, 16, 16}, {0x1ff0, 32, 16}, {0xfff, 4, 0}, {0x27ff, 100, 1}, {0x2800, 1, 0}, {^uint64(0), 100, 1}, {0x4000, 1, 0}, {0x1000, -5, 0}} {
		if got := len(s.Bytes(tt.addr, tt.n)); got != tt.want {
			t.Errorf("%d bytes at %#x: %d, should be %d", tt.n, tt.addr, got, tt.want)
		}
	}
	if s.Remove(0x1001) == nil || s.Remove(0x5000) == nil {
		t.Error("removed what is not there")
	}
	check(t, s.Remove(0x2000))
	if s.Bytes(0x2000, 1) != nil {
		t.Error("removed memory is there")
	}
}

// FuzzPRP: whatever pointers and lists say, the pieces are n bytes of the memory, or there is a status.
func FuzzPRP(f *testing.F) {
	entry := func(v ...uint64) (b []byte) {
		for _, e := range v {
			b = binary.LittleEndian.AppendUint64(b, e)
		}
		return b
	}
	f.Add(uint64(memBase), uint64(memBase+4096), uint32(8192), uint8(0), []byte{})
	f.Add(uint64(memBase+4), uint64(memBase+8), uint32(30000), uint8(0), entry(0, memBase, memBase+4096, memBase, memBase))
	f.Add(uint64(memBase), uint64(memBase+4088), uint32(1<<20), uint8(0), entry(memBase))
	f.Add(uint64(memBase), uint64(32)|3<<60|0<<32, uint32(512), uint8(0x40), entry(memBase, 512, memBase, 16|3<<60))
	f.Add(^uint64(3), ^uint64(7), uint32(65536), uint8(0), []byte{})
	f.Fuzz(func(t *testing.T, prp1, prp2 uint64, n uint32, flags uint8, memory []byte) {
		n = n%(1<<20) + 1
		host, own := make([]byte, 64<<10), make([]byte, 8192)
		copy(host, memory)
		copy(own, memory)
		var s Space
		check(t, s.Add(memBase, host[:32<<10]))
		check(t, s.Add(memBase+32<<10, host[32<<10:]))
		check(t, s.Add(^uint64(4095), own[:4096]))
		c := &Controller{cfg: Config{Bus: &s}}
		c.cmb = must(newCMB(CMB{Memory: own}))(t)
		c.window.Store(&window{memBase + 64<<10, own})
		m := mapper{c: c, page: 4096, queue: elsewhere}
		cmd := nvme.Command{Flags: flags &^ 3}
		put64(cmd.DPTR[:], prp1)
		put64(cmd.DPTR[8:], prp2)
		pieces, st := m.mapData(flags&1 != 0, &cmd, int(n), nvme.FromHost)
		if st != nvme.StatusSuccess {
			return
		}
		total := 0
		for _, p := range pieces {
			total += len(p)
			if len(p) == 0 || cap(p) != len(p) {
				t.Fatalf("a piece of %d bytes with room for %d", len(p), cap(p))
			}
		}
		if total != int(n) {
			t.Fatalf("%d bytes, should be %d", total, n)
		}
	})
}

// FuzzRegisters: whatever a driver writes to registers, doorbells and memory, nothing panics, no goroutine is left, and
// the controller can be reset and works.
func FuzzRegisters(f *testing.F) {
	step := func(b []byte, off uint16, v uint32) []byte {
		b = binary.LittleEndian.AppendUint16(b, off)
		return binary.LittleEndian.AppendUint32(b, v)
	}
	up := step(nil, uint16(nvme.RegAQA), 3|3<<16)
	up = step(up, uint16(nvme.RegASQ), asqAddr)
	up = step(up, uint16(nvme.RegACQ), acqAddr)
	up = step(up, uint16(nvme.RegCC), uint32(nvme.MakeCC(12)))
	f.Add([]byte{}, []byte{})
	f.Add(up, []byte{})
	id := nvme.Command{Opcode: nvme.AdminIdentify, CDW10: 1}
	id.SetPRP(dataAt, 0)
	var queue []byte
	for _, c := range []nvme.Command{id, createCQ(1, 4, ioCQ), createSQ(1, 4, ioSQ)} {
		var b [64]byte
		c.Put(&b)
		queue = append(queue, b[:]...)
	}
	f.Add(step(step(up, 0x1000, 3), 0x1004, 1), queue)
	f.Add(step(step(step(up, 0x1000, 1), 0x1000, 1), uint16(nvme.RegCC), 0), queue)
	f.Add(step(step(up, uint16(nvme.RegNSSR), nvme.NSSRMagic), uint16(nvme.RegCMBMSC), memBase|3), queue)
	f.Add(step(step(step(up, 0x1000, 3), 0x1008, 2), uint16(nvme.RegCC), 1<<14), queue)
	f.Fuzz(func(t *testing.T, steps, memory []byte) {
		m := newMachine(t, Config{IOQueues: 2, QueueEntries: 16, CMB: &CMB{Memory: make([]byte, 65536)}})
		copy(m.mem, memory)
		for len(steps) >= 6 {
			off, v := uint32(binary.LittleEndian.Uint16(steps)), binary.LittleEndian.Uint32(steps[2:])
			m.c.Write32(off, v)
			m.c.Read32(off)
			steps = steps[6:]
		}
		m.c.Write32(nvme.RegCMBMSC, 0)
		m.c.Write32(nvme.RegCMBMSC+4, 0)
		m.c.Write32(nvme.RegCC, 0)
		m.wait(nvme.CSTSReady|nvme.CSTSFatal, 0)
		m.enable()
		m.do(0, nvme.Command{Opcode: nvme.AdminAbort}, nvme.StatusSuccess)
		m.c.Close()
	})
}
