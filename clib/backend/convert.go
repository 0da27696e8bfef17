package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"math/bits"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/device"
)

// Translation between the numbers of verbs.h and those of package ib.

// IBV_DEVICE_* by capability.
var deviceCaps = map[ib.DeviceCap]uint32{
	ib.CapBadPKeyCntr: 1 << 1, ib.CapBadQKeyCntr: 1 << 2, ib.CapCurrQPState: 1 << 7, ib.CapPortActiveEvent: 1 << 10,
	ib.CapSysImageGUID: 1 << 11, ib.CapRCRNRNak: 1 << 12, ib.CapSRQResize: 1 << 13, ib.CapMemWindow: 1 << 17,
	ib.CapUDIPCsum: 1 << 18, ib.CapXRC: 1 << 20, ib.CapMemMgtExtensions: 1 << 21, ib.CapMemWindowType2B: 1 << 24,
}

// Vendor IDs and part numbers. The first vendor ID is a locally administered one: programs
// take 0 for "unknown".
const (
	vendor, part         = 0x02be7a, 1
	mlx5Vendor, mlx5Part = 0x02c9, 4119
)

func deviceAttr(a ib.DeviceAttr, odp ib.ODPCaps) C.struct_vbe_device_attr {
	hide := conf().Hide
	if hide["xrc"] {
		a.Caps &^= ib.CapXRC
	}
	if hide["mw"] {
		a.Caps &^= ib.CapMemWindow | ib.CapMemWindowType2B
		a.MaxMW = 0
	}
	if hide["atomic"] {
		a.AtomicCap = ib.AtomicNone
	}
	if hide["srq"] {
		a.MaxSRQ, a.MaxSRQWR, a.MaxSRQSGE = 0, 0, 0
	}
	if hide["odp"] {
		odp = ib.ODPCaps{}
	}
	// Atomics here are atomic with the processor's own too (IBV_ATOMIC_GLOB). But adapters
	// report IBV_ATOMIC_HCA, and UCX before 1.16 uses atomics with exactly that.
	a.AtomicCap = min(a.AtomicCap, ib.AtomicHCA)
	if a.VendorID == 0 {
		a.VendorID, a.VendorPartID = vendor, part
	}
	if conf().Identity == "mlx5" {
		a.VendorID, a.VendorPartID = mlx5Vendor, mlx5Part
	}
	var caps uint32
	for c := a.Caps; c != 0; c &= c - 1 {
		caps |= deviceCaps[1<<bits.TrailingZeros32(uint32(c))]
	}
	to := C.struct_vbe_device_attr{
		node_guid: C.uint64_t(a.NodeGUID), image_guid: C.uint64_t(a.SysImageGUID),
		max_mr_size: C.uint64_t(a.MaxMRSize), page_size_cap: C.uint64_t(a.PageSizeCap), max_dm_size: C.uint64_t(a.MaxDMSize),
		vendor_id: C.uint32_t(a.VendorID), vendor_part_id: C.uint32_t(a.VendorPartID), hw_ver: C.uint32_t(a.HWVersion),
		caps: C.uint32_t(caps), atomic_cap: C.uint32_t(a.AtomicCap - ib.AtomicNone),
		max_qp: C.int32_t(a.MaxQP), max_qp_wr: C.int32_t(a.MaxQPWR), max_sge: C.int32_t(a.MaxSGE), max_sge_rd: C.int32_t(a.MaxSGERd),
		max_inline: C.int32_t(a.MaxInlineData), max_cq: C.int32_t(a.MaxCQ), max_cqe: C.int32_t(a.MaxCQE),
		max_mr: C.int32_t(a.MaxMR), max_mw: C.int32_t(a.MaxMW), max_pd: C.int32_t(a.MaxPD), max_ah: C.int32_t(a.MaxAH),
		max_srq: C.int32_t(a.MaxSRQ), max_srq_wr: C.int32_t(a.MaxSRQWR), max_srq_sge: C.int32_t(a.MaxSRQSGE),
		max_rd_atom: C.int32_t(a.MaxQPRDAtom), max_init_rd_atom: C.int32_t(a.MaxQPInitRDAtom), max_res_rd_atom: C.int32_t(a.MaxResRDAtom),
		max_mcast_grp: C.int32_t(a.MaxMcastGrp), max_mcast_qp_attach: C.int32_t(a.MaxMcastQPAttach),
		max_total_mcast_qp_attach: C.int32_t(a.MaxTotalMcastQPAttach),
		max_pkeys:                 C.int32_t(a.MaxPKeys), ack_delay: C.int32_t(a.LocalCAAckDelay), ports: C.int32_t(a.PhysPortCnt),
		odp_rc: C.uint32_t(odp.RC), odp_uc: C.uint32_t(odp.UC), odp_ud: C.uint32_t(odp.UD), odp_xrc: C.uint32_t(odp.XRC),
	}
	if odp.Supported {
		to.odp_general |= 1
	}
	if odp.Implicit {
		to.odp_general |= 2
	}
	if a.Caps&ib.CapFlushGlobal != 0 && !hide["flush"] {
		to.flush = 1
	}
	if a.Caps&ib.CapAtomicWrite != 0 && !hide["atomic_write"] {
		to.atomic_write = 1
	}
	setChars(to.fw[:], a.FWVersion)
	return to
}

