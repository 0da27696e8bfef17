package device

// What a process reports about its part of a device, and what all of them report.

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
)

// status returns what this process has, for another process that asks. With brief, the lists
// of queue pairs, regions and so on, which may be long, are left out.
func (d *Device) status(brief bool) any {
	s := ib.ProcessResources{Program: filepath.Base(os.Args[0]), Device: d.name, Paging: d.PagingStats(), Counters: counted(d.Counters())}
	d.mu.Lock()
	s.CQs, s.PDs, s.SRQs, s.AHs, s.Channels = d.counts.cqs, d.counts.pds, d.counts.srqs, d.counts.ahs, d.counts.channels
	d.mu.Unlock()
	if brief {
		return s
	}
	for number, q := range d.allQPs() {
		q.mu.Lock()
		q.absorbLocked()
		a, c := q.core.Query(), &q.core.Counters
		s.QPs = append(s.QPs, ib.QPResource{Number: number, Type: q.core.Type.String(), State: a.State.String(), DestQPN: a.DestQPN, DestGID: a.AV.DGID, Shard: q.shard.Load().number,
			TxBytes: c[qp.CntTxBytes], RxBytes: c[qp.CntRxBytes], TxPackets: c[qp.CntTxPackets], RxPackets: c[qp.CntRxPackets], Retransmits: c[qp.CntRetransmits],
			Counters: counted(byName(c))})
		q.mu.Unlock()
	}
	for r := range d.table.Regions() {
		if c, ok := r.Snapshot(); ok {
			s.MRs = append(s.MRs, ib.MRResource{Number: r.Number(), Kind: c.Backing.Kind().String(), Addr: c.IOVA, Length: c.Length, Access: c.Access.String()})
			// Memory that comes and goes: on demand, and of dma-bufs.
			if b, ok := c.Backing.(interface {
				Stats() ib.PagingStats
				Present() uint64
			}); ok {
				stats, m := b.Stats(), &s.MRs[len(s.MRs)-1]
				m.Paging, m.Present = &stats, b.Present()
			}
		}
	}
	for w := range d.table.Windows() {
		m := ib.MWResource{Number: w.Number(), Type: w.Type().String()}
		var b mem.Bound
		if b, m.Bound = w.Bound(); m.Bound {
			m.MR, m.QPN, m.Addr, m.Length, m.Access = b.Region, b.QPN, b.Addr, b.Length, b.Access.String()
		}
		s.MWs = append(s.MWs, m)
	}
	s.DMs, s.XRCDs = d.buffersNow(), d.domainsNow()
	slices.SortFunc(s.QPs, func(a, b ib.QPResource) int { return int(a.Number) - int(b.Number) })
	return s
}

func (d *Device) buffersNow() (list []ib.DMResource) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for m := range d.buffers {
		list = append(list, ib.DMResource{Number: m.number, Class: m.Class().String(), Length: m.Length(), MRs: m.mem.Regions()})
	}
	slices.SortFunc(list, func(a, b ib.DMResource) int { return int(a.Number) - int(b.Number) })
	return list
}

func (d *Device) domainsNow() (list []ib.XRCDResource) {
	qps, srqs := map[*xrcDomain]int{}, map[*xrcDomain]int{}
	for _, q := range d.allQPs() {
		qps[q.domain]++
	}
	for _, s := range d.srqs.All() {
		if s.xrcd != nil {
			srqs[s.xrcd.domain]++
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for x := range d.domains.open {
		r := ib.XRCDResource{Number: x.id, Opens: x.opens, QPs: qps[x], SRQs: srqs[x]}
		if x.file != nil {
			w := x.name.Words()
			r.File = fmt.Sprintf("%x:%d", w[0], w[1])
		}
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b ib.XRCDResource) int { return int(a.Number) - int(b.Number) })
	return list
}

// counted returns the counters that are not 0.
func counted(all []provider.Counter) map[string]uint64 {
	m := map[string]uint64{}
	for _, c := range all {
		if c.Value != 0 {
			m[c.Name] = c.Value
		}
	}
	return m
}

// Resources asks every process of this user that has a device open on this host
// what it has, without the lists if brief is set.
func Resources(brief bool) ([]ib.DeviceResources, error) {
	list, err := host.List(brief)
	if err != nil {
		return nil, opError("list_resources", err)
	}
	all := []ib.DeviceResources{}
	for _, l := range list {
		d := ib.DeviceResources{Addr: l.Addr}
		for _, p := range l.Processes {
			var r ib.ProcessResources
			answered := len(p.Status) > 0 && json.Unmarshal(p.Status, &r) == nil
			r.Slot, r.PID, r.Answered = p.Slot, p.PID, answered
			d.Processes = append(d.Processes, r)
		}
		all = append(all, d)
	}
	return all, nil
}
