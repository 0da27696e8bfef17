package device

// Sharing a device with other processes of the host. Package host finds these processes,
// link.Shared carries trains to them; this file ties both to the device.

import (
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/train"
)

// Numbers of processes index arrays in both packages, which must be of the same length.
var _ [link.MaxNeighbours]struct{} = [host.MaxProcesses]struct{}{}

// openShared opens the link of a device that other processes may have open too.
// With alone, it fails if a process has an address already.
func openShared(addrs []netip.Addr, cfg *provider.Config, alone bool, tap link.Tap, dev *futureDevice) (*link.Shared, *host.Member, error) {
	var m *host.Member
	ready := make(chan struct{}) // closed when m is set, and the link has it
	s, err := link.OpenShared(&link.SharedConfig{
		UDP:       link.UDPConfig{Addrs: addrs, NoGSO: cfg.NoGSO, NoGRO: cfg.NoGRO, Tap: tap},
		Packets:   cfg.Link == linkUDP,
		NoPackets: cfg.Link == linkLocal,
		Look: func(a netip.Addr) (link.Neighbours, error) {
			<-ready
			return m.Look(a)
		},
		Freed: func() {
			if d := dev.Load(); d != nil {
				d.resume()
			}
		},
		Offer: func(t *train.Train, via link.Via) bool {
			d := dev.Load()
			return d != nil && d.offer(t, via)
		},
		Granted: func(qpn, remote uint32, l *link.PeerGrant) {
			if d := dev.Load(); d != nil {
				d.granted(qpn, remote, l)
			}
		},
	})
	if err != nil {
		return nil, nil, err
	}
	m, err = host.Join(host.Config{
		Status: dev.status,
		Memory: dev.memory,
		Export: dev.export,
		Addrs:  addrs, Alone: alone, Limits: hostLimits(cfg),
		Common: s.OpenCommon,
		Listen: func(w *host.Sockets) (int, error) { return listen(s.First(), w) },
		Died: func(words []host.LastWords) {
			if d := dev.Load(); d != nil {
				d.management.died(words)
			}
		},
		Watcher: watcherName(),
		Packets: cfg.Link == linkUDP,
		Segment: link.PassSegment,
		Shared:  mem.PassShared,
		Channel: func(c *net.UnixConn, from netip.Addr, process int) { s.Accept(c, from, process, ready) },
	})
	if err != nil {
		close(ready)  // callbacks that wait find no member
		_ = s.Close() // the first error says more
		return nil, nil, err
	}
	s.Join(m, m.Slot())
	close(ready)
	return s, m, nil
}

// listen opens the sockets of a place, for a receiver.
func listen(r *link.UDPReceiver, w *host.Sockets) (place int, err error) {
	if w.Adopt != nil {
		return w.Place, r.Adopt(w.Adopt)
	}
	return r.Listen(w.Place, w.Orphans, w.Hold)
}

// hostLimits are the limits of all processes of the device together.
func hostLimits(cfg *provider.Config) (h [host.NumObjects]uint64) {
	d := withDefaults(cfg.Limits)
	for o, n := range map[host.Object]int{host.QPs: d.QPs, host.CQs: d.CQs, host.MRs: d.MRs, host.PDs: d.PDs,
		host.AHs: d.AHs, host.XRCDs: d.PDs, host.SRQs: d.SRQs, host.Channels: d.CQs, host.Mcasts: maxAttachments, host.MWs: d.MWs, host.DMBytes: dmSize(cfg)} {
		h[o] = uint64(n)
	}
	return h
}

// countsLocked returns the counts of objects, by the index that all processes use.
func (d *Device) countsLocked() [host.NumObjects]*int {
	c := &d.counts
	return [...]*int{host.QPs: &c.qps, host.CQs: &c.cqs, host.MRs: &c.mrs, host.PDs: &c.pds,
		host.AHs: &c.ahs, host.SRQs: &c.srqs, host.Channels: &c.channels, host.XRCDs: &c.xrcds, host.Mcasts: &c.mcasts, host.MWs: &c.mws, host.DMBytes: &c.dm}
}

// publishLocked publishes to the other processes how many objects this one has.
func (d *Device) publishLocked() {
	if d.member == nil {
		return
	}
	for o, n := range d.countsLocked() {
		d.member.Set(host.Object(o), *n)
	}
}

// overLimitLocked reports whether all processes together have more of the objects that n
// counts than the device's limit, and that limit.
func (d *Device) overLimitLocked(n *int) (limit int, over bool) {
	counts := d.countsLocked()
	o := host.Object(slices.Index(counts[:], n))
	if d.member == nil || o < 0 { // o < 0: these objects are counted in this process alone
		return 0, false
	}
	return d.member.Limit(o), d.member.Over(o)
}

// addNumbered puts an object into a table, of queue pairs or of shared receive queues, and gets
// more numbers for this process by lease, if that is not nil and the table has run out of them.
func addNumbered[T any](d *Device, op string, table *mem.Slots[T], lease func() (uint32, error), create func(number uint32) *T) error {
	d.numbering.Lock()
	defer d.numbering.Unlock()
	if lease != nil && table.Short() {
		r, err := lease()
		if err != nil {
			return opError(op, err)
		}
		table.Extend(r)
	}
	if _, ok := table.AddFunc(create); !ok {
		return ib.Errorf(op, syscall.ENOMEM, "no number is free")
	}
	return nil
}

// giveUpFetches keeps other processes from fetching payload by reference that is still under
// way: the memory is about to be the program's again.
func (d *Device) giveUpFetches() {
	if s, ok := d.link.(*link.Shared); ok {
		s.GiveUpFetches()
	}
}

// ticket returns the ticket for trains whose payload may be fetched. The caller holds the
// queue pair's lock, which keeps its requests from being given up.
func (d *Device) ticket() uint64 {
	if s, ok := d.link.(*link.Shared); ok {
		return s.Ticket()
	}
	return 0
}
