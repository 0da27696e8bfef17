package main

// #include <errno.h>
// #include "call.h"
import "C"

import (
	"net/netip"
	"slices"
	"sync"

	"github.com/verbena-rdma/verbena/ib"
)

type addrList = []netip.Addr

// openContext is one ibv_context. Closing it closes the objects that the program made in it.
type openContext struct {
	shared *shared
	cookie C.uint64_t // the front's object
	name   string     // other processes import it by this name; if it is imported, the original's name

	mu      sync.Mutex // guards objects
	objects map[uint64]closer
}

// closer is an object of a context.
type closer interface{ close() error }

// contextTable is a table whose objects can be listed.
type contextTable struct {
	table[openContext]
	mu   sync.Mutex // guards list
	list []*openContext
}

func (t *contextTable) all() []*openContext {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.list)
}

var contexts = contextTable{table: table[openContext]{kind: C.VBE_CONTEXT}}

//export vbe_open
func vbe_open(name *C.char, cookie C.uint64_t) C.int64_t {
	s, err := acquire(goString(name))
	if err != nil {
		return failed(err)
	}
	c := newContext(s, cookie)
	c.name = s.dev.Publish(c.find)
	return c.enter()
}

func newContext(s *shared, cookie C.uint64_t) *openContext {
	return &openContext{shared: s, cookie: cookie, objects: map[uint64]closer{}}
}

// enter gives a context its handle.
func (c *openContext) enter() C.int64_t {
	h := contexts.add(c)
	if h == 0 {
		c.shared.dev.Unpublish(c.name)
		_ = c.shared.release() // the caller gets ENOMEM in any case
		return -C.int64_t(C.ENOMEM)
	}
	contexts.mu.Lock()
	contexts.list = append(contexts.list, c)
	contexts.mu.Unlock()
	return C.int64_t(h)
}

//export vbe_close
func vbe_close(h C.uint64_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil || !contexts.remove(uint64(h)) {
		return failed(errStale)
	}
	contexts.mu.Lock()
	contexts.list = slices.DeleteFunc(contexts.list, func(o *openContext) bool { return o == c })
	contexts.mu.Unlock()
	c.shared.dev.Unpublish(c.name)
	c.closeAll()
	return result(c.shared.release())
}

// closeOrder lists the kinds of objects, each before the kinds that it may use.
var closeOrder = []uint64{C.VBE_QP, C.VBE_AH, C.VBE_SRQ, C.VBE_CQ, C.VBE_XRCD, C.VBE_MKEY, C.VBE_MW, C.VBE_MR, C.VBE_DMAH, C.VBE_DM, C.VBE_PD}

// closeAll closes the objects that the program has not destroyed.
func (c *openContext) closeAll() {
	for _, kind := range closeOrder {
		for c.closeSome(kind) {
		}
	}
}

// closeSome closes the objects of a kind. It reports whether another call may close more:
// some were in use by objects that this call has closed.
func (c *openContext) closeSome(kind uint64) bool {
	c.mu.Lock()
	var left []uint64
	for h := range c.objects {
		if h>>32 == kind {
			left = append(left, h)
		}
	}
	c.mu.Unlock()
	closed := 0
	for _, h := range left {
		if c.destroy(h) == nil { // nobody would get the error
			closed++
		}
	}
	return closed > 0 && closed < len(left)
}

func (c *openContext) keep(h uint64, o closer) {
	c.mu.Lock()
	c.objects[h] = o
	c.mu.Unlock()
}

// destroy closes an object and removes its handle. It fails if the object is in use.
func (c *openContext) destroy(h uint64) error {
	c.mu.Lock()
	o := c.objects[h]
	c.mu.Unlock()
	if o == nil {
		return errStale
	}
	if err := o.close(); err != nil {
		return err
	}
	c.mu.Lock()
	delete(c.objects, h)
	c.mu.Unlock()
	tables[h>>32].remove(h)
	return nil
}

// object is an object of any kind in a context.
type object interface {
	closer
	owner() *openContext
	abolish() error // destroys the original of an imported object
}

// inContext is embedded in all objects.
type inContext struct{ ctx *openContext }

func (o inContext) owner() *openContext { return o.ctx }
func (inContext) abolish() error        { return nil }

