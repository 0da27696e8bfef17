package drivertest

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/verbena-rdma/verbena/nvme"
	"github.com/verbena-rdma/verbena/nvme/driver"
)

// Outcome is how a command ended.
type Outcome struct {
	Name   string
	Status nvme.Status
}

// probe is a command whose end is looked at.
type probe struct {
	name  string
	admin bool
	make  func(e *env) nvme.Command
}

// env is the memory of probes.
type env struct {
	ns     driver.Namespace
	data   driver.Memory // 1 MiB
	list   driver.Memory // 4 pages for PRP lists and SGL segments
	queue  driver.Memory // for queues that are made
	hole   uint64        // an address where nothing is
	config driver.Info
}

// page returns the address of a page of data.
func (e *env) page(i int) uint64 { return e.data.Addr + 4096*uint64(i) }

// prps writes a PRP list, or a part of one, and returns its address.
func (e *env) prps(off int, entries ...uint64) uint64 {
	for i, v := range entries {
		binary.LittleEndian.PutUint64(e.list.Bytes[off+8*i:], v)
	}
	return e.list.Addr + uint64(off)
}

// sgls writes SGL descriptors and returns their address.
func (e *env) sgls(off int, list ...nvme.SGL) uint64 {
	for i, d := range list {
		d.Put((*[16]byte)(e.list.Bytes[off+16*i:]))
	}
	return e.list.Addr + uint64(off)
}

func (e *env) io(opcode uint8, lba uint64, blocks int) nvme.Command {
	c := nvme.Command{Opcode: opcode, NSID: e.ns.ID}
	c.SetLBA(lba, blocks)
	c.SetPRP(e.page(0), e.page(1))
	return c
}

// Outcomes executes the probes, one after the other, and returns how each ended. The driver does not look at them, but
// passes them on.
func Outcomes(ctx context.Context, r *Rig) ([]Outcome, error) {
	e := &env{ns: r.NS, config: r.C.Info()}
	for _, m := range []struct {
		to *driver.Memory
		n  int
	}{{&e.data, 1 << 20}, {&e.list, 4 * 4096}, {&e.queue, 65536}} {
		var err error
		if *m.to, err = r.DMA.Alloc(m.n); err != nil {
			return nil, err
		}
		defer m.to.Free()
	}
	e.hole = e.data.Addr + uint64(len(e.data.Bytes)) // allocators leave one behind each piece
	var list []Outcome
	err := withQueue(ctx, r, driver.QueueConfig{}, func(q *driver.Queue) error {
		for _, p := range probes {
			clear(e.list.Bytes)
			cmd := p.make(e)
			do := q.Do
			if p.admin {
				do = r.C.Admin
			}
			done, err := do(ctx, cmd, driver.Memory{}, 0)
			var st nvme.Status
			if err != nil && !errors.As(err, &st) {
				return fmt.Errorf("%s: %w", p.name, err)
			}
			list = append(list, Outcome{p.name, done.Status})
		}
		return nil
	})
	return list, err
}

func with(c nvme.Command, change func(*nvme.Command)) nvme.Command {
	change(&c)
	return c
}

// ofIO makes a probe of blocks.
func ofIO(opcode uint8, lba uint64, blocks int) func(e *env) nvme.Command {
	return func(e *env) nvme.Command { return e.io(opcode, lba, blocks) }
}

// byPRP makes a probe of a write with PRPs.
func byPRP(n int, prps func(e *env) (prp1, prp2 uint64)) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := e.io(nvme.IOWrite, 0, n/512)
		c.SetPRP(prps(e))
		return c
	}
}

// bySGL makes a probe of a write with an SGL.
func bySGL(n int, sgl func(e *env) nvme.SGL) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := e.io(nvme.IOWrite, 0, n/512)
		c.SetSGL(sgl(e))
		return c
	}
}

func identify(cns uint8, nsid uint32) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := nvme.Command{Opcode: nvme.AdminIdentify, NSID: nsid, CDW10: uint32(cns)}
		c.SetPRP(e.page(0), 0)
		return c
	}
}

func logPage(id uint8, offset uint64, n int) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := nvme.LogPageCommand(id, offset, n, true)
		c.SetPRP(e.page(0), e.page(1))
		return c
	}
}

func feature(opcode uint8, cdw10, cdw11 uint32) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := nvme.Command{Opcode: opcode, CDW10: cdw10, CDW11: cdw11}
		c.SetPRP(e.page(0), 0)
		return c
	}
}

