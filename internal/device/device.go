// Package device is what stands around the protocol core (package qp). It has what the core
// is free of: tables, locks, links, time and goroutines.
//
// The way of a work request, top-down:
//
//  1. qp.go: PostSend appends to the send queue under the queue pair's lock.
//  2. transmit.go: the holder of the queue pair's transmit token pulls trains and hands
//     them to a link, without holding the lock.
//  3. loop.go, or package link: the train reaches the peer's queue pair.
//  4. receive.go: the receiver takes the peer's lock, executes the train, and pulls and
//     sends the answer in the same way.
//  5. cq.go: the completion waits in the completion queue.
//
// A poster takes a shorter way where it can (shortcut.go): by a grant (grant.go), or
// under the locks of both queue pairs of one process. Work that may block is deferred to
// workers (deferred.go).
//
// A lock of a queue pair is held only for steps that never wait. A goroutine that holds
// one only ever tries another, and only Close waits for a token. progress.go describes
// which goroutine does all this when: the poster, the poller, or the background goroutine.
// The other files are the objects of the provider interface, their limits and lifetimes.
package device

import (
	"context"
	"errors"
	"hash/fnv"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/verbena-rdma/verbena/ib"
	"github.com/verbena-rdma/verbena/internal/host"
	"github.com/verbena-rdma/verbena/internal/link"
	"github.com/verbena-rdma/verbena/internal/mem"
	"github.com/verbena-rdma/verbena/internal/pcap"
	"github.com/verbena-rdma/verbena/internal/provider"
	"github.com/verbena-rdma/verbena/internal/qp"
	"github.com/verbena-rdma/verbena/internal/sys"
)

// Device is an open software device.
type Device struct {
	cfg    provider.Config
	name   string
	base   time.Time // the zero of qp.Time
	addrs  []netip.Addr
	limits provider.Limits
	mtu    int

	link     link.Link
	freer    link.Freer   // the same, if it reports when it is not busy any more; or nil
	loopback bool         // queue pairs of this process are reached by the loop link
	capture  *pcap.Writer // nil: no capture

	table    *mem.Table
	srqs     *mem.Slots[SRQ]
	counters deviceCounters
	dmabufs  mem.DMABufCounts
	grants   grants
	drops    [link.NumReasons]atomic.Uint64
	noQP     atomic.Uint64 // packets for a queue pair that does not exist

	first   *shard // see progress.go
	spread  spread
	stopped atomic.Bool
	heldQPs struct {
		sync.Mutex       // guards list
		list       []*QP // that have trains which wait until the link is less busy
	}
	patience time.Duration // how long a datagram among those trains waits

	work    deferredWork
	advisor advisor
	events  eventQueue
	peers   peerTable
	mcast   mcast

	management management
	shares     shares
	exports    exports
	dm         *mem.DevicePool
	scatter    bool // short messages wait beside their completions, unless a queue pair refuses

	// numbering makes one call at a time add to a table of numbers, so that a call that has got more
	// numbers also finds one. It guards no field.
	numbering sync.Mutex

	mu      sync.Mutex // guards object counts, reference counts and closed
	counts  objectCounts
	member  *host.Member // nil: no other process can share the device; never changes
	domains xrcDomains
	proxies proxies
	nextPD  uint32
	nextCQ  uint32
	nextDM  uint32
	buffers map[*DM]struct{} // of device memory
	closed  bool
}

// objectCounts are numbers of objects, and bytes of device memory.
type objectCounts struct{ qps, cqs, mrs, mws, pds, ahs, srqs, channels, xrcds, mcasts, dm, dmahs int }

// defaultLimits are what an unconfigured device has.
var defaultLimits = provider.Limits{
	QPs: 1 << 16, CQs: 1 << 16, MRs: 1 << 20, MWs: 1 << 20, PDs: 1 << 16, AHs: 1 << 20, SRQs: 1 << 16,
	QPWR: 1 << 15, CQE: 1 << 22, SRQWR: 1 << 16,
}

func withDefaults(l provider.Limits) provider.Limits {
	d := defaultLimits
	top := d.All()
	for i, n := range l.All() {
		if *n > 0 {
			*top[i] = min(*top[i], *n)
		}
	}
	return d
}