// qpTypes are package ib's types by IBV_QPT_*.
var qpTypes = map[C.uint32_t]ib.QPType{2: ib.RC, 3: ib.UC, 4: ib.UD, 9: ib.XRCSend, 10: ib.XRCRecv}

// opcodes are package ib's by IBV_WR_*; 0 where there is none.
var opcodes = [...]ib.Opcode{0: ib.OpRDMAWrite, 1: ib.OpRDMAWriteImm, 2: ib.OpSend, 3: ib.OpSendImm, 4: ib.OpRDMARead,
	5: ib.OpAtomicCmpSwap, 6: ib.OpAtomicFetchAdd, 7: ib.OpLocalInv, 8: ib.OpBindMW, 9: ib.OpSendInv, 11: ib.OpConfigureMKey, 14: ib.OpFlush, 15: ib.OpAtomicWrite}

func opcode(n C.uint32_t) ib.Opcode {
	if n < C.uint32_t(len(opcodes)) {
		return opcodes[n]
	}
	return 0
}

// IBV_SEND_*
const (
	sendFence     = 1 << 0
	sendSignaled  = 1 << 1
	sendSolicited = 1 << 2
	sendInline    = 1 << 3
)

// sendFlags translates flags; ok is false if one is unknown.
func sendFlags(f C.uint32_t) (to ib.SendFlags, ok bool) {
	if f&sendFence != 0 {
		to |= ib.SendFence
	}
	if f&sendSignaled != 0 {
		to |= ib.SendSignaled
	}
	if f&sendSolicited != 0 {
		to |= ib.SendSolicited
	}
	return to, f&^(sendFence|sendSignaled|sendSolicited|sendInline) == 0
}

// wcOpcodes are IBV_WC_* by package ib's.
var wcOpcodes = [...]C.uint32_t{ib.WCSend: 0, ib.WCRDMAWrite: 1, ib.WCRDMARead: 2, ib.WCCompSwap: 3, ib.WCFetchAdd: 4,
	ib.WCBindMW: 5, ib.WCLocalInv: 6, ib.WCFlush: 8, ib.WCAtomicWrite: 9, ib.WCRecv: 1 << 7, ib.WCRecvRDMAWithImm: 1<<7 + 1,
	ib.WCConfigureMKey: 1<<7 + 7, ib.WCWaitFence: 1<<7 + 8, ib.WCSignalFence: 1<<7 + 9} // IBV_WC_DRIVER1 to 3

// putWC writes a completion in C's form.
func putWC(to *C.struct_vbe_wc, wc *ib.WC, note *device.Note) {
	*to = C.struct_vbe_wc{} // then field by field, for the reason in sendFrom
	to.wr_id, to.status, to.vendor_err = C.uint64_t(wc.ID), C.uint32_t(wc.Status), C.uint32_t(wc.VendorErr)
	to.byte_len, to.qp_num, to.src_qp = C.uint32_t(wc.ByteLen), C.uint32_t(wc.QPN), C.uint32_t(wc.SrcQP)
	to.pkey_index, to.sl = C.uint16_t(wc.PKeyIndex), C.uint8_t(wc.SL)
	to.when, to.event = C.uint64_t(note.At), C.uint32_t(note.Event)
	if note.Solicited {
		to.solicited = 1
	}
	if int(wc.Op) < len(wcOpcodes) {
		to.opcode = wcOpcodes[wc.Op]
	}
	if wc.Flags&ib.WCGRH != 0 {
		to.flags |= 1 << 0
	}
	if wc.Flags&ib.WCWithImm != 0 {
		to.flags |= 1 << 1
		to.imm_or_key = C.uint32_t(bits.ReverseBytes32(wc.Imm)) // network order; the processor is little-endian
	}
	if wc.Flags&ib.WCWithInv != 0 {
		to.flags |= 1 << 3
		to.imm_or_key = C.uint32_t(wc.InvalidatedKey)
	}
}

// attrMasks are the bits of package ib by the bit of IBV_QP_*.
var attrMasks = [...]ib.QPAttrMask{0: ib.QPMaskState, 1: ib.QPMaskCurState, 2: ib.QPMaskSQDAsyncNotify, 3: ib.QPMaskAccess,
	4: ib.QPMaskPKeyIndex, 5: ib.QPMaskPort, 6: ib.QPMaskQKey, 7: ib.QPMaskAV, 8: ib.QPMaskPathMTU, 9: ib.QPMaskTimeout,
	10: ib.QPMaskRetryCnt, 11: ib.QPMaskRNRRetry, 12: ib.QPMaskRQPSN, 13: ib.QPMaskMaxRDAtomic, 14: ib.QPMaskAltPath,
	15: ib.QPMaskMinRNRTimer, 16: ib.QPMaskSQPSN, 17: ib.QPMaskMaxDestRDAtomic, 18: ib.QPMaskPathMigState, 19: ib.QPMaskCap, 20: ib.QPMaskDestQPN}

