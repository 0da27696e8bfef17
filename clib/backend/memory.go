package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"errors"
	"os"
	"syscall"

	"github.com/verbena-rdma/verbena/dmabuf"
	"github.com/verbena-rdma/verbena/gpu"
	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
	"github.com/verbena-rdma/verbena/internal/importer"
	"github.com/verbena-rdma/verbena/internal/provider"
)

// Domains, regions, windows, indirect keys, XRC domains and address handles.

type protectionDomain struct {
	inContext
	provider.PD
	origin device.Origin // of a domain that is imported from another process; otherwise nil
}

type memoryRegion struct {
	inContext
	provider.MR
	origin device.Origin // as for a domain
}

type memoryWindow struct {
	inContext
	provider.MW
}

type indirectKey struct {
	inContext
	provider.MKey
}

type deviceMemory struct {
	inContext
	provider.DM
}

type dmaHandle struct {
	inContext
	provider.DMAH
}

type xrcDomain struct {
	inContext
	provider.XRCD
}

type addressHandle struct {
	inContext
	*ib.AH
}

func (o *memoryRegion) close() error  { return o.Close() }
func (o *memoryWindow) close() error  { return o.Close() }
func (o *indirectKey) close() error   { return o.Close() }
func (o *deviceMemory) close() error  { return o.Close() }
func (o *dmaHandle) close() error     { return o.Close() }
func (o *xrcDomain) close() error     { return o.Close() }
func (o *addressHandle) close() error { return o.Close() }

var (
	pds   = table[protectionDomain]{kind: C.VBE_PD}
	mrs   = table[memoryRegion]{kind: C.VBE_MR}
	mws   = table[memoryWindow]{kind: C.VBE_MW}
	mkeys = table[indirectKey]{kind: C.VBE_MKEY}
	dms   = table[deviceMemory]{kind: C.VBE_DM}
	dmahs = table[dmaHandle]{kind: C.VBE_DMAH}
	xrcds = table[xrcDomain]{kind: C.VBE_XRCD}
	ahs   = table[addressHandle]{kind: C.VBE_AH}
)

//export vbe_alloc_pd
func vbe_alloc_pd(h C.uint64_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	p, err := c.shared.dev.AllocPD()
	if err != nil {
		return failed(err)
	}
	return newHandle(&pds, c, &protectionDomain{inContext{c}, p, nil})
}

//export vbe_reg_mr
func vbe_reg_mr(h C.uint64_t, m *C.struct_vbe_mr) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	var r provider.MR
	var err error
	if m.dmah == 0 {
		r, err = pd.register(m)
	} else if h := dmahs.get(uint64(m.dmah)); h == nil {
		err = errStale
	} else {
		r, err = h.Register(pd.PD, ib.Access(m.access), func() (provider.MR, error) { return pd.register(m) })
	}
	if err != nil && m.kind == C.VBE_MEM_RANGE && m.dm == 0 {
		r, err = importer.RegisterPeer(pd.PD, uintptr(m.addr), uint64(m.length), uint64(m.iova), ib.Access(m.access), err)
	}
	if err != nil {
		return failed(err)
	}
	if m.kind == C.VBE_MEM_ALLOC || m.kind == C.VBE_MEM_SHARED {
		m.addr, m.length = C.uint64_t(addrOf(r.Bytes())), C.uint64_t(r.Length())
	}
	n := newHandle(&mrs, pd.ctx, &memoryRegion{inContext{pd.ctx}, r, nil})
	if n > 0 {
		m.handle, m.lkey, m.rkey = C.uint64_t(n), C.uint32_t(r.LKey()), C.uint32_t(r.RKey())
	}
	return n
}

