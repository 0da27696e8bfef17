// Package verbs is RDMA for Go: devices, memory regions, queue pairs and
// completions, in the nouns of InfiniBand verbs and the manners of Go.
//
// The device behind it is software. It needs no kernel module, no hardware and
// no privilege, speaks RoCE v2 to any peer, and moves bytes between queue pairs
// of one process without a packet. What the manual pages ibv_reg_mr(3),
// ibv_create_qp(3) and so on say holds here; the comment of each method names
// its page and the errnos that the method returns.
//
// # A tour
//
// Everything begins with a device, which stands on an IP address:
//
//	dev, err := verbs.Open("", nil)             // the first free of 127.77.0.1 to .254
//	dev, err := verbs.Open("192.0.2.7", nil)    // or one address of this host
//
// A protection domain ([PD]) holds what may work together. Memory is registered
// in a domain; then the device may access it. The memory region ([MR]) has a key
// for the program's own requests and a key for the peers':
//
//	pd, err := dev.AllocPD()
//	buf := make([]byte, 1<<20)
//	mr, err := pd.RegMR(buf, verbs.AccessLocalWrite|verbs.AccessRemoteWrite)
//
// A queue pair ([QP]) takes work requests and reports what became of them to
// completion queues ([CQ]), one for its sends and one for its receives, which
// may be the same:
//
//	cq, err := dev.CreateCQ(128, nil)
//	qp, err := pd.CreateQP(&verbs.QPConfig{
//		Type:   verbs.RC,
//		SendCQ: cq,
//		RecvCQ: cq,
//		Cap:    verbs.QPCap{MaxSendWR: 64, MaxRecvWR: 64, MaxSendSGE: 1, MaxRecvSGE: 1},
//	})
//
// Two queue pairs are connected by telling each about the other. How the two
// [Endpoint] values reach the other side is the program's business; they
// marshal to JSON. [QP.Connect] does with defaults what [QP.Modify], or
// [QP.ToInit], [QP.ToRTR] and [QP.ToRTS], do step by step:
//
//	err = qp.Connect(remote, nil) // remote is the peer's qp.Endpoint()
//
// Work is posted, runs without the program, and its completion is polled:
//
//	n, err := qp.PostSend([]verbs.SendWR{{
//		ID:         1,
//		Op:         verbs.OpRDMAWrite,
//		Flags:      verbs.SendSignaled,
//		SGL:        []verbs.SGE{mr.SGE(0, 4096)},
//		RemoteAddr: peer.Addr, // the peer's mr.Addr() and mr.RKey(), which
//		RKey:       peer.RKey, // the peer has sent as it has sent its Endpoint
//	}})
//	wcs := make([]verbs.WC, 16)
//	n, err = cq.Poll(wcs) // 0 if nothing has completed yet
//
// A program that would rather sleep than poll gives the completion queue a
// [Channel], arms it with [CQ.RequestNotify] and waits in [Channel.Next].
//
// The program closes what it has opened, children first: queue pairs before their
// completion queues, regions and domains before the device. Close of an object that
// is still in use fails with EBUSY and changes nothing. Calls on a closed object fail
// with EINVAL, or find nothing.
//
// # Three ways to hear of trouble
//
// A call fails: it returns an *[OpError], which wraps an errno. The call has found
// something wrong at once: an argument out of range, a full queue, a queue pair in
// the wrong state. Nothing has changed, except that a call that posts returns how
// many requests it took before the bad one. A call on a nil pointer, as an unchecked
// error leaves behind, fails with EINVAL too, if the method returns an error.
//
//	if errors.Is(err, syscall.ENOMEM) { … } // the queue is full: poll, then post again
//
// A work request fails after it was accepted: it ends in a completion whose Status
// is not [WCSuccess]. Only its execution could show the reason: a key that the peer
// refuses, a peer that does not answer. The queue pair is in the error state from
// then on (UD and UC: its send queue is). All requests behind the failed one are
// flushed: each has a completion with the status [WCWRFlushErr]. The first failure
// is the cause; the flushes only follow. The Err method of [WC] makes an error of a
// failed completion.
//
// An asynchronous event belongs to no request of this program: the device refused a
// peer's request, a shared receive queue ran low, a completion queue overflowed.
// [Device.NextEvent] returns events; a program that never calls it loses nothing else.
//
// # Concurrency
//
// All methods of all types may be called from any number of goroutines at the
// same time. Requests of one queue pair are executed in the order in which they
// were posted. If several goroutines post to one queue pair at the same time, the
// requests of one call may have requests of others between them. One completion is
// delivered to one Poll.
//
// The Post methods never wait. These calls do:
//
//   - Calls that take a context wait for an event, or until the context is done.
//   - [CQ.Poll] waits for the page of a short message that goes to on-demand memory,
//     if that page has to be fetched (NoScatterToCQE in [QPConfig]).
//   - [PD.AdviseMR] with [AdviseFlush] waits for the pages.
//   - [CQ.Close] waits until the queue's events are acknowledged.
//   - [Device.Close] waits for storage that a peer's FLUSH has set to work.
//   - [MR.Close], [MR.Rereg], [QP.Modify] and [QP.Close] wait for accesses that are
//     under way: microseconds, unless a peer process on this host is stopped in the
//     middle of one.
//   - Registering pinned memory waits for its pages.
//   - [Open], [Resources] and a few others ask other processes of this host.
//
// Poll and the Post methods do not allocate. Keep the slices that you hand to them
// and use them again: a slice literal in the argument is an allocation of the caller's.
//
// # Memory
//
// A region keeps its slice alive until [MR.Close] has returned, even if the program
// has dropped both. Registering copies and moves nothing. The collector does not
// move heap memory, so the address of a registered slice stays what it is;
// [MR.Addr] returns it and [MR.SGE] makes pieces of it.
//
// Goroutine stacks do move. [PD.RegMR] makes its argument escape to the heap
// and is therefore safe with any slice; never hand the address of a Go variable
// to [PD.RegMRAddr], which is for memory outside the Go heap (mmap, C, devices).
// Nor may registered memory contain Go pointers: the device writes it behind
// the collector's back.
//
// # Memory on demand
//
// With [AccessOnDemand] nothing is pinned. The range need not be mapped yet, may
// be larger than memory, and what is mapped there may change while the region
// exists: the device always sees what the CPU would see. [PD.RegImplicitMR] makes
// one region of the whole address space. The first access to a page is a page
// fault of the device, which the operating system resolves; later ones cost
// nothing more, until the page is taken away. An access to memory that is not
// mapped, or whose mapping does not allow the access, fails as one without the
// right does.
//
// [PD.AdviseMR] fetches memory before it is used. [MR.PagingStats] and
// [Device.PagingStats] count faults, invalidations and prefetches; "verbena stat"
// shows them for every process, and "verbena demo odp" what they are good for.
// [Device.QueryODPCaps] returns which operations may use such memory, and by what
// means of the kernel this machine pages.
//
// # Addresses, and when a range is the program's
//
// An address in a scatter/gather element ([SGE]) or in RemoteAddr is one in the
// address space of the region: the virtual address of the byte, unless the
// region was registered with [AccessZeroBased], where it is the offset, or with
// [PD.RegMRIOVA], where it counts from the address given there.
//
// The device and the peers access memory without asking the Go runtime, so the
// program must know when a range is its own. A range that a send request reads
// must not change between posting and completion; a range that a receive, a
// READ or an atomic writes is valid when its completion has been polled, and
// polling orders the accesses: what the device wrote before it, the poller sees
// after it. A range that peers may write changes at any time. A program notices a
// WRITE by a message that follows it on the same queue pair ([OpRDMAWriteImm] is
// both in one), or by spinning on a word with sync/atomic: one at the end of the
// range, or one that the peer stores after it by [OpAtomicWrite].
package verbs
