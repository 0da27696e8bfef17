package nvme

// Log pages (NVMe Base 1.4, 5.14). A page is made whole, and the part that the host asks for is copied out of it; what
// lies behind its end reads as zeros.

import (
	"slices"
	"sync/atomic"
)

// Log pages.
const (
	LogErrors            uint8 = 0x01
	LogSMART             uint8 = 0x02
	LogFirmware          uint8 = 0x03
	LogChangedNamespaces uint8 = 0x04
	LogCommands          uint8 = 0x05
	LogDiscovery         uint8 = 0x70
)

// LogPageCommand makes a get log page command, without its data pointer: n bytes, a multiple of 4, from an offset. If
// keep is set, events of the page stay masked.
func LogPageCommand(page uint8, offset uint64, n int, keep bool) Command {
	dwords := uint32(n/4 - 1)
	c := Command{Opcode: AdminGetLogPage, NSID: NSIDAll,
		CDW10: uint32(page) | dwords<<16, CDW11: dwords >> 16, CDW12: uint32(offset), CDW13: uint32(offset >> 32)}
	if keep {
		c.CDW10 |= logKeepEvent
	}
	return c
}

const logKeepEvent = 1 << 15 // CDW10: retain asynchronous event

// logPageBytes returns the length that the host asks for.
func (c *Controller) logPageBytes(cmd *Command) (int, Status) {
	dwords := uint64(cmd.CDW10>>16) | uint64(cmd.CDW11&0xffff)<<16
	n := (dwords + 1) * 4
	if n > uint64(c.MaxTransfer()) {
		return 0, StatusInvalidField | StatusDNR
	}
	return int(n), StatusSuccess
}

func (c *Controller) getLogPage(cmd *Command, data [][]byte) Status {
	n, st := c.logPageBytes(cmd)
	if st != StatusSuccess {
		return st
	}
	if !holds(data, n) {
		return StatusDataSGLLength | StatusDNR
	}
	id := uint8(cmd.CDW10)
	offset := uint64(cmd.CDW12) | uint64(cmd.CDW13)<<32
	if offset%4 != 0 {
		return StatusInvalidField | StatusDNR
	}
	keep := cmd.CDW10&logKeepEvent != 0
	if !keep {
		c.seen(id) // before the page is made, so that what comes meanwhile is reported again
	}
	page, st := c.logPage(id, cmd.NSID, keep || offset > 4*maxChanged)
	if st != StatusSuccess {
		return st
	}
	if offset > uint64(len(page)) {
		return StatusInvalidField | StatusDNR
	}
	rest := page[offset:]
	cur := pieces{rest: data}
	cur.scatter(rest[:min(n, len(rest))])
	for n -= min(n, len(rest)); n > 0; {
		part := min(n, len(zeros))
		cur.scatter(zeros[:part])
		n -= part
	}
	return StatusSuccess
}

// logPage makes a whole page. The list of changed namespaces begins anew then, unless keep is set.
func (c *Controller) logPage(id uint8, nsid uint32, keep bool) ([]byte, Status) {
	if (id == LogDiscovery) != c.sub.cfg.Discovery {
		return nil, StatusInvalidLogPage | StatusDNR
	}
	switch id {
	case LogErrors:
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.errors.page(), StatusSuccess
	case LogSMART:
		if nsid != 0 && nsid != NSIDAll {
			return nil, StatusInvalidField | StatusDNR // LPA: not by namespace
		}
		return c.smartPage(), StatusSuccess
	case LogFirmware:
		b := make([]byte, 512)
		b[0] = 1
		putText(b[8:16], c.sub.cfg.Firmware)
		return b, StatusSuccess
	case LogChangedNamespaces:
		c.mu.Lock()
		defer c.mu.Unlock()
		page := c.changed.page()
		if !keep {
			c.changed = changedList{}
		}
		return page, StatusSuccess
	case LogCommands:
		return c.commandsPage(), StatusSuccess
	case LogDiscovery:
		return c.sub.discoveryPage(), StatusSuccess
	}
	return nil, StatusInvalidLogPage | StatusDNR
}

// errorLog is the last commands that failed.
type errorLog struct {
	count uint64 // of all errors
	ring  [errorEntries]errorEntry
}

type errorEntry struct {
	number uint64
	queue  uint16
	cid    uint16
	status Status
	lba    uint64
	nsid   uint32
}

// unknownQueue stands where the executor cannot know the queue.
const unknownQueue = 0xffff