func (pd *protectionDomain) register(m *C.struct_vbe_mr) (provider.MR, error) {
	switch access := ib.Access(m.access); {
	case m.dm != 0:
		dm := dms.get(uint64(m.dm))
		if dm == nil {
			return nil, errStale
		}
		return pd.RegDMMR(dm.DM, uint64(m.iova), uint64(m.length), access)
	case m.kind == C.VBE_MEM_DMABUF && conf().Hide["dmabuf"]:
		return nil, ib.Errorf("reg_dmabuf_mr", syscall.EOPNOTSUPP, "VERBENA_HIDE has dmabuf")
	case m.kind == C.VBE_MEM_DMABUF:
		if r, handled, err := cudaBuffer(pd.PD, m); handled {
			return r, err
		}
		return importer.Register(pd.PD, rangeOf(m), access)
	case m.kind == C.VBE_MEM_ALLOC:
		return pd.AllocMR(uint64(m.length), access)
	case m.kind == C.VBE_MEM_SHARED:
		return pd.OpenSharedMR(textAt(uint64(m.share)), access)
	case m.kind == C.VBE_MEM_NULL:
		return pd.PD.(*device.PD).AllocNullMR()
	case m.kind == C.VBE_MEM_IMPLICIT:
		return pd.RegImplicitMR(access)
	default:
		if r, handled, err := cudaMemory(pd.PD, m); handled {
			return r, err
		}
		if gpu.Reserved(uint64(m.addr)) {
			return registerGPU(pd.PD, m)
		}
		return pd.RegMRAddr(uintptr(m.addr), uint64(m.length), uint64(m.iova), access)
	}
}

// vbe_alloc_dmah makes a DMA handle. Without steers, cpu and memType mean nothing.
//
//export vbe_alloc_dmah
func vbe_alloc_dmah(h C.uint64_t, ph, steers, cpu, memType C.uint32_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	cfg := ib.DMAHConfig{PH: uint8(ph)}
	if steers != 0 {
		cfg.Steering = &ib.Steering{CPU: int(cpu), MemType: ib.TPHMemType(memType)}
	}
	d, err := c.shared.dev.AllocDMAH(cfg)
	if err != nil {
		return failed(err)
	}
	return newHandle(&dmahs, c, &dmaHandle{inContext{c}, d})
}

// rangeOf returns the part of a dma-buf that a call names.
func rangeOf(m *C.struct_vbe_mr) importer.Range {
	return importer.Range{FD: int(m.fd), Offset: uint64(m.addr), Length: uint64(m.length), IOVA: uint64(m.iova)}
}

// reregIs has the ibv_rereg_mr_err_code for the state of a region after a failed
// re-registration.
var reregIs = map[ib.ReregState]C.int32_t{
	ib.ReregOldValid: C.VBE_REREG_OLD,
	ib.ReregNewValid: C.VBE_REREG_NEW,
	ib.ReregUnusable: C.VBE_REREG_UNUSABLE,
}

//export vbe_rereg_mr
func vbe_rereg_mr(h C.uint64_t, flags C.uint32_t, newPD C.uint64_t, m *C.struct_vbe_mr, is *C.int32_t) C.int64_t {
	*is = C.VBE_REREG_OLD
	r := mrs.get(uint64(h))
	if r == nil {
		return failed(errStale)
	}
	change := provider.MRChange{KeepKeys: true}
	toDMABuf := flags&C.VBE_REREG_TRANSLATION != 0 && m.kind == C.VBE_MEM_DMABUF
	toAlloc := flags&C.VBE_REREG_TRANSLATION != 0 && m.kind == C.VBE_MEM_ALLOC
	switch {
	case toDMABuf && conf().Hide["rereg_dmabuf"]:
		return failed(ib.Errorf("rereg_mr", syscall.EOPNOTSUPP, "VERBENA_HIDE has rereg_dmabuf"))
	case toAlloc:
		change.Alloc = uint64(m.length)
	case flags&C.VBE_REREG_TRANSLATION != 0 && !toDMABuf:
		change.Range = &provider.MRRange{Addr: uintptr(m.addr), Length: uint64(m.length), IOVA: uint64(m.iova)}
	}
	if flags&C.VBE_REREG_PD != 0 {
		pd := pds.get(uint64(newPD))
		if pd == nil {
			return failed(errStale)
		}
		change.PD = pd.PD
	}
	if flags&C.VBE_REREG_ACCESS != 0 {
		a := ib.Access(m.access)
		change.Access = &a
	}
	handled, err := false, error(nil)
	if toDMABuf || change.Range != nil {
		handled, err = cudaChange(r.MR, m, change, toDMABuf)
	}
	switch {
	case handled:
	case toDMABuf:
		err = importer.Rereg(r.MR, rangeOf(m), change)
	case change.Range != nil && gpu.Reserved(uint64(m.addr)):
		change.Range = nil
		err = reregisterGPU(r.MR, m, change)
	default:
		err = r.Rereg(change)
	}
	m.lkey, m.rkey = C.uint32_t(r.LKey()), C.uint32_t(r.RKey())
	if b := r.Bytes(); toAlloc && b != nil {
		m.addr = C.uint64_t(addrOf(b))
	}
	var re *ib.ReregError
	if errors.As(err, &re) {
		*is = reregIs[re.State]
	}
	return result(err)
}