// Open opens a device by name: see resolve. A nil config means defaults.
func Open(name string, cfg *provider.Config) (*Device, error) {
	if cfg == nil {
		cfg = &provider.Config{}
	}
	switch cfg.Link {
	case "", linkLoop, linkLocal, linkUDP:
	default:
		return nil, ib.Errorf("open_device", syscall.EINVAL, "link %q is none of %q, %q and %q", cfg.Link, linkLoop, linkLocal, linkUDP)
	}
	if cfg.Window < 0 {
		return nil, ib.Errorf("open_device", syscall.EINVAL, "a window of %d packets", cfg.Window)
	}
	if cfg.Receivers < 0 || cfg.Receivers > maxReceivers {
		return nil, ib.Errorf("open_device", syscall.EINVAL, "%d receivers: 0 to %d are possible", cfg.Receivers, maxReceivers)
	}
	for _, n := range cfg.Limits.All() {
		if *n < 0 {
			return nil, ib.Errorf("open_device", syscall.EINVAL, "a limit of %d", *n)
		}
	}
	devName, candidates, err := resolve(name, cfg.Addrs)
	if err != nil {
		return nil, err
	}
	for i, addrs := range candidates {
		d, err := openAt(devName, addrs, cfg, len(candidates) > 1)
		if err == nil {
			return d, nil
		}
		if !isInUse(err) || i == len(candidates)-1 {
			return nil, err
		}
	}
	return nil, ib.Errorf("open_device", syscall.EADDRNOTAVAIL, "%q has no address", name)
}

const (
	linkLoop  = "loop"
	linkLocal = "local"
	linkUDP   = "udp"
)

// openAt opens a device at addresses; with alone, only if no process has them yet.
func openAt(name string, addrs []netip.Addr, cfg *provider.Config, alone bool) (*Device, error) {
	tap := new(futureTap)
	dev := new(futureDevice)
	l, member, err := openLink(addrs, cfg, alone, tap, dev)
	if err != nil {
		return nil, opError("open_device", err)
	}
	d := newDevice(name, l, member, cfg)
	d.loopback = cfg.Link != linkUDP
	if err := register(d); err != nil {
		_ = d.closeLink()
		return nil, err
	}
	if cfg.PCAP != "" {
		if d.capture, err = pcap.Create(cfg.PCAP); err != nil {
			unregister(d)
			_ = d.closeLink()
			return nil, opError("open_device", err)
		}
		tap.Writer = d.capture
	}
	if err := d.openManagement(); err != nil {
		unregister(d)
		_ = d.closeLink()
		return nil, err
	}
	d.first.run()
	dev.Store(d)
	if member != nil {
		member.Watch()
	}
	return d, nil
}

// futureTap lets a capture be made after the link: only a device that has its
// address may overwrite a file.
type futureTap struct{ *pcap.Writer }

// futureDevice answers other processes for a device, from when the device is stored in it.
type futureDevice struct{ atomic.Pointer[Device] }

func (l *futureDevice) status(brief bool) any {
	if d := l.Load(); d != nil {
		return d.status(brief)
	}
	return nil
}

func (l *futureDevice) memory(token string) (fd int, length uint64, err error) {
	if d := l.Load(); d != nil {
		return d.shares.get(token)
	}
	return new(shares).get(token)
}

// opError makes an *ib.OpError of any error: with the errno that it wraps, or
// EIO.
func opError(op string, err error) error {
	var already *ib.OpError
	if err == nil || errors.As(err, &already) {
		return err
	}
	errno := syscall.EIO
	if errors.As(err, &errno) {
		return ib.Errorf(op, errno, "%s", strings.TrimSuffix(err.Error(), ": "+errno.Error()))
	}
	return ib.Errorf(op, errno, "%v", err)
}

func openLink(addrs []netip.Addr, cfg *provider.Config, alone bool, tap *futureTap, dev *futureDevice) (link.Link, *host.Member, error) {
	if cfg.Link == linkLoop {
		for _, a := range addrs {
			if _, _, err := sys.Interface(a); err != nil {
				return nil, nil, err
			}
		}
		return newNoLink(addrs), nil, nil
	}
	if cfg.PCAP != "" {
		return openShared(addrs, cfg, alone, tap, dev)
	}
	return openShared(addrs, cfg, alone, nil, dev)
}