// create makes a probe of a create command. The driver makes queue 1, so probes use 2.
func create(opcode uint8, id, size uint32, cdw11 uint32, off uint64) func(e *env) nvme.Command {
	return func(e *env) nvme.Command {
		c := nvme.Command{Opcode: opcode, CDW10: id | (size-1)<<16, CDW11: cdw11}
		c.SetPRP(e.queue.Addr+off, 0)
		return c
	}
}

func remove(opcode uint8, id uint32) func(e *env) nvme.Command {
	return func(*env) nvme.Command { return nvme.Command{Opcode: opcode, CDW10: id} }
}

func sgl(typ nvme.SGLType, addr uint64, n uint32) nvme.SGL {
	return nvme.SGL{Type: typ, Addr: addr, Length: n}
}

var probes = []probe{
	{"write", false, ofIO(nvme.IOWrite, 0, 8)},
	{"read", false, ofIO(nvme.IORead, 0, 8)},
	{"compare", false, ofIO(nvme.IOCompare, 0, 8)},
	{"compare, other data", false, func(e *env) nvme.Command {
		e.data.Bytes[0] ^= 1
		return e.io(nvme.IOCompare, 0, 8)
	}},
	{"flush", false, func(e *env) nvme.Command { return nvme.Command{Opcode: nvme.IOFlush, NSID: e.ns.ID} }},
	{"flush of all", false, func(*env) nvme.Command { return nvme.Command{Opcode: nvme.IOFlush, NSID: nvme.NSIDAll} }},
	{"write zeroes", false, ofIO(nvme.IOWriteZeroes, 0, 8)},
	{"last block", false, func(e *env) nvme.Command { return e.io(nvme.IORead, e.ns.Blocks-1, 1) }},
	{"behind the end", false, func(e *env) nvme.Command { return e.io(nvme.IORead, e.ns.Blocks, 1) }},
	{"over the end", false, func(e *env) nvme.Command { return e.io(nvme.IOWrite, e.ns.Blocks-1, 2) }},
	{"a sum that wraps", false, ofIO(nvme.IORead, math.MaxUint64, 2)},
	{"a product that wraps", false, ofIO(nvme.IORead, 1<<55, 1)},
	{"compare behind the end", false, func(e *env) nvme.Command { return e.io(nvme.IOCompare, e.ns.Blocks, 1) }},
	{"write zeroes over the end", false, func(e *env) nvme.Command { return e.io(nvme.IOWriteZeroes, e.ns.Blocks-1, 2) }},
	{"longer than MDTS", false, func(e *env) nvme.Command { return e.io(nvme.IORead, 0, e.config.MaxTransfer/512+1) }},
	{"namespace 0", false, func(e *env) nvme.Command {
		return with(e.io(nvme.IORead, 0, 1), func(c *nvme.Command) { c.NSID = 0 })
	}},
	{"namespace that is not active", false, func(e *env) nvme.Command {
		return with(e.io(nvme.IORead, 0, 1), func(c *nvme.Command) { c.NSID = 2 })
	}},
	{"namespace that cannot be", false, func(e *env) nvme.Command {
		return with(e.io(nvme.IORead, 0, 1), func(c *nvme.Command) { c.NSID = 0xfffffff0 })
	}},
	{"read of all namespaces", false, func(e *env) nvme.Command {
		return with(e.io(nvme.IORead, 0, 1), func(c *nvme.Command) { c.NSID = nvme.NSIDAll })
	}},
	{"no such command", false, ofIO(0x7e, 0, 1)},
	{"deallocate", false, func(e *env) nvme.Command {
		nvme.PutRange((*[16]byte)(e.data.Bytes), 8, 8)
		return nvme.Command{Opcode: nvme.IODatasetManagement, NSID: e.ns.ID, CDW11: nvme.CDW11Deallocate, DPTR: e.io(0, 0, 1).DPTR}
	}},
	{"deallocate behind the end", false, func(e *env) nvme.Command {
		nvme.PutRange((*[16]byte)(e.data.Bytes), e.ns.Blocks, 8)
		return nvme.Command{Opcode: nvme.IODatasetManagement, NSID: e.ns.ID, CDW11: nvme.CDW11Deallocate, DPTR: e.io(0, 0, 1).DPTR}
	}},

	{"PRP at an offset", false, byPRP(512, func(e *env) (uint64, uint64) { return e.page(0) + 512, 0 })},
	{"PRP not at 4 bytes", false, byPRP(512, func(e *env) (uint64, uint64) { return e.page(0) + 2, 0 })},
	{"second PRP not at a page", false, byPRP(8192, func(e *env) (uint64, uint64) { return e.page(0), e.page(1) + 512 })},
	{"PRP list", false, byPRP(12288, func(e *env) (uint64, uint64) { return e.page(0), e.prps(256, e.page(3), e.page(1)) })},
	{"PRP list that leads to another", false, byPRP(4*4096, func(e *env) (uint64, uint64) {
		e.prps(8192, e.page(7), e.page(8))
		return e.page(0), e.prps(4096-16, e.page(3), e.list.Addr+8192)
	})},
	{"PRP list with an entry not at a page", false, byPRP(12288, func(e *env) (uint64, uint64) { return e.page(0), e.prps(0, e.page(3), e.page(1)+512) })},
	{"PRP list not at 8 bytes", false, byPRP(12288, func(e *env) (uint64, uint64) { return e.page(0), e.list.Addr + 4 })},
	{"PRP nowhere", false, byPRP(512, func(e *env) (uint64, uint64) { return e.hole, 0 })},
	{"second PRP nowhere", false, byPRP(8192, func(e *env) (uint64, uint64) { return e.page(0), e.hole })},
	{"PRP list nowhere", false, byPRP(12288, func(e *env) (uint64, uint64) { return e.page(0), e.hole })},

	{"SGL", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLData, e.page(0)+8, 1024) })},
	{"SGL in a last segment", false, bySGL(1024, func(e *env) nvme.SGL {
		return sgl(nvme.SGLLastSegment, e.sgls(0, sgl(nvme.SGLData, e.page(0), 24), sgl(nvme.SGLData, e.page(2), 1000)), 32)
	})},
	{"SGL segments", false, bySGL(1024, func(e *env) nvme.SGL {
		next := e.sgls(4096, sgl(nvme.SGLData, e.page(2), 1000))
		return sgl(nvme.SGLSegment, e.sgls(0, sgl(nvme.SGLData, e.page(0), 24), sgl(nvme.SGLLastSegment, next, 16)), 32)
	})},
	{"SGL too short", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLData, e.page(0), 512) })},
	{"SGL too long", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLData, e.page(0), 2048) })},
	{"SGL nowhere", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLData, e.hole, 1024) })},
	{"SGL of another type", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLKeyed, e.page(0), 1024) })},
	{"SGL segment of 17 bytes", false, bySGL(1024, func(e *env) nvme.SGL {
		return sgl(nvme.SGLLastSegment, e.sgls(0, sgl(nvme.SGLData, e.page(0), 1024)), 17)
	})},
	{"SGL segment in a last segment", false, bySGL(1024, func(e *env) nvme.SGL {
		return sgl(nvme.SGLLastSegment, e.sgls(0, sgl(nvme.SGLData, e.page(0), 512), sgl(nvme.SGLLastSegment, e.list.Addr, 16)), 32)
	})},
	{"SGL segment that leads nowhere", false, bySGL(1024, func(e *env) nvme.SGL {
		return sgl(nvme.SGLSegment, e.sgls(0, sgl(nvme.SGLData, e.page(0), 512), sgl(nvme.SGLData, e.page(1), 512)), 32)
	})},
	{"SGL segment nowhere", false, bySGL(1024, func(e *env) nvme.SGL { return sgl(nvme.SGLLastSegment, e.hole, 32) })},
	{"data pointer of a reserved kind", false, func(e *env) nvme.Command {
		return with(e.io(nvme.IORead, 0, 1), func(c *nvme.Command) { c.Flags = 0xc0 })
	}},

	{"identify controller", true, identify(nvme.CNSController, 0)},
	{"identify namespace", true, identify(nvme.CNSNamespace, 1)},
	{"identify namespace 0", true, identify(nvme.CNSNamespace, 0)},
	{"identify inactive namespace", true, identify(nvme.CNSNamespace, 2)},
	{"identify impossible namespace", true, identify(nvme.CNSNamespace, 0xfffffff0)},
	{"identify active namespaces", true, identify(nvme.CNSActiveNamespaces, 0)},
	{"identify active namespaces above all", true, identify(nvme.CNSActiveNamespaces, 0xfffffffe)},
	{"identify descriptors", true, identify(nvme.CNSDescriptors, 1)},
	{"identify descriptors of namespace 0", true, identify(nvme.CNSDescriptors, 0)},
	{"identify descriptors of inactive namespace", true, identify(nvme.CNSDescriptors, 2)},
	{"identify command set of a namespace", true, identify(nvme.CNSCommandSetNamespace, 1)},
	{"identify command set of the controller", true, identify(nvme.CNSCommandSetController, 0)},
	{"identify something else", true, identify(0x7f, 1)},
	{"identify by SGL", true, func(e *env) nvme.Command {
		return with(identify(nvme.CNSController, 0)(e), func(c *nvme.Command) { c.SetSGL(sgl(nvme.SGLData, e.page(0), 4096)) })
	}},
	{"no such admin command", true, func(*env) nvme.Command { return nvme.Command{Opcode: 0x3f} }},
	{"log of errors", true, logPage(nvme.LogErrors, 0, 64)},
	{"log of health", true, logPage(nvme.LogSMART, 0, 512)},
	{"log of firmware", true, logPage(nvme.LogFirmware, 0, 512)},
	{"log of commands", true, logPage(nvme.LogCommands, 0, 4096)},
	{"log of changed namespaces", true, logPage(nvme.LogChangedNamespaces, 0, 4096)},
	{"log of health behind its end", true, logPage(nvme.LogSMART, 516, 4)},
	{"no such log", true, logPage(0x6f, 0, 4)},
	{"get number of queues", true, feature(nvme.AdminGetFeatures, uint32(nvme.FeatureQueues), 0)},
	{"get temperature threshold", true, feature(nvme.AdminGetFeatures, uint32(nvme.FeatureTemperature), 0)},
	{"get write cache", true, feature(nvme.AdminGetFeatures, uint32(nvme.FeatureVolatileWriteCache), 0)},
	{"get no feature", true, feature(nvme.AdminGetFeatures, 0x7f, 0)},
	{"set write cache", true, feature(nvme.AdminSetFeatures, uint32(nvme.FeatureVolatileWriteCache), 1)},
	{"set and save", true, feature(nvme.AdminSetFeatures, uint32(nvme.FeatureVolatileWriteCache)|1<<31, 1)},
	{"set no feature", true, feature(nvme.AdminSetFeatures, 0x7f, 0)},
	{"set number of queues to a value that cannot be", true, feature(nvme.AdminSetFeatures, uint32(nvme.FeatureQueues), 0xffffffff)},
	{"abort of no command", true, func(*env) nvme.Command { return nvme.Command{Opcode: nvme.AdminAbort, CDW10: 1 | 0x7777<<16} }},

	{"create completion queue 0", true, create(nvme.AdminCreateCQ, 0, 4, 1, 0)},
	{"create completion queue again", true, create(nvme.AdminCreateCQ, 1, 4, 1, 0)},
	{"create completion queue beyond the limit", true, create(nvme.AdminCreateCQ, 60000, 4, 1, 0)},
	{"create completion queue of one entry", true, create(nvme.AdminCreateCQ, 2, 1, 1, 0)},
	{"create completion queue that is too long", true, func(e *env) nvme.Command {
		return create(nvme.AdminCreateCQ, 2, uint32(e.config.MaxEntries)+1, 1, 0)(e)
	}},
	{"create completion queue not at a page", true, create(nvme.AdminCreateCQ, 2, 4, 1, 512)},
	{"create completion queue not contiguous", true, create(nvme.AdminCreateCQ, 2, 4, 0, 0)},
	{"create completion queue with a vector that cannot be", true, create(nvme.AdminCreateCQ, 2, 4, 3|0xfff0<<16, 0)},
	{"create completion queue", true, create(nvme.AdminCreateCQ, 2, 4, 1, 0)},
	{"create submission queue without completion queue", true, create(nvme.AdminCreateSQ, 2, 4, 1|3<<16, 4096)},
	{"create submission queue for completion queue 0", true, create(nvme.AdminCreateSQ, 2, 4, 1, 4096)},
	{"create submission queue of one entry", true, create(nvme.AdminCreateSQ, 2, 1, 1|2<<16, 4096)},
	{"create submission queue not at a page", true, create(nvme.AdminCreateSQ, 2, 4, 1|2<<16, 4096+64)},
	{"create submission queue not contiguous", true, create(nvme.AdminCreateSQ, 2, 4, 2<<16, 4096)},
	{"create submission queue", true, create(nvme.AdminCreateSQ, 2, 4, 1|2<<16, 4096)},
	{"create submission queue again", true, create(nvme.AdminCreateSQ, 2, 4, 1|2<<16, 4096)},
	{"delete completion queue in use", true, remove(nvme.AdminDeleteCQ, 2)},
	{"delete submission queue 0", true, remove(nvme.AdminDeleteSQ, 0)},
	{"delete submission queue", true, remove(nvme.AdminDeleteSQ, 2)},
	{"delete submission queue again", true, remove(nvme.AdminDeleteSQ, 2)},
	{"delete completion queue", true, remove(nvme.AdminDeleteCQ, 2)},
	{"delete completion queue again", true, remove(nvme.AdminDeleteCQ, 2)},
	{"delete completion queue 0", true, remove(nvme.AdminDeleteCQ, 0)},
}
