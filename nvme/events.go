package nvme

// Async events (NVMe Base 1.4, 5.2). The host leaves a few requests; each completes with one event. After an event
// has been reported, others of its log page are not, until the host has read that page.

import "slices"

// EventType is the type of an async event.
type EventType uint8

// Types of events.
const (
	EventError  EventType = 0
	EventHealth EventType = 1
	EventNotice EventType = 2
)

// What errors and notices are about.
const (
	ErrorInvalidDoorbell      uint8 = 0 // a doorbell of a queue that there is not
	ErrorInvalidDoorbellValue uint8 = 1
	ErrorDiagnostic           uint8 = 2
	ErrorPersistent           uint8 = 3 // an internal error that stays
	ErrorTransient            uint8 = 4

	NoticeNamespace uint8 = 0x00
	NoticeDiscovery uint8 = 0xf0
)

// Bits of the feature FeatureAsyncEvents, and of OAES in identify data.
const (
	AsyncNamespaces uint32 = 1 << 8
	AsyncDiscovery  uint32 = 1 << 31
)

// Event is what the result of an async event request says.
type Event struct {
	Type    EventType
	Info    uint8
	LogPage uint8 // to be read
}

// ParseEvent reads the result of an async event request.
func ParseEvent(result uint64) Event {
	return Event{Type: EventType(result & 7), Info: uint8(result >> 8), LogPage: uint8(result >> 16)}
}

func (e Event) result() uint64 {
	return uint64(e.Type) | uint64(e.Info)<<8 | uint64(e.LogPage)<<16
}

// events is the requests that wait for events, and the events that wait for requests.
type events struct {
	requests []uint16 // CIDs
	pending  []Event
	masked   [256]bool // log pages of events that were reported or are pending
}

// asyncSupported returns the notices that this controller can send.
func (c *Controller) asyncSupported() uint32 {
	if c.sub.cfg.Discovery {
		return AsyncDiscovery
	}
	return AsyncNamespaces
}

// Report reports an event to the host. Transports report what they notice of queues and doorbells.
func (c *Controller) Report(e Event) {
	c.mu.Lock()
	var done Completion
	ok := false
	if !c.closed.Load() && !c.events.masked[e.LogPage] {
		c.events.masked[e.LogPage] = true
		c.events.pending = append(c.events.pending, e)
		done, ok = c.events.match()
	}
	c.mu.Unlock()
	if ok {
		c.complete(done)
	}
}

// match takes an event and a request for it, if there are both.
func (e *events) match() (Completion, bool) {
	if len(e.pending) == 0 || len(e.requests) == 0 {
		return Completion{}, false
	}
	done := Completion{CID: e.requests[0], Result: e.pending[0].result()}
	e.requests, e.pending = slices.Delete(e.requests, 0, 1), slices.Delete(e.pending, 0, 1)
	return done, true
}

// complete hands a completion to the transport, unless the controller is closed.
func (c *Controller) complete(done Completion) {
	c.notify.Lock()
	defer c.notify.Unlock()
	if !c.closed.Load() && c.cfg.Complete != nil {
		c.cfg.Complete(done)
	}
}

// asyncEventRequest completes with the oldest event, or waits for one.
func (c *Controller) asyncEventRequest(cmd *Command) (uint64, Status) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.events.requests) >= asyncRequests {
		return 0, StatusAsyncLimit | StatusDNR
	}
	c.events.requests = append(c.events.requests, cmd.CID)
	if done, ok := c.events.match(); ok {
		return done.Result, StatusSuccess // of this request: none waits while events are pending
	}
	return 0, statusWaits
}

// seen ends the masking of events whose log page the host reads.
func (c *Controller) seen(page uint8) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events.masked[page] = false
	c.events.pending = slices.DeleteFunc(c.events.pending, func(e Event) bool { return e.LogPage == page })
}

// abort aborts an async event request. Every other command is executed at once or not to be stopped, which bit 0 of
// the result says.
func (c *Controller) abort(cmd *Command) (uint64, Status) {
	sq, cid := uint16(cmd.CDW10), uint16(cmd.CDW10>>16)
	if sq != 0 {
		return 1, StatusSuccess
	}
	c.mu.Lock()
	i := slices.Index(c.events.requests, cid)
	if i >= 0 {
		c.events.requests = slices.Delete(c.events.requests, i, i+1)
	}
	c.mu.Unlock()
	if i < 0 {
		return 1, StatusSuccess
	}
	c.complete(Completion{CID: cid, Status: StatusAbortRequested})
	return 0, StatusSuccess
}

// namespaceChanged notes that a namespace came, went or changed.
func (c *Controller) namespaceChanged(nsid uint32) {
	c.mu.Lock()
	c.changed.add(nsid)
	wanted := c.features.value[FeatureAsyncEvents]&AsyncNamespaces != 0
	c.mu.Unlock()
	if wanted {
		c.Report(Event{EventNotice, NoticeNamespace, LogChangedNamespaces})
	}
}

// discoveryChanged notes that the discovery log page is another.
func (c *Controller) discoveryChanged() {
	c.mu.Lock()
	wanted := c.features.value[FeatureAsyncEvents]&AsyncDiscovery != 0
	c.mu.Unlock()
	if wanted {
		c.Report(Event{EventNotice, NoticeDiscovery, LogDiscovery})
	}
}