func newDevice(name string, l link.Link, member *host.Member, cfg *provider.Config) *Device {
	if name == "" {
		name = "verbena-" + l.Addrs()[0].String()
	}
	d := &Device{
		cfg:    *cfg,
		name:   name,
		base:   time.Now().Add(-time.Second), // 0 means "never" to the protocol core
		addrs:  l.Addrs(),
		limits: withDefaults(cfg.Limits),
		mtu:    l.MTU(),
		link:   l,
		member: member,
	}
	d.work.closing = make(chan struct{})
	d.table = mem.NewTable(mem.TableConfig{MaxRegions: d.limits.MRs + d.limits.MWs, Killed: d.killed, Resumed: d.resumed, Invalidated: d.invalidated, Inside: d.grants.inside, Left: d.left})
	d.freer, _ = l.(link.Freer)
	// No number is 0, which programs take for "none".
	if none := func(i uint32) bool { return i == 0 }; member != nil {
		d.srqs = mem.NewSharedSlots[SRQ](d.limits.SRQs, none, member.Key())
	} else {
		d.srqs = mem.NewSlots[SRQ](d.limits.SRQs, none, mem.RandomPermKey())
	}
	var places *host.Places
	if member != nil {
		places = member.Places()
	}
	d.first = d.addShard(l, places)
	d.spread.most = receivers(cfg, member != nil)
	d.patience = datagramPatience
	d.dm = mem.NewDevicePool(uint64(d.maxDM()))
	d.scatter = scatterWanted()
	d.events.init()
	return d
}

// StartPoller has the runtime start its network poller, with descriptors from a number on: for
// the backend of the C library, which shares its process with a program in C
// (internal/sys/poller.go).
func StartPoller(above int) error { return sys.StartPoller(above) }

func (d *Device) now() qp.Time { return time.Since(d.base) }

// Close closes the device. It fails with EBUSY while objects are left. On any other error
// the device is closed all the same; its packet capture may not be complete, for one.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		return nil
	}
	if d.counts != (objectCounts{}) {
		c := d.counts
		d.mu.Unlock()
		return ib.Errorf("close_device", syscall.EBUSY, "still open: %d QPs, %d CQs, %d MRs, %d MWs, %d PDs, %d AHs, %d SRQs, %d channels, %d XRC domains, %d bytes of device memory, %d DMA handles",
			c.qps, c.cqs, c.mrs, c.mws, c.pds, c.ahs, c.srqs, c.channels, c.xrcds, c.dm, c.dmahs)
	}
	d.closed = true
	d.mu.Unlock()
	unregister(d)
	d.work.close()
	d.advisor.close()
	d.stop()
	d.management.close()
	d.closeProxies()
	err := errors.Join(d.closeLink(), d.dm.Close())
	d.events.close()
	if d.capture != nil {
		if e := d.capture.Close(); err == nil {
			err = opError("close_device", e)
		}
	}
	return err
}

// closeLink closes the link, and only then leaves the other processes: one of them may take the
// place over, and read its sockets.
func (d *Device) closeLink() error {
	err := d.link.Close()
	if d.member != nil {
		err = errors.Join(err, d.member.Close())
	}
	return err
}

// countLocked changes a number of objects by one, up to its limit.
func (d *Device) countLocked(op string, n *int, limit int) error { return d.addLocked(op, n, 1, limit) }

// addLocked changes a number of objects, or of bytes, up to its limit.
func (d *Device) addLocked(op string, n *int, by, limit int) error {
	if d.closed {
		return ib.Errorf(op, syscall.ENODEV, "the device is closed")
	}
	if by > limit-*n {
		return ib.Errorf(op, syscall.ENOMEM, "the device's limit of %d is reached", limit)
	}
	*n += by
	d.publishLocked()
	if all, over := d.overLimitLocked(n); over {
		*n -= by
		d.publishLocked()
		return ib.Errorf(op, syscall.ENOMEM, "the device's limit of %d is reached, by all processes that share it", all)
	}
	return nil
}

