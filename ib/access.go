package ib

import "strings"

// Access is the set of rights of a memory region, with the bits of
// IBV_ACCESS_*. Local reading is always allowed. As an attribute of a queue pair
// it limits its peer: both the region and the queue pair must grant a right.
type Access uint32

const (
	AccessLocalWrite   Access = 1 << 0 // the device may write on behalf of local work requests
	AccessRemoteWrite  Access = 1 << 1 // peers may RDMA WRITE; needs AccessLocalWrite
	AccessRemoteRead   Access = 1 << 2 // peers may RDMA READ
	AccessRemoteAtomic Access = 1 << 3 // peers may do atomics; needs AccessLocalWrite
	AccessMWBind       Access = 1 << 4 // memory windows may be bound to the region
	AccessZeroBased    Access = 1 << 5 // addresses in requests are offsets from the region's start
	AccessOnDemand     Access = 1 << 6 // pages are not pinned but faulted in when accessed
	// AccessFlushGlobal lets peers FLUSH the region to global visibility.
	AccessFlushGlobal Access = 1 << 8
	// AccessFlushPersistent lets peers FLUSH the region to persistence. Its memory
	// must be a file mapped shared, on a file system that has storage.
	AccessFlushPersistent Access = 1 << 9
	// AccessRelaxedOrdering is a hint; a software device keeps the order anyway.
	AccessRelaxedOrdering Access = 1 << 20
	// AccessRemoteInvalidate is Verbena's own: peers may invalidate the region's
	// key, by SEND with invalidate. Indirect keys and type 2 windows always can be
	// invalidated; a region only with this right.
	AccessRemoteInvalidate Access = 1 << 30
)

// AccessFlush is the set of rights that let a peer FLUSH the region.
const AccessFlush = AccessFlushGlobal | AccessFlushPersistent

// AccessRemote is the set of rights that let a peer touch the region.
const AccessRemote = AccessRemoteWrite | AccessRemoteRead | AccessRemoteAtomic

var accessNames = []struct {
	bit  Access
	name string
}{
	{AccessLocalWrite, "local-write"},
	{AccessRemoteWrite, "remote-write"},
	{AccessRemoteRead, "remote-read"},
	{AccessRemoteAtomic, "remote-atomic"},
	{AccessMWBind, "mw-bind"},
	{AccessZeroBased, "zero-based"},
	{AccessOnDemand, "on-demand"},
	{AccessFlushGlobal, "flush-global"},
	{AccessFlushPersistent, "flush-persistent"},
	{AccessRelaxedOrdering, "relaxed-ordering"},
	{AccessRemoteInvalidate, "remote-invalidate"},
}

// String names the rights, joined by "|"; no rights are "local-read".
func (a Access) String() string {
	if a == 0 {
		return "local-read"
	}
	var names []string
	for _, n := range accessNames {
		if a&n.bit != 0 {
			names = append(names, n.name)
			a &^= n.bit
		}
	}
	if a != 0 {
		names = append(names, "unknown")
	}
	return strings.Join(names, "|")
}