// logError notes a command that failed. Compare failures and aborts are answers, not errors.
func (c *Controller) logError(admin bool, cmd *Command, st Status) {
	if code := st.Code(); code == StatusCompareFailure || code == StatusAbortRequested {
		return
	}
	c.counts.errors.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	l := &c.errors
	e := &l.ring[l.count%errorEntries]
	l.count++
	*e = errorEntry{number: l.count, cid: cmd.CID, status: st, nsid: cmd.NSID}
	if !admin {
		e.queue, e.lba = unknownQueue, cmd.SLBA()
	}
}

// page returns the entries, the newest first.
func (l *errorLog) page() []byte {
	b := make([]byte, 64*errorEntries)
	for i := range min(l.count, errorEntries) {
		e := &l.ring[(l.count-1-i)%errorEntries]
		p := b[64*i:]
		le.PutUint64(p[0:], e.number)
		le.PutUint16(p[8:], e.queue)
		le.PutUint16(p[10:], e.cid)
		le.PutUint16(p[12:], uint16(e.status)<<1)
		le.PutUint16(p[14:], 0xffff) // which field was wrong: not said
		le.PutUint64(p[16:], e.lba)
		le.PutUint32(p[24:], e.nsid)
	}
	return b
}

// changedList is the namespaces that changed since the host last looked.
type changedList struct {
	ids  []uint32 // sorted
	many bool     // more than the page can hold
}

const maxChanged = 1024

func (l *changedList) add(nsid uint32) {
	i, found := slices.BinarySearch(l.ids, nsid)
	switch {
	case found || l.many:
	case len(l.ids) == maxChanged:
		l.ids, l.many = nil, true
	default:
		l.ids = slices.Insert(l.ids, i, nsid)
	}
}

func (l *changedList) page() []byte {
	b := make([]byte, 4*maxChanged)
	if l.many {
		le.PutUint32(b, NSIDAll)
	}
	for i, id := range l.ids {
		le.PutUint32(b[4*i:], id)
	}
	return b
}

// commandsPage returns which commands are supported, and what they change.
func (c *Controller) commandsPage() []byte {
	b := make([]byte, 4096)
	for op := range numOpcodes {
		admin, io := &adminCommands[op], &ioCommands[op]
		own := !admin.transport || !c.fabrics()
		if keepAlive := op == int(AdminKeepAlive); own && (!keepAlive || c.fabrics()) {
			le.PutUint32(b[4*op:], admin.effects)
		}
		le.PutUint32(b[1024+4*op:], io.effects)
	}
	return b
}

// smartCounters counts what a controller does.
type smartCounters struct {
	reads, writes               atomic.Uint64
	sectorsRead, sectorsWritten atomic.Uint64 // of 512 bytes
	mediaErrors, errors         atomic.Uint64
}

func (s *smartCounters) read(n int64)  { s.reads.Add(1); s.sectorsRead.Add(uint64(n) / 512) }
func (s *smartCounters) write(n int64) { s.writes.Add(1); s.sectorsWritten.Add(uint64(n) / 512) }

// smartCounts is smartCounters at one time.
type smartCounts struct{ reads, writes, sectorsRead, sectorsWritten, mediaErrors, errors uint64 }

func (s *smartCounters) load() smartCounts {
	return smartCounts{s.reads.Load(), s.writes.Load(), s.sectorsRead.Load(), s.sectorsWritten.Load(), s.mediaErrors.Load(), s.errors.Load()}
}

func (s *smartCounts) add(o smartCounts) {
	s.reads += o.reads
	s.writes += o.writes
	s.sectorsRead += o.sectorsRead
	s.sectorsWritten += o.sectorsWritten
	s.mediaErrors += o.mediaErrors
	s.errors += o.errors
}

// smartPage returns the health of the subsystem, whose controllers count for themselves.
func (c *Controller) smartPage() []byte {
	s := c.sub
	s.mu.Lock()
	sum := s.past
	for _, other := range s.controllers {
		sum.add(other.counts.load())
	}
	s.mu.Unlock()

	b := make([]byte, 512)
	le.PutUint16(b[1:], compositeTemperature)
	b[3], b[4] = 100, 10 // spare, and its threshold, in per cent
	thousands := func(sectors uint64) uint64 { return (sectors + 999) / 1000 }
	le.PutUint64(b[32:], thousands(sum.sectorsRead))
	le.PutUint64(b[48:], thousands(sum.sectorsWritten))
	le.PutUint64(b[64:], sum.reads)
	le.PutUint64(b[80:], sum.writes)
	le.PutUint64(b[160:], sum.mediaErrors)
	le.PutUint64(b[176:], sum.errors)
	return b
}