// Attr describes the device.
func (d *Device) Attr() ib.DeviceAttr {
	links := []string{}
	if d.loopback {
		links = append(links, linkLoop)
	}
	if _, shared := d.link.(*link.Shared); shared && d.cfg.Link != linkUDP {
		links = append(links, linkLocal)
	}
	if _, none := d.link.(*noLink); !none && d.cfg.Link != linkLocal {
		links = append(links, linkUDP)
	}
	guid := GUID(d.addrs[0])
	return ib.DeviceAttr{
		Name: d.name, FWVersion: Version, NodeGUID: guid, SysImageGUID: guid,
		VendorID: 0, VendorPartID: 0, HWVersion: 1, PhysPortCnt: 1,
		Caps: ib.CapSRQResize | ib.CapRCRNRNak | ib.CapBadPKeyCntr | ib.CapBadQKeyCntr | ib.CapCurrQPState |
			ib.CapSysImageGUID | ib.CapAtomicWrite | ib.CapFlushGlobal | ib.CapFlushPersistent | ib.CapXRC |
			ib.CapMemWindow | ib.CapMemWindowType2B,
		AtomicCap: ib.AtomicGlob, PageSizeCap: ^uint64(4095),
		MaxMRSize: 1 << 47, MaxQP: d.limits.QPs, MaxQPWR: d.limits.QPWR, MaxSGE: maxSGE, MaxSGERd: maxSGE,
		MaxInlineData: maxInline, MaxCQ: d.limits.CQs, MaxCQE: d.limits.CQE, MaxMR: d.limits.MRs, MaxMW: d.limits.MWs, MaxPD: d.limits.PDs,
		MaxAH: d.limits.AHs, MaxSRQ: d.limits.SRQs, MaxSRQWR: d.limits.SRQWR, MaxSRQSGE: maxSGE,
		MaxQPRDAtom: qp.MaxRDAtomic, MaxQPInitRDAtom: qp.MaxRDAtomic, MaxResRDAtom: qp.MaxRDAtomic * d.limits.QPs,
		MaxMcastGrp: maxGroups, MaxMcastQPAttach: maxGroupMembers, MaxTotalMcastQPAttach: maxAttachments,
		MaxPKeys: 1, LocalCAAckDelay: 15, MemoryLock: d.cfg.Lock, Links: links, Offloads: d.link.Offloads(),
		StalePinnedRange: stalePinnedRange(), DMABuf: map[bool]string{false: "dynamic", true: "pinned"}[d.cfg.PinDMABuf], MaxDMSize: uint64(d.maxDM()),
	}
}

// stalePinnedRange describes what happens to a pinned region whose memory is unmapped.
func stalePinnedRange() string {
	if mem.PagingMeans().Notifier == "userfaultfd" {
		return "told by the kernel: what is unmapped, mapped anew or discarded under a region fails from then on"
	}
	return "at access: unmapped or truncated memory fails; memory mapped anew at the same address is not noticed"
}

// Version is what devinfo shows as firmware version.
const Version = "0.1.0"

// GUID makes a stable node GUID of a device's first address: locally administered,
// unicast (EUI-64).
func GUID(first netip.Addr) uint64 {
	h := fnv.New64a()
	b := first.As16()
	_, _ = h.Write(b[:])
	return h.Sum64()&^(3<<56) | 2<<56
}

// Port describes port 1.
func (d *Device) Port(port int) (ib.PortAttr, error) {
	if port != 1 {
		return ib.PortAttr{}, ib.Errorf("query_port", syscall.EINVAL, "port %d: the device has port 1 alone", port)
	}
	sum := d.counters.sum()
	return ib.PortAttr{State: ib.PortActive, MaxMTU: ib.MTU4096, ActiveMTU: mtuOf(d.mtu), GIDTableLen: len(d.addrs),
		PKeyTableLen: 1, MaxMsgSize: qp.MaxMsgSize, LinkLayer: "Ethernet", Interface: interfaceOf(d.addrs[0]),
		BadPKeyCntr:  uint32(d.drops[link.DropPKey].Load()),
		QKeyViolCntr: uint32(sum[qp.CntDropQKey])}, nil
}

// mtuOf returns the largest MTU of at most n bytes.
func mtuOf(n int) ib.MTU {
	m := ib.MTU4096
	for m > ib.MTU256 && m.Bytes() > n {
		m--
	}
	return m
}

// GIDs returns one GID for each address.
func (d *Device) GIDs() []ib.GID {
	g := make([]ib.GID, len(d.addrs))
	for i, a := range d.addrs {
		g[i] = ib.GIDFromAddr(a)
	}
	return g
}

// NextEvent waits for an asynchronous event.
func (d *Device) NextEvent(ctx context.Context) (ib.AsyncEvent, error) { return d.events.next(ctx) }