func attrMask(m C.uint32_t) (to ib.QPAttrMask, err error) {
	for ; m != 0; m &= m - 1 {
		i := bits.TrailingZeros32(uint32(m))
		if i >= len(attrMasks) {
			return 0, ib.Errorf("modify_qp", syscall.EINVAL, "bit %d of the mask is unknown", i)
		}
		to |= attrMasks[i]
	}
	return to, nil
}

// state translates a state of verbs.h, where RESET is 0. An unknown one becomes 0, which
// the device refuses.
func state(s C.uint32_t) ib.QPState {
	if s > 6 {
		return 0
	}
	return ib.QPState(s + 1)
}

func pathFrom(p *C.struct_vbe_path) ib.AHAttr {
	a := ib.AHAttr{SGIDIndex: int(p.sgid_index), FlowLabel: uint32(p.flow_label), HopLimit: uint8(p.hop_limit),
		TrafficClass: uint8(p.traffic_class), SL: uint8(p.sl), PortNum: uint8(p.port)}
	for i := range a.DGID {
		a.DGID[i] = uint8(p.dgid[i])
	}
	return a
}

func pathTo(a *ib.AHAttr) C.struct_vbe_path {
	p := C.struct_vbe_path{sgid_index: C.uint8_t(a.SGIDIndex), flow_label: C.uint32_t(a.FlowLabel), hop_limit: C.uint8_t(a.HopLimit),
		traffic_class: C.uint8_t(a.TrafficClass), sl: C.uint8_t(a.SL), port: C.uint8_t(a.PortNum)}
	for i := range a.DGID {
		p.dgid[i] = C.uint8_t(a.DGID[i])
	}
	return p
}

// maxCap is beyond every limit, and fits an int.
const maxCap = 1 << 30

func capFrom(c *C.struct_vbe_qp_cap) ib.QPCap {
	n := func(v C.uint32_t) int { return int(min(v, maxCap)) }
	return ib.QPCap{MaxSendWR: n(c.send_wr), MaxRecvWR: n(c.recv_wr), MaxSendSGE: n(c.send_sge), MaxRecvSGE: n(c.recv_sge), MaxInlineData: n(c.inline_data)}
}

func capTo(c *ib.QPCap) C.struct_vbe_qp_cap {
	return C.struct_vbe_qp_cap{send_wr: C.uint32_t(c.MaxSendWR), recv_wr: C.uint32_t(c.MaxRecvWR),
		send_sge: C.uint32_t(c.MaxSendSGE), recv_sge: C.uint32_t(c.MaxRecvSGE), inline_data: C.uint32_t(c.MaxInlineData)}
}

func attrFrom(a *C.struct_vbe_qp_attr) ib.QPAttr {
	return ib.QPAttr{State: state(a.state), CurState: state(a.cur_state), Access: ib.Access(a.access), PKeyIndex: uint16(a.pkey_index),
		Port: uint8(a.port), QKey: uint32(a.qkey), AV: pathFrom(&a.av), PathMTU: ib.MTU(min(a.path_mtu, 255)), Timeout: uint8(a.timeout),
		RetryCnt: uint8(a.retry_cnt), RNRRetry: uint8(a.rnr_retry), RQPSN: uint32(a.rq_psn), MaxRDAtomic: uint8(a.max_rd_atomic),
		MinRNRTimer: uint8(a.min_rnr_timer), SQPSN: uint32(a.sq_psn), MaxDestRDAtomic: uint8(a.max_dest_rd_atomic),
		Cap: capFrom(&a.cap), DestQPN: uint32(a.dest_qpn), SQDAsyncNotify: a.sqd_notify != 0}
}

func attrTo(a *ib.QPAttr) C.struct_vbe_qp_attr {
	to := C.struct_vbe_qp_attr{state: C.uint32_t(a.State) - 1, cur_state: C.uint32_t(a.State) - 1, path_mtu: C.uint32_t(a.PathMTU),
		qkey: C.uint32_t(a.QKey), rq_psn: C.uint32_t(a.RQPSN), sq_psn: C.uint32_t(a.SQPSN), dest_qpn: C.uint32_t(a.DestQPN),
		access: C.uint32_t(a.Access), cap: capTo(&a.Cap), av: pathTo(&a.AV), pkey_index: C.uint16_t(a.PKeyIndex),
		max_rd_atomic: C.uint8_t(a.MaxRDAtomic), max_dest_rd_atomic: C.uint8_t(a.MaxDestRDAtomic), min_rnr_timer: C.uint8_t(a.MinRNRTimer),
		port: C.uint8_t(a.Port), timeout: C.uint8_t(a.Timeout), retry_cnt: C.uint8_t(a.RetryCnt), rnr_retry: C.uint8_t(a.RNRRetry)}
	if a.SQDAsyncNotify {
		to.sqd_notify = 1
	}
	if a.SQDraining {
		to.sq_draining = 1
	}
	return to
}