// object is get, for code that handles all kinds.
func (t *table[T]) object(h uint64) object {
	if o := t.get(h); o != nil {
		return any(o).(object)
	}
	return nil
}

// tables has the table of each kind of object.
var tables = map[uint64]interface {
	object(h uint64) object
	remove(h uint64) bool
}{C.VBE_PD: &pds, C.VBE_MR: &mrs, C.VBE_MW: &mws, C.VBE_CQ: &cqs, C.VBE_SRQ: &srqs, C.VBE_XRCD: &xrcds, C.VBE_QP: &qps, C.VBE_DM: &dms, C.VBE_AH: &ahs, C.VBE_MKEY: &mkeys, C.VBE_DMAH: &dmahs}

// objectOf returns the object of a handle of any kind, or nil.
func objectOf(h uint64) object {
	if t := tables[h>>32]; t != nil {
		return t.object(h)
	}
	return nil
}

// ownerOf returns the context that an object belongs to, or nil if there is no such object.
func ownerOf(h uint64) *openContext {
	if o := objectOf(h); o != nil {
		return o.owner()
	}
	return nil
}

//export vbe_destroy
func vbe_destroy(h C.uint64_t) C.int64_t {
	o := objectOf(uint64(h))
	if o == nil {
		return failed(errStale)
	}
	if err := o.abolish(); err != nil {
		return failed(err)
	}
	return result(o.owner().destroy(uint64(h)))
}

// vbe_has returns 0 if an object belongs to a context.
//
//export vbe_has
func vbe_has(h, object C.uint64_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil || ownerOf(uint64(object)) != c {
		return failed(errStale)
	}
	return 0
}

// newHandle enters an object into its table and its context. If the table is full, it
// closes the object.
func newHandle[T any, P interface {
	*T
	closer
}](t *table[T], c *openContext, o P) C.int64_t {
	h := t.add((*T)(o))
	if h == 0 {
		_ = o.close() // the caller gets ENOMEM in any case
		return -C.int64_t(C.ENOMEM)
	}
	c.keep(h, o)
	return C.int64_t(h)
}

//export vbe_query_device
func vbe_query_device(h C.uint64_t, to *C.struct_vbe_device_attr) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	*to = deviceAttr(c.shared.dev.Attr(), c.shared.dev.ODPCaps())
	return 0
}

//export vbe_query_port
func vbe_query_port(h C.uint64_t, port C.uint32_t, to *C.struct_vbe_port_attr) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	a, err := c.shared.dev.Port(int(port))
	if err != nil {
		return failed(err)
	}
	*to = C.struct_vbe_port_attr{state: C.int32_t(a.State), max_mtu: C.int32_t(a.MaxMTU), active_mtu: C.int32_t(a.ActiveMTU),
		gids: C.int32_t(a.GIDTableLen), pkeys: C.int32_t(a.PKeyTableLen), max_msg: C.uint32_t(a.MaxMsgSize),
		bad_pkey: C.uint32_t(a.BadPKeyCntr), bad_qkey: C.uint32_t(a.QKeyViolCntr)}
	setChars(to._interface[:], a.Interface)
	return 0
}

//export vbe_gids
func vbe_gids(h C.uint64_t, to *C.uint8_t, room C.int64_t) C.int64_t {
	c := contexts.get(uint64(h))
	if c == nil {
		return failed(errStale)
	}
	return putGIDs(c.shared.dev.GIDs(), to, room)
}

// vbe_gids_of is vbe_gids for a device that need not be open.
//
//export vbe_gids_of
func vbe_gids_of(name *C.char, to *C.uint8_t, room C.int64_t) C.int64_t {
	all, err := list()
	if err != nil {
		return failed(err)
	}
	var gids []ib.GID
	for _, d := range all {
		if d.name == goString(name) {
			for _, a := range d.config.Addrs {
				gids = append(gids, ib.GIDFromAddr(a))
			}
		}
	}
	return putGIDs(gids, to, room)
}

// putGIDs writes as many GIDs as there is room for, and returns how many.
func putGIDs(gids []ib.GID, to *C.uint8_t, room C.int64_t) C.int64_t {
	n := min(len(gids), int(room))
	out := view(to, n*len(ib.GID{}))
	for i, g := range gids[:n] {
		for j, b := range g {
			out[i*len(g)+j] = C.uint8_t(b)
		}
	}
	return C.int64_t(n)
}