//export vbe_query_mr
func vbe_query_mr(h C.uint64_t, m *C.struct_vbe_mr) C.int64_t {
	r := mrs.get(uint64(h))
	if r == nil {
		return failed(errStale)
	}
	m.length, m.lkey, m.rkey = C.uint64_t(r.Length()), C.uint32_t(r.LKey()), C.uint32_t(r.RKey())
	return 0
}

// vbe_share_mr writes the handle by which another process opens memory that the library has
// allocated.
//
//export vbe_share_mr
func vbe_share_mr(h C.uint64_t, to *C.char, room C.uint64_t) C.int64_t {
	r := mrs.get(uint64(h))
	if r == nil {
		return failed(errStale)
	}
	handle, err := r.Share()
	switch {
	case err != nil:
		return failed(err)
	case uint64(len(handle)) >= uint64(room):
		return failed(ib.Errorf("share_mr", syscall.ENOSPC, "the handle has %d bytes", len(handle)+1))
	}
	text := view(to, len(handle)+1)
	for i := range len(handle) {
		text[i] = C.char(handle[i])
	}
	text[len(handle)] = 0
	return 0
}

//export vbe_alloc_dm
func vbe_alloc_dm(h, length C.uint64_t, logAlign C.uint32_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	dm, err := c.shared.dev.AllocDM(provider.DMConfig{Length: uint64(length), LogAlign: int(min(logAlign, 63))})
	if err != nil {
		return failed(err)
	}
	return newHandle(&dms, c, &deviceMemory{inContext{c}, dm})
}

// vbe_export_dm returns a descriptor of a dma-buf of the device memory.
//
//export vbe_export_dm
func vbe_export_dm(h C.uint64_t) C.int64_t {
	dm := dms.get(uint64(h))
	if dm == nil {
		return failed(errStale)
	}
	b, err := importer.ExportDM(dm.DM)
	if err != nil {
		return failed(err)
	}
	defer b.Put() // the descriptor has a reference of its own
	fd, err := b.FD()
	if err != nil {
		return failed(err)
	}
	return C.int64_t(fd)
}

// vbe_export_file returns a descriptor of the dma-buf of a memory file: an object of the render node
// that the preloaded library shows.
//
//export vbe_export_file
func vbe_export_file(file C.int) C.int64_t {
	b, err := dmabuf.FromFile(int(file), "drm", "")
	if err != nil {
		return failed(err)
	}
	defer b.Put() // the descriptor has a reference of its own
	fd, err := b.FD()
	if err != nil {
		return failed(err)
	}
	return C.int64_t(fd)
}

// vbe_dmabuf_file returns a descriptor of the memory file of a dma-buf that vbe_export_file has made.
//
//export vbe_dmabuf_file
func vbe_dmabuf_file(fd C.int) C.int64_t {
	b, err := dmabuf.Get(int(fd))
	if err != nil {
		return failed(err)
	}
	defer b.Put()
	file, err := b.File()
	if err != nil {
		return failed(err)
	}
	return C.int64_t(file)
}

//export vbe_copy_dm
func vbe_copy_dm(h, offset, addr, length C.uint64_t, write C.uint32_t) C.int64_t {
	dm := dms.get(uint64(h))
	if dm == nil {
		return failed(errStale)
	}
	if uint64(length) > dm.Length() || uint64(offset) > dm.Length()-uint64(length) {
		return failed(ib.Errorf("memcpy_dm", syscall.EFAULT, "%d bytes at %d of %d", length, offset, dm.Length()))
	}
	if length == 0 {
		return 0
	}
	b := bytesAt(uint64(addr), uint64(length))
	var err error
	if write != 0 {
		_, err = dm.WriteAt(b, int64(offset))
	} else {
		_, err = dm.ReadAt(b, int64(offset))
	}
	return result(err)
}

//export vbe_advise
func vbe_advise(h C.uint64_t, advice, flush C.uint32_t, sgl C.uint64_t, n C.uint32_t) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	return result(pd.Advise(ib.Advice(advice), flush != 0, sges(uint64(sgl), uint32(n))))
}

