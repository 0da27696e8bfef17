// Package verbs is RDMA for Go: devices, memory regions, queue pairs and
// completions, in the nouns of InfiniBand verbs and the manners of Go.
//
// The device behind it is software. It needs no kernel module, no hardware and
// no privilege, speaks RoCE v2 to any peer, and moves bytes between queue pairs
// of one process without a packet. What ibv_reg_mr(3), ibv_create_qp(3) and
// their sisters say holds here; each method names the page it corresponds to
// and the errnos it returns.
//
// # A tour
//
// Everything begins with a device, which stands on an IP address:
//
//	dev, err := verbs.Open("", nil)             // the first free of 127.77.0.1 to .254
//	dev, err := verbs.Open("192.0.2.7", nil)    // or one address of this host
//
// A protection domain ([PD]) holds what may work together. Memory becomes
// visible to the device by registering it in a domain; the memory region ([MR])
// has a key for local use and a key for peers:
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
//		RemoteAddr: peer.Addr, // the peer's mr.Addr() and mr.RKey(),
//		RKey:       peer.RKey, // which it told us too
//	}})
//	wcs := make([]verbs.WC, 16)
//	n, err = cq.Poll(wcs) // 0 if nothing has completed yet
//
// A program that would rather sleep than poll gives the completion queue a
// [Channel], arms it with [CQ.RequestNotify] and waits in [Channel.Next].
//
// What was opened is closed, children first: queue pairs before their queues,
// regions and domains before the device. Close of something that is still in
// use fails with EBUSY and changes nothing. What is closed is not to be used any
// more: calls fail with EINVAL, or find nothing.
//
// # Three ways to hear of trouble
//
// A call that fails returns an *[OpError], which wraps an errno. It tells of
// what was seen to be wrong at once: an argument out of range, a full queue, a
// queue pair in the wrong state. Nothing has changed, except that a call that
// posts says how many requests it took before the bad one. Calls on a nil
// pointer, from an error that was not looked at, fail with EINVAL too.
//
//	if errors.Is(err, syscall.ENOMEM) { … } // the queue is full: poll, then post again
//
// A work request that was accepted and failed later ends in a completion whose
// Status is not [WCSuccess]. It tells of what only execution could show: a key
// that the peer refuses, a peer that does not answer. The queue pair is in the
// error state from then on (UD and UC: its send queue is), and everything
// behind the failure is flushed, each request with a completion of its own that
// says [WCWRFlushErr]. The first failure is the cause; the flushes only follow.
// The Err method of [WC] makes an error of a failed completion.
//
// An asynchronous event belongs to no request of this program: a peer asked for
// what it may not have, a shared receive queue ran low, a completion queue
// overflowed. Events wait in [Device.NextEvent]; a program that does not ask
// for them loses nothing else.
//
// # Concurrency
//
// All methods of all types may be called from any number of goroutines at the
// same time. Requests of one queue pair are executed in the order in which they
// were posted; two goroutines that post to one queue pair are in the order in
// which their calls happened to be served, but the requests of one call stay
// together only if nobody else posts. One completion is delivered to one Poll.
//
// No method blocks but those that take a context, [CQ.Close], which waits for
// events that were not acknowledged, and [Device.Close], which waits for storage
// that a peer's FLUSH has set to work. Poll and the Post methods do not
// allocate; keep the slices that you hand to them and use them again, because a
// slice literal in the argument is an allocation of the caller's.
//
// # Memory
//
// A slice that was registered is kept alive by its region, also when the
// program holds neither: the device lets go of it when [MR.Close] has returned.
// Registering does not copy and does not move anything. The collector does not
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
// nothing more, until the page is taken away. Access to what is not mapped, or
// not so, fails as access without the right does.
//
// Memory that is about to be used can be fetched before ([PD.AdviseMR]).
// [MR.PagingStats] and [Device.PagingStats] count faults, invalidations and
// prefetches; "verbena stat" shows them for every process, and "verbena demo odp"
// what they are good for. [Device.QueryODPCaps] says which operations may use such
// memory, and what paging runs on here.
//
// # Addresses, and who owns a range when
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
// after it. A range that peers may write at any time is never quiet; a program
// learns of a WRITE by a message that follows it on the same queue pair
// ([OpRDMAWriteImm] is both in one), or by spinning on a word with sync/atomic:
// one at the end of the range, or one that the peer stores behind it by
// [OpAtomicWrite].
package verbs