//export vbe_alloc_mw
func vbe_alloc_mw(h C.uint64_t, typ C.uint32_t, rkey *C.uint32_t) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	if typ != 1 && typ != 2 {
		return failed(ib.Errorf("alloc_mw", syscall.EINVAL, "windows of type %d", typ))
	}
	w, err := pd.AllocMW(ib.MWType(typ))
	if err != nil {
		return failed(err)
	}
	*rkey = C.uint32_t(w.RKey())
	return newHandle(&mws, pd.ctx, &memoryWindow{inContext{pd.ctx}, w})
}

//export vbe_create_mkey
func vbe_create_mkey(h C.uint64_t, pieces, invalidatable C.uint32_t, key *C.uint32_t) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	k, err := pd.CreateMKey(int(min(pieces, maxCap)))
	if err != nil {
		return failed(err)
	}
	if invalidatable == 0 {
		k.(*device.MKey).Shelter()
	}
	*key = C.uint32_t(k.Key())
	return newHandle(&mkeys, pd.ctx, &indirectKey{inContext{pd.ctx}, k})
}

//export vbe_bind_mw
func vbe_bind_mw(h, window C.uint64_t, wr *C.struct_vbe_send_wr, rkey *C.uint32_t) C.int64_t {
	q, w := qps.get(uint64(h)), mws.get(uint64(window))
	if q == nil || w == nil {
		return failed(errStale)
	}
	flags, ok := sendFlags(wr.flags)
	if !ok || wr.flags&sendInline != 0 {
		return failed(ib.Errorf("bind_mw", syscall.EINVAL, "flags %#x", wr.flags))
	}
	key, err := q.QP.BindMW(w.MW, uint64(wr.id), flags, bindOf(wr))
	if err != nil {
		return failed(err)
	}
	*rkey = C.uint32_t(key)
	return 0
}

func bindOf(wr *C.struct_vbe_send_wr) ib.MWBind {
	return ib.MWBind{MW: uint32(wr.mw_key), RKey: uint32(wr.mw_new_key), LKey: uint32(wr.mw_lkey), Addr: uint64(wr.mw_addr),
		Length: uint64(wr.mw_length), Access: ib.Access(wr.mw_access)}
}

// layoutOf translates the configuration of an indirect key. A key that is configured already
// is changed in place.
func layoutOf(l *C.struct_vbe_layout) ib.MKeyConfig {
	update := ib.MKeyInPlace
	if l.keep&C.VBE_KEEP_ACCESS != 0 {
		update |= ib.MKeyKeepAccess
	}
	if l.keep&C.VBE_KEEP_LAYOUT != 0 {
		update |= ib.MKeyKeepLayout
	}
	return ib.MKeyConfig{MKey: uint32(l.key), Access: ib.Access(l.access), Update: update,
		Interleaved: strides(uint64(l.pieces), uint32(l.num)), Repeat: uint64(l.repeat)}
}

//export vbe_create_ah
func vbe_create_ah(h C.uint64_t, p *C.struct_vbe_path) C.int64_t {
	pd := pds.get(uint64(h))
	if pd == nil {
		return failed(errStale)
	}
	ah, err := pd.CreateAH(pathFrom(p))
	if err != nil {
		return failed(err)
	}
	return newHandle(&ahs, pd.ctx, &addressHandle{inContext{pd.ctx}, ah})
}

// Flags of vbe_open_xrcd.
const (
	xrcdCreate    = 1
	xrcdExclusive = 2
)

//export vbe_open_xrcd
func vbe_open_xrcd(h C.uint64_t, fd C.int64_t, flags C.uint32_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	cfg := provider.XRCDConfig{Create: flags&xrcdCreate != 0, Exclusive: flags&xrcdExclusive != 0}
	if fd != -1 {
		// cfg.File closes its descriptor, so it gets a duplicate of the program's.
		own, err := syscall.Dup(int(fd))
		if err != nil {
			return failed(ib.Errorf("open_xrcd", syscall.EBADF, "descriptor %d", fd))
		}
		cfg.File = os.NewFile(uintptr(own), "xrcd")
		defer func() { _ = cfg.File.Close() }() // nothing was written to it
	}
	x, err := c.shared.dev.OpenXRCD(cfg)
	if err != nil {
		return failed(err)
	}
	return newHandle(&xrcds, c, &xrcDomain{inContext{c}, x})
}
